package relay

import (
	"errors"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// A pull that is taken can be kept and planned for: no panic, memory within the
// relay's, every byte that would be sent from the memory of this transfer, to an
// address that the pull names. All memory comes back.
func FuzzTakeKeep(f *testing.F) {
	region := func(layer string, group int, shared ...int) mooncake.Region {
		return mooncake.Region{Layer: layer, Base: 1 << 40, Stride: 1024, Payload: 512, Group: group, Shared: shared, RowOffset: mooncake.NoRow}
	}
	for _, p := range []mooncake.Pull{
		{Regions: []mooncake.Region{region("a", 0, 0), region("b", 1, 1)}},
		{Regions: []mooncake.Region{region("a", mooncake.SharedGroup, 0, 1), region("b", 0, 0)}},
		{Regions: []mooncake.Region{{Base: 1, Group: mooncake.Unsent, Index: mooncake.Unsent, RowOffset: mooncake.Unsent}}},
		{},
	} {
		p.Host, p.Port, p.TPSize = "127.0.0.1", 1, 1
		p.Wanted = map[string]mooncake.Wanted{
			"r": {TransferID: "x", Blocks: [][]int{{1, 2, 0}, {7}}}, "s": {TransferID: "y#2", Blocks: [][]int{{}, {3, 4}}}, "t": {TransferID: "z"},
		}
		f.Add(mooncake.AppendPull(nil, &p, 0))
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
		pull, err := take(zmtp.Message{b})
		if err != nil {
			return
		}
		for _, w := range pull.Wanted {
			k, err := r.newKept(t.Context(), "d", pull.Regions, w.Blocks)
			if err == nil {
				checkEntries(t, k, pull, w)
				r.loaded(k, errors.New("of the test"))
				r.release(k)
			}
			if _, err := e.deliver(&ask{ctx: t.Context()}, pull, w, nil); err == nil && !parseID(w.TransferID).again {
				t.Fatal("served by nobody")
			}
		}
		if s := r.Stats(); s.Kept != 0 || s.KeptBytes != 0 {
			t.Fatalf("stats %+v", s)
		}
	})
}

func checkEntries(t *testing.T, k *kept, pull *mooncake.Pull, w mooncake.Wanted) {
	entries, total, err := k.entries(pull, w.Blocks)
	if err != nil {
		return
	}
	sum := int64(0)
	for _, e := range entries {
		sum += int64(len(e.Local))
		named := slices.ContainsFunc(pull.Regions, func(g mooncake.Region) bool {
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
