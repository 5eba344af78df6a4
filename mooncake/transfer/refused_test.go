// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"errors"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"
)

// A peer that ends the connection with each refusal costs a call 256 connections in a row at most. Refusals with writes between them
// that the peer takes are not in a row: those writes arrive, however many there are.
func TestRefusalsInARowAreBounded(t *testing.T) {
	const apart = 4096
	f := func(n int, refuses func(i int) bool, most int64, want func(i int) error) {
		t.Helper()
		peer := fakeTarget(t, 2, Range{testBase, uint64(n * apart)})
		var connections atomic.Int64
		peer.each(func(_ int, c *net.TCPConn) {
			connections.Add(1)
			head := make([]byte, headerBytes)
			for {
				if _, err := io.ReadFull(c, head); err != nil {
					return
				}
				h := parseHeader(head)
				if _, err := io.CopyN(io.Discard, c, int64(h.size)); err != nil {
					return
				}
				code := uint32(statusOK)
				if refuses(int(h.addr-testBase) / apart) {
					code = statusRejected
				}
				frame := statusFrame(code)
				if _, err := c.Write(frame[:]); err != nil || code != statusOK {
					return
				}
			}
		})
		var list []Entry
		var errs []error
		for i := range n {
			list = append(list, Entry{make([]byte, 8), testBase + uint64(i*apart)})
			errs = append(errs, want(i))
		}
		check(t, client(t, Options{Conns: 1}).Write(timeout(t, 60*time.Second), peer.name, list), errs...)
		if got := connections.Load(); got > most {
			t.Errorf("%d connections, want at most %d", got, most)
		}
	}
	all := func(int) bool { return true }
	f(400, all, 256, func(int) error { return ErrRejected })
	odd := func(i int) bool { return i%2 == 1 }
	f(600, odd, 301, func(i int) error {
		if odd(i) {
			return ErrRejected
		}
		return nil
	})
}

// A table has MaxRegions regions, and refuses one more, however they come.
func TestTableHasMaxRegions(t *testing.T) {
	table := NewTable()
	mems := make([][]byte, MaxRegions)
	for i := range mems {
		mems[i] = make([]byte, 1)
	}
	regions, err := table.Publish(mems...)
	if err != nil || len(regions) != MaxRegions {
		t.Fatalf("%d regions, %v", len(regions), err)
	}
	if _, err := table.Publish(make([]byte, 1)); !errors.Is(err, ErrRegions) {
		t.Errorf("one more: %v", err)
	}
	if _, err := table.Register(testBase, make([]byte, 1)); !errors.Is(err, ErrRegions) {
		t.Errorf("one more at an address: %v", err)
	}
	if _, err := NewTable().Publish(append(mems, make([]byte, 1))...); !errors.Is(err, ErrRegions) {
		t.Errorf("one more at once: %v", err)
	}
}
