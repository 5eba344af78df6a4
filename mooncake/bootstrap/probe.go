// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
)

// prober finds out whether a process listens at a side channel. It bounds the number of probes at a time.
type prober struct {
	timeout  time.Duration
	networks []netip.Prefix // addresses that may be probed for any peer
	dial     func(ctx context.Context, host string) error
	slots    peercred.OriginShares
	freed    chan struct{} // capacity 1; a value means that a slot may be free
	wg       sync.WaitGroup
}

func newProber(timeout time.Duration, limit int, networks []netip.Prefix) *prober {
	return &prober{timeout: timeout, networks: networks, slots: peercred.OriginShares{Max: limit}, freed: make(chan struct{}, 1), dial: dialTCP}
}

// maxProbesPerEngine is the largest number of workers' addresses that are probed for one decision; an engine's further workers are not
// probed.
const maxProbesPerEngine = 4

// anyDead reports whether the side channel of one of the workers of an engine refuses connections. The text says what it found. An engine
// works only as a whole, so one side channel that refuses connections proves that the engine is dead; at other addresses another process
// may listen. The probes count as those of the origin `from`. anyDead returns after the probe timeout at the latest.
func (p *prober) anyDead(ctx context.Context, from peercred.Origin, workers []worker) (bool, string) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	why, tried := "no address that can be probed", 0
	found := make(chan error, maxProbesPerEngine)
	for _, w := range workers[:min(len(workers), maxProbesPerEngine)] {
		host, err := p.addr(w)
		if err != nil {
			why = err.Error()
			continue
		}
		tried++
		p.wg.Go(func() {
			err := p.probe(ctx, from, host)
			switch {
			case err == nil:
				err = fmt.Errorf("%s accepts connections", host)
			case errors.Is(err, syscall.ECONNREFUSED):
				err = fmt.Errorf("%s refuses connections: %w", host, syscall.ECONNREFUSED)
			}
			found <- err
		})
	}
	for range tried {
		select {
		case err := <-found:
			if errors.Is(err, syscall.ECONNREFUSED) {
				return true, err.Error()
			}
			why = err.Error()
		case <-ctx.Done():
			return false, fmt.Sprintf("%s; no answer of another within %v", why, p.timeout)
		}
	}
	return false, why
}

// errProbes ends a probe for a peer that has the most probes, to make room for another peer's probe.
var errProbes = errors.New("the probe was ended to make room for another peer's")

// probe waits for a free slot, counted for the origin `from`, and dials host (host:port). It returns nil if host accepts the connection.
func (p *prober) probe(ctx context.Context, from peercred.Origin, host string) error {
	for {
		in, leave, ok := p.slots.Enter(ctx, from, errProbes)
		if ok {
			defer func() { leave(); wake(p.freed) }()
			wake(p.freed) // more than one slot may be free
			err := p.dial(in, host)
			if cause := context.Cause(in); errors.Is(cause, errProbes) {
				return cause
			}
			return err
		}
		select {
		case <-p.freed:
		case <-ctx.Done():
			return fmt.Errorf("not probed in time, because %d probes are under way", p.slots.Max)
		}
	}
}

func dialTCP(ctx context.Context, host string) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", host)
	if err != nil {
		return err
	}
	return conn.Close()
}

// addr returns host:port of the worker's side channel if it may be probed. A worker on another host may only register an address of its
// own host for probing; otherwise it could use this registry to scan ports.
func (p *prober) addr(w worker) (string, error) {
	hostport, ok := strings.CutPrefix(w.addr, "tcp://")
	host, port, err := net.SplitHostPort(hostport)
	if !ok || err != nil || host == "" || port == "" || port == "0" {
		return "", fmt.Errorf("address %.100q is not tcp://HOST:PORT", w.addr)
	}
	if w.from.Here {
		return hostport, nil
	}
	ip, err := netip.ParseAddr(host)
	if err == nil && (ip.Unmap().String() == w.from.Addr || slices.ContainsFunc(p.networks, func(n netip.Prefix) bool { return n.Contains(ip.Unmap()) })) {
		return hostport, nil
	}
	return "", fmt.Errorf("%s was registered by another host, %s", w.addr, w.from.Addr)
}
