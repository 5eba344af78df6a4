// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

type regionJSON struct {
	Layer   string `json:"layer_name"`
	Index   int    `json:"layer_index"`
	Base    uint64 `json:"base_addr"`
	Stride  uint64 `json:"block_len"`
	Payload uint64 `json:"kv_block_len"`
	Group   int    `json:"group_index"`
	Shared  []int  `json:"shared_group_ids"`
	Row     int    `json:"row_offset"`
}

func regionsOf(list []regionJSON) []wire.Region {
	out := make([]wire.Region, len(list))
	for i, r := range list {
		out[i] = wire.Region{Layer: r.Layer, Index: r.Index, Base: r.Base, Stride: r.Stride, Payload: r.Payload, Group: r.Group, Shared: r.Shared, RowOffset: r.Row}
	}
	return out
}

// text is an error as the vectors write it.
func text(err error) *string {
	if err == nil {
		return nil
	}
	s := err.Error()
	return &s
}

func same(a, b *string) bool { return a == b || a != nil && b != nil && *a == *b }

func show(s *string) string {
	if s == nil {
		return "no error"
	}
	return *s
}

func TestGoldenRegions(t *testing.T) {
	var file struct {
		Cases []struct {
			Local, Remote []regionJSON
			Partial       bool
			Err           *string
			Aligned       int
			Promote       bool
			OutLocal      [][]any `json:"out_local"`
			OutRemote     [][]any `json:"out_remote"`
			Validate      struct {
				LT, RT int
				Rep    bool
				Heads  int
				Out    *string
			}
		}
	}
	testkit.ReadVector(t, "mooncake-connector/regions-v0330.json", &file)
	row := func(r *wire.Region) string {
		return fmt.Sprint([]any{r.Layer, r.Base, r.Stride, r.Payload, r.Group, r.RowOffset})
	}
	for i, c := range file.Cases {
		pairs, err := align(regionsOf(c.Local), regionsOf(c.Remote), c.Partial)
		if !same(text(err), c.Err) {
			t.Errorf("case %d: align: %s, want %s", i, show(text(err)), show(c.Err))
		}
		if len(pairs) != c.Aligned {
			t.Errorf("case %d: %d pairs, want %d", i, len(pairs), c.Aligned)
		}
		if c.Err != nil || err != nil {
			continue
		}
		widen := len(pairs) == len(c.Local) && len(pairs) == len(c.Remote)
		if widen != c.Promote {
			t.Errorf("case %d: widen %v", i, widen)
		}
		out := merge(pairs, widen)
		if len(out) != len(c.OutLocal) || len(out) != len(c.OutRemote) {
			t.Errorf("case %d: %d regions, want %d and %d", i, len(out), len(c.OutLocal), len(c.OutRemote))
			continue
		}
		for j := range out {
			for side, both := range map[string][2]string{
				"local": {row(&out[j].p), exact(c.OutLocal[j])}, "remote": {row(&out[j].d), exact(c.OutRemote[j])},
			} {
				if both[0] != both[1] {
					t.Errorf("case %d region %d %s: %s, want %s", i, j, side, both[0], both[1])
				}
			}
		}
		v := c.Validate
		if got := text(validate(out, v.LT, v.RT, v.Rep, v.Heads)); !same(got, v.Out) {
			t.Errorf("case %d: validate: %s, want %s", i, show(got), show(v.Out))
		}
	}
	t.Logf("%d cases", len(file.Cases))
}

// exact prints a JSON row with its numbers as integers.
func exact(row []any) string {
	for i, v := range row {
		if f, ok := v.(float64); ok {
			row[i] = int64(f)
		}
	}
	return fmt.Sprint(row)
}

func TestGoldenPlan(t *testing.T) {
	var file struct {
		Cases []struct {
			A struct {
				PRank      int    `json:"local_tp_rank"`
				PSize      int    `json:"local_tp_size"`
				DRank      int    `json:"remote_tp_rank"`
				DSize      int    `json:"remote_tp_size"`
				PLen       uint64 `json:"local_kv_block_len"`
				DLen       uint64 `json:"remote_kv_block_len"`
				Replicated bool   `json:"producer_cache_replicated"`
				Heads      int    `json:"total_num_kv_heads"`
			}
			Out json.RawMessage
		}
	}
	testkit.ReadVector(t, "mooncake-connector/transfer-plan-v0330.json", &file)
	for i, c := range file.Cases {
		s, err := planSlice(Peer{TPRank: c.A.PRank, TPSize: c.A.PSize}, Peer{TPRank: c.A.DRank, TPSize: c.A.DSize},
			c.A.PLen, c.A.DLen, c.A.Replicated, c.A.Heads)
		var refusal struct{ Msg *string }
		if json.Unmarshal(c.Out, &refusal) == nil {
			if !same(text(err), refusal.Msg) {
				t.Errorf("case %d: %s, want %s", i, show(text(err)), show(refusal.Msg))
			}
			continue
		}
		if err != nil {
			t.Errorf("case %d: %v", i, err)
			continue
		}
		if got := fmt.Sprintf("[%v,%d,%d,%d]", s.send, s.src, s.dst, s.length); got != strings.ReplaceAll(string(c.Out), " ", "") {
			t.Errorf("case %d: %s, want %s", i, got, c.Out)
		}
	}
	t.Logf("%d cases", len(file.Cases))
}

func TestGoldenDescriptors(t *testing.T) {
	var file struct {
		Cases []struct {
			Specs         []string
			Ratio         int
			LT, RT        [2]int
			Rep           bool
			Heads         int
			Reqs          [][3]json.RawMessage
			Local, Remote [][4]uint64
			Out           struct {
				Desc    [][3]uint64
				ErrReqs []string `json:"err_reqs"`
				ErrMsg  *string  `json:"err_msg"`
				Msg     *string
			}
		}
	}
	testkit.ReadVector(t, "mooncake-connector/transfer-params-v0330.json", &file)
	for i, c := range file.Cases {
		var pairs []regionPair
		for j := range c.Local {
			l, r := c.Local[j], c.Remote[j]
			pairs = append(pairs, regionPair{
				wire.Region{Base: l[0], Stride: l[1], Payload: l[2], Group: int(l[3]), RowOffset: wire.NoRow},
				wire.Region{Base: r[0], Stride: r[1], Payload: r[2], Group: int(r[3]), RowOffset: wire.NoRow},
			})
		}
		kinds := make([]GroupKind, len(c.Specs))
		for j, s := range c.Specs {
			if s == "mamba" {
				kinds[j] = Mamba
			}
		}
		plan, err := newPushPlan(pairs, Peer{TPRank: c.LT[0], TPSize: c.LT[1]}, Peer{TPRank: c.RT[0], TPSize: c.RT[1]},
			c.Rep, c.Heads, kinds, c.Ratio)
		if err != nil {
			t.Fatalf("case %d: %v", i, err)
		}
		var out []Descriptor
		var failed []string
		var first, fatal *string
		for _, raw := range c.Reqs {
			var id string
			var own, wanted [][]int
			if err := errors.Join(json.Unmarshal(raw[0], &id), json.Unmarshal(raw[1], &own), json.Unmarshal(raw[2], &wanted)); err != nil {
				t.Fatal(err)
			}
			var err error
			out, err = plan.Append(out, own, wanted)
			if _, ends := errors.AsType[*LayoutError](err); ends {
				fatal = text(err)
				break
			}
			if err != nil {
				failed = append(failed, id)
				if first == nil {
					first = text(err)
				}
			}
		}
		if !same(fatal, c.Out.Msg) {
			t.Errorf("case %d: %s, want %s", i, show(fatal), show(c.Out.Msg))
		}
		if fatal != nil {
			continue
		}
		var want []Descriptor
		for _, d := range c.Out.Desc {
			want = append(want, Descriptor{d[0], d[1], d[2]})
		}
		if !slices.Equal(out, want) {
			t.Errorf("case %d: descriptors\n got %v\nwant %v", i, out, want)
		}
		if !slices.Equal(failed, c.Out.ErrReqs) || !same(first, c.Out.ErrMsg) {
			t.Errorf("case %d: failed %v (%s), want %v (%s)", i, failed, show(first), c.Out.ErrReqs, show(c.Out.ErrMsg))
		}
	}
	t.Logf("%d cases", len(file.Cases))
}
