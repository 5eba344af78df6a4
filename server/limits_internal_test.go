// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/tiering"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// Requests that wait for lookups: one user has half of what others leave, and each one,
// until all places are taken.
func TestWaitsOfOneUserLeavePlacesForOthers(t *testing.T) {
	var w waits
	var all []*wait
	begin := func(peer string) bool {
		of := &wait{peer: new(zmtp.Peer), owner: lease.Owner{Peer: peer}, timeout: time.Hour}
		ctx, ok := w.begin(of)
		if !ok {
			return false
		}
		if end, ok := ctx.Deadline(); !ok || time.Until(end) > maxWaitFor {
			t.Errorf("%s may wait until %v", peer, end)
		}
		all = append(all, of)
		return true
	}
	for i, want := range []int{512, 256, 128, 64, 32, 16, 8, 4, 2, 1, 1, 0} {
		n := 0
		for begin(fmt.Sprint("uid ", i)) {
			n++
		}
		if n != want {
			t.Errorf("beside %d waits another user has %d, want %d", len(all)-n, n, want)
		}
	}
	last := all[len(all)-1]
	all = all[:len(all)-1]
	w.end(last)
	if !begin("another") || begin("one more") {
		t.Error("one wait that ended makes room for one")
	}
	for _, of := range all {
		w.end(of)
	}
	w.stop() // returns, since nothing waits
	if w.mu.all != 0 || len(w.mu.of) != 0 || len(w.mu.cancel) != 0 || begin("late") || !w.stopped() {
		t.Errorf("left are %d waits, %d users, %d connections", w.mu.all, len(w.mu.of), len(w.mu.cancel))
	}
}

// The end of a connection ends its waits, of others none; the server's end ends all.
func TestWaitsEndWithTheirConnection(t *testing.T) {
	var w waits
	begin := func(p *zmtp.Peer) (context.Context, *wait) {
		of := &wait{peer: p, owner: lease.Owner{Peer: "uid 1"}, timeout: time.Hour}
		ctx, ok := w.begin(of)
		if !ok {
			t.Fatal("no place")
		}
		return ctx, of
	}
	p, q := new(zmtp.Peer), new(zmtp.Peer)
	one, of1 := begin(p)
	two, of2 := begin(p)
	other, of3 := begin(q)
	w.detach(p)
	if one.Err() == nil || two.Err() == nil || other.Err() != nil {
		t.Errorf("after the connection: %v, %v, another's %v", one.Err(), two.Err(), other.Err())
	}
	w.end(of1)
	w.end(of2)
	go func() {
		<-other.Done()
		w.end(of3)
	}()
	w.stop()
	if other.Err() == nil || w.mu.all != 0 {
		t.Errorf("after the server: %v, %d waits", other.Err(), w.mu.all)
	}
}

// Flow control of event streams gets no answer, nor does a request whose number could not
// be sent back; everything else gets one.
func TestMessagesWithoutAnswer(t *testing.T) {
	s := newBareServer(t, io.Discard)
	noop := lmcache.AppendOp(nil, lmcache.OpNoop)
	f := func(answered bool, m ...[]byte) {
		t.Helper()
		if got := s.Answer(m); (got != nil) != answered {
			t.Errorf("%.40q is answered with %q", m, got)
		}
	}
	f(false, []byte{1}, nil, []byte("ack"))
	f(false, []byte{1}, nil, []byte("cancel"))
	f(true, []byte{1}, nil, []byte("other"))
	f(true, []byte{1}, nil, []byte("ack"), []byte("ack"))
	f(true, []byte{1}, nil)
	f(true, []byte{1}, noop, []byte("ack"))
	f(true, []byte{1}, noop)
	f(false, []byte{1})
	f(false)
	f(true, make([]byte, maxUID), noop)
	f(false, make([]byte, maxUID+1), noop)
}

// What is said about hits that are missing begins where it matters, not before.
func TestFindingsBeginWhereTheyMatter(t *testing.T) {
	f := func(what string, want bool, change func(*Status)) {
		t.Helper()
		st := &Status{ChunkTokens: 256, Workers: []WorkerStatus{{Instance: 1}}, Declined: map[string]uint64{}, Lookup: LookupStatus{
			Lookups: 10, AskedTokens: 100, HitTokens: 100, Hits: 10, Retrieves: 10, MissReasons: map[string]uint64{"evicted": 1},
		}, Pool: PoolStatus{TotalBytes: 1000}}
		change(st)
		said := ""
		for _, one := range st.findings() {
			said += one.What + ": " + one.Do + "\n"
		}
		if strings.Contains(said, what) != want {
			t.Errorf("%q said: %v, want %v, in:\n%s", what, !want, want, said)
		}
	}
	f("1 prompt was shorter", true, func(st *Status) { st.Lookup.Lookups, st.Lookup.Short = 2, 1 })
	f("shorter", false, func(st *Status) { st.Lookup.Lookups, st.Lookup.Short = 3, 1 })
	f("shorter", false, func(st *Status) { st.Lookup.Lookups = 0 })
	f("for example 64", true, func(st *Status) { st.Lookup.Short = 10 })
	f("for example 16", true, func(st *Status) { st.Lookup.Short, st.ChunkTokens = 10, 32 })
	f("no prompt was asked", false, func(st *Status) { st.Lookup.Lookups, st.Lookup.Short = 0, 1 })
	f("no prompt was asked", false, func(st *Status) { st.Lookup.Lookups, st.Declined["miss"] = 0, 1 })
	f("no prompt was asked", false, func(st *Status) { st.Lookup.Lookups, st.Workers = 0, nil })
	f("no prompt was asked", true, func(st *Status) { st.Lookup.Lookups = 0 })
	f("followed", false, func(st *Status) { st.Lookup.Hits, st.Lookup.Retrieves = 4, 1 })
	f("5 lookups hit here and 1 load followed", true, func(st *Status) { st.Lookup.Hits, st.Lookup.Retrieves = 5, 1 })
	f("followed", false, func(st *Status) { st.Lookup.Hits, st.Lookup.Retrieves = 0, 0 })
	f("evicted", false, func(st *Status) { st.Lookup.HitTokens = 90 })
	f("evicted", true, func(st *Status) { st.Lookup.HitTokens = 89 })
	f("evicted", false, func(st *Status) { st.Lookup.HitTokens, st.Lookup.Lookups = 0, 0 })
	f("quarantine", false, func(st *Status) { st.Pool.QuarantinedBytes = 100 })
	f("quarantine", true, func(st *Status) { st.Pool.QuarantinedBytes = 101 })
	f("at that rate", true, func(st *Status) { st.Lookup.HitTokens, st.Recent = 0, RecentStatus{Seconds: 10, EvictedBytes: 1} })
	f("at that rate", false, func(st *Status) { st.Lookup.HitTokens, st.Recent = 0, RecentStatus{Seconds: 9, EvictedBytes: 1} })
	f("at that rate", false, func(st *Status) { st.Lookup.HitTokens, st.Recent = 0, RecentStatus{Seconds: 300} })
	f("no worker that can be served", true, func(st *Status) { st.Workers[0].Refused = "so" })
	f("refused", false, func(*Status) {})
	f("another chunk size", false, func(*Status) {})
	f("did not fit", false, func(*Status) {})
	f("a salt", false, func(st *Status) { st.Lookup.HitTokens, st.Lookup.MissReasons = 0, map[string]uint64{"never stored": 1} })
	below := func(change func(b *BelowStatus)) func(*Status) {
		return func(st *Status) { st.Below.Tiers = []TierStatus{{Name: "disk"}}; change(&st.Below) }
	}
	f("tier", false, below(func(*BelowStatus) {}))
	f("1 object of another length", true, below(func(b *BelowStatus) { b.Tiers[0].Corrupt = 1 }))
	f("too slow in 5 calls", true, below(func(b *BelowStatus) { b.Tiers[0].Failures, b.Tiers[0].Late = 2, 3 }))
	f("has taken nothing of 1 object: see whether it is full: it has 2 KiB free", true, below(func(b *BelowStatus) { b.Tiers[0].Dropped, b.Tiers[0].FreeBytes = 1, 2048 }))
	f("has taken nothing", false, below(func(b *BelowStatus) { b.Tiers[0].Dropped, b.Tiers[0].WriteBytes = 1, 1 }))
	for _, state := range tier.States {
		words := "is " + strings.ReplaceAll(string(state), "_", " ") + " since 2026-01-01T00:00:00Z: because"
		f(words, state != tier.Works, below(func(b *BelowStatus) {
			b.Tiers[0].State, b.Tiers[0].Since, b.Tiers[0].LastError = string(state), "2026-01-01T00:00:00Z", "because"
		}))
	}
	f("tiers give 1.00 GB/s to a request, engines compute 2.00 GB/s", true, below(func(b *BelowStatus) { b.Estimate = tiering.RateStats{LoadRate: 1e9, ComputeRate: 2e9} }))
	f("tiers give", false, below(func(b *BelowStatus) { b.Estimate = tiering.RateStats{LoadRate: 1e9, ComputeRate: 1e9} }))
	f("tiers give", false, below(func(b *BelowStatus) { b.Estimate = tiering.RateStats{ComputeRate: 1e9} }))
	f("3 chunks left the pool before", true, below(func(b *BelowStatus) { b.SkippedChunks, b.LostChunks = 1, 2 }))
	f("1 chunk left the pool before", true, below(func(b *BelowStatus) { b.SkippedChunks = 1 }))
	f("1 chunk left the pool before", true, below(func(b *BelowStatus) { b.LostChunks = 1 }))
}

// Reasons of misses come with the most frequent first, equal ones by name.
func TestFrequentMissesComeFirst(t *testing.T) {
	st := &Status{Lookup: LookupStatus{MissReasons: map[string]uint64{"evicted": 2, "never stored": 9, "cleared": 2, "z": 1, miss.Short.String(): 99}}}
	var order []string
	st.missFindings(func(what, _ string) { order = append(order, what[strings.LastIndex(what, ": ")+2:]) })
	if got := strings.Join(order, ", "); got != "never stored, cleared, evicted, z" {
		t.Error(got)
	}
}

// A tier's figures in a line: rates per second, and only what is there.
func TestTierInALine(t *testing.T) {
	st := tierStatus("disk", tier.Stats{Hits: 3, Misses: 1, ReadBytes: 4e9, ReadTime: 2 * time.Second, WrittenBytes: 1e9, WriteTime: 0})
	if st.ReadRate != 2 || st.WriteRate != 0 || math.IsNaN(rate(0, 0)) {
		t.Errorf("%+v", st)
	}
	for got, want := range map[string]string{
		st.Text(): "2.00 GB/s each), wrote", (&TierStatus{Hits: 3, Misses: 1}).Text(): "3 of 4 chunks found",
		(&TierStatus{Objects: 5, UsedBytes: 1 << 20, LimitBytes: 1 << 30}).Text(): ", keeps 5 in 1 MiB of 1 GiB",
		(&TierStatus{Corrupt: 1, Late: 2, Failures: 3, Dropped: 4}).Text():        "found, 1 corrupt, 2 late, 3 failed, 4 not taken",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q, want %q in it", got, want)
		}
	}
	if got := (&TierStatus{}).Text(); strings.Contains(got, "keeps") || strings.Contains(got, " of 0") && !strings.Contains(got, "0 of 0 chunks") || strings.HasSuffix(got, ",") {
		t.Errorf("of a new tier: %q", got)
	}
}

// lockedLog is a log that is read while it is written.
type lockedLog struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lockedLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// While it runs, a server notices that its pool's name was removed, says once what it
// served, and puts a worker to sleep that fell silent.
func TestRunChecksNameSummaryAndSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log lockedLog
		s, st := newBareServerWith(t, &log, 64*4096, Options{ChunkTokens: 4, WorkerReap: time.Minute})
		e := &engine{t, s}
		e.register(7)
		e.call(lmcache.OpPing, lmcache.AppendInt(nil, 7))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			s.Run(ctx)
		}()
		time.Sleep(11 * time.Second)
		e.store(7, "a", 1, 0, 3)
		e.lookup("b", 1, 4, 3)
		time.Sleep(5 * time.Second)
		if strings.Contains(log.String(), "last 10 s") {
			t.Error("a line about ten seconds comes after five")
		}
		time.Sleep(5 * time.Second)
		if !s.Healthy() || len(s.Status().Workers) != 1 {
			t.Errorf("unhealthy %q, workers %+v", s.Unhealthy(), s.Status().Workers)
		}
		if err := os.Remove(st.Files().Path()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(7 * time.Second)
		if !s.Healthy() {
			t.Error("the pool's name is looked for more than once in ten seconds")
		}
		time.Sleep(55 * time.Second)
		if got := s.Unhealthy(); len(got) != 1 || !strings.Contains(got[0], "removed") {
			t.Errorf("unhealthy %q", got)
		}
		if got := s.Status().Workers; len(got) != 1 || !got[0].Asleep {
			t.Errorf("workers %+v", got)
		}
		cancel()
		<-ended
		for what, want := range map[string]int{"last 10 s": 1, "asked_tokens=16 hit_tokens=12 hit_percent=75": 1, "name was removed": 1, "it is silent": 1} {
			if n := strings.Count(log.String(), what); n != want {
				t.Errorf("%q is said %d times, want %d:\n%s", what, n, want, log.String())
			}
		}
	})
}

// A worker that cannot map the pool and sends what it stores through the socket is named
// in the log once, with what to do where that is not allowed.
func TestWorkersThatSendPickledTensorsAreNamed(t *testing.T) {
	for mode, want := range map[PickleMode]string{PickleOff: "start the server with --pickle on", PickleOn: "its chunks pass through the socket"} {
		var log strings.Builder
		s, _ := newBareServerWith(t, &log, 64*4096, Options{ChunkTokens: 4, Pickle: mode})
		e := &engine{t, s}
		e.register(7)
		for i := range uint32(3) {
			e.commit(7, "a", i, 0, 2, e.pickled(2))
		}
		got := s.Status().Workers
		if n := strings.Count(log.String(), want); n != 1 || len(got) != 1 || !got[0].CannotMapShm {
			t.Errorf("mode %d: %q is said %d times, workers %+v:\n%s", mode, want, n, got, log.String())
		}
		if mode == PickleOn {
			e.lookup("b", 1, 2, 2)
		}
	}
}

// What does not fit into one message is a miss; what just fits is not.
func TestPickledChunksFillAMessage(t *testing.T) {
	const chunks = 3
	s, st := newBareServerWith(t, io.Discard, 64*4096, Options{ChunkTokens: 4, Pickle: PickleOnly})
	e := &engine{t, s}
	e.register(7)
	e.commit(7, "a", 1, 0, chunks, e.pickled(chunks))
	load := func() bool {
		limit := s.opts.PickleBytes
		s.opts.PickleBytes = MaxPickleBytes // a lookup finds what a load can have: this one is for its own check
		e.lookup("b", 1, chunks, chunks)
		s.opts.PickleBytes = limit
		k := e.key("b", 1, 0, chunks).Append(nil)
		got, err := lmcache.DecodePrepareRetrieve(e.call(lmcache.OpPrepareRetrieve, k, lmcache.AppendInt(nil, 7)))
		if err != nil {
			t.Fatal(err)
		}
		e.call(lmcache.OpCommitRetrieve, k, lmcache.AppendInt(nil, 7))
		e.call(lmcache.OpEndSession, lmcache.AppendString(nil, "b"))
		return got.Success
	}
	size := int64(len(e.pickled(chunks)))
	low, high := int64(0), 10*size
	for high-low > 1 { // the least limit with which it is sent
		s.opts.PickleBytes = (low + high) / 2
		if load() {
			high = s.opts.PickleBytes
		} else {
			low = s.opts.PickleBytes
		}
	}
	if high < size || high > size+4*1024 {
		t.Errorf("%d bytes of pickled tensors are sent from a limit of %d bytes on", size, high)
	}
	s.opts.PickleBytes = size
	if s.opts.PickleBytes--; load() {
		t.Error("more than the limit is sent")
	}
	if got := st.Stats(); got.Transfers != 0 || got.EvictableObjs != chunks {
		t.Errorf("%+v", got)
	}
	s.opts.PickleBytes = size
	e.commit(7, "c", 2, 0, chunks, e.pickled(chunks)) // exactly the limit
	s.opts.PickleBytes = size - 1
	e.commit(7, "d", 3, 0, chunks, e.pickled(chunks))
	s.opts.PickleBytes = size * 4
	e.lookup("e", 2, chunks, chunks)
	e.lookup("f", 3, chunks, 0)
}

// A server that is told to stop takes nothing new, lets transfers in progress end, and
// does not wait longer than it was told for those that do not.
func TestShutdownWaitsForTransfersOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _ := newBareServerWith(t, io.Discard, 64*4096, Options{ChunkTokens: 4})
		e := &engine{t, s}
		e.register(7)
		e.register(8)
		if e.prepare(7, "a", 1, 0, 2) != 2 || e.prepare(8, "dead", 2, 0, 2) != 2 {
			t.Fatal("no places")
		}
		e.call(lmcache.OpUnregisterEngineDriven, lmcache.AppendInt(nil, 8)) // nobody waits for it
		began, took := time.Now(), make(chan time.Duration, 1)
		go func() {
			if err := s.Shutdown(t.Context()); err != nil && !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			took <- time.Since(began)
		}()
		time.Sleep(5 * time.Second)
		if e.prepare(7, "new", 3, 0, 1) != 0 {
			t.Error("a transfer began after the end was announced")
		}
		e.commit(7, "a", 1, 0, 2, nil)
		if got := <-took; got < 5*time.Second || got > 6*time.Second {
			t.Errorf("it waited %v for a transfer of 5 s", got)
		}
	})
}

// Options that are left out have the values that are documented.
func TestDefaultsOfOptions(t *testing.T) {
	o := Options{}.withDefaults()
	if o.WorkerReap != 2*time.Minute || o.RegistrationGrace != time.Hour || o.DrainTimeout != 10*time.Second || o.ChunkTokens != 256 ||
		o.MemoBytes != 64<<20 || o.MaxInstances != 4096 || o.PickleBytes != MaxPickleBytes || o.ClientGenerations != lmcache.AllGenerations || o.CopyWorkers < 1 {
		t.Errorf("%+v", o)
	}
	if pinged, never := o.silences(); pinged != 2*time.Minute || never != time.Hour {
		t.Errorf("dropped after %v, %v", pinged, never)
	}
	o = Options{NoMemo: true, MemoBytes: 1, KeepSilent: true, KeepNeverPinged: true, PickleBytes: MaxPickleBytes + 1}.withDefaults()
	if pinged, never := o.silences(); o.MemoBytes != 0 || pinged != 0 || never != 0 || o.PickleBytes != MaxPickleBytes {
		t.Errorf("%+v: dropped after %v, %v", o, pinged, never)
	}
}

// A server that takes pickled tensors takes messages of its limit and what belongs to
// them, and as much at a time as four of them take, or a quarter of the memory.
func TestMemoryForPickledMessages(t *testing.T) {
	f := func(pickled, frame int64) {
		t.Helper()
		var r zmtp.RouterOptions
		(&Options{Pickle: PickleOn, PickleBytes: pickled}).routerLimits(&r)
		message := frame + 64<<20
		all := max(message, min(4*message, systemMemory()/4))
		if r.MaxFrameBytes != frame || r.MaxMessageBytes != message || r.MaxReceiveBytes != all || r.MaxUnsentBytes != all {
			t.Errorf("pickled %d: %+v, want frames of %d, messages of %d, %d in all", pickled, r, frame, message, all)
		}
	}
	f(1000, 64<<20)
	f(64<<20, 64<<20+5)
	f(1<<30, 1<<30+5)
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		t.Skip(err)
	}
	var kib int64
	if _, err := fmt.Sscanf(string(b), "MemTotal: %d kB", &kib); err != nil {
		t.Fatal(err)
	}
	if got := systemMemory() >> 10; got < kib*9/10 || got > kib*11/10 {
		t.Errorf("%d KiB of memory, /proc says %d", got, kib)
	}
}
