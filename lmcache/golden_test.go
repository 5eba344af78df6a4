// SPDX-License-Identifier: Apache-2.0

package lmcache_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// keyFields is a key as the recording's JSON shows it.
type keyFields struct {
	Model     string          `json:"model_name"`
	WorldSize int             `json:"world_size"`
	Worker    *int            `json:"worker_id"`
	Tokens    []uint32        `json:"token_ids"`
	Start     int             `json:"start"`
	End       int             `json:"end"`
	RequestID string          `json:"request_id"`
	Salt      string          `json:"cache_salt"`
	Configs   json.RawMessage `json:"request_configs"`
	Readers   int             `json:"num_kv_readers"`
}

func (k *keyFields) key() *lmcache.Key {
	worker := lmcache.AllWorkers
	if k.Worker != nil {
		worker = *k.Worker
	}
	return &lmcache.Key{
		Model: k.Model, WorldSize: k.WorldSize, Worker: worker, Tokens: k.Tokens, Start: k.Start, End: k.End,
		RequestID: k.RequestID, Salt: k.Salt, Readers: k.Readers,
	}
}

// Every recorded frame decodes to what the recording says, and what we encode
// ourselves is equal to it byte for byte.
func TestRecordedFrames(t *testing.T) {
	cases := 0
	for _, file := range []string{"engine_driven_shm", "engine_driven_pickle", "lmcache_driven_cpu_shm", "kv_events_stream", "p2p"} {
		var rec testkit.Recording
		testkit.ReadVector(t, "lmcache-mp/"+file+".json", &rec)
		memo := lmcache.NewMemo(rec.Meta.ChunkTokens, 1<<20)
		for _, step := range rec.Steps {
			for i, f := range step.Frames {
				frames := testkit.Frames(f.Hex)
				if len(frames[1]) == 0 {
					continue // flow control of the event stream
				}
				cases++
				where := fmt.Sprintf("%s: %s frame %d", file, step.Step, i)
				op, err := lmcache.ParseOp(frames[1])
				if err != nil || op == lmcache.OpUnknown {
					t.Errorf("%s: ParseOp = %v, %v", where, op, err)
				}
				if !bytes.Equal(lmcache.AppendOp(nil, op), frames[1]) {
					t.Errorf("%s: AppendOp(%v) = %x, want %x", where, op, lmcache.AppendOp(nil, op), frames[1])
				}
				if f.Direction == "client_to_server" {
					checkRequest(t, where, memo, op, frames[2:], f.Decoded.Payloads)
				} else if len(frames) == 3 {
					checkReply(t, where, op, frames[2])
				}
			}
		}
	}
	t.Logf("%d cases", cases)
}

func checkRequest(t *testing.T, where string, memo *lmcache.Memo, op lmcache.Op, payloads [][]byte, decoded []json.RawMessage) {
	t.Helper()
	r, err := new(lmcache.Decoder).Decode(memo, lmcache.Only(lmcache.Latest), op, payloads)
	if err != nil {
		t.Errorf("%s: %v", where, err)
		return
	}
	checkFields(t, where, r, payloads)
	for i, p := range payloads {
		var want keyFields
		if json.Unmarshal(decoded[i], &want) != nil || want.Tokens == nil {
			continue
		}
		key := want.key()
		var got lmcache.KeyView
		if err := memo.DecodeKey(p, &got); err != nil {
			t.Errorf("%s: %v", where, err)
			continue
		}
		checkKey(t, where, memo, &got, key)
		if string(want.Configs) == "null" {
			if enc := key.Append(nil); !bytes.Equal(enc, p) {
				t.Errorf("%s: key encodes as\n%x, want\n%x", where, enc, p)
			}
		}
	}
	var encoded [][]byte
	switch r := r.(type) {
	case *lmcache.KVCache:
		encoded = r.Frames()
	case *lmcache.StoreRequest:
		encoded, payloads = [][]byte{lmcache.AppendBlockIDs(nil, r.Blocks)}, payloads[2:3]
	case *lmcache.RetrieveRequest:
		encoded, payloads = [][]byte{lmcache.AppendBlockIDs(nil, r.Blocks)}, payloads[2:3]
	case *lmcache.EngineDriven:
		encoded = [][]byte{r.Append(nil)}
	case *lmcache.ReportBlockAllocationRequest:
		var records []struct {
			ID     string `json:"req_id"`
			Blocks []int  `json:"new_block_ids"`
			Tokens []int  `json:"new_token_ids"`
		}
		if err := json.Unmarshal(decoded[2], &records); err != nil {
			t.Fatal(err)
		}
		var list []lmcache.BlockAllocation
		for _, r := range records {
			list = append(list, lmcache.BlockAllocation{RequestID: r.ID, NewBlocks: r.Blocks, NewTokens: r.Tokens})
		}
		encoded, payloads = [][]byte{lmcache.AppendBlockAllocations(nil, list)}, payloads[2:3]
	default:
		return
	}
	if !slices.EqualFunc(encoded, payloads, bytes.Equal) {
		t.Errorf("%s: encodes as %x, want %x", where, encoded, payloads)
	}
}

func checkKey(t *testing.T, where string, memo *lmcache.Memo, got *lmcache.KeyView, want *lmcache.Key) {
	t.Helper()
	chunkTokens := memo.ChunkTokens()
	if string(got.Model) != want.Model || got.WorldSize != want.WorldSize || got.Worker != want.Worker ||
		got.Start != want.Start || got.End != want.End || string(got.RequestID) != want.RequestID ||
		string(got.Salt) != want.Salt || got.Readers != want.Readers || got.NumTokens != len(want.Tokens) {
		t.Errorf("%s: decoded %+v, want %+v", where, got, want)
	}
	memo.Hash(got, got.Chunks)
	if hashes := kv.ChunkHashes(want.Tokens, chunkTokens); !slices.Equal(got.Hashes, hashes) {
		t.Errorf("%s: hashes %v, want %v", where, got.Hashes, hashes)
	}
}

func checkReply(t *testing.T, where string, op lmcache.Op, frame []byte) {
	t.Helper()
	equal := func(got []byte, err error) {
		t.Helper()
		if err != nil || !bytes.Equal(got, frame) {
			t.Errorf("%s: %v, encodes as %x, want %x", where, err, got, frame)
		}
	}
	switch op {
	case lmcache.OpRegisterEngineDriven:
		p, err := lmcache.DecodePool(frame)
		equal(p.Append(nil), err)
	case lmcache.OpPrepareStore:
		p, err := lmcache.DecodePrepareStore(frame)
		if p.Slots == nil {
			return // pickle mode: an empty context, which we never send
		}
		s := slotsOf(p.Slots)
		s.Indices = p.Indices
		equal(lmcache.AppendPrepareStore(nil, &s), err)
	case lmcache.OpPrepareRetrieve:
		p, err := lmcache.DecodePrepareRetrieve(frame)
		switch {
		case err != nil || len(p.Data) > 0:
			if err != nil {
				t.Errorf("%s: %v", where, err)
			}
		case !p.Success:
			equal(lmcache.AppendPrepareRetrieve(nil, nil), err)
		default:
			s := slotsOf(p.Slots)
			equal(lmcache.AppendPrepareRetrieve(nil, &s), err)
		}
	case lmcache.OpQueryPrefetchStatus, lmcache.OpWaitPrefetchStatus, lmcache.OpGetChunkSize:
		n, err := lmcache.DecodeInt(frame)
		equal(lmcache.AppendInt(nil, n), err)
	case lmcache.OpPing, lmcache.OpCommitStore, lmcache.OpCommitRetrieve:
		v, err := lmcache.DecodeBool(frame)
		equal(lmcache.AppendBool(nil, v), err)
	case lmcache.OpStore, lmcache.OpRetrieve:
		v, err := lmcache.DecodeCopied(frame)
		equal(v.Append(nil), err)
	}
}

// slotsOf takes recorded slots, all of one layout, back to what made them.
func slotsOf(slots []lmcache.SlotAt) lmcache.Slots {
	var s lmcache.Slots
	for _, at := range slots {
		s.Lengths = []int64{at.Length}
		s.Offsets = append(s.Offsets, at.Offset)
		sh := at.Shape
		s.Layouts = []kv.Layout{{SinglePlane: len(sh) == 3, Layers: sh[len(sh)-3], Slots: sh[len(sh)-2], Hidden: sh[len(sh)-1], DType: at.DType}}
	}
	return s
}

func TestNegativeReplies(t *testing.T) {
	f := func(op lmcache.Op, want string) {
		t.Helper()
		got, ok := lmcache.AppendNegative(nil, op, "why")
		if !ok {
			got = []byte("none")
		}
		w := []byte(want)
		if want != "none" {
			w, _ = hex.DecodeString(want)
		}
		if !bytes.Equal(got, w) {
			t.Errorf("%v: %x, want %s", op, got, want)
		}
	}
	f(lmcache.OpStore, "92c400c2")
	f(lmcache.OpRetrieve, "92c400c2")
	f(lmcache.OpLookup, "none")
	f(lmcache.OpQueryPrefetchStatus, "00")
	f(lmcache.OpCommitStore, "c2")
	f(lmcache.OpClear, "none")
	f(lmcache.OpGetExperimental, "90")
	f(lmcache.OpUnknown, "none")
	f(lmcache.OpRegisterKVCache, "none")
	f(lmcache.OpPrepareStore, hex.EncodeToString(lmcache.AppendPrepareStore(nil, &lmcache.Slots{})))
	module, _ := lmcache.AppendNegative(nil, lmcache.OpServerModuleCall, "why")
	if v, _, err := msgp.ReadMapStrIntfBytes(module, nil); err != nil || v["success"] != false || v["error"] != "why" {
		t.Errorf("server_module_call: %v, %v", v, err)
	}
	events, _ := lmcache.AppendNegative(nil, lmcache.OpSubscribeKVEvents, "why")
	if v, _, err := msgp.ReadMapStrIntfBytes(events, nil); err != nil || v["enabled"] != false {
		t.Errorf("subscribe_kv_events: %v, %v", v, err)
	}
}

func TestParseOp(t *testing.T) {
	f := func(hexFrame string, want lmcache.Op, ok bool) {
		t.Helper()
		b, _ := hex.DecodeString(hexFrame)
		if got, err := lmcache.ParseOp(b); got != want || (err == nil) != ok {
			t.Errorf("ParseOp(%s) = %v, %v, want %v", hexFrame, got, err, want)
		}
	}
	f("16", lmcache.OpPing, true)
	f("cc16", lmcache.OpPing, true) // wider than it needs
	f("d300000000000000"+"16", lmcache.OpPing, true)
	f("a470696e67", lmcache.OpPing, true)
	f("0b", lmcache.OpUnknown, true)   // retired
	f("cc80", lmcache.OpUnknown, true) // never given
	f("ccca", lmcache.OpUnknown, true) // our own id for a named operation
	f("ff", lmcache.OpUnknown, true)   // -1
	f("a0", lmcache.OpUnknown, true)
	f("", lmcache.OpUnknown, false)
	f("c1", lmcache.OpUnknown, false)
	f("1616", lmcache.OpUnknown, false)
	f("cb400c000000000000", lmcache.OpUnknown, false)
	f("a470696e", lmcache.OpUnknown, false)
}
