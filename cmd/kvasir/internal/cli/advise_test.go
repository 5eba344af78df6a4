// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	advice "github.com/kvasir-kv/kvasir/cmd/kvasir/internal/status"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hitcurve"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// planted is a server with one engine's worker, whose chunks have 16 tokens and 4 KiB.
type planted struct {
	t    *testing.T
	c    *lmcache.Client
	url  string // of the HTTP interface
	asks int
}

const plantedWorker = 101

func plant(t *testing.T, chunks int, o store.Options) *planted {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: int64(chunks) * 4096, Dir: t.TempDir(), ChunkTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	o.WorkerShare, o.PeerShare, o.Curves = 1, 1, &hitcurve.Options{Policy: "lru"}
	if o.Below != nil {
		o.Curves.Tiers = []hitcurve.Tier{{Name: "below"}}
	}
	st := store.New(p, o)
	s := server.New(st, server.Options{ChunkTokens: 16})
	address, err := s.Listen(t.Context(), "tcp://127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c, err := lmcache.NewClient("tcp://" + address)
	if err != nil {
		t.Fatal(err)
	}
	page := httptest.NewServer(admin.Handler(s, admin.Options{}))
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.Run(ctx)
	}()
	t.Cleanup(func() {
		page.Close()
		_ = c.Close()
		stop()
		<-ended
		_, _ = s.Close(), st.Close()
	})
	d := &planted{t: t, c: c, url: page.URL}
	reg := lmcache.EngineDriven{InstanceID: plantedWorker, Model: "m", WorldSize: 1, BlockSize: 16, Layers: 1, Hidden: 128, DType: "bfloat16", SinglePlane: true, PhysicalSlots: 16}
	if _, err := c.RegisterEngineDriven(t.Context(), &reg); err != nil {
		t.Fatal(err)
	}
	return d
}

// request looks a prompt up and stores it, as an engine does. It returns the chunks that hit.
func (d *planted) request(salt string, prompt []uint32) (hit int) {
	d.t.Helper()
	d.asks++
	ctx, cancel := context.WithTimeout(d.t.Context(), time.Minute)
	defer cancel()
	k := &lmcache.Key{Model: "m", Salt: salt, RequestID: fmt.Sprint("r", d.asks), WorldSize: 1, Worker: lmcache.AllWorkers, Tokens: prompt, End: len(prompt), Readers: 1}
	hit, err := d.c.Lookup(ctx, k)
	if err == nil && len(prompt) >= 16 {
		k.Worker = 0
		if _, err = d.c.PrepareStore(ctx, k, plantedWorker, nil); err == nil {
			_, err = d.c.CommitStore(ctx, k, plantedWorker)
		}
	}
	if err == nil || strings.Contains(err.Error(), "commit") {
		err = d.c.EndSession(ctx, k.RequestID)
	}
	if err != nil {
		d.t.Fatal(err)
	}
	return hit
}

// advise returns the first advice of kvasir advise, all of its advice, and its text.
func (d *planted) advise(args ...string) (first advice.Option, all advice.Advice, text string) {
	d.t.Helper()
	args = append([]string{"advise", "--url", d.url}, args...)
	code, text, stderr := run(d.t, args...)
	if code != 0 || stderr != "" {
		d.t.Fatalf("exit %d, %s%s", code, text, stderr)
	}
	code, stdout, stderr := run(d.t, append(args, "--json")...)
	if err := json.Unmarshal([]byte(stdout), &all); err != nil || code != 0 {
		d.t.Fatalf("exit %d, %v, %s%s", code, err, stdout, stderr)
	}
	if len(all.Options) > 0 {
		first = all.Options[0]
	}
	return first, all, text
}

func promptOf(seed, tokens int) []uint32 {
	out := make([]uint32, tokens)
	for i := range out {
		out[i] = uint32(i*31 + seed*1000003)
	}
	return out
}

// Prompts that come in turns and do not fit: more memory is the first advice, with what it saves.
func TestAdviseOfAPoolThatIsTooSmall(t *testing.T) {
	d := plant(t, 24, store.Options{})
	for i := range 60 {
		d.request("", promptOf(1+i%6, 16*8))
	}
	first, all, text := d.advise("--gpu-hour-price", "3600", "--prefill-tokens-per-second", "100")
	if first.Kind != "pool" || first.Points < 80 || first.Rate < 0.85 || all.Window.Ceiling < 0.85 || all.Window.Ceiling > 0.95 {
		t.Errorf("%+v\n%s", all, text)
	}
	if want := first.Points / 100 * 60 * 128 / 100; first.Seconds < want*0.99 || first.Seconds > want*1.01 || first.Money < first.Seconds*0.99 || first.Money > first.Seconds*1.01 {
		t.Errorf("%+v, want %.1f s", first, want)
	}
	for _, want := range []string{"possible", "more RAM", "this pool", "without end", "of GPU time", "s of prefill"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in\n%s", want, text)
		}
	}
	if code, text, _ := run(t, "status", "--url", d.url); code != 0 || !strings.Contains(text, "possible (kvasir advise") {
		t.Errorf("status: exit %d\n%s", code, text)
	}
	answer, err := http.Get(d.url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	page, err := io.ReadAll(answer.Body)
	for _, want := range []string{`kvasir_hit_rate_ceiling{window="24h"} 0.`, `kvasir_hit_rate_estimate{policy="lru",pools="16"} 0.`, `kvasir_hit_rate_measured{window="15m"} `} {
		if !strings.Contains(string(page), want) {
			t.Errorf("no %s among the metrics, %v", want, err)
		}
	}
}

// Each planted situation has its own advice first, and no advice of the other situations.
func TestAdviseNamesWhatIsPlanted(t *testing.T) {
	body := randomTokens(1, 2400)
	for _, planted := range []struct {
		name, kind string
		also       string // kinds of advice that may come beside it
		words      string
		chunks     int
		points     float64
		slow       bool // a tier that has all and answers too late
		play       func(d *planted)
	}{
		{name: "a pool that is too small", kind: "pool", also: "tier", words: "more RAM", chunks: 24, points: 80, play: func(d *planted) {
			for i := range 60 {
				d.request("", promptOf(1+i%6, 16*8))
			}
		}},
		{name: "the wrong salt", kind: "salt", words: "one cache_salt", chunks: 512, points: 80, play: func(d *planted) {
			for i := range 40 {
				d.request(fmt.Sprint("user-", i), promptOf(1, 16*8))
			}
		}},
		{name: "chunks that are too large", kind: "chunk_size", words: "--chunk-size below 16", chunks: 64, points: 80, play: func(d *planted) {
			for range 40 {
				d.request("", promptOf(1, 12))
			}
			d.request("", promptOf(2, 32))
		}},
		{name: "a tier that is too slow", kind: "slow_tier", words: "a faster tier", chunks: 64, points: 50, slow: true, play: func(d *planted) {
			for i := range 12 {
				d.request("", promptOf(100+i, 16*8))
			}
		}},
		{name: "prompts that begin with a date", kind: "beginning", words: "move what changes at their beginning", chunks: 8192, points: 80, play: func(d *planted) {
			for i := range uint32(40) {
				d.request("", slices.Concat([]uint32{2026, 11, i, i * 7}, body, randomTokens(uint64(100+i), 60)))
			}
		}},
		{name: "the same behind a tier", kind: "beginning", words: "move what changes at their beginning", chunks: 8192, points: 80, play: func(d *planted) {
			for i := range uint32(40) {
				d.request("", slices.Concat([]uint32{2026, 11, i, i * 7}, body, randomTokens(uint64(100+i), 60)))
			}
		}},
	} {
		t.Run(planted.name, func(t *testing.T) {
			var o store.Options
			release := func() {}
			switch {
			case planted.slow:
				flaky, err := tiertest.NewFlaky(tier.NewMemory(1<<30), "stat * hang")
				if err != nil {
					t.Fatal(err)
				}
				o, release = store.Options{Below: flaky, LoadTimeout: 20 * time.Millisecond}, flaky.Release
			case strings.HasSuffix(planted.name, "a tier"):
				o = store.Options{Below: tier.NewMemory(1 << 30)}
			}
			d := plant(t, planted.chunks, o)
			t.Cleanup(release) // before the store is closed
			planted.play(d)
			first, all, text := d.advise()
			if first.Kind != planted.kind || first.Points < planted.points || first.Most == (first.Kind == "pool") || !strings.Contains(text, planted.words) {
				t.Errorf("%+v\n%s", all, text)
			}
			for _, o := range all.Options {
				if o.Kind != planted.kind && o.Kind != planted.also {
					t.Errorf("it also says %s\n%s", o.Kind, text)
				}
			}
		})
	}
}

// advise, status, the metrics and the findings report a beginning that changes with its cost, in tokens and their share.
func TestAdviseOfAChangingBeginning(t *testing.T) {
	d := plant(t, 8192, store.Options{})
	body := randomTokens(1, 2400)
	asked := 0
	for i := range uint32(40) {
		d.request("", slices.Concat([]uint32{2026, 11, i, i * 7}, body, randomTokens(uint64(100+i), 60)))
		asked += 2464
	}
	first, all, text := d.advise()
	// Only the text between the first and the last anchor counts. One window in 32 is an anchor, so more than 500 tokens of 2,400 lie outside
	// them once in 500,000 runs.
	if first.Lost < uint64(39*1900) || first.Lost > uint64(40*2400) || math.Abs(first.Share-float64(first.Lost)/float64(asked)) > 1e-9 {
		t.Errorf("of %d tokens: %+v\n%s", asked, all, text)
	}
	code, status, _ := run(t, "status", "--url", d.url)
	for _, want := range []string{"were not found because what is before them changes", "move what changes (a date, an id, a name)"} {
		if code != 0 || !strings.Contains(status, want) {
			t.Errorf("no %q in\n%s", want, status)
		}
	}
	answer, err := http.Get(d.url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	page, err := io.ReadAll(answer.Body)
	if _, of, ok := strings.Cut(string(page), "\nkvasir_changed_beginning_tokens_total "); err != nil || !ok || of[0] == '0' {
		t.Errorf("%v, %.20s", err, of)
	}
}

// Conversations that continue, prompts without a common part, and prompts with one closing text give no advice about beginnings.
func TestAdviseOfOrdinaryPrompts(t *testing.T) {
	d := plant(t, 8192, store.Options{})
	closing := randomTokens(2, 300)
	for i := range uint64(12) {
		talk := randomTokens(10+i, 600)
		for turn := range uint64(4) {
			d.request("", talk)
			talk = slices.Concat(talk, randomTokens(100*i+turn, 350))
		}
		d.request("", randomTokens(5000+i, 1800))
		d.request("", slices.Concat(randomTokens(6000+i, 900), closing))
	}
	if _, all, text := d.advise(); slices.ContainsFunc(all.Options, func(o advice.Option) bool { return o.Kind == "beginning" }) || strings.Contains(text, "Not known") {
		t.Errorf("%s", text)
	}
}

// Where the engine sends hashes alone, the loss from changing beginnings is not known, and advise says so.
func TestAdviseOfHashesAlone(t *testing.T) {
	st := admin.Status{Status: server.Status{PID: 1, ChunkTokens: 256, HitCurves: make([]hitcurve.Window, 3)}}
	st.Lookup.AskedTokens, st.Lookup.Beginnings.UnknownTokens = 10_000, 4000
	var shown atomic.Pointer[admin.Status]
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(shown.Load()) }))
	defer web.Close()
	d := &planted{t: t, url: web.URL}
	show := func() {
		now := st
		now.HitCurves = slices.Clone(st.HitCurves)
		shown.Store(&now)
	}
	st.HitCurves[2] = hitcurve.Window{Asked: 40, Tokens: 10_000, Curve: make([]hitcurve.Point, len(hitcurve.Factors))}
	show()
	if _, _, text := d.advise(); !strings.Contains(text, "Not known: whether beginnings that change lost any of 4,000 tokens") {
		t.Errorf("%s", text)
	}
	st.HitCurves[2], st.VLLM, st.Lookup.Lookups = hitcurve.Window{}, &server.VLLMStatus{}, 5
	show()
	if _, _, text := d.advise(); !strings.Contains(text, "Nothing is estimated for vLLM's tiered offloading") {
		t.Errorf("%s", text)
	}
}

func randomTokens(seed uint64, n int) []uint32 {
	r := rand.New(rand.NewPCG(seed, 1))
	out := make([]uint32, n)
	for i := range out {
		out[i] = r.Uint32N(150_000)
	}
	return out
}

// advise reports prompts that are shorter than a chunk, also where no other prompt came.
func TestAdviseOfShortPromptsAlone(t *testing.T) {
	d := plant(t, 64, store.Options{})
	for range 40 {
		d.request("", promptOf(1, 12))
	}
	if first, all, text := d.advise(); first.Kind != "chunk_size" || !strings.Contains(text, "--chunk-size below 16") || strings.Contains(text, "Of 0 tokens") || strings.Contains(text, " 0 s of") {
		t.Errorf("%+v\n%s", all, text)
	}
}

// A server without requests and a server that already finds all it can get no advice.
func TestAdviseWithNothingToGain(t *testing.T) {
	d := plant(t, 64, store.Options{})
	if _, all, text := d.advise(); len(all.Options) != 0 || !strings.Contains(text, "nothing to say yet") {
		t.Errorf("%+v\n%s", all, text)
	}
	for range 30 {
		d.request("", promptOf(1, 16*8))
	}
	if _, all, text := d.advise("--window", "15m"); len(all.Options) != 0 || !strings.Contains(text, "Nothing that could be bought") || !strings.Contains(text, "hit 96.7 % of 96.7 % possible") {
		t.Errorf("%+v\n%s", all, text)
	}
}

func TestAdviseRefuses(t *testing.T) {
	old := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/old") {
			_, _ = w.Write([]byte(`{"pid": 1, "chunk_size": 256}`))
			return
		}
		if strings.HasPrefix(r.URL.Path, "/cut") {
			_, _ = w.Write([]byte(`{"pid": 1, "chunk_size": 256, "hit_curves": [{"asked_chunks": 5}, {"asked_chunks": 5}, {"asked_chunks": 5}]}`))
			return
		}
		_, _ = w.Write([]byte(`{}`))
	}))
	defer old.Close()
	f := func(code int, want string, args ...string) {
		t.Helper()
		got, stdout, stderr := run(t, append([]string{"advise"}, args...)...)
		if got != code || stdout != "" || !strings.Contains(stderr, want) {
			t.Errorf("%v: exit %d, want %d and %q:\n%s%s", args, got, code, want, stdout, stderr)
		}
	}
	f(1, "not answered by a kvasir server", "--url", old.URL)
	f(1, "earlier release", "--url", old.URL+"/old")
	f(1, "earlier release", "--url", old.URL+"/cut")
	f(2, "--gpu-hour-price 1e+308", "--gpu-hour-price", "1e308", "--json")
	f(2, "--prefill-tokens-per-second 1e-300", "--prefill-tokens-per-second", "1e-300", "--json")
	f(2, "--prefill-tokens-per-second +Inf", "--prefill-tokens-per-second", "Inf")
	f(2, "--gpu-hour-price -1", "--gpu-hour-price=-1")
	f(2, "--gpu-hour-price NaN", "--gpu-hour-price=NaN")
	f(2, "--prefill-tokens-per-second 0", "--prefill-tokens-per-second", "0")
	f(2, "must be one of", "--window", "2h")
}

// No advice promises more than its window can gain: where all but ten points of a window hit, the gain is ten points at most, whatever was
// lost since the start. Tokens are counted from the chunks that were asked for, with each chunk's own size.
func TestAdviceFitsItsOwnFigures(t *testing.T) {
	st := admin.Status{Status: server.Status{PID: 1, ChunkTokens: 256}}
	st.Pool.TotalBytes = 1 << 30
	st.Lookup.AskedTokens, st.Lookup.HitTokens = 1000, 400
	st.Lookup.LostTokens = map[string]uint64{miss.OtherSalt.Label(): 300, miss.BelowSlow.Label(): 300}
	w := hitcurve.Window{Lookups: 10, Asked: 100, Tokens: 1600, Pool: 0.90, Hit: 0.90, Ceiling: 0.95, Curve: make([]hitcurve.Point, len(hitcurve.Factors))}
	for i, f := range hitcurve.Factors {
		w.Curve[i] = hitcurve.Point{Bytes: int64(f * (1 << 30)), Rate: 0.90, LRU: 0.90}
	}
	st.HitCurves = []hitcurve.Window{w, w, w}
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(st) }))
	defer web.Close()
	d := &planted{t: t, url: web.URL}
	_, all, text := d.advise("--prefill-tokens-per-second", "0.5")
	if all.Tokens != 1600 || !strings.Contains(text, "at 0.5 prompt tokens a second") {
		t.Errorf("%+v\n%s", all, text)
	}
	points := map[string]float64{}
	for _, o := range all.Options {
		points[o.Kind] = o.Points
		if o.Rate > 1 || math.Abs(o.Rate-w.Hit-o.Points/100) > 1e-9 {
			t.Errorf("%+v", o)
		}
	}
	if math.Abs(points["salt"]-10) > 1e-6 || math.Abs(points["slow_tier"]-10) > 1e-6 || len(points) != 2 {
		t.Errorf("%v\n%s", points, text)
	}
}
