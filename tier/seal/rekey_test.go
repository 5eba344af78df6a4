// SPDX-License-Identifier: Apache-2.0

package seal

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// slowPlace is a place whose writes or deletes wait once a test says so.
type slowPlace struct {
	*tier.Memory
	slow         atomic.Bool
	slowDelete   atomic.Bool
	entered, let chan struct{}
}

func (p *slowPlace) Delete(ctx context.Context, keys []kv.Key) error {
	if p.slowDelete.Load() {
		p.entered <- struct{}{}
		<-p.let
	}
	return p.Memory.Delete(ctx, keys)
}

func (p *slowPlace) Write(ctx context.Context, k kv.Key, m tier.Meta, src []byte) error {
	if p.slow.Load() {
		p.entered <- struct{}{}
		<-p.let
	}
	return p.Memory.Write(ctx, k, m, src)
}

// If the header of an object names another key than its place says, Rekey reports that the key is missing, not that all is done.
func TestRekeyCountsHeadersThatDoNotFit(t *testing.T) {
	one, two := strings.Repeat("ab", 32), strings.Repeat("cd", 32)
	open := func(text string) *Keys {
		k, err := OpenKeys(t.Context(), Source{Text: text})
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	for _, at := range []int{8, 20} { // version, id of the key
		place := tier.NewMemory(1 << 20)
		src := []byte("an object")
		m := tier.Meta{Len: int64(len(src)), Sum: xxh3.Hash(src)}
		if err := New(place, open(one), Options{}).Write(t.Context(), testName, m, src); err != nil {
			t.Fatal(err)
		}
		metas := make([]tier.Meta, 1)
		if err := place.Stat(t.Context(), []kv.Key{testName}, metas); err != nil {
			t.Fatal(err)
		}
		raw := make([]byte, metas[0].Len)
		if _, err := place.Read(t.Context(), testName, raw); err != nil {
			t.Fatal(err)
		}
		raw[at] ^= 0x40
		if err := place.Delete(t.Context(), []kv.Key{testName}); err != nil {
			t.Fatal(err)
		}
		if err := place.Write(t.Context(), testName, metas[0], raw); err != nil {
			t.Fatal(err)
		}
		x := New(place, open(two+","+one), Options{}).Sealed()
		s, err := x.Rekey(t.Context(), func(context.Context, int64) error { return nil }, func(RekeyStats) {})
		if err != nil || s.Seen != 1 || s.Unknown != 1 || s.Rewritten != 0 {
			t.Errorf("byte %d: %+v, %v", at, s, err)
		}
		if err := x.Write(t.Context(), testName, m, src); err != nil {
			t.Fatal(err)
		}
		if _, err := x.Read(t.Context(), testName, make([]byte, len(src))); err != nil {
			t.Errorf("byte %d: a store did not replace it: %v", at, err)
		}
	}
}

// The Tier remembers at most maxStale objects whose headers do not fit. It finds a forgotten one again.
func TestHeadersThatDoNotFitAreBounded(t *testing.T) {
	x := New(tier.NewMemory(1<<20), nil, Options{}).Sealed()
	for i := range maxStale + 10 {
		k := testName
		k.Group = uint32(i)
		x.noteStale(k)
	}
	if len(x.mu.stale) != maxStale || x.stale.Load() != maxStale {
		t.Errorf("%d are remembered", len(x.mu.stale))
	}
}

// An object that is deleted, or dropped, while Rekey encrypts it anew does not come back.
func TestDeletesWaitForARekey(t *testing.T) {
	for name, remove := range map[string]func(x *Tier) error{
		"delete": func(x *Tier) error { return x.Delete(t.Context(), []kv.Key{testName}) },
		"drop": func(x *Tier) error {
			_, err := x.RemoveIf(t.Context(), func(tier.Content) bool { return true }, func(context.Context, int) error { return nil })
			return err
		},
	} {
		one, two := strings.Repeat("ab", 32), strings.Repeat("cd", 32)
		open := func(text string) *Keys {
			k, err := OpenKeys(t.Context(), Source{Text: text})
			if err != nil {
				t.Fatal(err)
			}
			return k
		}
		place := &slowPlace{Memory: tier.NewMemory(1 << 20), entered: make(chan struct{}), let: make(chan struct{})}
		src := []byte("an object")
		if err := New(place, open(one), Options{}).Write(t.Context(), testName, tier.Meta{Len: int64(len(src)), Sum: xxh3.Hash(src)}, src); err != nil {
			t.Fatal(err)
		}
		x := New(place, open(two+","+one), Options{}).Sealed()
		place.slow.Store(true)
		rekeyed, removed := make(chan error, 1), make(chan error, 1)
		go func() {
			_, err := x.Rekey(t.Context(), func(context.Context, int64) error { return nil }, func(RekeyStats) {})
			rekeyed <- err
		}()
		<-place.entered // the object was read, and is not written yet
		go func() { removed <- remove(x) }()
		select {
		case err := <-removed:
			t.Errorf("%s: it did not wait: %v", name, err)
			removed <- err
		case <-time.After(50 * time.Millisecond):
		}
		close(place.let)
		if err := errors.Join(<-rekeyed, <-removed); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := x.Read(t.Context(), testName, make([]byte, len(src))); !errors.Is(err, tier.ErrMissing) {
			t.Errorf("%s: it came back: %v", name, err)
		}
	}
}

// Rekey also encrypts an object anew whose write began with the former key and ends after Rekey began.
func TestRekeyHasWritesOfTheFormerKey(t *testing.T) {
	keys, err := OpenKeys(t.Context(), Source{Text: strings.Repeat("ab", 32)})
	if err != nil {
		t.Fatal(err)
	}
	place := &slowPlace{Memory: tier.NewMemory(1 << 20), entered: make(chan struct{}), let: make(chan struct{})}
	x := New(place, keys, Options{}).Sealed()
	src := []byte("an object")
	place.slow.Store(true)
	wrote, rekeyed := make(chan error, 1), make(chan error, 1)
	go func() {
		wrote <- x.Write(t.Context(), testName, tier.Meta{Len: int64(len(src)), Sum: xxh3.Hash(src)}, src)
	}()
	<-place.entered
	place.slow.Store(false)
	next, err := OpenKeys(t.Context(), Source{Text: strings.Repeat("cd", 32) + "," + strings.Repeat("ab", 32)})
	if err != nil {
		t.Fatal(err)
	}
	keys.all.Store(next.all.Load()) // as Watch does
	keys.source = next.source
	go func() {
		_, err := x.Rekey(t.Context(), func(context.Context, int64) error { return nil }, func(RekeyStats) {})
		rekeyed <- err
	}()
	select {
	case err := <-rekeyed:
		t.Errorf("it did not wait for the write: %v", err)
		rekeyed <- err
	case <-time.After(50 * time.Millisecond):
	}
	close(place.let)
	if err := errors.Join(<-wrote, <-rekeyed); err != nil {
		t.Fatal(err)
	}
	metas := make([]tier.Meta, 1)
	if err := place.Stat(t.Context(), []kv.Key{testName}, metas); err != nil || metas[0].Seal != next.ring().list[0].number {
		t.Errorf("the object has the key %04x, the new one is %04x: %v", metas[0].Seal, next.ring().list[0].number, err)
	}
}

// hugePlace lists an object with a false length.
type hugePlace struct{ *tier.Memory }

func (hugePlace) List(_ context.Context, f func(kv.Key, tier.Meta) bool) error {
	for _, n := range []int64{sealedBytes(maxRekey + 1), 1 << 49, 1} {
		if !f(testName, tier.Meta{Len: n, Seal: oneKey(0xab).number}) {
			break
		}
	}
	return nil
}

// A false length that a place claims makes Rekey neither allocate memory nor wait.
func TestRekeyOfAClaimedLength(t *testing.T) {
	keys, err := OpenKeys(t.Context(), Source{Text: strings.Repeat("cd", 32) + "," + strings.Repeat("ab", 32)})
	if err != nil {
		t.Fatal(err)
	}
	x := New(hugePlace{tier.NewMemory(1 << 20)}, keys, Options{}).Sealed()
	n, err := x.Rekey(t.Context(), func(_ context.Context, n int64) error {
		t.Errorf("it would move %d bytes", n)
		return nil
	}, func(RekeyStats) {})
	if err != nil || n.Failed != 3 || n.LastFailure == "" {
		t.Errorf("%+v, %v", n, err)
	}
}

// Rekey does not encrypt an object anew while it is being deleted.
func TestRekeyLeavesWhatIsBeingDeleted(t *testing.T) {
	keys, err := OpenKeys(t.Context(), Source{Text: strings.Repeat("cd", 32) + "," + strings.Repeat("ab", 32)})
	if err != nil {
		t.Fatal(err)
	}
	old, err := OpenKeys(t.Context(), Source{Text: strings.Repeat("ab", 32)})
	if err != nil {
		t.Fatal(err)
	}
	place := &slowPlace{Memory: tier.NewMemory(1 << 20), entered: make(chan struct{}), let: make(chan struct{})}
	src := []byte("an object")
	if err := New(place, old, Options{}).Write(t.Context(), testName, tier.Meta{Len: int64(len(src)), Sum: xxh3.Hash(src)}, src); err != nil {
		t.Fatal(err)
	}
	x := New(place, keys, Options{}).Sealed()
	place.slowDelete.Store(true)
	removed := make(chan error, 1)
	go func() { removed <- x.Delete(t.Context(), []kv.Key{testName}) }()
	<-place.entered
	n, err := x.Rekey(t.Context(), func(context.Context, int64) error { return nil }, func(RekeyStats) {})
	if err != nil || n.Rewritten != 0 || n.Failed != 0 {
		t.Errorf("%+v, %v", n, err)
	}
	close(place.let)
	if err := <-removed; err != nil {
		t.Error(err)
	}
	if _, err := x.Read(t.Context(), testName, make([]byte, len(src))); !errors.Is(err, tier.ErrMissing) {
		t.Errorf("it came back: %v", err)
	}
}
