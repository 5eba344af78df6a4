// SPDX-License-Identifier: Apache-2.0

package server

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"io"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/access"
)

// recorded057 are the recordings of a real client and server of 0.5.7rc2.
type recorded057 struct {
	Recordings map[string]struct {
		testkit.Recording
		Cases []struct {
			Case    string
			Request []testkit.Hex   `json:"request_frames_hex"`
			Reply   [][]testkit.Hex `json:"reply_frames_hex"`
		}
	}
}

// connected is a connection of a test.
func connected(s *Server) *caller {
	return &caller{Caller: access.Self(), conn: &connection{generations: s.opts.ClientGenerations}}
}

func (c *caller) ask(s *Server, m [][]byte) [][]byte {
	sc := &scratch{inProcess: c}
	out := s.answer(sc, m)
	for i := range out {
		out[i] = bytes.Clone(out[i])
	}
	return out
}

// The recorded lives of 0.5.7 clients, request by request: our replies equal the reference's but where that is silent or wrong,
// and every request has a reply.
func TestRecorded057(t *testing.T) {
	var all recorded057
	testkit.ReadVector(t, "lmcache-mp/generation-0.5.7rc2.json", &all)
	slots := hex.EncodeToString
	// By recording and step, the result frame where the reference is wrong or has no reply; empty for none.
	differs := map[string]string{
		"engine_driven_shm negotiate_chunk_size_does_not_fit":    "10", // the connection's size
		"engine_driven_inline negotiate_chunk_size_does_not_fit": "10",
		"engine_driven_shm ping_id":                              "c2", // an unknown instance is asked to register
		"engine_driven_inline ping_id":                           "c2",
		"hybrid_shm prepare_store_skipped_too_few_groups":        slots(lmcache.AppendPrepareStore(nil, &lmcache.Slots{})),
		"hybrid_shm prepare_store_skipped_out_of_range":          slots(lmcache.AppendPrepareStore(nil, &lmcache.Slots{})),
		"hybrid_inline prepare_store_skipped_too_few_groups":     slots(lmcache.AppendPrepareStore(nil, &lmcache.Slots{})),
		"hybrid_inline prepare_store_skipped_out_of_range":       slots(lmcache.AppendPrepareStore(nil, &lmcache.Slots{})),
	}
	cases := 0
	for _, server := range [][]string{{"engine_driven_shm", "hybrid_shm"}, {"engine_driven_inline", "hybrid_inline"}, {"negotiate_up"}, {"negotiate_late"}} {
		o := Options{ChunkTokens: 16}
		if server[0] != "engine_driven_shm" {
			o.Pickle = PickleOnly // no shared memory
		}
		var log bytes.Buffer
		s, _ := newBareServerWith(t, &log, 256<<20, o)
		for _, name := range server {
			who := connected(s)
			for _, step := range all.Recordings[name].Steps {
				for i, f := range step.Frames {
					if f.Direction != "client_to_server" {
						continue
					}
					cases++
					what := name + " " + step.Step
					got := who.ask(s, testkit.Frames(f.Hex))
					if len(got) < 2 || !bytes.Equal(got[0], f.Hex[0]) || !bytes.Equal(got[1], f.Hex[1]) {
						t.Errorf("%s: reply %x", what, got)
						continue
					}
					want, other := differs[what]
					recorded := i+1 < len(step.Frames) && step.Frames[i+1].Direction == "server_to_client"
					switch {
					case other:
						if len(got) != 3 || hex.EncodeToString(got[2]) != want {
							t.Errorf("%s: reply %x, want result %s", what, got, want)
						}
					case recorded:
						same057(t, what, got, testkit.Frames(step.Frames[i+1].Hex))
					default:
						t.Logf("%s: the reference is silent, our result is %x", what, got[2:])
					}
				}
			}
		}
		if t.Failed() {
			t.Logf("%s", log.String())
		}
	}
	if cases < 250 {
		t.Errorf("only %d cases", cases)
	}
}

// same057 compares replies but for the places of slots.
func same057(t *testing.T, what string, got, want [][]byte) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s: %d frames %x, want %x", what, len(got), got, want)
		return
	}
	if len(want) < 3 {
		return
	}
	op, err := lmcache.ParseOp(want[1])
	if err != nil {
		t.Fatal(err)
	}
	g, w := got[2], want[2]
	switch op {
	case lmcache.OpRegisterEngineDriven:
		a, err := lmcache.DecodePool(g)
		b, _ := lmcache.DecodePool(w)
		if err != nil || (a.Bytes > 0) != (b.Bytes > 0) || (a.ShmName == "") != (b.ShmName == "") || a.HasNullBlock != b.HasNullBlock || a.NullBlock != b.NullBlock {
			t.Errorf("%s: %+v, want %+v", what, a, b)
		}
		return
	case lmcache.OpPrepareStore, lmcache.OpPrepareRetrieve:
		g, w = unplaced(t, op, g), unplaced(t, op, w)
	}
	if !bytes.Equal(g, w) {
		t.Errorf("%s: result\n%x, want\n%x", what, g, w)
	}
}

// unplaced returns what an answer says besides the places of its slots, which must be aligned and disjoint.
func unplaced(t *testing.T, op lmcache.Op, frame []byte) []byte {
	t.Helper()
	var slots []lmcache.SlotAt
	var all any
	if op == lmcache.OpPrepareStore {
		p, err := lmcache.DecodePrepareStore(frame)
		if err != nil {
			t.Error(err)
		}
		slots = slices.Clone(p.Slots)
		for i := range p.Slots {
			p.Slots[i].Offset = 0
		}
		all = p
	} else {
		p, err := lmcache.DecodePrepareRetrieve(frame)
		if err != nil {
			t.Error(err)
		}
		slots = slices.Clone(p.Slots)
		for i := range p.Slots {
			p.Slots[i].Offset = 0
		}
		all = p
	}
	for i, at := range slots {
		for _, other := range slots[:i] {
			if at.Offset < other.Offset+other.Length && other.Offset < at.Offset+at.Length || at.Offset%4096 != 0 {
				t.Errorf("slots %+v and %+v", at, other)
			}
		}
	}
	return fmt.Appendf(nil, "%+v", all)
}

// Malformed requests of 0.5.7 are answered, and none disturbs the next.
func TestMalformed057(t *testing.T) {
	var all recorded057
	testkit.ReadVector(t, "lmcache-mp/generation-0.5.7rc2.json", &all)
	// A prepare of 0.5.6's form is served, so that the next one finds its places taken; and an envelope gives the places of
	// its range back, so that no commit follows. The reference publishes places that nobody has written.
	differs := map[string]string{
		"prepare_store_three_payloads": hex.EncodeToString(lmcache.AppendPrepareStore(nil, &lmcache.Slots{})),
		"commit_store_shm":             "c2",
	}
	for _, name := range []string{"errors_shm", "errors_inline"} {
		o := Options{ChunkTokens: 16}
		if name == "errors_inline" {
			o.Pickle = PickleOnly
		}
		s, _ := newBareServerWith(t, io.Discard, 256<<20, o)
		who := connected(s)
		for i, c := range all.Recordings[name].Cases {
			what := fmt.Sprint(name, " ", i, " ", c.Case)
			request := testkit.Frames(c.Request)
			got := who.ask(s, request)
			if len(got) < 2 {
				t.Errorf("%s: no reply", what)
				continue
			}
			if want, ok := differs[c.Case]; ok && name == "errors_shm" {
				if len(got) != 3 || hex.EncodeToString(got[2]) != want {
					t.Errorf("%s: reply %x, want result %s", what, got, want)
				}
				continue
			}
			if len(c.Reply) == 0 {
				t.Logf("%s: the reference is silent, our result is %x", what, got[2:])
				continue
			}
			same057(t, what, got, testkit.Frames(c.Reply[0]))
		}
	}
}
