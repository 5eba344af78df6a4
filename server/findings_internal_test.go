// SPDX-License-Identifier: Apache-2.0

package server

import (
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/store/miss"
)

// Each reason for which hits are missing is a sentence with what to do, and a server
// without such a reason says nothing.
func TestFindings(t *testing.T) {
	served := []WorkerStatus{{Instance: 1, Model: "m", World: 1}}
	f := func(what, do string, change func(*Status)) {
		t.Helper()
		st := &Status{ChunkTokens: 256, Workers: served, Declined: map[string]uint64{}, Lookup: LookupStatus{
			Lookups: 10, AskedTokens: 1000, HitTokens: 950, Hits: 10, Retrieves: 10, MissReasons: map[string]uint64{},
		}, Pool: PoolStatus{TotalBytes: 1 << 30}}
		change(st)
		got := st.findings()
		if what == "" {
			if len(got) != 0 {
				t.Errorf("want nothing, got %+v", got)
			}
			return
		}
		if len(got) != 1 || !strings.Contains(got[0].What, what) || !strings.Contains(got[0].Do, do) {
			t.Errorf("want one of %q, %q, got %+v", what, do, got)
		}
	}
	missed := func(why string) func(*Status) {
		return func(st *Status) { st.Lookup.HitTokens, st.Lookup.MissReasons = 500, map[string]uint64{why: 7} }
	}
	f("", "", func(*Status) {})
	f("", "", func(st *Status) { st.Lookup.MissReasons["never stored"] = 10 }) // 95 % hit: the ends of prompts
	f("not healthy: it is shutting down", "docs/operate/server.md", func(st *Status) { st.Unhealthy = []string{"it is shutting down"} })
	f("no worker that can be served", "LMCacheMPConnector", func(st *Status) { st.Workers = nil })
	f("2 registrations were refused: raise --l1-size-gb", "restart the engine", func(st *Status) { st.TurnedAway = []RefusedStatus{{Why: "raise --l1-size-gb", Count: 2}} })
	f("worker 2 of other is refused: because", "restarted", func(st *Status) {
		st.Workers = append([]WorkerStatus{{Instance: 2, Model: "other", Refused: "because"}}, served...)
	})
	f("3 lookups asked for a model", "declined", func(st *Status) { st.Declined["unknown_model"] = 3 })
	f("1 request came from engines that started under another chunk size", "restart those engines", func(st *Status) { st.Declined["chunk_size"] = 1 })
	f("3 requests could not be read, the last one: lookup: a token", "such requests are misses", func(st *Status) {
		st.Declined["malformed"], st.Malformed = 3, "lookup: a token"
	})
	f("no prompt was asked for yet", "at least 256 tokens", func(st *Status) { st.Lookup = LookupStatus{} })
	f("8 prompts were shorter than a chunk of 256 tokens", "--chunk-size", func(st *Status) {
		st.Lookup.Short = 8
		st.Lookup.MissReasons[miss.Short.String()] = 8
	})
	f("7 lookups ended at a chunk that could not be served: never stored", "from its first token on", missed("never stored"))
	f("never stored", "4 lookups came with a salt", func(st *Status) { missed("never stored")(st); st.Lookup.Salted = 4 })
	f("evicted", "raise --l1-size-gb", missed("evicted"))
	f("evicted", "in the last 300 s 90 chunks were evicted, at that rate all 1 GiB are new after 10m0s", func(st *Status) {
		missed("evicted")(st)
		st.Recent = RecentStatus{Seconds: 300, EvictedChunks: 90, EvictedBytes: 1 << 29}
	})
	f("2 lookups hit here and 0 loads followed", "vLLM's own prefix cache", func(st *Status) { st.Lookup.Hits, st.Lookup.Retrieves = 2, 0 })
	f("1 store did not fit whole", "raise --l1-size-gb", func(st *Status) { st.Pool.Failures = 1 })
	f("wait in quarantine", "--l1-write-ttl-seconds", func(st *Status) { st.Pool.QuarantinedBytes = 1 << 29 })
	f("no room for what the tier below has", "quotas", missed(miss.NoRoom.String()))
	for r := miss.NeverStored; int(r) < miss.NumReasons; r++ {
		switch r {
		case miss.NotPinned: // a load's, not a lookup's
		case miss.Short, miss.Unregistered, miss.Declined, miss.SkipLoad: // other findings speak of them
		default:
			f(r.String(), "", missed(r.String()))
		}
		if do := (&Status{}).adviceFor(r.String()); do == "see docs/operate/server.md" && r != miss.NotPinned {
			t.Errorf("no advice for %q", r)
		}
	}
}

// Rates are of the last five minutes, not of the whole life.
func TestRecentForgetsTheOld(t *testing.T) {
	var r recently
	start := time.Now()
	for i := range 100 {
		r.add(start.Add(time.Duration(i)*10*time.Second), summary{lookups: uint64(i)})
		if i < maxSamples-1 && r.since(start).at != start {
			t.Fatalf("after %d samples the start is forgotten", i+1)
		}
	}
	if got := r.since(start).n.lookups; got != 100-maxSamples {
		t.Errorf("the oldest sample is number %d", got)
	}
}
