// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"sync"

	"github.com/kvasir-kv/kvasir/zmtp"
)

// front stands where D looks for P's side channel: it shows each pull to the engine, and
// carries it to the engine's Sender and the answers back, a connection for each of D's.
type front struct {
	router *zmtp.Router
	mu     sync.Mutex
	inner  map[*zmtp.Peer]*zmtp.Dealer
}

// listen begins to take pulls. see says where the Sender is.
func (f *front) listen(ctx context.Context, at string, see func(zmtp.Message) (sender string, err error), failed func(error)) (string, error) {
	f.inner = make(map[*zmtp.Peer]*zmtp.Dealer)
	f.router = zmtp.NewRouter(func(peer *zmtp.Peer, m zmtp.Message) {
		m = clone(m)
		sender, err := see(m)
		if err == nil {
			err = f.carry(peer, sender, m)
		}
		if err != nil {
			failed(err)
			peer.Close()
		}
	}, zmtp.RouterOptions{OnDisconnect: func(p *zmtp.Peer, _ error) { f.gone(p) }})
	addr, err := f.router.Listen(ctx, at)
	if err != nil {
		return "", err
	}
	return "tcp://" + addr.String(), nil
}

func clone(m zmtp.Message) zmtp.Message {
	out := make(zmtp.Message, len(m))
	for i := range m {
		out[i] = append([]byte(nil), m[i]...)
	}
	return out
}

// carry passes a message of peer on.
func (f *front) carry(peer *zmtp.Peer, sender string, m zmtp.Message) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	d := f.inner[peer]
	if d == nil {
		d = zmtp.NewDealer(sender, zmtp.DealerOptions{Handler: func(m zmtp.Message) {
			if peer.Send(m...) == nil {
				peer.Flush()
			}
		}})
		if err := d.Start(); err != nil {
			return err
		}
		f.inner[peer] = d
	}
	return d.Send(m...)
}

func (f *front) gone(peer *zmtp.Peer) {
	f.mu.Lock()
	d := f.inner[peer]
	delete(f.inner, peer)
	f.mu.Unlock()
	if d != nil {
		go d.Close()
	}
}
