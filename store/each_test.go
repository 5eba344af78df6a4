// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bytes"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/tier"
)

// each looks chunks up one by one, to the end.
func (b *bench) each(t *testing.T, h []kv.Hash, most int64) (*store.EachLookup, store.LookupResult) {
	t.Helper()
	keys := make([]kv.Key, len(h))
	for i := range h {
		keys[i] = objectKey(one, 0, h[i])
	}
	x, err := b.store.LookupEach(store.EachQuery{Owner: nobody, Keys: keys, Bytes: chunkBytes, Most: most})
	if err != nil {
		t.Fatal(err)
	}
	if x.Incomplete() {
		x.Fetch(t.Context())
	}
	return x, x.Result()
}

// Each object that is there is lent, in the pool or below, whatever is missing before it. It stays in place until its loan ends, also
// beyond the quarantine of other holds.
func TestEachObjectIsLent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 6, "", store.Options{})
		defer b.close()
		h := prompt(1, 5)
		keep(t, b.memory, one, h[0], h[2])
		b.put("p", h[3:4], 0, 1, 1)
		x, got := b.each(t, h, 1<<30)
		if got.Hit != 1 || got.Below != 1 || got.Why != miss.NeverStored || got.Missing.Chunk != h[1] || !got.Waited {
			t.Errorf("%+v", got)
		}
		for i, want := range []bool{true, false, true, true, false} {
			if p := x.Places[i]; p.Bytes > 0 != want || want && !bytes.Equal(b.at(p.Offset), content(h[i], 0)) {
				t.Errorf("object %d: %+v, want it lent: %v", i, p, want)
			}
		}
		time.Sleep(10 * quarantine)
		b.store.Expire()
		b.put("q", prompt(2, 8), 0, 8, 3)
		for i := range h {
			if p := x.Places[i]; p.Bytes > 0 && !bytes.Equal(b.at(p.Offset), content(h[i], 0)) {
				t.Errorf("object %d was overwritten while it was lent", i)
			}
		}
		x.Loan.GiveBack()
		b.idle()
		b.put("q", prompt(2, 8), 0, 6, 3)
	})
}

// A lookup waits for the tier no longer than LoadTimeout; what the pool has is lent all the same. A bound of the bytes holds, and
// objects of other lengths are not lent.
func TestEachLookupIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 8, "read * hang", store.Options{})
		defer b.close()
		h := prompt(1, 3)
		keep(t, b.memory, one, h[0])
		b.put("p", h[1:3], 0, 2, 2)
		began := time.Now()
		x, got := b.each(t, h, 1<<30)
		if took := time.Since(began); took > 3*time.Second {
			t.Errorf("a lookup waited for %v", took)
		}
		if got.Hit != 0 || got.Why != miss.BelowSlow || x.Places[0].Bytes != 0 || x.Places[1].Bytes == 0 || x.Places[2].Bytes == 0 {
			t.Errorf("%+v, %+v", got, x.Places)
		}
		x.Loan.GiveBack()
		b.flaky.Release()
		synctest.Wait()
	})
	synctest.Test(t, func(t *testing.T) {
		b := newTiered(t, 8, "", store.Options{})
		defer b.close()
		h := prompt(1, 3)
		b.put("p", h[:2], 0, 2, 2)
		data := content(h[2], 0)[:chunkBytes/2]
		if err := b.memory.Write(t.Context(), objectKey(one, 0, h[2]), tier.Meta{Len: int64(len(data)), Sum: xxh3.Hash(data)}, data); err != nil {
			t.Fatal(err)
		}
		x, _ := b.each(t, h, chunkBytes)
		if x.Places[0].Bytes == 0 || x.Places[1].Bytes != 0 || x.Places[2].Bytes != 0 || x.Bytes != chunkBytes {
			t.Errorf("%+v", x.Places)
		}
		x.Loan.GiveBack()
		if x, _ := b.each(t, nil, 1<<30); x.Loan != nil {
			t.Error("a lookup of nothing has a loan")
		}
		b.idle()
	})
}

// A lasting store keeps its places beyond any quarantine, until its commit or until its worker's process has ended.
func TestLastingStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, t.TempDir(), 4, store.Options{})
		defer b.stop()
		h := prompt(1, 2)
		tr := transfer(5, h, 0, 2, false)
		p := store.Transfer{Lasting: true}
		if _, err := b.store.BeginStore(tr, []byte("r"), h, &p); err != nil || len(p.Offsets) != 2 {
			t.Fatal(err, p.Offsets)
		}
		time.Sleep(100 * quarantine)
		b.store.Expire()
		b.put("q", prompt(2, 4), 0, 4, 2)
		if got := b.store.CommitStore(tr, []byte("r"), h, true); got.Chunks != 2 {
			t.Errorf("after a long time: %+v", got)
		}
		more := prompt(3, 2)
		tr = transfer(5, more, 0, 2, false)
		if _, err := b.store.BeginStore(tr, []byte("r"), more, &p); err != nil || len(p.Offsets) != 2 {
			t.Fatal(err, p.Offsets)
		}
		b.store.Detach(5)
		if b.store.EndQuarantine(5) != 1 {
			t.Error("the places of an ended process are in quarantine")
		}
		b.idle()
	})
}

// What a worker of an earlier server may still write to stays out of use beyond the quarantine while a process that maps the pool is
// stopped: the worker goes on where it was.
func TestStoppedWorkerOfAnEarlierServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var stopped bool
		b := newBench(t, t.TempDir(), 4, store.Options{Stopped: func() bool { return stopped }})
		defer func() { b.stop() }()
		h := prompt(1, 2)
		var p store.Transfer
		if _, err := b.store.BeginStore(transfer(5, h, 0, 2, false), []byte("r"), h, &p); err != nil || len(p.Offsets) != 2 {
			t.Fatal(err, p.Offsets)
		}
		b.kill()
		stopped = true
		time.Sleep(10 * quarantine)
		b.store.Expire()
		b.put("q", prompt(2, 4), 0, 4, 2)
		stopped = false
		b.store.Expire()
		b.put("q", prompt(2, 4), 0, 4, 2)
	})
}

// Where too many transfers are in progress a lookup fails; nothing is lent then.
func TestEachLookupWhenBusy(t *testing.T) {
	b := newBench(t, t.TempDir(), 4, store.Options{MaxHolds: 1})
	defer b.stop()
	h := prompt(1, 2)
	b.put("p", h, 0, 2, 2)
	x, _ := b.each(t, h[:1], 1<<30)
	if _, err := b.store.LookupEach(store.EachQuery{Keys: []kv.Key{objectKey(one, 0, h[1])}, Bytes: chunkBytes, Most: 1 << 30}); !errors.Is(err, store.ErrBusy) {
		t.Errorf("a second loan of one: %v", err)
	}
	x.Loan.GiveBack()
}
