// SPDX-License-Identifier: Apache-2.0

package status_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	topview "github.com/kvasir-kv/kvasir/cmd/kvasir/internal/status"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/admin"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// fake answers like a server: its figures grow by one step with each request for /status.
type fake struct {
	step     atomic.Int64
	down     atomic.Bool
	many     int // workers, misses
	edit     func(*admin.Status)
	liveEdit func(*admin.Live)
	model    string
	old      bool // it has no /now
	blind    bool // it runs a registry, and neither relay nor proxy
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if f.down.Load() {
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	switch r.URL.Path {
	case "/status":
		_ = json.NewEncoder(w).Encode(f.status(uint64(f.step.Add(1))))
	case "/now":
		if f.old {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		e := f.live(uint64(f.step.Load()))
		if f.liveEdit != nil {
			f.liveEdit(&e)
		}
		_ = json.NewEncoder(w).Encode(e)
	case "/explain":
		if r.URL.Query().Get("request_id") == "gone" {
			_, _ = w.Write([]byte(`{"reasons": {}, "lookups": [], "requests": []}`))
			return
		}
		_ = json.NewEncoder(w).Encode(f.explained(r.URL.Query().Get("request_id")))
	case "/metrics":
		n := f.step.Load()
		fmt.Fprintf(w, "# HELP kvasir_stored_bytes_total x\nkvasir_stored_bytes_total %d\nkvasir_retrieved_bytes_total %d\nother 1\nbroken\nkvasir_evicted_bytes_total x\n", n*1e9, n*2e9)
		for _, le := range []string{"0.001", "0.01", "+Inf"} {
			count := n * 100
			if le == "0.001" {
				count = n * 98
			}
			fmt.Fprintf(w, "kvasir_request_duration_seconds_bucket{operation=\"lookup\",le=%q} %d\n", le, count)
		}
	}
}

func (f *fake) status(n uint64) *admin.Status {
	st := &admin.Status{Status: server.Status{Healthy: true, Version: "v1", PID: 7, Started: "2026-01-01T00:00:00Z", Uptime: 61, ChunkTokens: 256}}
	st.Pool.TotalBytes, st.Pool.UsageRatio, st.Pool.ResidentChunks = 4<<30, 0.5, 12345
	st.Lookup.Lookups, st.Lookup.AskedTokens, st.Lookup.HitTokens = n*10, n*1000, n*750
	st.Recent.Seconds, st.Recent.AskedTokens, st.Recent.HitTokens = 61, 200, 100
	st.Lookup.MissReasons = map[string]uint64{"never stored": n * 3, "evicted": 5}
	for i := range f.many {
		st.Lookup.MissReasons[fmt.Sprintf("reason %d", i)] = uint64(i)
		st.Workers = append(st.Workers, server.WorkerStatus{Model: f.model, World: 2, Mode: "engine_driven", ChunkBytes: 14 << 20, SilentFor: 3})
		st.Below.Tiers = append(st.Below.Tiers, server.TierStatus{Name: f.model})
		st.Findings = append(st.Findings, server.Finding{What: f.model, Do: "nothing"})
	}
	if f.many > 0 {
		st.Workers[0].Refused = "its pool is\nsmaller than a chunk"
		st.Parts = map[string]map[string]float64{
			"relay": {"kvasir_relay_pulled_total": 12, `kvasir_relay_served_total{from="memory"}`: 4}, "bootstrap": {"kvasir_bootstrap_engines": 1},
			"proxy": {`kvasir_proxy_engine_well{engine="a"}`: 1, `kvasir_proxy_engine_well{engine="b"}`: 0},
		}
	}
	if f.edit != nil {
		f.edit(st)
	}
	return st
}

func take(t *testing.T, url string, at time.Time) *topview.Snapshot {
	t.Helper()
	s, err := new(topview.Asker).Take(t.Context(), url, "", at)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// top --once and top --json have only one try, so they wait longer for an answer than the screen, which asks again.
func TestOnceWaitsForALateServer(t *testing.T) {
	f := new(fake)
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f.step.Load() == 0 && r.URL.Path == "/status" {
			time.Sleep(2500 * time.Millisecond)
		}
		f.ServeHTTP(w, r)
	}))
	defer web.Close()
	var out strings.Builder
	o := topview.Options{URL: web.URL, Asker: new(topview.Asker), Interval: 10 * time.Millisecond}
	if err := topview.Once(t.Context(), o, &out); err != nil || !strings.Contains(out.String(), "v1") {
		t.Errorf("%v, %s", err, &out)
	}
}

// see returns the lines of the screen after two looks at the server, two seconds apart.
func see(t *testing.T, f *fake, width, height int) []string {
	t.Helper()
	return seeView(t, f, topview.Overview, "", width, height)
}

// seeView is see for a view and some keys. It also makes the requests to the server that the keys cause.
func seeView(t *testing.T, f *fake, view topview.View, keys string, width, height int) []string {
	t.Helper()
	web := httptest.NewServer(f)
	defer web.Close()
	s, at := topview.Screen{URL: "http://h:1", View: view}, time.Unix(1000, 0)
	for range 2 {
		at = at.Add(2 * time.Second)
		s.Add(take(t, web.URL, at), nil, at)
	}
	for _, key := range []byte(keys) {
		if !s.Key(key) {
			continue
		}
		snap, err := new(topview.Asker).Take(t.Context(), web.URL, s.Chosen(), at.Add(time.Second))
		if err != nil {
			t.Fatal(err)
		}
		s.Add(snap, nil, at.Add(time.Second))
	}
	return s.Lines(width, height, "note", at)
}

// Rates are differences of two looks, by the time between them.
func TestRates(t *testing.T) {
	got := strings.Join(see(t, &fake{many: 1, model: "m"}, 120, 0), "\n")
	for _, want := range []string{
		"kvasir v1  http://h:1  process 7  up 1m1s", "note\nhealthy\n", "[######......]  50.0 % of 4 GiB, 12,345 chunks",
		"now 75.0 %   last 1m1s 50.0 %   since the start 75.0 % of tokens", "lookups 5.0/s", "GB/s      stored 0.50   retrieved 1.00   from tiers 0.00",
		"hit rate   ▇", "  never stored                        3          6", "  evicted                             0          5",
		"  lookup                              100      ≤ 1ms     ≤ 10ms", "refused: its pool is", "12 pulled (0 B)", "4 from memory", "1 of 2 engines well", "  - m",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
}

// The screen has the size of the terminal, however much there is to show and whatever names models
// have. At 80 by 24 it has each part.
func TestFits(t *testing.T) {
	evil := "evil\x1b[2J\n模型" + strings.Repeat("x", 300)
	for _, size := range [][2]int{{80, 24}, {80, 25}, {200, 60}, {40, 12}, {20, 3}, {1, 1}} {
		lines := see(t, &fake{many: 40, model: evil}, size[0], size[1])
		if len(lines) > size[1] {
			t.Errorf("%v: %d lines", size, len(lines))
		}
		for _, line := range lines {
			if utf8.RuneCountInString(line) > size[0] || strings.ContainsAny(line, "\x1b\n\r\x00模") {
				t.Errorf("%v: %q", size, line)
			}
		}
		all := strings.Join(lines, "\n")
		for _, title := range []string{"why lookups found no more", "tiers below", "workers", "in the same process", "time of requests", "what keeps hits away"} {
			if size[0] >= 80 && size[1] >= 24 && !strings.Contains(all, title) {
				t.Errorf("%v: no %q in\n%s", size, title, all)
			}
		}
		if size[1] == 24 && len(lines) != 24 {
			t.Errorf("%d of 24 lines are used", len(lines))
		}
	}
}

// The counters of a restarted server begin at 0: the screen shows no rates until two looks at it, and
// never a negative one. When a server does not answer, its last figures stay.
func TestOtherServer(t *testing.T) {
	f := &fake{}
	web := httptest.NewServer(f)
	defer web.Close()
	s, at := topview.Screen{URL: "u"}, time.Unix(1000, 0)
	look := func() string {
		at = at.Add(time.Second)
		snap, err := new(topview.Asker).Take(t.Context(), web.URL, "", at)
		s.Add(snap, err, at)
		return strings.Join(s.Lines(80, 24, "", at), "\n")
	}
	if first := look(); !strings.Contains(first, "lookups -") {
		t.Errorf("one look has no rates:\n%s", first)
	}
	look()
	f.down.Store(true)
	if gone := look(); !strings.Contains(gone, "NO ANSWER for 0s") || !strings.Contains(gone, "12,345 chunks") {
		t.Errorf("gone:\n%s", gone)
	}
	if gone := look(); !strings.Contains(gone, "NO ANSWER for 1s") {
		t.Errorf("gone:\n%s", gone)
	}
	f.down.Store(false)
	f.step.Store(0)
	f.edit = func(st *admin.Status) { st.PID = 8 }
	if back := look(); !strings.Contains(back, "lookups -") || !strings.Contains(back, "healthy") || strings.Contains(back, "NO ANSWER") {
		t.Errorf("back:\n%s", back)
	}
	if on := look(); !strings.Contains(on, "lookups 10.0/s") {
		t.Errorf("going on:\n%s", on)
	}
	f.edit = func(st *admin.Status) { st.PID, st.Healthy, st.Unhealthy = 8, false, []string{"no memory"} }
	if ill := look(); !strings.Contains(ill, "NOT healthy: no memory") {
		t.Errorf("ill:\n%s", ill)
	}
}

// terminal is a pseudo-terminal of 80 by 24.
func terminal(t *testing.T) (master, slave *os.File) {
	t.Helper()
	m, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("there are no pseudo-terminals here: %v", err)
	}
	t.Cleanup(func() { m.Close() })
	fd := int(m.Fd())
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Skipf("there are no pseudo-terminals here: %v", err)
	}
	if err := errors.Join(unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0), unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: 80})); err != nil {
		t.Fatal(err)
	}
	s, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("there are no pseudo-terminals here: %v", err)
	}
	t.Cleanup(func() { s.Close() })
	return m, s
}

// On a terminal the screen is drawn again and again; a server that goes away and comes back
// is noticed, a key ends it, and the terminal is as before.
func TestTerminal(t *testing.T) {
	master, slave := terminal(t)
	f := &fake{many: 40, model: "m"}
	web := httptest.NewServer(f)
	defer web.Close()
	before, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	frames := make(chan string, 1000)
	go func() { // ends with the terminal
		defer close(frames)
		all, buf := "", make([]byte, 1<<16)
		for {
			n, err := master.Read(buf)
			if err != nil {
				return
			}
			all += string(buf[:n])
			for {
				frame, rest, ok := strings.Cut(all, "\x1b[K\x1b[J")
				if !ok {
					break
				}
				all = rest
				frames <- frame
			}
			if strings.Contains(all, "\x1b[?1049l") {
				frames <- all
				all = ""
			}
		}
	}()
	wait := func(text string) {
		t.Helper()
		for deadline := time.After(90 * time.Second); ; {
			select {
			case frame, ok := <-frames:
				if !ok {
					t.Fatalf("the terminal ended before it showed %q", text)
				}
				if _, screen, ok := strings.Cut(frame, "\x1b[H"); ok {
					lines := strings.Split(screen, "\r\n")
					if len(lines) > 24 {
						t.Errorf("%d lines", len(lines))
					}
					for _, line := range lines {
						line = strings.NewReplacer("\r", "", "\x1b[K", "", "\x1b[1m", "", "\x1b[31m", "", "\x1b[0m", "").Replace(line)
						if utf8.RuneCountInString(line) > 80 || strings.Contains(line, "\x1b") {
							t.Errorf("%q", line)
						}
					}
				}
				if strings.Contains(frame, text) {
					return
				}
			case <-deadline:
				t.Fatalf("it never showed %q", text)
			}
		}
	}
	ended := make(chan error, 1)
	go func() {
		ended <- topview.Top(context.Background(), topview.Options{URL: web.URL, Asker: new(topview.Asker), Interval: 50 * time.Millisecond, In: slave, Out: slave, Color: true})
	}()
	wait("lookups ")
	wait("/s ")
	f.down.Store(true)
	wait("NO ANSWER")
	f.down.Store(false)
	wait("healthy")
	for _, k := range []struct{ keys, want string }{
		{"2", "hit rate by tier"},
		{"\x1b[C", "one request: chat-0"},
		{"\x1b[B\x1b[B", "one request: chat-1"},
		{"\t", "slowest requests of ten minutes"},
		{"\x1bOB\r", "> chat-1"},
		{"\x1b[D\x1b[D", "hit rate by tier"},
		{"\x1b[17~é5", "240 cells"},
		{"6", "relay: P→D"},
		{"?", "these keys, and back"},
		{"?", "relay: P→D"},
		{"1", "[1 overview]"},
		{"p", "PAUSED"},
		{"q", ""},
	} {
		if _, err := master.WriteString(k.keys); err != nil {
			t.Fatal(err)
		}
		if k.want != "" {
			wait(k.want)
		}
	}
	wait("\x1b[?25h\x1b[?1049l")
	if err := <-ended; err != nil {
		t.Error(err)
	}
	after, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil || *after != *before {
		t.Errorf("the terminal's settings: %+v, were %+v (%v)", after, before, err)
	}
	slave.Close()
	for range frames {
	}
}
