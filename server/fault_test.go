// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/server"
)

// Pool memory that is gone (a full file system, a file cut by its user) declines
// the pickled request that touches it, in both directions. The slots come back,
// and another worker whose memory is there goes on.
func TestPickledCopyWithoutMemory(t *testing.T) {
	const chunks = 4
	s, st, dir := newPickleServer(t, 16, chunks*4096, server.Options{Pickle: server.PickleOnly})
	a, b := &pickler{t: t, s: s, id: 7, layout: smallLayout}, &pickler{t: t, s: s, id: 8, layout: smallLayout}
	for _, p := range []*pickler{a, b} {
		register(t, s, int64(p.id), smallLayout)
	}
	path := filepath.Join(dir, "pool")
	resize := func(n int64) {
		t.Helper()
		if err := os.Truncate(path, n); err != nil {
			t.Fatal(err)
		}
	}
	if !a.store(1, 1) {
		t.Fatal("a does not store")
	}
	resize(4096) // a's chunk is left
	if b.store(2, 2) {
		t.Error("b stored into memory that is gone")
	}
	if got := st.Stats(); got.Transfers != 0 || got.StagedBytes != 0 || got.CondemnedBytes != 0 || got.ResidentBytes != 4096 {
		t.Errorf("b's slots did not come back: %+v", got)
	}
	if !a.load(1, 1) {
		t.Error("a's chunk, whose memory is there, is a miss")
	}
	resize(chunks * 4096)
	if !b.store(2, 2) {
		t.Error("b does not store though the memory is there again")
	}
	resize(4096)
	if b.load(2, 2) {
		t.Error("b loaded from memory that is gone")
	}
	if !a.load(1, 1) {
		t.Error("a's chunk is a miss after b's failure")
	}
	if got := st.Stats(); got.Transfers != 0 || got.StagedBytes != 0 {
		t.Errorf("transfers are left: %+v", got)
	}
	resize(chunks * 4096)
	if got := metric(t, s, `kvasir_declined_total{reason="memory_gone"}`); got != 2 {
		t.Errorf("%v requests counted as declined for memory that is gone, want 2", got)
	}
}

// metric returns the value of a series, written as it stands in /metrics.
func metric(t *testing.T, s *server.Server, series string) float64 {
	t.Helper()
	var page strings.Builder
	if err := metrics.Write(&page, s.Stats()); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(page.String()) {
		if rest, ok := strings.CutPrefix(line, series+" "); ok {
			v, err := strconv.ParseFloat(strings.TrimSpace(rest), 64)
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
	}
	t.Fatalf("no series %s", series)
	return 0
}
