// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// reader follows the KV events of a node, over its kills, as a router does that has no replay socket.
type reader struct {
	s    *soak
	node *part
	sub  *zmtp.Sub

	mu struct {
		sync.Mutex
		fresh bool // a new connection: it begins with AllBlocksCleared
		next  uint64
		has   map[string]bool // medium|hash
		n     int             // messages
	}
}

func newReader(s *soak, node *part) *reader {
	r := &reader{s: s, node: node}
	r.mu.has, r.mu.fresh = map[string]bool{}, true
	r.sub = zmtp.NewSub(fmt.Sprintf("tcp://%s:5557", addrOf(node.host)), zmtp.DealerOptions{
		ConnectTimeout: 2 * time.Second, IdleTimeout: 15 * time.Second,
		Handler: r.take,
		OnState: func(up bool, _ error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.mu.fresh = r.mu.fresh || up
		},
	})
	_ = r.sub.Subscribe("") // short enough
	_ = r.sub.Start()       // the address is well formed
	return r
}

func (r *reader) take(m zmtp.Message) {
	old := r.node.isOld() // the previous release begins not every connection with AllBlocksCleared
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(m) != 3 || len(m[1]) != 8 {
		r.s.violation("%s: an event message of %d frames", r.node.name, len(m))
		return
	}
	sequence := binary.BigEndian.Uint64(m[1])
	batch, err := event.Decode(m[2])
	if err != nil {
		r.s.violation("%s: event message %d: %v", r.node.name, sequence, err)
		return
	}
	switch {
	case old:
	case r.mu.fresh && (len(batch.Events) == 0 || batch.Events[0].Kind != event.Cleared):
		r.s.violation("%s: the first message of a connection, number %d, does not begin with AllBlocksCleared", r.node.name, sequence)
	case !r.mu.fresh && sequence != r.mu.next:
		r.s.violation("%s: event message %d comes after %d", r.node.name, sequence, r.mu.next-1)
	}
	if r.mu.fresh {
		clear(r.mu.has)
	}
	r.mu.fresh, r.mu.next = false, sequence+1
	r.mu.n++
	for i := range batch.Events {
		if what := applyEvent(r.mu.has, &batch.Events[i]); what != "" && !old {
			r.s.violation("%s: event message %d: %s", r.node.name, sequence, what)
		}
	}
}

// applyEvent changes a list by one event. It returns what contradicts the list.
func applyEvent(has map[string]bool, e *event.Event) (what string) {
	if e.Kind == event.Cleared {
		clear(has)
		return ""
	}
	for _, h := range e.Hashes {
		k := e.Medium + "|" + hex.EncodeToString(h)
		if has[k] == (e.Kind == event.Stored) {
			what = fmt.Sprintf("%v of %s, which was so before", e.Kind, k)
		}
		if has[k] = true; e.Kind == event.Removed {
			delete(has, k)
		}
	}
	return what
}

// snapshot asks the node for all that its events say.
func (r *reader) snapshot(ctx context.Context) (map[string]bool, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	has, done := map[string]bool{}, make(chan error, 1)
	end := func(err error) {
		select {
		case done <- err:
		default:
		}
	}
	d := zmtp.NewDealer(fmt.Sprintf("tcp://%s:5558", addrOf(r.node.host)), zmtp.DealerOptions{Handler: func(m zmtp.Message) {
		switch {
		case len(m) != 4 || len(m[2]) != 8:
			end(fmt.Errorf("a reply of %d frames", len(m)))
		case bytes.Equal(m[2], bytes.Repeat([]byte{0xff}, 8)):
			end(nil)
		default:
			batch, err := event.Decode(m[3])
			if err != nil {
				end(err)
				return
			}
			for i := range batch.Events {
				applyEvent(has, &batch.Events[i])
			}
		}
	}})
	if err := d.Start(); err != nil {
		return nil, err
	}
	defer d.Close()
	if err := d.Send(nil, []byte("snapshot")); err != nil {
		return nil, err
	}
	select {
	case err := <-done:
		return has, err
	case <-ctx.Done():
		return nil, errors.New("the replay socket does not answer a snapshot")
	}
}

// object is an object of a node's pool.
type object struct {
	Key struct {
		Hash string `json:"chunk_hash_hex"`
		Salt string `json:"cache_salt"`
	}
	Bytes int64 `json:"size_bytes"`
}

// objects asks a node for all objects of its pool.
func (p *part) objects(ctx context.Context) (out []object, err error) {
	for token := ""; ; {
		var page struct {
			Entries []object
			Next    string `json:"next_page_token"`
		}
		if err := call(ctx, http.MethodGet, p.url("/cache/objects?page_size=5000&page_token="+token), "", &page); err != nil {
			return nil, err
		}
		out = append(out, page.Entries...)
		if token = page.Next; token == "" {
			return out, nil
		}
	}
}

// chunks asks the node which chunks its pool has, by the names of events.
func (r *reader) chunks(ctx context.Context) (map[string]bool, error) {
	objects, err := r.node.objects(ctx)
	if err != nil {
		return nil, err
	}
	has := map[string]bool{}
	for _, o := range objects {
		b, err := hex.DecodeString(o.Key.Hash)
		if err != nil || len(b) != len(kv.Hash{}) {
			return nil, fmt.Errorf("a chunk hash is %q", o.Key.Hash)
		}
		h := kv.Hash(b)
		if o.Key.Salt != "" {
			h = kv.SaltedHash(o.Key.Salt, h)
		}
		has[event.CPU+"|"+hex.EncodeToString(h[:])] = true
	}
	return has, nil
}

// compare reports how the reader's list differs from the server's, and from what the pool has.
func (r *reader) compare(ctx context.Context) error {
	want, err := r.snapshot(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", r.node.name, err)
	}
	pool, err := r.chunks(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", r.node.name, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for k := range want {
		if !r.mu.has[k] {
			return fmt.Errorf("%s: the reader of events lacks %s (it has %d, the server %d)", r.node.name, k, len(r.mu.has), len(want))
		}
	}
	for k := range r.mu.has {
		if !want[k] {
			return fmt.Errorf("%s: the reader of events has %s, which the server has not (it has %d, the server %d)", r.node.name, k, len(r.mu.has), len(want))
		}
		if strings.HasPrefix(k, event.CPU) && !pool[k] {
			return fmt.Errorf("%s: events say %s, which the pool has not (%d of them)", r.node.name, k, len(pool))
		}
	}
	return nil
}
