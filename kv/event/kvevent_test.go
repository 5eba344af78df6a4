// SPDX-License-Identifier: Apache-2.0

package event_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv/event"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// recorded is vectors/kv-events/events.json: what vLLM 0.32's classes write and read.
type recorded struct {
	Payloads []struct {
		Name   string
		TS     float64
		Rank   *int `json:"data_parallel_rank"`
		Events []map[string]json.RawMessage
		Hex    string
	}
	Decoding []struct {
		Name, Hex string
		Accepted  bool
	}
}

func read(t testing.TB) (r recorded) {
	t.Helper()
	testkit.ReadVector(t, "kv-events/events.json", &r)
	return r
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// hashOf reads a hash of the vectors, and whether it is an integer of 0 or more.
func hashOf(t testing.TB, raw json.RawMessage) (h []byte, integer bool) {
	t.Helper()
	var n json.Number
	if json.Unmarshal(raw, &n) == nil && n != "" {
		if v, err := n.Int64(); err == nil {
			return binary.BigEndian.AppendUint64(nil, uint64(v)), v >= 0
		}
		var u uint64
		if err := json.Unmarshal(raw, &u); err != nil {
			t.Fatal(err)
		}
		return binary.BigEndian.AppendUint64(nil, u), true
	}
	var b struct{ Hex string }
	if err := json.Unmarshal(raw, &b); err != nil {
		t.Fatal(err)
	}
	return unhex(t, b.Hex), false
}

// want is an event of the vectors; plain says that our encoder has all its fields.
func want(t testing.TB, m map[string]json.RawMessage) (ev event.Event, plain, ints bool) {
	t.Helper()
	into := func(name string, v any) {
		if raw, ok := m[name]; ok && string(raw) != "null" {
			if err := json.Unmarshal(raw, v); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}
	kind, group := "", (*int)(nil)
	into("type", &kind)
	into("group_idx", &group)
	ev.Kind = map[string]event.Kind{"BlockStored": event.Stored, "BlockRemoved": event.Removed, "AllBlocksCleared": event.Cleared}[kind]
	ev.Group = -1
	if group != nil {
		ev.Group = *group
	}
	var hashes []json.RawMessage
	into("block_hashes", &hashes)
	bin := 0
	for _, raw := range hashes {
		h, integer := hashOf(t, raw)
		if integer {
			ints = true
		} else {
			bin++
		}
		ev.Hashes = append(ev.Hashes, h)
	}
	plain = !ints || bin == 0
	for _, h := range ev.Hashes {
		plain = plain && (ints || len(h) != 8)
	}
	if raw, ok := m["parent_block_hash"]; ok && string(raw) != "null" {
		var integer bool
		ev.Parent, integer = hashOf(t, raw)
		plain = plain && integer == ints
	}
	into("token_ids", &ev.Tokens)
	into("block_size", &ev.BlockTokens)
	into("medium", &ev.Medium)
	into("lora_name", &ev.LoRA)
	for _, name := range []string{"lora_id", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id"} {
		if raw, ok := m[name]; ok && string(raw) != "null" {
			plain = false
		}
	}
	var extra [][]json.RawMessage
	into("extra_keys", &extra)
	if raw, ok := m["extra_keys"]; ok && string(raw) != "null" && len(extra) == 0 {
		plain = false // an empty list is sent
	}
	for i, keys := range extra {
		for _, raw := range keys {
			s := ""
			if json.Unmarshal(raw, &s) != nil {
				plain = false
			} else if i == 0 && s != ev.LoRA {
				ev.Salt = s
			}
		}
	}
	if len(extra) > 0 && ev.Salt == "" && ev.LoRA == "" {
		plain = false // [nil] is sent
	}
	return ev, plain, ints
}

// Decode reads each payload that vLLM wrote. If the encoder has all its fields, it writes the same bytes.
func TestRecordedPayloads(t *testing.T) {
	written := 0
	for _, p := range read(t).Payloads {
		b := unhex(t, p.Hex)
		got, err := event.Decode(b)
		if err != nil {
			t.Errorf("%s: %v", p.Name, err)
			continue
		}
		w := event.Batch{Time: p.TS, Rank: -1}
		if p.Rank != nil {
			w.Rank = *p.Rank
		}
		all, ints := true, false
		for _, m := range p.Events {
			ev, plain, i := want(t, m)
			all, ints = all && plain, ints || i
			w.Events = append(w.Events, ev)
		}
		if got.Time != w.Time || got.Rank != w.Rank || len(got.Events) != len(w.Events) {
			t.Errorf("%s: %+v", p.Name, got)
			continue
		}
		for i := range got.Events {
			if !equal(&got.Events[i], &w.Events[i]) {
				t.Errorf("%s: event %d is %+v, want %+v", p.Name, i, got.Events[i], w.Events[i])
			}
		}
		if !all {
			continue
		}
		written++
		if out := (event.Encoding{IntHashes: ints}).Append(nil, &w); !bytes.Equal(out, b) {
			t.Errorf("%s: written as\n%x, want\n%x", p.Name, out, b)
		}
	}
	if written < 25 {
		t.Errorf("only %d payloads were written", written)
	}
}

func equal(a, b *event.Event) bool {
	same := func(x, y [][]byte) bool { return slices.EqualFunc(x, y, bytes.Equal) }
	return a.Kind == b.Kind && same(a.Hashes, b.Hashes) && bytes.Equal(a.Parent, b.Parent) && slices.Equal(a.Tokens, b.Tokens) &&
		a.BlockTokens == b.BlockTokens && a.Medium == b.Medium && a.LoRA == b.LoRA && a.Salt == b.Salt && a.Group == b.Group
}

// Decode refuses the payloads that vLLM's classes refuse, except arrays, which older releases sent.
func TestRecordedDecoding(t *testing.T) {
	for _, c := range read(t).Decoding {
		_, err := event.Decode(unhex(t, c.Hex))
		if c.Name == "event_as_array" || c.Name == "event_stored_as_array" {
			continue
		}
		if (err == nil) != c.Accepted || err != nil && !errors.Is(err, event.ErrBatch) {
			t.Errorf("%s: %v, accepted: %v", c.Name, err, c.Accepted)
		}
	}
}

var sample = event.Batch{
	Time: 1.5, Rank: -1, Epoch: 1 << 63,
	Events: []event.Event{
		{Kind: event.Stored, Hashes: [][]byte{bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)}, Tokens: []int64{1, 300, 70000, 9}, BlockTokens: 2, Medium: event.CPU, Salt: "tenant", Group: -1},
		{Kind: event.Stored, Hashes: [][]byte{bytes.Repeat([]byte{3}, 32)}, Parent: bytes.Repeat([]byte{2}, 32), Tokens: []int64{7, 8}, BlockTokens: 2, Medium: event.Storage, LoRA: "l", Salt: "s", Group: 1},
		{Kind: event.Stored, Hashes: [][]byte{bytes.Repeat([]byte{4}, 32)}, Tokens: []int64{7, 8}, BlockTokens: 2, Group: 0},
		{Kind: event.Removed, Hashes: [][]byte{bytes.Repeat([]byte{1}, 32)}, Medium: event.CPU, Group: -1},
		{Kind: event.Removed, Hashes: [][]byte{bytes.Repeat([]byte{1}, 32)}, Medium: event.CPU, Group: 2},
		{Kind: event.Cleared, Group: -1},
	},
}

// A batch that is written in either encoding is read back unchanged.
func TestEncodingsComeBack(t *testing.T) {
	for _, e := range []event.Encoding{{}, {Arrays: true}} {
		got, err := event.Decode(e.Append(nil, &sample))
		if err != nil || !reflect.DeepEqual(got, sample) {
			t.Errorf("%+v: %v\n%+v", e, err, got)
		}
	}
	ints, err := event.Decode((event.Encoding{IntHashes: true, Arrays: true}).Append(nil, &sample))
	if err != nil || !bytes.Equal(ints.Events[1].Parent, bytes.Repeat([]byte{2}, 8)) {
		t.Errorf("%v %+v", err, ints)
	}
	encoded := event.Batch{Rank: 3, Events: []event.Event{{Kind: event.Stored, Encoded: event.AppendTokens(nil, []int64{5, -1}), Group: -1}}}
	if got, err := event.Decode((event.Encoding{}).Append(nil, &encoded)); err != nil || !slices.Equal(got.Events[0].Tokens, []int64{5, -1}) || got.Rank != 3 || got.Epoch != 0 {
		t.Errorf("%v %+v", err, got)
	}
}

// A batch that is cut anywhere is refused.
func TestCutBatchIsRefused(t *testing.T) {
	for _, e := range []event.Encoding{{}, {Arrays: true}} {
		b := e.Append(nil, &sample)
		for i := range b {
			if _, err := event.Decode(b[:i]); !errors.Is(err, event.ErrBatch) {
				t.Errorf("%+v, %d of %d bytes: %v", e, i, len(b), err)
			}
		}
	}
}

// Texts are UTF-8: vLLM's readers refuse a batch in which one is not.
func TestTextThatIsNotUTF8IsRefused(t *testing.T) {
	for _, ev := range []event.Event{
		{Kind: event.Stored, Hashes: [][]byte{{1}}, Salt: "\xff", Group: -1}, {Kind: event.Stored, Hashes: [][]byte{{1}}, LoRA: "\xff", Group: -1}, {Kind: event.Removed, Medium: "\xff", Group: -1},
	} {
		for _, e := range []event.Encoding{{}, {Arrays: true}} {
			if _, err := event.Decode(e.Append(nil, &event.Batch{Events: []event.Event{ev}})); !errors.Is(err, event.ErrBatch) {
				t.Errorf("%+v: %v", ev, err)
			}
		}
	}
}

// A batch that was read can be written, and is then read as the same batch.
func FuzzDecode(f *testing.F) {
	for _, p := range read(f).Payloads {
		f.Add(unhex(f, p.Hex))
	}
	for _, p := range read(f).Decoding {
		f.Add(unhex(f, p.Hex))
	}
	f.Add((event.Encoding{Arrays: true}).Append(nil, &sample))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := event.Decode(b)
		if err != nil {
			return
		}
		again, err := event.Decode((event.Encoding{}).Append(nil, &got))
		if err != nil {
			t.Fatalf("%v of %+v", err, got)
		}
		if len(again.Events) != len(got.Events) || again.Rank != got.Rank || again.Epoch != got.Epoch {
			t.Fatalf("%+v, then %+v", got, again)
		}
	})
}
