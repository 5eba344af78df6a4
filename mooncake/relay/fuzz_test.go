// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"errors"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// A pull that is taken can be kept and planned for: no panic, memory within the
// relay's, every byte that would be sent from the memory of this transfer, to an
// address that the pull names. All memory comes back.
func FuzzTakeKeep(f *testing.F) {
	region := func(layer string, group int, shared ...int) wire.Region {
		return wire.Region{Layer: layer, Base: 1 << 40, Stride: 1024, Payload: 512, Group: group, Shared: shared, RowOffset: wire.NoRow}
	}
	for _, p := range []wire.Pull{
		{Regions: []wire.Region{region("a", 0, 0), region("b", 1, 1)}},
		{Regions: []wire.Region{region("a", wire.SharedGroup, 0, 1), region("b", 0, 0)}},
		{Regions: []wire.Region{{Base: 1, Group: wire.Unsent, Index: wire.Unsent, RowOffset: wire.Unsent}}},
		{},
	} {
		p.Host, p.Port, p.TPSize = "127.0.0.1", 1, 1
		p.Wanted = map[string]wire.Wanted{
			"r": {TransferID: "x", Blocks: [][]int{{1, 2, 0}, {7}}}, "s": {TransferID: "y#2", Blocks: [][]int{{}, {3, 4}}}, "t": {TransferID: "z"},
		}
		f.Add(wire.AppendPull(nil, &p, 0))
		f.Add(wire.AppendPull(nil, &p, 18))
	}
	web := httptest.NewServer(nil)
	defer web.Close()
	r, err := Open(Options{Upstream: web.URL, MemoryPath: f.TempDir() + "/memory", MemoryBytes: 1 << 20, Timeout: time.Second})
	if err != nil {
		f.Fatal(err)
	}
	defer r.Close()
	e := &engine{r: r, id: "e"} // without workers: each load fails
	f.Fuzz(func(t *testing.T, b []byte) {
		pull, err := decodePull(zmtp.Message{b}, 4096)
		if err != nil {
			return
		}
		for _, w := range pull.Wanted {
			k, err := r.newKept(t.Context(), "d", pull.Regions, w.Blocks)
			if err == nil {
				checkEntries(t, k, pull, w)
				r.loadEnded(k, errors.New("of the test"))
				r.release(k)
			}
			if _, err := e.deliver(&request{ctx: t.Context()}, pull, w, nil); err == nil && !parseID(w.TransferID).repeat {
				t.Fatal("served by nobody")
			}
		}
		s := r.Stats()
		for end := time.Now().Add(10 * time.Second); (s.Kept != 0 || s.KeptBytes != 0) && time.Now().Before(end); s = r.Stats() {
			time.Sleep(time.Millisecond) // a load that has just failed gives its memory back
		}
		if s.Kept != 0 || s.KeptBytes != 0 {
			t.Fatalf("stats %+v", s)
		}
	})
}

func checkEntries(t *testing.T, k *savedTransfer, pull *wire.Pull, w wire.Wanted) {
	entries, total, err := k.entries(pull, w.Blocks)
	if err != nil {
		return
	}
	sum := int64(0)
	for _, e := range entries {
		sum += int64(len(e.Local))
		named := slices.ContainsFunc(pull.Regions, func(g wire.Region) bool {
			return slices.ContainsFunc(slices.Concat(w.Blocks...), func(id int) bool { return e.Remote == g.Base+uint64(id)*g.Stride })
		})
		if !named || len(e.Local) == 0 {
			t.Fatalf("%d bytes to %#x of %+v", len(e.Local), e.Remote, pull)
		}
	}
	if sum != total || total > 64<<20 {
		t.Fatalf("%d bytes, said to be %d", sum, total)
	}
}
