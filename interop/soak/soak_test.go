// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv/event"
)

// One seed gives one schedule, others another one; no fault reaches into a quiet time, and each names a part or host that
// there is.
func TestSchedule(t *testing.T) {
	o := options{length: 3 * time.Minute, seed: 7, faults: true}
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
		host := hosts[f.Target] != "" || f.Target == "shm" || f.Target == "clients" || strings.HasPrefix(f.Target, "disk") || f.Target == "fs2"
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
func TestOneCycle(t *testing.T) {
	dir := t.TempDir()
	faults := []fault{{Cycle: 0, At: 1}, {Cycle: 1, At: time.Second, Kind: "a"}, {Cycle: 1, At: 5 * time.Second, Kind: "b"}, {Cycle: 2, At: 1}}
	if got := oneCycle(faults, dir); len(got) != 1 || got[0].At != 1 {
		t.Errorf("without a record: %v", got)
	}
	if err := writeJSON(filepath.Join(dir, "record.json"), record{Cycles: 1, CycleBegan: 70 * time.Second, FailedAt: 73 * time.Second}); err != nil {
		t.Fatal(err)
	}
	if got := oneCycle(faults, dir); len(got) != 1 || got[0].Kind != "a" || got[0].Cycle != 0 {
		t.Errorf("with a record: %v", got)
	}
}

// Kills are counted in all, and those of parts that all others share.
func TestKilled(t *testing.T) {
	r := record{Kills: map[string]int{"node": 9, "redis": 2, "relay": 1, "registry": 3, "proxy": 4}}
	if all, single := r.killed(); all != 19 || single != 6 {
		t.Errorf("%d kills, %d of single points", all, single)
	}
}
