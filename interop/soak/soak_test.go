// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv/event"
)

// One seed gives one schedule, others another one; no fault reaches into a quiet time, and each names a part or host that
// there is.
func TestSchedule(t *testing.T) {
	o := options{length: 3 * time.Minute, seed: 7, faults: true, redis: "cluster", store: "s3", master: "mooncake_master"}
	a, b := makeSchedule(&o), makeSchedule(&o)
	if !reflect.DeepEqual(a, b) || len(a.Faults) < 60 {
		t.Fatalf("%d faults, and %d", len(a.Faults), len(b.Faults))
	}
	if o.seed = 8; reflect.DeepEqual(a.Faults, makeSchedule(&o).Faults) {
		t.Error("two seeds have one schedule")
	}
	var names []string
	for _, p := range makeParts(&o, variantOf(7)) {
		names = append(names, p.name)
	}
	for _, f := range a.Faults {
		if f.At+f.For > a.Cycle-a.Quiet {
			t.Errorf("%v ends in the quiet time, which begins after %v", f, a.Cycle-a.Quiet)
		}
		host := hosts[f.Target] != "" || f.Target == "shm" || f.Target == "clients" || strings.HasPrefix(f.Target, "disk") || f.Target == "fs2" || f.Target == "redis" || f.Target == "replica"
		if !host && !slices.Contains(names, f.Target) {
			t.Errorf("%v: there is no such part", f)
		}
	}
}

// A fault of a node or a tier explains no failed request; one of an engine does, while it lasts and for the grace after it.
func TestWindows(t *testing.T) {
	var w windows
	closed := w.open(fault{Kind: "kill", Target: "node1"})
	from := time.Now()
	if w.during(from, from.Add(time.Second), time.Minute, fault.hurts) {
		t.Error("a killed node explains a failed request")
	}
	closed()
	closed = w.open(fault{Kind: "kill", Target: "p1"})
	if from = time.Now(); !w.during(from, from.Add(time.Second), 0, fault.hurts) {
		t.Error("a killed P explains nothing")
	}
	closed()
	if from = time.Now().Add(time.Second); w.during(from, from.Add(time.Second), 100*time.Millisecond, fault.hurts) || !w.during(from, from.Add(time.Second), time.Minute, fault.hurts) {
		t.Error("the grace does not hold")
	}
}

// A part may have more than at its start what it keeps by design, and a little: one more is growth. D keeps connections to each P and to the
// relay, a node those for its tiers, and events for replays.
func TestBeyond(t *testing.T) {
	o := options{redis: "cluster", master: "mooncake_master"}
	v := variant{"TP 2 to 1", 2, 1, false}
	base := size{Goroutines: 40, Descriptors: 30, Mappings: 100, ResidentMiB: 60}
	for _, c := range []struct {
		kind           string
		pooled, caches int
	}{{"d", 20, 100}, {"node", 48 + 9 + 8, 228}, {"p", 0, 100}, {"proxy", 0, 100}} {
		p := part{kind: c.kind}
		if p.pooled(&o, v) != c.pooled || p.cachesMiB(true) != c.caches || p.cachesMiB(false) < c.caches {
			t.Errorf("%s: %d connections and %d MiB, want %d and %d", c.kind, p.pooled(&o, v), p.cachesMiB(true), c.pooled, c.caches)
		}
		most := size{base.Goroutines + c.pooled + 20, base.Descriptors + c.pooled + 16, base.Mappings + 60, base.ResidentMiB + c.caches}
		if what := most.beyond(base, c.pooled, c.caches); what != "" {
			t.Errorf("%s: what is allowed is growth: %s", c.kind, what)
		}
		for i, more := range []size{{Goroutines: 1}, {Descriptors: 1}, {Mappings: 1}, {ResidentMiB: 1}} {
			z := size{most.Goroutines + more.Goroutines, most.Descriptors + more.Descriptors, most.Mappings + more.Mappings, most.ResidentMiB + more.ResidentMiB}
			if z.beyond(base, c.pooled, c.caches) == "" {
				t.Errorf("%s: one more of figure %d is no growth", c.kind, i)
			}
		}
	}
}

// Answers are judged by their form: what is neither an answer nor a named error is wrong.
func TestJudge(t *testing.T) {
	f := func(status int, body, want string) {
		t.Helper()
		if got := judge(status, []byte(body)); got.kind != want {
			t.Errorf("%d %s: %+v, want %s", status, body, got, want)
		}
	}
	f(200, `{"choices":[{"text":" ~1"}]}`, "ok")
	f(503, `{"error":{"message":"no engine"}}`, "error")
	f(200, `{"choices":[{"text":" ~1","finish_reason":"abort"}]}`, "error")
	f(503, `{"error":{"message":""}}`, "wrong")
	f(503, `busy`, "wrong")
	f(200, ``, "wrong")
	f(200, `{"choices":[]}`, "wrong")
	f(200, `{"choices":[{"text":""}],"error":{"message":"x"}}`, "wrong")
	g := func(stream, want, text string) {
		t.Helper()
		if got := readStream(strings.NewReader(stream)); got.kind != want || want == "ok" && got.texts[0] != text {
			t.Errorf("%q: %+v, want %s", stream, got, want)
		}
	}
	g("data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"text\":\"b\"}]}\n\ndata: [DONE]\n\n", "ok", "ab")
	g("data: {\"choices\":[{\"text\":\"a\"}]}\n\n", "wrong", "")
	g(": ping\n\ndata: {\"error\":{\"message\":\"broke off\"}}\n\n", "error", "")
	g("data: nonsense\n\n", "wrong", "")
}

// A list of events is changed by each event, and one that contradicts it is named.
func TestApplyEvent(t *testing.T) {
	has := map[string]bool{}
	f := func(kind event.Kind, medium, hash string, contradicts bool, want int) {
		t.Helper()
		what := applyEvent(has, &event.Event{Kind: kind, Medium: medium, Hashes: [][]byte{[]byte(hash)}})
		if (what != "") != contradicts || len(has) != want {
			t.Errorf("%v %s %s: %q, %v", kind, medium, hash, what, has)
		}
	}
	f(event.Stored, event.CPU, "a", false, 1)
	f(event.Stored, event.Storage, "a", false, 2)
	f(event.Stored, event.CPU, "a", true, 2)
	f(event.Removed, event.CPU, "a", false, 1)
	f(event.Removed, event.CPU, "a", true, 1)
	f(event.Cleared, "", "", false, 0)
}

// Faults come once more after they have ended, the quiet time moves by as much, and neither bound of a shrunk schedule is exceeded.
func TestRepeated(t *testing.T) {
	two := &schedule{Cycle: 40 * time.Second, For: 40 * time.Second, Quiet: 20 * time.Second, NoEnd: true, Faults: []fault{
		{Kind: "late", At: time.Second, For: 9 * time.Second}, {Kind: "kill", At: 4 * time.Second, For: 3 * time.Second},
	}}
	got := repeated(two, 2)
	if got == nil || len(got.Faults) != 4 || got.Faults[2].At != 13*time.Second || got.Faults[3].At != 16*time.Second || got.For != 52*time.Second || got.Cycle != got.For || !got.NoEnd {
		t.Fatalf("%+v", got)
	}
	if got := repeated(two, 3); got != nil {
		t.Errorf("six faults: %+v", got)
	}
	two.Faults[0].For = time.Minute
	if got := repeated(two, 3); got != nil {
		t.Errorf("more than two minutes: %+v", got)
	}
	if got := repeated(&schedule{For: time.Minute}, 2); got != nil {
		t.Errorf("no fault at all: %+v", got)
	}
}

// What fails now and then with many faults may fail with one of them, as often as the bounds allow: each kind once a part, the last one first.
func TestAlone(t *testing.T) {
	s := &schedule{Cycle: time.Minute, For: 10 * time.Minute, Quiet: 20 * time.Second}
	faults := []fault{
		{Kind: "late", Target: "h1", At: time.Second, For: 14 * time.Second},
		{Kind: "kill", Target: "d1", At: 2 * time.Second, For: time.Second},
		{Kind: "kill", Target: "d2", At: 3 * time.Second, For: time.Second},
		{Kind: "kill", Target: "d1", At: 30 * time.Second, For: time.Second},
		{Kind: "stop", Target: "p1", At: 39 * time.Second, For: 50 * time.Second},
	}
	var played []string
	got := alone(s, faults, failure{after: 50 * time.Second, quiet: true}, func(t *schedule) bool {
		f := t.Faults[0]
		played = append(played, fmt.Sprint(f.Kind, " ", f.Target, " ", len(t.Faults)))
		return f.Kind == "late"
	})
	if want := []string{"stop p1 1", "kill d1 5", "kill d2 5", "late h1 5"}; !slices.Equal(played, want) {
		t.Errorf("%q were played, want %q", played, want)
	}
	if got == nil || bounds(got, mustFail) != nil || len(got.Faults) != 5 {
		t.Errorf("%+v", got)
	}
	if got := alone(s, faults, failure{after: 50 * time.Second, quiet: true}, func(*schedule) bool { return false }); got != nil {
		t.Errorf("nothing fails: %+v", got)
	}
}

// What is left out makes the run pass; all else is left out.
func TestMinimal(t *testing.T) {
	var all []fault
	for i := range 23 {
		all = append(all, fault{At: time.Duration(i)})
	}
	tries := 0
	got := minimal(all, func(faults []fault) bool {
		tries++
		has := func(i int) bool {
			return slices.ContainsFunc(faults, func(f fault) bool { return f.At == time.Duration(i) })
		}
		return has(3) && has(17)
	})
	if len(got) != 2 || got[0].At != 3 || got[1].At != 17 || tries > 80 {
		t.Errorf("%v after %d tries", got, tries)
	}
}

// Sockets that listen are read from the kernel's table: those of the process, by their inodes.
func TestListening(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0B004D0A:15B5 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 71 1 0000000000000000 100 0 0 10 0
   1: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 72 1 0000000000000000 100 0 0 10 0
   2: 0B004D0A:1F91 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 99 1 0000000000000000 100 0 0 10 0
   3: 0B004D0A:15B5 0C004D0A:9A40 01 00000000:00000000 00:00000000 00000000     0        0 73 1 0000000000000000 100 0 0 10 0
`
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		t.Skip("the table is of a little-endian machine")
	}
	got, err := listening(table, map[string]bool{"71": true, "72": true, "73": true})
	if err != nil || fmt.Sprint(got) != "[10.77.0.11:5557 127.0.0.1:8080]" {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := listening(strings.Replace(table, "0B004D0A:15B5", "0B004D:15B5", 1), map[string]bool{"71": true}); err == nil {
		t.Error("an address of three bytes is read")
	}
}

// A request that fails by KV of other tokens is found in the engine's log, also when it failed near a fault or was tried again, and
// the engine was killed since.
func TestScanFindsWrongBytes(t *testing.T) {
	f := func(text string, want bool) {
		t.Helper()
		p := &part{log: filepath.Join(t.TempDir(), "d1.log")}
		if err := os.WriteFile(p.log, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := p.scan() != nil; got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
	f("--- life 1\nlevel=INFO msg=ready\n", false)
	f("--- life 1\nlevel=ERROR msg=\"wrong KV bytes\" request=soak-7 err=x\n--- life 2\nlevel=INFO msg=ready\n", true)
}

// A connection that a stranger cuts, and clients that leave, explain no failed request.
func TestStrangersHurtNobody(t *testing.T) {
	for _, f := range []fault{{Kind: "strangers", Target: "p1"}, {Kind: "strangers", Target: "proxy1"}, {Kind: "leave", Target: "clients"}} {
		if f.hurts() || f.refusesStarts() {
			t.Errorf("%v explains a failure", f)
		}
	}
}

// A log is read on from where the last look ended, and a line that was not whole is looked at again.
func TestScanGoesOn(t *testing.T) {
	p := &part{log: filepath.Join(t.TempDir(), "d1.log")}
	f := func(text string, want bool) {
		t.Helper()
		if err := os.WriteFile(p.log, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if got := p.scan() != nil; got != want {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
	f("one\nwrong K", false)
	f("one\nwrong KV bytes\n", true)
	f("one\nwrong KV bytes\ntwo\n", false)
}

// Of a failed run only the faults of the failed cycle that began before the failure are tried.
func TestFailedCycle(t *testing.T) {
	dir := t.TempDir()
	s := &schedule{Cycle: time.Minute, Quiet: 20 * time.Second, Faults: []fault{{Cycle: 0, At: 1}, {Cycle: 1, At: time.Second, Kind: "a"}, {Cycle: 1, At: 5 * time.Second, Kind: "b"}, {Cycle: 2, At: 1}}}
	if got, where := failedCycle(s, dir); len(got) != 1 || got[0].At != 1 || !where.quiet {
		t.Errorf("without a record: %v %+v", got, where)
	}
	f := func(r record, faults string, want failure) {
		t.Helper()
		if err := writeJSON(filepath.Join(dir, "record.json"), r); err != nil {
			t.Fatal(err)
		}
		got, where := failedCycle(s, dir)
		names := ""
		for _, f := range got {
			names += f.Kind
			if f.Cycle != 0 {
				t.Errorf("%v is not of cycle 0", f)
			}
		}
		if names != faults || where != want {
			t.Errorf("%q %+v, want %q %+v", names, where, faults, want)
		}
	}
	f(record{Cycles: 1, CycleBegan: 70 * time.Second, FailedAt: 73 * time.Second}, "a", failure{cycle: 1, after: 3 * time.Second})
	f(record{Cycles: 1, CycleBegan: 70 * time.Second, FailedAt: 120 * time.Second}, "ab", failure{cycle: 1, after: 50 * time.Second, quiet: true})
	f(record{Cycles: 1, CycleBegan: 70 * time.Second, FailedAt: 120 * time.Second, LeftOut: map[string]int{"a": 1, "b": 2}, Faults: map[string]int{"b": 1}}, "b", failure{cycle: 1, after: 50 * time.Second, quiet: true})
	f(record{Cycles: 3, CycleBegan: 130 * time.Second, FailedAt: 210 * time.Second}, "", failure{cycle: 2, after: 80 * time.Second, quiet: true, end: true})
}

// A shrunk schedule begins with its first fault, reaches beyond the moment of the failure, and has at most two minutes.
func TestShorter(t *testing.T) {
	s := &schedule{Seed: 9, Cycle: 10 * time.Minute}
	faults := []fault{{At: 300 * time.Second, For: 4 * time.Second}, {At: 310 * time.Second, For: 2 * time.Second}}
	got, err := shorter(s, faults, failure{cycle: 4, after: 320 * time.Second})
	if err != nil || got.Checks != 4 || got.Faults[0].At != time.Second || got.Faults[1].At != 11*time.Second || got.For != 56*time.Second || got.cycles() != 1 || !got.NoEnd || got.Seed != 9 {
		t.Errorf("%+v, %v", got, err)
	}
	if got.Cycle-got.Quiet < 21*time.Second {
		t.Errorf("the quiet time comes before the failure: %+v", got)
	}
	got, err = shorter(s, faults, failure{after: 590 * time.Second, quiet: true, end: true})
	if err != nil || got.For > longest || got.NoEnd {
		t.Errorf("in the quiet time: %+v, %v", got, err)
	}
	if _, err := shorter(s, faults, failure{after: 500 * time.Second}); err == nil {
		t.Error("a schedule of more than two minutes is taken")
	}
	if got, err := shorter(s, nil, failure{after: 500 * time.Second}); err != nil || len(got.Faults) != 0 || got.For > longest {
		t.Errorf("without faults: %+v, %v", got, err)
	}
}

// The fewest faults are none where the run fails without any, else a part of the last ones; what never fails is said.
func TestFewest(t *testing.T) {
	var all []fault
	for i := range 40 {
		all = append(all, fault{At: time.Duration(i)})
	}
	f := func(needs []time.Duration, want int, ok bool) {
		t.Helper()
		tries, ones := 0, 0
		var got []fault
		found := fewest(all, func(faults []fault) bool {
			tries++
			for _, n := range needs {
				if !slices.ContainsFunc(faults, func(f fault) bool { return f.At == n }) {
					return false
				}
			}
			got = faults
			return true
		}, func() bool { ones++; return false })
		if len(got) != want || found != ok || tries > 60 || ones > 1 || !ok && ones == 0 {
			t.Errorf("%v: %v %v after %d tries, and %d of one fault", needs, got, found, tries, ones)
		}
	}
	f(nil, 0, true)
	f([]time.Duration{38}, 1, true)
	f([]time.Duration{31, 38}, 2, true)
	f([]time.Duration{0, 39}, 2, true)
	f([]time.Duration{99}, 0, false)
	all = all[:7]
	f([]time.Duration{99}, 0, false)
	if one := false; !fewest(all, func([]fault) bool { return false }, func() bool { one = true; return true }) || !one {
		t.Error("one fault, many times, was not tried")
	}
}

// A shrunk schedule that is too long, has too many faults, or fails too rarely is none.
func TestBounds(t *testing.T) {
	f := func(faults int, length time.Duration, failed int, ok bool) {
		t.Helper()
		if err := bounds(&schedule{Faults: make([]fault, faults), For: length}, failed); (err == nil) != ok {
			t.Errorf("%d faults, %v, %d failed: %v", faults, length, failed, err)
		}
	}
	f(5, 2*time.Minute, 3, true)
	f(0, time.Minute, 3, true)
	f(6, time.Minute, 5, false)
	f(1, 3*time.Minute, 5, false)
	f(1, time.Minute, 2, false)
}

// The slope is that of the end of the run; what scatters is uncertain, and two samples show none.
func TestSlope(t *testing.T) {
	begin := time.Date(2026, 11, 27, 0, 0, 0, 0, time.UTC)
	series := func(f func(minute int) int) (out []sample) {
		for m := 0; m <= 60; m += 5 {
			out = append(out, sample{At: begin.Add(time.Duration(m) * time.Minute), KiB: map[string]int{"a": f(m), "b": 50 << 10}})
		}
		return out
	}
	flat, ok := slopeOf(series(func(m int) int { return 50<<10 + map[bool]int{true: 40 << 10}[m < 15] })) // caches fill at first
	if !ok || flat.PercentPerDay != 0 || flat.Samples != 10 || flat.Minutes != 45 || flat.MeanMiB != 100 {
		t.Errorf("flat: %+v %v", flat, ok)
	}
	leak, ok := slopeOf(series(func(m int) int { return 50<<10 + 10*m }))
	if !ok || leak.PercentPerDay-leak.Uncertainty < 10 || leak.Uncertainty > 0.1 {
		t.Errorf("10 KiB a minute: %+v %v", leak, ok)
	}
	noise, ok := slopeOf(series(func(m int) int { return 50<<10 + 1024*(m/5%2) }))
	if !ok || noise.PercentPerDay-noise.Uncertainty > 0 || noise.Uncertainty < 5 {
		t.Errorf("noise: %+v %v", noise, ok)
	}
	if _, ok := slopeOf(series(func(int) int { return 1 })[:2]); ok {
		t.Error("two samples have a slope")
	}
}

// A bucket in a stale time answers what was there when it began; one that is busy answers 503; beyond its size the oldest object goes.
func TestForwarder(t *testing.T) {
	var mu sync.Mutex
	objects := map[string]string{"/kvcache/old": "1"}
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		switch r.Method {
		case http.MethodPut:
			b, _ := io.ReadAll(r.Body)
			objects[r.URL.Path] = string(b)
		case http.MethodDelete:
			delete(objects, r.URL.Path)
		default:
			v, ok := objects[r.URL.Path]
			if !ok {
				w.WriteHeader(http.StatusNotFound)
				return
			}
			w.Header().Set("X-Amz-Meta-Kvasir", v)
			_, _ = io.WriteString(w, v)
		}
	}))
	defer store.Close()
	f, err := newForwarder(store.URL)
	if err != nil {
		t.Fatal(err)
	}
	front := httptest.NewServer(f)
	defer front.Close()
	call := func(method, path, body string, status int, want string) {
		t.Helper()
		q, err := http.NewRequest(method, front.URL+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r, err := http.DefaultClient.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		b, _ := io.ReadAll(r.Body)
		if r.StatusCode != status || status == http.StatusOK && method == http.MethodGet && (string(b) != want || r.Header.Get("X-Amz-Meta-Kvasir") != want) {
			t.Errorf("%s %s: %d %q, want %d %q", method, path, r.StatusCode, b, status, want)
		}
	}
	f.setStale(true)
	call("PUT", "/kvcache/old", "2", 200, "")
	call("PUT", "/kvcache/new", "1", 200, "")
	call("GET", "/kvcache/old", "", 200, "1")
	call("GET", "/kvcache/new", "", 404, "")
	call("DELETE", "/kvcache/old", "", 200, "")
	call("GET", "/kvcache/old", "", 200, "1")
	call("HEAD", "/kvcache/new", "", 404, "")
	f.setStale(false)
	call("GET", "/kvcache/old", "", 404, "")
	call("GET", "/kvcache/new", "", 200, "1")
	f.busy.Store(true)
	call("GET", "/kvcache/new", "", 503, "")
	f.busy.Store(false)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go f.expire(ctx)
	f.wrote("/kvcache/new", bucketBytes)
	call("PUT", "/kvcache/third", "3", 200, "")
	testkit.Eventually(t, "the oldest object expires", func() bool {
		mu.Lock()
		defer mu.Unlock()
		_, there := objects["/kvcache/new"]
		return !there
	})
	call("GET", "/kvcache/third", "", 200, "3")
}

// What the machine lacks is no part of the deployment, and a fault of it says why it is left out.
func TestLacks(t *testing.T) {
	o := options{redis: none, store: none, master: none, lacks: map[string]string{"redis": "no redis-server", "s3": "no store", "mooncake": "no master"}}
	s := &soak{o: &o, parts: makeParts(&o, variantOf(0)), replica: map[string]bool{}}
	s.record.Lacks = o.lacks
	for _, p := range s.parts {
		if p.foreign || p.kind == "store" {
			t.Errorf("%s is a part", p.name)
		}
	}
	f := func(target, why string) {
		t.Helper()
		if _, _, err := s.victim(fault{Target: target}); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %v, want %q", target, err, why)
		}
	}
	f("redis", "no redis-server")
	f("replica", "no redis-server")
	f("s3", "no store")
	f("master", "no master")
	f("store1", "no master")
	if p, kind, err := s.victim(fault{Target: "d1"}); err != nil || p.name != "d1" || kind != "d" {
		t.Errorf("%v %q %v", p, kind, err)
	}
}

// A run goes on with what it was started with, and takes no other settings; a failed one is shrunk with its own build.
func TestGoOn(t *testing.T) {
	o := options{dir: t.TempDir(), binary: "/x/kvasir", bug: "/b.patch", clocks: true, collects: true, redis: "cluster", store: none, master: none, clients: 9}
	if err := o.save(); err != nil {
		t.Fatal(err)
	}
	on := options{resume: o.dir, clients: 6}
	if err := on.goOn(); err != nil || on.binary != o.binary || !on.built || !on.collects || on.clients != 9 || on.redis != "cluster" || on.store != none {
		t.Errorf("%+v, %v", on, err)
	}
	shrunk := options{replay: filepath.Join(o.dir, "schedule.json"), binary: "bin/kvasir"}
	if err := shrunk.goOn(); err != nil || shrunk.binary != o.binary || !shrunk.built {
		t.Errorf("%+v, %v", shrunk, err)
	}
	if err := (&options{resume: t.TempDir()}).goOn(); err == nil {
		t.Error("a directory without a run goes on")
	}
	alone := options{replay: filepath.Join(t.TempDir(), "schedule.json"), binary: "bin/kvasir"}
	if err := alone.goOn(); err != nil || alone.binary != "bin/kvasir" || alone.built {
		t.Errorf("%+v, %v", alone, err)
	}
}

// Kills are counted in all, and those of parts that all others share.
func TestKilled(t *testing.T) {
	r := record{Kills: map[string]int{"node": 9, "redis": 2, "relay": 1, "registry": 3, "proxy": 4}}
	if all, single := r.killed(); all != 19 || single != 6 {
		t.Errorf("%d kills, %d of single points", all, single)
	}
}

// The schedule kills often enough: an hour and ten runs of ten minutes have a thousand kills, 200 of them of parts that all share.
func TestKillsOfTheWholeRecord(t *testing.T) {
	all, single := 0, 0
	for seed := range uint64(11) {
		o := options{length: 10 * time.Minute, seed: 300 + seed, faults: true}
		if seed == 0 {
			o.length = time.Hour
		}
		for _, f := range makeSchedule(&o).Faults {
			if f.Kind != "kill" && f.Kind != "flip" && f.Kind != "torn" {
				continue
			}
			all++
			if f.Target == "redis" || f.Target == "master" || f.Target == "relay" || strings.HasPrefix(f.Target, "registry") {
				single++
			}
		}
	}
	t.Logf("%d kills, %d of single points", all, single)
	if all < 1000 || single < 200 {
		t.Errorf("%d kills, %d of single points", all, single)
	}
}
