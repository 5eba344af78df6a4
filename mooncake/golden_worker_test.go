package mooncake

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/vectors"
)

// wireCase is one encoding of one release.
type wireCase struct {
	Release string          `json:"ver"`
	Type    string          `json:"type"`
	Value   json.RawMessage `json:"v"`
	Hex     vectors.Hex     `json:"hex"`
	Bad     int             `json:"bad"`
}

// wireValue holds the fields of all three structures.
type wireValue struct {
	Host      string                     `json:"remote_hostname"`
	Port      int                        `json:"remote_port"`
	TPSize    int                        `json:"remote_tp_size"`
	TPRank    int                        `json:"remote_tp_rank"`
	PPSize    int                        `json:"remote_pp_size"`
	LayoutID  uint64                     `json:"layout_id"`
	Wanted    map[string]json.RawMessage `json:"req_blocks"`
	Bases     []uint64                   `json:"kv_caches_base_addr"`
	Strides   []uint64                   `json:"block_lens"`
	Payloads  []uint64                   `json:"kv_block_lens"`
	Layers    []string                   `json:"registered_layer_names"`
	Indices   []int                      `json:"registered_layer_indices"`
	Groups    []int                      `json:"registered_group_indices"`
	Shared    [][]int                    `json:"registered_shared_group_ids"`
	Rows      []int                      `json:"registered_row_offsets"`
	Requests  []string                   `json:"request_ids"`
	BlockIDs  [][]int                    `json:"block_ids"`
	Status    Status                     `json:"status"`
	OK        []string                   `json:"ok_reqs"`
	Failed    []string                   `json:"err_reqs"`
	ErrorText string                     `json:"err_msg"`
}

func (v *wireValue) pull(t *testing.T) *Pull {
	p := &Pull{
		Host: v.Host, Port: v.Port, TPSize: v.TPSize, TPRank: v.TPRank, PPSize: max(v.PPSize, 1), LayoutID: v.LayoutID,
		Wanted: map[string]Wanted{}, Regions: make([]Region, len(v.Bases)),
	}
	for id, raw := range v.Wanted {
		var pair []json.RawMessage
		var w Wanted
		if err := errors.Join(json.Unmarshal(raw, &pair), json.Unmarshal(pair[0], &w.TransferID)); err != nil {
			t.Fatal(err)
		}
		if json.Unmarshal(pair[1], &w.Blocks) != nil {
			w.Blocks = [][]int{nil}
			if err := json.Unmarshal(pair[1], &w.Blocks[0]); err != nil {
				t.Fatal(err)
			}
		}
		p.Wanted[id] = w
	}
	for i, b := range v.Bases {
		g := Region{
			Base: b, Stride: at(v.Strides, i, 0), Layer: at(v.Layers, i, ""), Index: at(v.Indices, i, Unsent),
			Group: at(v.Groups, i, Unsent), Shared: at(v.Shared, i, nil), RowOffset: at(v.Rows, i, Unsent),
		}
		g.Payload = at(v.Payloads, i, g.Stride)
		p.Regions[i] = g
	}
	return p
}

// normal makes empty and absent lists of ids equal: they mean the same.
func normal(p *Pull) string {
	for id, w := range p.Wanted {
		if !slices.ContainsFunc(w.Blocks, func(g []int) bool { return len(g) > 0 }) {
			w.Blocks = nil
		}
		p.Wanted[id] = w
	}
	return strings.ReplaceAll(fmt.Sprintf("%+v", *p), "[]", "<>")
}

func TestGoldenWire(t *testing.T) {
	var file struct{ Cases []wireCase }
	vectors.Read(t, "mooncake-connector/wire-msgpack.json", &file)
	refused := 0
	for i, c := range file.Cases {
		minor, err := strconv.Atoi(strings.Split(c.Release, ".")[1])
		if err != nil {
			t.Fatal(err)
		}
		r := Release(minor)
		var v wireValue
		if c.Bad == 0 {
			if err := json.Unmarshal(c.Value, &v); err != nil {
				t.Fatalf("case %d: %v", i, err)
			}
		}
		var again []byte
		var got, want string
		switch c.Type {
		case "MooncakeAgentMetadata":
			var p *PullV1
			if p, err = DecodePullV1(c.Hex); err == nil {
				again = AppendPullV1(nil, p)
				got = fmt.Sprint(*p)
				want = fmt.Sprint(PullV1{v.Host, v.Port, v.Requests, v.Bases, v.BlockIDs})
			}
		case "MooncakeXferMetadata":
			var p *Pull
			if p, err = DecodePull(c.Hex, r); err == nil {
				again = AppendPull(nil, p, r)
				got, want = normal(p), normal(v.pull(t))
				if _, err := DecodePull(c.Hex, 0); err != nil {
					t.Errorf("case %d (%s %s): refused when any release goes: %v", i, c.Release, c.Type, err)
				}
			}
		case "MooncakeXferResponse":
			var y *Reply
			if y, err = DecodeReply(c.Hex, r); err == nil {
				again = AppendReply(nil, y)
				got = fmt.Sprintf("%+v", *y)
				want = fmt.Sprintf("%+v", Reply{Status: v.Status, OK: v.OK, Failed: v.Failed, Message: v.ErrorText, LayoutID: v.LayoutID})
			}
		default:
			t.Fatalf("case %d: type %q", i, c.Type)
		}
		if c.Bad == 1 {
			refused++
			if err == nil || !errors.Is(err, ErrMessage) {
				t.Errorf("case %d (%s %s): %x accepted or an odd error: %v", i, c.Release, c.Type, c.Hex, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("case %d (%s %s): %v", i, c.Release, c.Type, err)
			continue
		}
		if got != want {
			t.Errorf("case %d (%s %s):\n got %s\nwant %s", i, c.Release, c.Type, got, want)
		}
		if !bytes.Equal(again, c.Hex) {
			t.Errorf("case %d (%s %s): encoded\n got %x\nwant %x", i, c.Release, c.Type, again, []byte(c.Hex))
		}
	}
	t.Logf("%d cases, %d of them to be refused", len(file.Cases), refused)
}

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

func regionsOf(list []regionJSON) []Region {
	out := make([]Region, len(list))
	for i, r := range list {
		out[i] = Region{r.Layer, r.Index, r.Base, r.Stride, r.Payload, r.Group, r.Shared, r.Row}
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
	vectors.Read(t, "mooncake-connector/regions-v0330.json", &file)
	row := func(r *Region) string {
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
	vectors.Read(t, "mooncake-connector/transfer-plan-v0330.json", &file)
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
	vectors.Read(t, "mooncake-connector/transfer-params-v0330.json", &file)
	for i, c := range file.Cases {
		var pairs []regionPair
		for j := range c.Local {
			l, r := c.Local[j], c.Remote[j]
			pairs = append(pairs, regionPair{
				Region{Base: l[0], Stride: l[1], Payload: l[2], Group: int(l[3]), RowOffset: NoRow},
				Region{Base: r[0], Stride: r[1], Payload: r[2], Group: int(r[3]), RowOffset: NoRow},
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
