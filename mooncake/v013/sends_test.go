// SPDX-License-Identifier: Apache-2.0

package v013

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// Every recorded pull: the copies, their target, whether the engine is
// called at all, and the refusal's text.
func TestSendBlocksGolden(t *testing.T) {
	var doc struct {
		Cases []struct {
			Bases, RBases []uint64
			BlockLen      uint64 `json:"block_len"`
			Reqs          [][2]json.RawMessage
			Remote        [][]int
			RC            int
			Session       *string
			Desc          [][3]uint64
			Out           json.RawMessage
		}
	}
	testkit.ReadVector(t, "mooncake-connector/send-blocks-v0130.json", &doc)
	uncalled, refused := 0, 0
	for i, c := range doc.Cases {
		pull := &wire.Pull013{Host: "10.0.0.9", Port: 15001, Bases: c.RBases, Blocks: c.Remote}
		own := make([][]int, len(c.Reqs))
		for j, r := range c.Reqs {
			var id string
			if err := errors.Join(json.Unmarshal(r[0], &id), json.Unmarshal(r[1], &own[j])); err != nil {
				t.Fatal(err)
			}
			pull.Requests = append(pull.Requests, id)
		}
		var session *string
		var got [][3]uint64
		batch, err := (&memory{Bases: c.Bases, BlockBytes: c.BlockLen}).plan(nil, pull, own)
		if err == nil { // vLLM calls its engine with an empty batch, too
			d := sessionOf(pull)
			session, got = &d, [][3]uint64{}
			for _, d := range batch {
				got = append(got, [3]uint64{d.Src, d.Dst, d.Len})
			}
			if c.RC != 0 {
				err = &wire.Error{Class: "RuntimeError", Text: fmt.Sprintf("Error in batch_transfer_sync_write: %d", c.RC)}
			}
		}
		var out any
		if err != nil {
			var refusal *wire.Error
			if !errors.As(err, &refusal) {
				t.Fatalf("case %d: %v", i, err)
			}
			refused++
			out = map[string]any{"err": refusal.Class, "msg": refusal.Text}
		}
		if session == nil {
			uncalled++
		}
		ok := sameJSON(t, out, c.Out)
		if !ok || fmt.Sprint(got) != fmt.Sprint(c.Desc) || (got == nil) != (c.Desc == nil) || (session == nil) != (c.Session == nil) || session != nil && *session != *c.Session {
			t.Fatalf("case %d: %v to %v, want %v to %v", i, got, session, c.Desc, c.Session)
		}
	}
	if uncalled == 0 || refused <= uncalled {
		t.Fatalf("%d refusals, %d of them without a call", refused, uncalled)
	}
	t.Logf("send-blocks-v0130.json: %d cases, %d refusals, the engine not called in %d", len(doc.Cases), refused, uncalled)
}

// Block ids from the wire that would wrap an address are refused.
func TestPlanRange(t *testing.T) {
	f := func(base uint64, own, want int) {
		t.Helper()
		o := memory{Bases: []uint64{base}, BlockBytes: 4096}
		d, err := o.plan(nil, &wire.Pull013{Bases: []uint64{base}, Blocks: [][]int{{want}}}, [][]int{{own}})
		if !errors.Is(err, wire.ErrRange) || d != nil {
			t.Errorf("base %#x, blocks %d and %d: %v, %v", base, own, want, d, err)
		}
	}
	f(0, -1, 0)
	f(0, 0, -1)
	f(0, 0, math.MaxInt)
	f(0, 0, math.MaxInt-1)
	f(0, math.MaxInt/2048, 0)
	f(math.MaxUint64-100, 0, 0)
	o := memory{Bases: []uint64{1 << 63}, BlockBytes: 1 << 62}
	d, err := o.plan(nil, &wire.Pull013{Bases: []uint64{0}, Blocks: [][]int{{2}}}, [][]int{{0}})
	if err != nil || d[0] != (mooncake.Descriptor{Src: 1 << 63, Dst: 1 << 63, Len: 1 << 62}) {
		t.Errorf("%v, %v", d, err)
	}
}

// Random pulls, leases and drops: what is ready is free exactly once, and never
// while a pull holds it; a pull never sees blocks of a request that is not ready.
func TestSends(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now, lease := time.Unix(1000, 0), time.Minute
		table := newSendTable(lease)
		type pull struct {
			held *heldPull
			ids  []string
			dead map[string]bool // dropped meanwhile
		}
		var pulls []pull
		known := map[string]bool{} // → ready
		id := rapid.SampledFrom([]string{"a", "b", "c", "d"})
		free := func(ids []string) {
			for _, id := range ids {
				if !known[id] {
					t.Fatalf("%s is free, and was not ready", id)
				}
				delete(known, id)
				for _, p := range pulls {
					if slices.Contains(p.ids, id) && !p.dead[id] {
						t.Fatalf("%s is free in a pull", id)
					}
				}
			}
		}
		end := func(i int, sent bool) {
			p := pulls[i]
			waiting, err := p.held.waiting()
			if err == nil && !waiting {
				for j, b := range p.held.blocks() {
					if len(b) == 0 || !known[p.ids[j]] {
						t.Fatalf("%s has blocks %v, ready %v", p.ids[j], b, known[p.ids[j]])
					}
				}
			}
			pulls = slices.Delete(pulls, i, i+1)
			free(p.held.end(sent && err == nil && !waiting, now))
		}
		for range rapid.SampledFrom([]int{4, 20, 80}).Draw(t, "steps") {
			x := id.Draw(t, "id")
			switch rapid.IntRange(0, 6).Draw(t, "op") {
			case 0:
				table.announce(x)
				if _, ok := known[x]; !ok {
					known[x] = false
				}
			case 1:
				table.ready(x, []int{1}, now)
				known[x] = true
			case 2:
				table.drop(x)
				if ready, ok := known[x]; ok && !ready {
					delete(known, x)
					for _, p := range pulls {
						p.dead[x] = slices.Contains(p.ids, x)
					}
				}
			case 3:
				now = now.Add(rapid.SampledFrom([]time.Duration{time.Second, lease, 2 * lease}).Draw(t, "later"))
				free(table.expire(now))
			case 4:
				ids := []string{x, id.Draw(t, "other")}
				held, err := table.hold(ids)
				_, first := known[ids[0]]
				_, second := known[ids[1]]
				if (err == nil) != (first && second) || err != nil && !errors.Is(err, wire.ErrUnknown) {
					t.Fatalf("pull of %v, known %v: %v", ids, known, err)
				}
				if err == nil {
					pulls = append(pulls, pull{held, ids, map[string]bool{}})
				}
			default:
				if len(pulls) > 0 {
					end(rapid.IntRange(0, len(pulls)-1).Draw(t, "pull"), rapid.Bool().Draw(t, "sent"))
				}
			}
			if table.size() != len(known) {
				t.Fatalf("%d requests, want %v", table.size(), known)
			}
		}
		for len(pulls) > 0 {
			end(0, false)
		}
		now = now.Add(2 * lease)
		free(table.expire(now))
		for x := range known {
			table.drop(x)
		}
		if table.size() != 0 {
			t.Fatalf("%d requests are left", table.size())
		}
	})
}
