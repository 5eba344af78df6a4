// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"fmt"
	"testing"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// 0.13 knows no windows: P offers all blocks, and D asks for all of them.
func TestFirstReleaseClipsNoWindows(t *testing.T) {
	all := [][]int{{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}}
	group := []CacheGroup{{Group: coordinator.Group{Kind: coordinator.SlidingWindow, Block: 16, Window: 32}}}
	for _, release := range []wire.Release{13, 0} {
		d, err := New(Options{Pairing: RequestIDs("", 0), Role: wire.Consumer, Release: release, Groups: group})
		if err != nil {
			t.Fatal(err)
		}
		r := &Request{ID: "r", PromptTokens: 160, Params: wire.RemotePrefillAt("h", 1)}
		if _, err := d.Match(r, 0); err != nil {
			t.Fatal(err)
		}
		if err := d.Allocated(r, all, 160); err != nil {
			t.Fatal(err)
		}
		m, err := d.Build()
		if err != nil || len(m.Pulls) != 1 || fmt.Sprint(m.Pulls[0].Blocks) != fmt.Sprint(all) {
			t.Fatalf("D asks for %+v, %v", m, err)
		}
		p, err := New(Options{Pairing: RequestIDs("h", 1), Role: wire.Producer, Release: release, Groups: group})
		if err != nil {
			t.Fatal(err)
		}
		r = &Request{ID: "r", PromptTokens: 160, Params: wire.RemoteDecode("")}
		if err := p.Allocated(r, nil, 0); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Build(); err != nil {
			t.Fatal(err)
		}
		if _, err := p.Finish(r, LengthCapped, all); err != nil {
			t.Fatal(err)
		}
		m, err = p.Build()
		if err != nil || len(m.Sends) != 1 || fmt.Sprint(m.Sends[0].Blocks) != fmt.Sprint(all) {
			t.Fatalf("P offers %+v, %v", m, err)
		}
	}
}
