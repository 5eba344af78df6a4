// SPDX-License-Identifier: Apache-2.0

package lmcache_test

import (
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/lmcache"
)

// checkFields compares a decoded request with what a plain msgpack reader, which
// knows nothing of the protocol, finds in the payloads.
func checkFields(t *testing.T, where string, r lmcache.Request, payloads [][]byte) {
	t.Helper()
	plain := make([]any, len(payloads))
	for i, p := range payloads {
		if i == 1 && (r.Op() == lmcache.OpRegisterKVCache || r.Op() == lmcache.OpP2PLookupAndLock) {
			continue // extensions, and a map with integer keys
		}
		v, rest, err := msgp.ReadIntfBytes(p)
		if err != nil || len(rest) > 0 {
			t.Fatalf("%s: payload %d: %v", where, i, err)
		}
		plain[i] = v
	}
	number := func(v any) int64 {
		switch v := v.(type) {
		case int64:
			return v
		case uint64:
			return int64(v)
		}
		return math.MinInt64
	}
	want := func(what string, got, want any) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %s is %v, want %v", where, what, got, want)
		}
	}
	ints := func(lists any) (out [][]int) {
		for _, list := range lists.([]any) {
			of := []int{}
			for _, v := range list.([]any) {
				of = append(of, int(number(v)))
			}
			out = append(out, of)
		}
		return out
	}
	checkRange := func(k *lmcache.KeyRange) {
		t.Helper()
		m := plain[0].(map[string]any)
		want("model_name", string(k.Key.Model), m["model_name"])
		want("request_id", string(k.Key.RequestID), m["request_id"])
		want("worker_id", int64(k.Key.Worker), number(m["worker_id"]))
		want("instance_id", k.InstanceID, number(plain[1]))
		want("start", int64(k.From)*int64(k.Key.End-k.Key.Start), number(m["start"])*int64(k.To-k.From))
		want("hashes", len(k.Key.Hashes) >= k.To, true)
	}
	switch r := r.(type) {
	case *lmcache.PrepareStoreRequest:
		checkRange(&r.KeyRange)
	case *lmcache.CommitStoreRequest:
		checkRange(&r.KeyRange)
		want("data", string(r.Data), string(plain[2].([]byte)))
	case *lmcache.PrepareRetrieveRequest:
		checkRange(&r.KeyRange)
	case *lmcache.CommitRetrieveRequest:
		checkRange(&r.KeyRange)
	case *lmcache.StoreRequest:
		checkRange(&r.KeyRange)
		want("blocks", reflect.DeepEqual(r.Blocks, ints(plain[2])), true)
	case *lmcache.RetrieveRequest:
		checkRange(&r.KeyRange)
		want("blocks", reflect.DeepEqual(r.Blocks, ints(plain[2])), true)
		want("skip_first_n_tokens", r.SkipTokens, number(plain[4]))
	case *lmcache.LookupRequest:
		want("tp_size", r.TensorParallel, number(plain[1]))
		want("end", int64(r.Key.End), number(plain[0].(map[string]any)["end"]))
	case *lmcache.FreeLookupLocksRequest:
		want("tp_size", r.TensorParallel, number(plain[1]))
		want("end", int64(r.Key.End)*int64(r.To), number(plain[0].(map[string]any)["end"])*int64(r.To))
	case *lmcache.PrefetchStatusRequest:
		want("request_id", string(r.RequestID), plain[0])
		want("wait", r.Wait, len(plain) == 2)
	case *lmcache.EndSessionRequest:
		want("request_id", string(r.RequestID), plain[0])
	case *lmcache.PingRequest:
		want("bare", r.Bare, len(plain) == 0)
		if r.OfWorker {
			want("instance_id", r.InstanceID, number(plain[0]))
		} else if !r.Bare {
			want("instance_id", nil, plain[0])
		}
	case *lmcache.UnregisterRequest:
		want("instance_id", r.InstanceID, number(plain[0]))
	case *lmcache.ClearRequest:
		if len(plain) == 1 {
			want("force", r.Force, plain[0])
		}
	case *lmcache.P2PLookupRequest:
		wantKeys(t, where, r.Keys, payloads[0], plain[0].([]any))
	case *lmcache.P2PUnlockRequest:
		wantKeys(t, where, r.Keys, payloads[0], plain[0].([]any))
	case *lmcache.P2PResultRequest:
		want("task", r.Task, number(plain[0]))
	case *lmcache.EngineDriven:
		m := plain[0].(map[string]any)
		want("model_name", r.Model, m["model_name"])
		want("instance_id", r.InstanceID, number(m["instance_id"]))
	case *lmcache.KVCache:
		want("model_name", r.Model, plain[2])
		want("instance_id", r.InstanceID, number(plain[0]))
	}
}

// Every request that a client of each generation sent is decoded as that generation
// means it, one after the other by the same Decoder.
func TestRequestsOfGenerations(t *testing.T) {
	kinds := map[reflect.Type]bool{}
	for _, release := range recordedReleases {
		var d lmcache.Decoder
		memo, of := lmcache.NewMemo(chunkTokensOf(t, release), 1<<20), lmcache.Only(generationOf[release])
		requests(t, release, func(_, i int, m [][]byte) {
			readings, err := of.Read(m, nil)
			if err != nil || len(readings) != 1 {
				t.Fatalf("%s: request %d: %v, %v", release, i, readings, err)
			}
			r, err := d.Decode(memo, of, readings[0].Op, m[2:])
			if err != nil {
				t.Fatalf("%s: request %d, %v: %v", release, i, readings[0].Op, err)
			}
			if r.Op() != readings[0].Op {
				t.Errorf("%s: request %d decodes as %v, not %v", release, i, r.Op(), readings[0].Op)
			}
			kinds[reflect.TypeOf(r)] = true
			checkFields(t, release+" "+r.Op().String(), r, m[2:])
		})
	}
	if len(kinds) < 8 {
		t.Errorf("only %d kinds of requests: %v", len(kinds), kinds)
	}
}

// What is not well-formed is an error that says what is wrong, and nothing of one
// request is left in the next.
func TestDecodeRequests(t *testing.T) {
	var d lmcache.Decoder
	memo := lmcache.NewMemo(4, 0)
	key := func(change func(*lmcache.Key)) []byte {
		k := lmcache.Key{Model: "m", WorldSize: 1, Tokens: []uint32{1, 2, 3, 4, 5, 6, 7, 8}, End: 8, RequestID: "r", Readers: 1}
		if change != nil {
			change(&k)
		}
		return k.Append(nil)
	}
	integer := func(n int64) []byte { return lmcache.AppendInt(nil, n) }
	text := func(s string) []byte { return lmcache.AppendString(nil, s) }
	decode := func(op lmcache.Op, p ...[]byte) (lmcache.Request, error) {
		return d.Decode(memo, lmcache.Only(lmcache.Latest), op, p)
	}
	bad := func(want string, is error, op lmcache.Op, p ...[]byte) {
		t.Helper()
		if _, err := decode(op, p...); err == nil || !strings.Contains(err.Error(), want) || is != nil && !errors.Is(err, is) {
			t.Errorf("%v: %v, want %q", op, err, want)
		}
	}
	bad("takes 2, got 1", lmcache.ErrPayloads, lmcache.OpLookup, key(nil))
	bad("tp_size", nil, lmcache.OpLookup, key(nil), text("x"))
	bad("instance_id", nil, lmcache.OpPrepareStore, key(nil), text("x"))
	bad("worker_id is nil", lmcache.ErrKey, lmcache.OpPrepareStore, key(func(k *lmcache.Key) { k.Worker = lmcache.AllWorkers }), integer(1))
	for _, change := range []func(k *lmcache.Key){
		func(k *lmcache.Key) { k.Model = "\xff" }, func(k *lmcache.Key) { k.RequestID = "r\xc3" }, func(k *lmcache.Key) { k.Salt = "\xed\xa0\x80" },
	} {
		bad("is not UTF-8", lmcache.ErrKey, lmcache.OpLookup, key(change), integer(1))
	}
	driven := lmcache.EngineDriven{InstanceID: 1, Model: "m\xff", WorldSize: 1, BlockSize: 16, Layers: 1, Hidden: 1, DType: "float16"}
	bad("is not UTF-8", nil, lmcache.OpRegisterEngineDriven, driven.Append(nil))
	lends := lmcache.KVCache{InstanceID: 1, Model: "\xc3", WorldSize: 1, EngineType: "vllm"}
	bad("not UTF-8", nil, lmcache.OpRegisterKVCache, lends.Frames()...)
	bad("[0, 7) of 8 tokens", lmcache.ErrRange, lmcache.OpCommitRetrieve, key(func(k *lmcache.Key) { k.End = 7 }), integer(1))
	bad("data", nil, lmcache.OpCommitStore, key(nil), integer(1), text("x"))
	bad("block_ids", nil, lmcache.OpStore, key(nil), integer(1), integer(1), []byte{0xc4, 0})
	bad("skip_first_n_tokens", nil, lmcache.OpRetrieve, key(nil), integer(1), []byte{0x90}, []byte{0xc4, 0}, text("x"))
	bad("request_id: longer than", nil, lmcache.OpEndSession, text(strings.Repeat("x", lmcache.MaxRequestBytes+1)))
	bad("timeout", nil, lmcache.OpWaitPrefetchStatus, text("r"), text("x"))
	bad("instance_id", nil, lmcache.OpPing, text("x"))
	bad("instance_id", lmcache.ErrTrailing, lmcache.OpPing, []byte{0xc0, 0xc0})
	bad("not a list", nil, lmcache.OpReportBlockAllocation, integer(1), text("m"), integer(1))

	// An engine gives back what it has itself, which may end inside of a chunk: that chunk is still to be loaded.
	free := func(from, to, wantFrom, wantTo int) {
		t.Helper()
		r, err := decode(lmcache.OpFreeLookupLocks, key(func(k *lmcache.Key) { k.Start, k.End = from, to }), integer(1))
		if f := r.(*lmcache.FreeLookupLocksRequest); err != nil || f.From != wantFrom || f.To != wantTo {
			t.Errorf("free_lookup_locks of tokens [%d, %d): %+v, %v, want chunks [%d, %d)", from, to, r, err, wantFrom, wantTo)
		}
	}
	free(0, 8, 0, 2)
	free(0, 7, 0, 1)
	free(0, 3, 0, 0)
	free(4, 7, 1, 1)
	free(5, 8, 1, 2)
	free(0, 99, 0, 2)
	free(-1, 8, 0, 2)
	free(8, 4, 1, 1)

	timeout := func(seconds float64, want time.Duration) {
		t.Helper()
		r, err := decode(lmcache.OpWaitPrefetchStatus, text("r"), msgp.AppendFloat64(nil, seconds))
		if w := r.(*lmcache.PrefetchStatusRequest); err != nil || !w.Wait || w.Timeout != want || string(w.RequestID) != "r" {
			t.Errorf("%v s: %+v, %v", seconds, r, err)
		}
	}
	timeout(1.5, 1500*time.Millisecond)
	timeout(-1, 0)
	timeout(math.NaN(), 0)
	timeout(math.Inf(1), time.Hour)
	if r, err := decode(lmcache.OpQueryPrefetchStatus, text("q")); err != nil || r.(*lmcache.PrefetchStatusRequest).Timeout != 0 || r.Op() != lmcache.OpQueryPrefetchStatus {
		t.Errorf("after a wait: %+v, %v", r, err)
	}
	if r, err := decode(lmcache.OpCommitStore, key(nil), integer(9), lmcache.AppendBytes(nil, []byte("abc"))); err != nil || string(r.(*lmcache.CommitStoreRequest).Data) != "abc" {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err := decode(lmcache.OpCommitStore, key(nil), integer(9), []byte{0xc4, 0}); err != nil || len(r.(*lmcache.CommitStoreRequest).Data) != 0 {
		t.Errorf("after one with data: %+v, %v", r, err)
	}
	if r, err := decode(lmcache.OpPing, integer(5)); err != nil || *r.(*lmcache.PingRequest) != (lmcache.PingRequest{InstanceID: 5, OfWorker: true}) {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err := decode(lmcache.OpPing, []byte{0xc0}); err != nil || *r.(*lmcache.PingRequest) != (lmcache.PingRequest{}) {
		t.Errorf("a scheduler's ping after a worker's: %+v, %v", r, err)
	}
	if r, err := decode(lmcache.OpServerModuleCall, []byte{0xc1}); err != nil || r.Op() != lmcache.OpServerModuleCall {
		t.Errorf("an operation that is not served: %+v, %v", r, err)
	}
}

// What engines send for each request costs the decoder no allocation.
func TestDecodeAllocatesNothing(t *testing.T) {
	var d lmcache.Decoder
	memo := lmcache.NewMemo(4, 1<<20)
	key := (&lmcache.Key{Model: "m", WorldSize: 1, Tokens: []uint32{1, 2, 3, 4, 5, 6, 7, 8}, End: 8, RequestID: "r", Readers: 1}).Append(nil)
	one := lmcache.AppendInt(nil, 1)
	for op, p := range map[lmcache.Op][][]byte{
		lmcache.OpLookup: {key, one}, lmcache.OpPing: {one}, lmcache.OpNoop: {}, lmcache.OpQueryPrefetchStatus: {lmcache.AppendString(nil, "r")},
		lmcache.OpPrepareStore: {key, one}, lmcache.OpCommitStore: {key, one, {0xc4, 0}}, lmcache.OpEndSession: {lmcache.AppendString(nil, "r")},
	} {
		if n := testing.AllocsPerRun(100, func() {
			if _, err := d.Decode(memo, lmcache.Only(lmcache.Latest), op, p); err != nil {
				t.Fatal(err)
			}
		}); n > 0 {
			t.Errorf("%v: %v allocations", op, n)
		}
	}
}

// wantKeys compares object keys with what a plain reader finds, and with the frame once
// they are encoded again.
func wantKeys(t *testing.T, where string, got []lmcache.ObjectKey, frame []byte, plain []any) {
	t.Helper()
	if len(got) != len(plain) {
		t.Fatalf("%s: %d keys, want %d", where, len(got), len(plain))
	}
	again := msgp.AppendArrayHeader(nil, uint32(len(got)))
	for i, k := range got {
		m := plain[i].(map[string]any)
		if string(k.Chunk[:]) != string(m["chunk_hash"].([]byte)) || string(k.Model) != m["model_name"] || string(k.Salt) != m["cache_salt"] {
			t.Errorf("%s: key %d is %+v, want %v", where, i, k, m)
		}
		again = k.Append(again)
	}
	if string(again) != string(frame) {
		t.Errorf("%s: encoded again\n%x, want\n%x", where, again, frame)
	}
}

// Object keys that are not whole, too many or out of range are errors.
func TestBadObjectKeys(t *testing.T) {
	var d lmcache.Decoder
	f := func(name string, keys []byte) {
		t.Helper()
		if _, err := d.Decode(lmcache.NewMemo(4, 1<<20), lmcache.Only(lmcache.Latest), lmcache.OpP2PUnlockObjects, [][]byte{keys}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	list := func(n int, key []byte) []byte {
		b := msgp.AppendArrayHeader(nil, uint32(n))
		for range n {
			b = append(b, key...)
		}
		return b
	}
	good := lmcache.ObjectKey{Model: []byte("m"), Rank: 0x01000100}
	if _, err := d.Decode(lmcache.NewMemo(4, 1<<20), lmcache.Only(lmcache.Latest), lmcache.OpP2PUnlockObjects, [][]byte{list(2, good.Append(nil))}); err != nil {
		t.Fatal(err)
	}
	f("empty", list(1, []byte{0x80}))
	f("more than there are", list(2, good.Append(nil))[:40])
	f("too many", list(lmcache.MaxObjectKeys+1, good.Append(nil)))
	f("a salt with a slash", list(1, (&lmcache.ObjectKey{Model: []byte("m"), Salt: []byte("a/b")}).Append(nil)))
	f("a model that is too long", list(1, (&lmcache.ObjectKey{Model: make([]byte, 4096)}).Append(nil)))
	short := msgp.AppendBytes(msgp.AppendString(msgp.AppendMapHeader(nil, 1), "chunk_hash"), make([]byte, 31))
	f("a short hash", list(1, short))
	rank := msgp.AppendInt64(msgp.AppendString(msgp.AppendMapHeader(nil, 1), "kv_rank"), 1<<32)
	f("a rank of more than 32 bits", list(1, rank))
}
