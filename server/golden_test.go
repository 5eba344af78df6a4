// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

func newServer(t testing.TB, chunkTokens int, poolBytes int64, so store.Options) (*server.Server, *store.Store) {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: poolBytes, Dir: t.TempDir(), ChunkTokens: chunkTokens})
	if err != nil {
		t.Fatal(err)
	}
	st := store.New(p, so)
	s := server.New(st, server.Options{ChunkTokens: chunkTokens, Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	return s, st
}

// The whole recorded life of engine-driven workers, request by request: our
// replies equal the reference's but where they may or must differ.
func TestRecordedEngineDriven(t *testing.T) {
	var rec testkit.Recording
	testkit.ReadVector(t, "lmcache-mp/engine_driven_shm.json", &rec)
	s, _ := newServer(t, rec.Meta.ChunkTokens, 256<<20, store.Options{})
	// Where the reference is silent, or has options that we do not.
	differs := map[string]string{
		"ping_id":                        "c2", // an unknown instance is asked to register
		"get_experimental":               "90", // no event stream without a Book
		"prepare_store_unknown_instance": "81a7636f6e7465787482a5736c6f747390ad6368756e6b5f696e646963657390",
	}
	cases := 0
	for _, step := range rec.Steps {
		for i, f := range step.Frames {
			if f.Direction != "client_to_server" {
				continue
			}
			cases++
			got := s.Answer(testkit.Frames(f.Hex))
			if want, ok := differs[step.Step]; ok {
				if len(got) != 3 || fmt.Sprintf("%x", got[2]) != want {
					t.Errorf("%s: reply %x, want result %s", step.Step, got, want)
				}
				continue
			}
			if i+1 == len(step.Frames) || step.Frames[i+1].Direction == "client_to_server" {
				t.Fatalf("%s: the recording has no reply", step.Step)
			}
			want := testkit.Frames(step.Frames[i+1].Hex)
			compareReply(t, step.Step, f.Hex[1], got, want)
		}
	}
	t.Logf("%d cases", cases)
}

func compareReply(t *testing.T, step string, opFrame []byte, got, want [][]byte) {
	t.Helper()
	op, err := lmcache.ParseOp(opFrame)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(want) {
		t.Errorf("%s: %d frames %x, want %d", step, len(got), got, len(want))
		return
	}
	for i := range want {
		g, w := got[i], want[i]
		if i == 2 {
			g, w = withoutPlaces(t, op, g), withoutPlaces(t, op, w)
		}
		if !bytes.Equal(g, w) {
			t.Errorf("%s: frame %d is\n%x, want\n%x", step, i, g, w)
		}
	}
}

// withoutPlaces removes what two servers may place differently: slot offsets,
// after checking that they are aligned and disjoint, and the pool's name.
func withoutPlaces(t *testing.T, op lmcache.Op, frame []byte) []byte {
	t.Helper()
	clear := func(slots []lmcache.SlotAt, indices, groups []int) lmcache.Slots {
		s := lmcache.Slots{Indices: indices, Groups: groups}
		if groups != nil {
			s.Layouts, s.Lengths = make([]kv.Layout, 2), make([]int64, 2)
		}
		for i, at := range slots {
			for _, other := range slots[:i] {
				if at.Offset < other.Offset+other.Length && other.Offset < at.Offset+at.Length {
					t.Errorf("%v: slots overlap: %+v, %+v", op, at, other)
				}
			}
			if at.Offset%4096 != 0 {
				t.Errorf("%v: slot at %d", op, at.Offset)
			}
			s.Offsets = append(s.Offsets, 0)
			sh := at.Shape
			g := 0
			if len(groups) > 0 {
				g = groups[i]
			}
			for len(s.Layouts) <= g {
				s.Layouts, s.Lengths = append(s.Layouts, kv.Layout{}), append(s.Lengths, 0)
			}
			s.Lengths[g] = at.Length
			s.Layouts[g] = kv.Layout{SinglePlane: len(sh) == 3, Layers: sh[len(sh)-3], Slots: sh[len(sh)-2], Hidden: sh[len(sh)-1], DType: at.DType}
		}
		return s
	}
	switch op {
	case lmcache.OpRegisterEngineDriven:
		p, err := lmcache.DecodePool(frame)
		if err != nil || p.ShmName == "" || p.Bytes <= 0 {
			t.Errorf("pool %+v, %v", p, err)
		}
		return nil
	case lmcache.OpPrepareStore:
		p, err := lmcache.DecodePrepareStore(frame)
		if err != nil {
			t.Error(err)
		}
		s := clear(p.Slots, p.Indices, p.Groups)
		return lmcache.AppendPrepareStore(nil, &s)
	case lmcache.OpPrepareRetrieve:
		p, err := lmcache.DecodePrepareRetrieve(frame)
		if err != nil {
			t.Error(err)
		}
		if p.Success {
			s := clear(p.Slots, p.Indices, p.Groups)
			return lmcache.AppendPrepareRetrieve(nil, &s)
		}
	}
	return frame
}

// Malformed requests are answered at once, and none disturbs the next.
func TestMalformed(t *testing.T) {
	var file struct {
		Cases []struct {
			Case    string
			Request []testkit.Hex   `json:"request_frames_hex"`
			Reply   [][]testkit.Hex `json:"reply_frames_hex"`
		}
	}
	testkit.ReadVector(t, "lmcache-mp/malformed_frames.json", &file)
	s, _ := newServer(t, 32, 1<<20, store.Options{})
	silent := map[string]bool{"ack_unknown_stream": true, "single_frame_message": true}
	results := map[string]string{ // the negative value of the operation
		"ping_missing_payload": "c2", "ping_extra_payload": "c2", "ping_wrong_type": "c2",
	}
	for _, c := range file.Cases {
		request := testkit.Frames(c.Request)
		got := s.Answer(request)
		var want [][]byte
		switch {
		case silent[c.Case]:
		case len(c.Reply) > 0:
			want = testkit.Frames(c.Reply[0])
		default:
			want = request[:2:2]
			if r, ok := results[c.Case]; ok {
				want = append(want, []byte{map[string]byte{"c2": 0xc2}[r]})
			}
		}
		if !slices.EqualFunc(got, want, bytes.Equal) {
			t.Errorf("%s: reply %x, want %x", c.Case, got, want)
		}
		if ok := s.Answer([][]byte{{1}, {24}}); len(ok) != 3 || string(ok[2]) != "\xa2OK" {
			t.Fatalf("after %s: noop answers %x", c.Case, ok)
		}
	}
	t.Logf("%d cases", len(file.Cases))
}

// What the reference does wrong is done right.
func TestReferenceDefects(t *testing.T) {
	var file struct {
		Steps []struct {
			Step    string
			Request []testkit.Hex `json:"request_hex"`
			Reply   []testkit.Hex `json:"reply_hex"`
		}
	}
	testkit.ReadVector(t, "lmcache-mp/reference_defects.json", &file)
	s, _ := newServer(t, 256, 64<<20, store.Options{})
	miss := fmt.Sprintf("%x", lmcache.AppendPrepareRetrieve(nil, nil))
	result := map[int]string{ // by step, where the reference is wrong or silent
		3:  "",   // end_session after the last worker left: answered
		6:  "00", // never committed: a miss
		7:  miss,
		10: "", // num_kv_readers 0: a lookup that finds nothing
	}
	for i, step := range file.Steps {
		request := testkit.Frames(step.Request)
		got := s.Answer(request)
		switch want, ok := result[i]; {
		case i == 13: // same request id, other tokens: its own slots, not "all cached"
			p, err := lmcache.DecodePrepareStore(got[2])
			if err != nil || len(p.Slots) != 1 {
				t.Errorf("%s: %+v, %v", step.Step, p, err)
			}
		case ok && want == "":
			if len(got) != 2 || !bytes.Equal(got[0], request[0]) {
				t.Errorf("%d %s: reply %x, want two frames", i, step.Step, got)
			}
		case ok:
			if len(got) != 3 || fmt.Sprintf("%x", got[2]) != want {
				t.Errorf("%d %s: reply %x, want result %s", i, step.Step, got, want)
			}
		default:
			compareReply(t, fmt.Sprint(i, " ", step.Step), request[1], got, testkit.Frames(step.Reply))
		}
	}
	t.Logf("%d cases", len(file.Steps))
}

// A client whose operations are not served gets every answer at once.
func TestRecordedRefusals(t *testing.T) {
	cases := 0
	for _, name := range []string{"engine_driven_pickle", "kv_events_stream", "p2p"} {
		var rec testkit.Recording
		testkit.ReadVector(t, "lmcache-mp/"+name+".json", &rec)
		s, st := newServer(t, 32, 1<<20, store.Options{})
		for _, step := range rec.Steps {
			for _, f := range step.Frames {
				if f.Direction != "client_to_server" || len(f.Hex[1]) == 0 {
					continue
				}
				cases++
				got := s.Answer(testkit.Frames(f.Hex))
				if len(got) < 2 || !bytes.Equal(got[0], f.Hex[0]) || !bytes.Equal(got[1], f.Hex[1]) {
					t.Errorf("%s %s: reply %x", name, step.Step, got)
					continue
				}
				op, _ := lmcache.ParseOp(f.Hex[1])
				if op == lmcache.OpStore && fmt.Sprintf("%x", got[2]) != "92c400c2" {
					t.Errorf("%s %s: reply %x", name, step.Step, got[2])
				}
			}
		}
		if got := st.Stats(); got.Resident != 0 || got.StagedBytes != 0 {
			t.Errorf("%s left %+v", name, got)
		}
	}
	t.Logf("%d cases", cases)
}
