// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
)

// record is what a run did, as record.json has it.
type record struct {
	Seed       uint64
	Started    time.Time
	Ended      time.Time
	Cycles     int // whole ones
	Requests   map[string]int
	Hits       hits // of all answered requests
	CalmHits   hits // of those that no fault was near
	Faults     map[string]int
	Kills      map[string]int // kill -9, by kind of part
	Single     int            // of them, those of shared single points
	Singles    map[string]int // the same, by kind
	Failovers  int            // of Redis: replicas that became primaries
	Refused    int            // starts that were refused with a reason, as while /dev/shm is full
	Alone      map[string]int // ends of others' programs that no fault asked for, by part
	Lacks      map[string]string
	LeftOut    map[string]int // faults that this machine could not make
	Lives      map[string]int
	Sizes      map[string][2]size // at the start and at the end, idle
	CycleBegan time.Duration      // of the last cycle, after the start of the run
	FailedAt   time.Duration      // the first violation, after the start of the run
	Memory     []sample
	Slope      *slope
	CannotShow []string // what this run is too short, or not equipped, to show
	Earlier    []string // violations before -resume
	Violations []string
	Failure    string
}

// singlePoints are the kinds of parts that all others share.
var singlePoints = []string{"redis", "master", "registry", "relay"}

// killed returns the number of kill -9, and of those of shared single points.
func (r *record) killed() (all, single int) {
	for kind, n := range r.Kills {
		all += n
		if slices.Contains(singlePoints, kind) {
			single += n
		}
	}
	return all, single
}

// soak is one run.
type soak struct {
	o        *options
	schedule *schedule
	parts    []*part
	readers  []*reader
	windows  windows
	load     *load
	bucket   *forwarder // nil without S3
	baseline map[string]size
	shared   []string // in /dev/shm, at the start
	variant  variant
	checks   int // of promises
	began    time.Time
	failed   chan struct{} // closed at the first violation
	ended    chan struct{} // closed when parts are ended for good

	mu     sync.Mutex // guards record, and lines of the output
	record record
	// replica names the Redis servers that were replicas when their roles were read last.
	replica map[string]bool
	once    sync.Once
}

func newSoak(o *options) (*soak, error) {
	s := &soak{o: o, began: time.Now(), failed: make(chan struct{}), ended: make(chan struct{}), baseline: map[string]size{}, replica: map[string]bool{}}
	s.record = record{
		Seed: o.seed, Started: s.began.UTC(), Requests: map[string]int{}, Faults: map[string]int{}, Kills: map[string]int{}, LeftOut: map[string]int{},
		Lives: map[string]int{}, Sizes: map[string][2]size{}, Alone: map[string]int{},
	}
	at := filepath.Join(o.dir, "schedule.json")
	switch {
	case o.resume != "":
		s.schedule = &schedule{}
		if err := readJSON(at, s.schedule); err != nil {
			return nil, err
		}
		// Without a record the run ended in its first cycle.
		if err := readJSON(filepath.Join(o.dir, "record.json"), &s.record); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		if s.record.Cycles >= s.schedule.cycles() && len(s.record.Violations) == 0 && s.record.Failure == "" {
			return nil, fmt.Errorf("the run of %s is complete: %d cycles", o.dir, s.record.Cycles)
		}
		s.record.Seed = s.schedule.Seed
		s.record.Earlier = append(s.record.Earlier, s.record.Violations...)
		s.record.Violations, s.record.Failure, s.record.FailedAt, s.record.CannotShow = nil, "", 0, nil
		s.logf("going on with cycle %d of %d", s.record.Cycles, s.schedule.cycles())
	case o.replay != "":
		s.schedule = &schedule{}
		if err := readJSON(o.replay, s.schedule); err != nil {
			return nil, err
		}
		s.record.Seed = s.schedule.Seed
	default:
		s.schedule = makeSchedule(o)
	}
	if err := writeJSON(at, s.schedule); err != nil {
		return nil, err
	}
	s.checks = s.schedule.Checks + s.record.Cycles
	s.record.Lacks = o.lacks
	for _, what := range slices.Sorted(maps.Keys(o.lacks)) {
		s.logf("left out of the deployment: %s: %s", what, o.lacks[what])
	}
	if err := makeHosts(o.dir); err != nil {
		return nil, err
	}
	if s.variant = variantOf(s.schedule.Seed); o.real != "" {
		s.variant = variant{"real vLLM, TP 1 to 1", 1, 1, false}
	}
	s.logf("model: %s", s.variant.name)
	s.parts = makeParts(o, s.variant)
	for _, p := range s.parts {
		if o.resume == "" {
			_ = os.Remove(p.log) // of an earlier run in this directory
		} else if st, err := os.Stat(p.log); err == nil {
			p.scanned = st.Size() // what it had before was found before
		}
	}
	var err error
	if o.store != none {
		if s.bucket, err = newForwarder(fmt.Sprintf("http://127.0.0.1:%d", s3Behind)); err != nil {
			return nil, err
		}
	}
	for _, p := range s.parts {
		switch p.kind {
		case "node":
			s.readers = append(s.readers, newReader(s, p))
		case "redis":
			at := filepath.Join(o.dir, p.name) // the cluster of an earlier life in this directory goes
			if err := errors.Join(os.RemoveAll(at), os.MkdirAll(at, 0o755)); err != nil {
				return nil, err
			}
		}
	}
	s.load, err = newLoad(s)
	return s, err
}

func (s *soak) part(name string) *part {
	i := slices.IndexFunc(s.parts, func(p *part) bool { return p.name == name })
	if i < 0 {
		panic("BUG: soak: no part " + name)
	}
	return s.parts[i]
}

func (s *soak) logf(format string, args ...any) {
	fmt.Printf("%8.3f  %s\n", time.Since(s.began).Seconds(), fmt.Sprintf(format, args...))
}

// violation records that a promise was broken. The run ends unless it keeps going.
func (s *soak) violation(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.record.Violations) == 0 {
		s.record.FailedAt = time.Since(s.began)
	}
	s.logf("VIOLATION: %s", text)
	s.record.Violations = append(s.record.Violations, fmt.Sprintf("%.3f %s", time.Since(s.began).Seconds(), text))
	if !s.o.keepGoing {
		s.once.Do(func() { close(s.failed) })
	}
}

// alone judges the end of a part that no fault asked for. A start that is refused with a reason, as while /dev/shm is
// full, is no violation while a fault explains it. Whatever it was, a supervisor starts the part again.
func (s *soak) alone(p *part, err error, lived time.Duration) {
	why, now := p.reason(), time.Now()
	if p.foreign {
		s.mu.Lock()
		s.record.Alone[p.name]++
		s.mu.Unlock()
		s.logf("%s, which is not Kvasir's, ended by itself after %v: %v (%s)", p.name, lived.Round(time.Millisecond), err, p.log)
		if p.isRealEngine() { // requests may fail until it is well again
			defer s.windows.open(fault{Kind: "kill", Target: p.name})()
		}
	} else if p.isOld() {
		s.logf("%s of the previous release ended by itself: %v", p.name, err)
	} else if why == "" || lived > 40*time.Second || !s.windows.during(now.Add(-lived), now, 2*time.Second, fault.refusesStarts) {
		s.violation("%s ended by itself after %v: %v: %s (%s)", p.name, lived.Round(time.Millisecond), err, why, p.log)
	} else {
		s.mu.Lock()
		s.record.Refused++
		s.mu.Unlock()
		s.logf("%s is not started: %s", p.name, why)
	}
	select {
	case <-time.After(time.Second):
	case <-s.failed:
		return
	case <-s.ended:
		return
	}
	if err := p.start(s.alone); err != nil {
		s.violation("%v", err)
		return
	}
	if p.isRealEngine() {
		s.awaitRealEngine(context.Background(), p)
	}
}

var errViolated = errors.New("a promise was broken")

// play starts everything, runs the cycles, and compares everything at the end.
func (s *soak) play(parent context.Context) error {
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	go func() {
		select {
		case <-s.failed:
			cancel()
		case <-ctx.Done():
		}
	}()
	if err := s.start(ctx); err != nil {
		return err
	}
	s.load.start(ctx, s.o.clients)
	var watching sync.WaitGroup
	watching.Go(func() { s.watch(ctx) })
	defer watching.Wait()
	defer s.load.stop()
	defer cancel()
	if err := s.warm(ctx); err != nil {
		return err
	}
	cycles := s.schedule.cycles()
	for c := s.record.Cycles; c < cycles && ctx.Err() == nil; c++ {
		s.cycle(ctx, c)
		if ctx.Err() == nil {
			s.record.Cycles = c + 1
			if err := writeJSON(filepath.Join(s.o.dir, "record.json"), &s.record); err != nil {
				return err
			}
		}
	}
	if ctx.Err() == nil && !s.schedule.NoEnd {
		s.churn(ctx)
		s.load.drain(ctx)
		s.sizes(ctx)
		s.judgeMemory()
		if s.o.compare == "" || s.record.CalmHits.Prompt == 0 {
			s.cannotShow("that hit rates stay within %d points: %d prompt tokens in calm times, compared with %q; runs of 40 minutes have calm times, and -compare names a run without faults", maxHitDifference, s.record.CalmHits.Prompt, s.o.compare)
		}
	}
	switch {
	case len(s.record.Violations) > 0:
		return errViolated
	case parent.Err() == nil && s.o.compare != "" && s.record.CalmHits.Prompt > 0:
		return s.compareHits()
	case parent.Err() != nil:
		return fmt.Errorf("interrupted after %d of %d cycles: go on with -resume %s", s.record.Cycles, cycles, s.o.dir)
	}
	return nil
}

// maxHitDifference is how far the hit rate in calm times may be below that of a run without faults, points.
const maxHitDifference = 3

// compareHits compares the hit rate in calm times with that of a run of the same seed without faults.
func (s *soak) compareHits() error {
	var r record
	if err := readJSON(s.o.compare, &r); err != nil {
		return err
	}
	if r.Seed != s.record.Seed || len(r.Faults) > 0 {
		return fmt.Errorf("%s is no record of seed %d without faults", s.o.compare, s.record.Seed)
	}
	with, without := s.record.CalmHits, r.Hits
	s.logf("hit rate in calm times %.1f %% of %d tokens, without faults %.1f %% of %d", with.percent(), with.Prompt, without.percent(), without.Prompt)
	switch {
	case with.Prompt == 0 || without.Prompt == 0:
		return errors.New("hit rates cannot be compared: no request was answered in a calm time; a run of 40 minutes has such times")
	case with.percent() < without.percent()-maxHitDifference:
		s.violation("the hit rate in calm times is %.1f %%, without faults it is %.1f %%", with.percent(), without.percent())
		return errViolated
	}
	return nil
}

// watch looks into the logs of engines all the time, so that a run ends soon after wrong KV was used.
func (s *soak) watch(ctx context.Context) {
	for ctx.Err() == nil {
		wait(ctx, time.Second)
		for _, p := range s.parts {
			if p.kind != "p" && p.kind != "d" {
				continue
			}
			if err := p.scan(); err != nil {
				s.violation("%v", err)
			}
		}
	}
}

// start starts all parts in order.
func (s *soak) start(ctx context.Context) error {
	if s.bucket != nil {
		if err := s.bucket.serve(ctx, "r", s3Port); err != nil {
			return err
		}
	}
	clustered := false
	for _, p := range s.parts {
		if !clustered && p.kind != "redis" {
			if err := s.makeCluster(ctx); err != nil {
				return err
			}
			clustered = true
		}
		if p.kind == "proxy" { // it is not well before an engine is
			if err := s.awaitRealEngines(ctx); err != nil {
				return err
			}
		}
		if err := p.start(s.alone); err != nil {
			return err
		}
		if p.kind == "p" || p.kind == "d" || p.isRealEngine() {
			continue // they start side by side
		}
		if err := p.await(ctx, 60*time.Second); err != nil {
			return err
		}
	}
	for _, p := range s.parts {
		if err := p.await(ctx, p.startLimit(60*time.Second)); err != nil {
			return err
		}
	}
	return nil
}

// warm lets the load run for a moment, and measures what idle parts take.
func (s *soak) warm(ctx context.Context) error {
	s.load.strict.Store(true)
	wait(ctx, 5*time.Second)
	s.load.drain(ctx)
	s.check(ctx)
	for _, p := range s.parts {
		if p.foreign || ctx.Err() != nil {
			continue
		}
		z, err := p.size(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		s.baseline[p.name] = z
	}
	var err error
	if s.shared, err = shared(); err != nil {
		return err
	}
	s.load.strict.Store(false)
	s.load.paused.Store(false)
	s.logf("warm: %d requests", s.load.next.Load())
	return nil
}

// cycle injects the faults of one cycle, then compares everything in its quiet time.
func (s *soak) cycle(ctx context.Context, c int) {
	var wg sync.WaitGroup
	start := time.Now()
	s.mu.Lock()
	s.record.CycleBegan = start.Sub(s.began)
	s.mu.Unlock()
	for _, f := range s.schedule.Faults {
		if f.Cycle != c {
			continue
		}
		wg.Go(func() {
			wait(ctx, time.Until(start.Add(f.At)))
			if ctx.Err() == nil {
				s.inject(ctx, f)
			}
		})
	}
	wg.Wait()
	wait(ctx, time.Until(start.Add(s.schedule.Cycle-s.schedule.Quiet)))
	for _, p := range s.parts {
		if ctx.Err() != nil {
			return
		}
		if err := p.await(ctx, p.startLimit(30*time.Second)); err != nil && ctx.Err() == nil {
			s.violation("in the quiet time of cycle %d: %v", c, err)
		}
	}
	if err := eventually(ctx, 20*time.Second, s.clusterWhole); err != nil {
		s.logf("Redis Cluster is not whole in the quiet time of cycle %d: %v", c, err)
	}
	if s.o.real != "" {
		s.load.drain(ctx)
		s.reviveEngines(ctx)
		s.load.paused.Store(false)
	}
	wait(ctx, 8*time.Second)
	s.load.strict.Store(true)
	wait(ctx, 6*time.Second)
	s.load.drain(ctx)
	s.load.strict.Store(false)
	if ctx.Err() != nil {
		return
	}
	s.measure(ctx) // before a node is killed: all have lived through the calm time
	s.check(ctx)
	s.mu.Lock()
	s.logf("cycle %d ended: requests %v, kills %v, left out %v", c, s.record.Requests, s.record.Kills, s.record.LeftOut)
	s.mu.Unlock()
	s.load.paused.Store(false)
}

// churn ends connections of all kinds again and again under load, so that what is left behind by each of them shows in the sizes.
func (s *soak) churn(ctx context.Context) {
	const times, pause = 40, 700 * time.Millisecond
	for _, p := range s.parts {
		if p.foreign || ctx.Err() != nil {
			continue
		}
		if err := s.visit(ctx, p, times); err != nil {
			s.logf("no connections are cut at %s, so what each leaves behind is not looked for: %v", p.name, err)
		}
	}
	for _, host := range []string{"h1", "h2", "r"} {
		defer s.windows.open(fault{Kind: "reset", Target: host})()
	}
	for i := 0; i < times && ctx.Err() == nil; i++ {
		for _, host := range []string{"h1", "h2", "r"} {
			if err := resetLinks(host); err != nil {
				s.logf("connections cannot be reset, so what each leaves behind is not looked for: %v", err)
				return
			}
		}
		wait(ctx, pause)
	}
	s.logf("all connections were reset %d times", times)
}

// stop ends all parts in order, engines before what they use.
func (s *soak) stop() {
	close(s.ended)
	interrupted := len(s.record.Violations) > 0
	for _, r := range s.readers {
		_ = r.sub.Close()
	}
	for _, p := range slices.Backward(s.parts) {
		p.pause(false)
		if !p.end(syscall.SIGTERM, 20*time.Second) && !interrupted && !p.foreign {
			s.violation("%s did not end within 20 s of SIGTERM: its stacks are in %s", p.name, p.log)
		}
		s.record.Lives[p.name] = p.mu.lives
	}
	if !interrupted {
		s.leftovers()
		for _, p := range s.parts {
			if err := p.scan(); err != nil {
				s.violation("%v", err)
			}
		}
	}
}

// print prints the record.
func (s *soak) print() {
	fmt.Printf("seed %d: %d cycles in %v, requests %v\n", s.record.Seed, s.record.Cycles, time.Since(s.began).Round(time.Second), s.record.Requests)
	fmt.Printf("hit rate %.1f %% of %d prompt tokens", s.record.Hits.percent(), s.record.Hits.Prompt)
	if n := s.record.CalmHits.Prompt; n > 0 {
		fmt.Printf(", in calm times %.1f %% of %d", s.record.CalmHits.percent(), n)
	}
	fmt.Println()
	all, single := s.record.killed()
	fmt.Printf("%d kills: %v; %d of them of shared single points: %v; %d failovers of Redis\n", all, s.record.Kills, single, s.record.Singles, s.record.Failovers)
	for _, what := range slices.Sorted(maps.Keys(s.record.Lacks)) {
		fmt.Printf("  left out of the deployment: %s: %s\n", what, s.record.Lacks[what])
	}
	for _, name := range slices.Sorted(maps.Keys(s.record.Alone)) {
		fmt.Printf("  %s, which is not Kvasir's, ended by itself %d times\n", name, s.record.Alone[name])
	}
	for _, k := range slices.Sorted(maps.Keys(s.record.Faults)) {
		fmt.Printf("  %-12s %d", k, s.record.Faults[k])
		if n := s.record.LeftOut[k]; n > 0 {
			fmt.Printf(", %d left out", n)
		}
		fmt.Println()
	}
	for k, n := range s.record.LeftOut {
		if s.record.Faults[k] == 0 {
			fmt.Printf("  %-12s 0, %d left out\n", k, n)
		}
	}
	for _, what := range s.record.CannotShow {
		fmt.Println("this run does not show", what)
	}
	for _, v := range s.record.Violations {
		fmt.Println("VIOLATION", v)
	}
	fmt.Fprintf(os.Stdout, "logs, schedule.json and record.json: %s\n", s.o.dir)
}
