// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// wireCase is one encoding of one release.
type wireCase struct {
	Release string          `json:"ver"`
	Type    string          `json:"type"`
	Value   json.RawMessage `json:"v"`
	Hex     testkit.Hex     `json:"hex"`
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
	q := *p
	q.Release = 0 // encoded in another form, it has another
	return strings.ReplaceAll(fmt.Sprintf("%+v", q), "[]", "<>")
}

func TestGoldenWire(t *testing.T) {
	var file struct{ Cases []wireCase }
	testkit.ReadVector(t, "mooncake-connector/wire-msgpack.json", &file)
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
			var p *Pull013
			if p, err = DecodePull013(c.Hex); err == nil {
				again = AppendPull013(nil, p)
				got = fmt.Sprint(*p)
				want = fmt.Sprint(Pull013{v.Host, v.Port, v.Requests, v.Bases, v.BlockIDs})
			}
		case "MooncakeXferMetadata":
			var p *Pull
			if p, err = DecodePull(c.Hex, r); err == nil {
				again = AppendPull(nil, p, r)
				got, want = normal(p), normal(v.pull(t))
				if len(p.Regions) > 0 && p.Release.BlockSizes() != r.BlockSizes() {
					t.Errorf("case %d (%s): taken for release %d", i, c.Release, p.Release)
				}
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
