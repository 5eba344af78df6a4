// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"testing"
	"time"
)

// A Progress counts the bytes of a write at the target and at the initiator. Writes without one count nothing.
func TestProgress(t *testing.T) {
	tab := NewTable()
	mem := make([]byte, 24<<20)
	r, err := tab.Register(1<<40, mem)
	if err != nil {
		t.Fatal(err)
	}
	target, err := Listen(TargetOptions{}, tab)
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	c := New(Options{})
	defer c.Close()
	local := make([]byte, len(mem))
	entries := []Entry{{Local: local[:20<<20], Remote: 1 << 40}, {Local: local[20<<20 : 21<<20], Remote: 1<<40 + 22<<20}}
	if err := c.Write(t.Context(), target.Name(), entries); err != nil { // without a Progress
		t.Fatal(err)
	}
	var in, out Progress
	if !in.First().IsZero() || in.Bytes() != 0 || (*Progress)(nil).Bytes() != 0 || !(*Progress)(nil).First().IsZero() {
		t.Error("it begins with something")
	}
	r.Count(&in)
	start := time.Now()
	if err := c.WriteCounting(t.Context(), target.Name(), entries, &out); err != nil {
		t.Fatal(err)
	}
	for name, p := range map[string]*Progress{"in": &in, "out": &out} {
		if p.Bytes() != 21<<20 || p.First().Before(start.Truncate(time.Microsecond)) || p.First().After(time.Now()) {
			t.Errorf("%s: %d bytes, the first at %v", name, p.Bytes(), p.First())
		}
	}
	if err := c.WriteCounting(t.Context(), target.Name(), []Entry{{Local: local[:8], Remote: 1}}, &out); err == nil || in.Bytes() != 21<<20 || out.Bytes() != 21<<20 {
		t.Errorf("a refused one: %v, %d bytes", err, in.Bytes())
	}
}
