// SPDX-License-Identifier: Apache-2.0

package transferlog_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/transferlog"
)

// told returns a transfer as one line: state, steps with their times, bytes.
func told(t transferlog.Transfer) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s %.0fms", t.ID, t.State, t.MS)
	for _, s := range t.Steps {
		fmt.Fprintf(&b, " | %s %s %.0f+%.0f %dB", s.State, s.What, s.From, s.MS, s.Bytes)
	}
	return b.String()
}

func wantTold(t *testing.T, list []transferlog.Transfer, want ...string) {
	t.Helper()
	if len(list) != len(want) {
		t.Fatalf("%d transfers, want %d", len(list), len(want))
	}
	for i := range want {
		if got := told(list[i]); got != want[i] {
			t.Errorf("%d:\n%s\nwant\n%s", i, got, want[i])
		}
	}
}

// Last returns a transfer with its steps, while it runs and when it has ended. Two transfers with the same id, or with the
// same time, stay two. Calls after the end change nothing.
func TestLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l transferlog.Log
		if got := l.Last(); got == nil || len(got) != 0 {
			t.Errorf("an empty one: %+v", got)
		}
		first, bytes := time.Time{}, uint64(0)
		progress := func() (time.Time, uint64) { return first, bytes }
		a := l.Begin(transferlog.Transfer{ID: "a", Blocks: 3, Bytes: 100}, transferlog.Computing, "P computes")
		time.Sleep(10 * time.Millisecond)
		a.Receiving("P sends", progress)
		b := l.Begin(transferlog.Transfer{ID: "a", Request: "other", Blocks: 7, Bytes: 700}, transferlog.Waiting, "waits")
		wantTold(t, l.Last(), "a waiting 0ms | waiting waits 0+0 0B", "a computing 10ms | computing P computes 0+10 0B")
		first, bytes = time.Now().Add(2*time.Millisecond), 40
		time.Sleep(5 * time.Millisecond)
		wantTold(t, l.Last()[1:], "a sending 15ms | computing P computes 0+12 0B | sending P sends 12+3 40B")
		bytes = 120 // some of it twice
		a.From("P")
		sent := uint64(0)
		a.Next(transferlog.Sending, "to D", func() (time.Time, uint64) { return time.Time{}, sent })
		b.To("d2")
		b.End(transferlog.Failed, strings.Repeat("w", 1000))
		time.Sleep(4 * time.Millisecond)
		sent, bytes = 100, 0
		a.End(transferlog.Done, "")
		sent = 0
		a.End(transferlog.Failed, "later")
		a.Next(transferlog.Sending, "later", nil)
		a.Receiving("later", progress)
		time.Sleep(time.Second)
		list := l.Last()
		wantTold(t, list, "a failed 5ms | waiting waits 0+5 0B",
			"a done 19ms | computing P computes 0+12 0B | sending P sends 12+3 100B | sending to D 15+4 100B")
		if list[0].Blocks != 7 || list[0].Bytes != 700 || list[0].To != "d2" || len(list[0].Why) != 256 || list[1].Source != "P" || list[1].Why != "" {
			t.Errorf("%+v", list)
		}
		if got := list[1].Rate; got < 24.9e-6 || got > 25.1e-6 { // 100 B in 4 ms
			t.Errorf("%v GB/s", got)
		}
	})
}

// A log is bounded: it drops the oldest transfers that have ended, and then the oldest that run. It cuts texts.
// A transfer has a bounded number of steps.
func TestLogIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l transferlog.Log
		var all []*transferlog.Entry
		begin := func(id string) *transferlog.Entry {
			time.Sleep(time.Millisecond)
			e := l.Begin(transferlog.Transfer{ID: id}, transferlog.Computing, "")
			all = append(all, e)
			return e
		}
		for i := range transferlog.Max {
			begin(fmt.Sprint(i))
		}
		all[5].End(transferlog.Done, "")
		all[3].End(transferlog.Expired, "")
		for i := range 3 {
			begin(fmt.Sprint("new", i))
		}
		var ids []string
		for _, x := range l.Last() {
			ids = append(ids, x.ID)
		}
		if got := strings.Join(ids, " "); len(ids) != transferlog.Max || !strings.HasPrefix(got, "new2 new1 new0 63 ") || !strings.HasSuffix(got, " 7 6 4 2 1") {
			t.Errorf("%d: %s", len(ids), got) // 3, 5 and then 0 went
		}
		all[0].End(transferlog.Done, "") // the log has dropped it: nothing happens
		long := strings.Repeat("é", 500)
		e := l.Begin(transferlog.Transfer{ID: long, Request: long, Model: long, From: long, To: long, Rank: long}, transferlog.Computing, "")
		e.To(long)
		for range 20 {
			e.Next(transferlog.Sending, "", nil)
		}
		x := l.Last()[0]
		for _, s := range []string{x.ID, x.Request, x.Model, x.From, x.To, x.Rank} {
			if len(s) != 128 {
				t.Errorf("a text of %d bytes", len(s))
			}
		}
		if len(x.Steps) != 6 {
			t.Errorf("%d steps", len(x.Steps))
		}
		if text, err := json.Marshal(x); err != nil || len(text) > 2500 {
			t.Errorf("%d bytes, %v", len(text), err)
		}
	})
}

// Finish ends a transfer with the state that its error means.
func TestFinish(t *testing.T) {
	f := func(err error, state transferlog.State, why string) {
		t.Helper()
		var l transferlog.Log
		l.Begin(transferlog.Transfer{}, transferlog.Computing, "").Finish(err, io.EOF, context.DeadlineExceeded)
		if got := l.Last()[0]; got.State != state || got.Why != why {
			t.Errorf("%v: %s, %q", err, got.State, got.Why)
		}
	}
	f(nil, transferlog.Done, "")
	f(fmt.Errorf("pull: %w", context.DeadlineExceeded), transferlog.Expired, "pull: context deadline exceeded")
	f(io.ErrUnexpectedEOF, transferlog.Failed, "unexpected EOF")
}

// The methods of a nil Log do nothing.
func TestNoLog(t *testing.T) {
	var l *transferlog.Log
	e := l.Begin(transferlog.Transfer{}, transferlog.Computing, "")
	e.From("P")
	e.To("d")
	e.Receiving("", nil)
	e.Next(transferlog.Sending, "", nil)
	e.End(transferlog.Done, "")
	e.Finish(nil)
	if e != nil || l.Last() != nil {
		t.Error("it remembers")
	}
}

// A transfer that relay and proxy saw is one row with the relay's steps and the proxy's names. Each
// worker of D has its own row. A transfer that only one of them saw has a row, too.
func TestJoin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var relay, proxy transferlog.Log
		const id = "kvasir-0123456789abcdef0123456789abcdef"
		p := proxy.Begin(transferlog.Transfer{ID: id, Request: "chat-1", Model: "m", To: "http://d", From: "p"}, transferlog.Computing, "P computes")
		time.Sleep(10 * time.Millisecond)
		var rs []*transferlog.Entry
		for rank := range 2 {
			rs = append(rs, relay.Begin(transferlog.Transfer{ID: id, Request: "cmpl-1", From: "p at h", To: "10.0.0.2:1", Rank: fmt.Sprint(rank)}, transferlog.Computing, "waits for P"))
		}
		time.Sleep(20 * time.Millisecond)
		now := time.Now()
		for _, r := range rs {
			r.Receiving("P sends", func() (time.Time, uint64) { return now, 0 })
		}
		time.Sleep(5 * time.Millisecond)
		p.Next(transferlog.Waiting, "until D", nil)
		for _, r := range rs {
			r.End(transferlog.Done, "")
		}
		p.End(transferlog.Done, "")
		time.Sleep(time.Millisecond)
		late := proxy.Begin(transferlog.Transfer{ID: "late", Request: "chat-2"}, transferlog.Computing, "P computes")
		time.Sleep(7 * time.Millisecond)
		late.Next(transferlog.Waiting, "until D", nil)
		time.Sleep(30 * time.Millisecond)
		asked := relay.Begin(transferlog.Transfer{ID: "late"}, transferlog.Computing, "waits for P")
		now = time.Now()
		asked.Receiving("P sends", func() (time.Time, uint64) { return now, 0 })
		time.Sleep(3 * time.Millisecond)
		relay.Begin(transferlog.Transfer{ID: "own"}, transferlog.Computing, "waits for P")
		time.Sleep(time.Millisecond)
		proxy.Begin(transferlog.Transfer{Request: "without an id"}, transferlog.Computing, "P computes")
		time.Sleep(time.Millisecond)
		list := transferlog.Join(relay.Last(), proxy.Last())
		joined := "kvasir-01234567… done 35ms | computing P computes 0+30 0B | sending P sends 30+5 0B"
		wantTold(t, list,
			" computing 1ms | computing P computes 0+1 0B",
			"own computing 2ms | computing waits for P 0+2 0B",
			"late sending 42ms | computing P computes 0+7 0B | waiting waits for D 7+30 0B | computing waits for P 37+0 0B | sending P sends 37+5 0B",
			joined, joined)
		if x, y := list[3], list[4]; x.Request != "chat-1" || x.Model != "m" || x.To != "http://d" || x.From != "p at h" || x.Rank == y.Rank {
			t.Errorf("%+v", x)
		}
		if got := transferlog.Join(nil, nil); got == nil || len(got) != 0 {
			t.Errorf("of nothing: %+v", got)
		}
		for range 100 {
			relay.Begin(transferlog.Transfer{}, transferlog.Computing, "")
			proxy.Begin(transferlog.Transfer{}, transferlog.Computing, "")
		}
		if n := len(transferlog.Join(relay.Last(), proxy.Last())); n != transferlog.Max {
			t.Errorf("%d of two full logs", n)
		}
	})
}

func TestShort(t *testing.T) {
	f := func(id, want string) {
		t.Helper()
		if got := transferlog.Short(id); got != want {
			t.Errorf("%q is shown as %q, want %q", id, got, want)
		}
	}
	f("", "")
	f("xfer-1#2", "xfer-1#2")
	f(strings.Repeat("a", 20), strings.Repeat("a", 20))
	f("kvasir-0123456789abcdef", "kvasir-01234567…")
	f("kvasir-0123456789abcdef#12!", "kvasir-01234567…#12!")
	f("short#"+strings.Repeat("s", 40), "short#sssssssss…") // not what this proxy appends: it may be the secret
}

// Logging a transfer costs less than one or two microseconds, whatever a browser does.
func BenchmarkTransfer(b *testing.B) {
	var l transferlog.Log
	progress := func() (time.Time, uint64) { return time.Time{}, 1 }
	b.ReportAllocs()
	for b.Loop() {
		e := l.Begin(transferlog.Transfer{ID: "kvasir-0123456789abcdef0123456789abcdef", Request: "cmpl-1234", From: "p at h", To: "10.0.0.2:4000"}, transferlog.Computing, "waits for P")
		e.Receiving("P sends", progress)
		e.From("P")
		e.Next(transferlog.Sending, "relay sends to D", progress)
		e.End(transferlog.Done, "")
	}
}
