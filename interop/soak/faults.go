// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// fault is one fault of a schedule.
type fault struct {
	Cycle  int           // in which cycle
	At     time.Duration // after the cycle's start
	For    time.Duration
	Kind   string
	Target string // a part or a host
}

func (f fault) String() string {
	return fmt.Sprintf("cycle %d, %v: %s %s for %v", f.Cycle, f.At.Round(time.Millisecond), f.Kind, f.Target, f.For.Round(time.Millisecond))
}

// schedule is what a run does, as schedule.json has it.
type schedule struct {
	Seed   uint64
	For    time.Duration
	Cycle  time.Duration // faults, then quiet
	Calm   time.Duration // before the quiet time, with load and without faults: hit rates are compared then
	Quiet  time.Duration // the end of each cycle
	NoEnd  bool          // what is left behind after all cycles is not compared
	Checks int           // promises are checked in turns: as many checks count as done before the first one
	Faults []fault
}

// cycles is how many there are.
func (s *schedule) cycles() int { return max(1, int(s.For/s.Cycle)) }

// kinds are the faults, with their targets and how often each is drawn.
var kinds = []struct {
	name    string
	weight  int
	targets []string
}{
	{"kill", 18, []string{
		"node1", "node2", "p1", "p2", "d1", "d2", "registry1", "registry2", "relay", "relay", "proxy1", "proxy2", "redis", "redis", "replica", "master", "master", "store1", "store2", "s3",
	}},
	{"term", 3, []string{"node1", "node2", "p1", "d2", "registry1", "registry2", "relay", "proxy1", "store1", "store2"}},
	{"stop", 7, []string{"node1", "node2", "p1", "p1", "p2", "p2", "d1", "d2", "registry1", "registry2", "relay", "redis", "proxy2", "master", "store1", "store2"}},
	{"cut", 3, []string{"h1", "h2", "r"}},
	{"half", 3, []string{"h1", "h2", "r"}},
	{"slow", 3, []string{"h1", "h2", "r"}},
	{"late", 6, []string{"h1", "h2"}},
	{"reset", 3, []string{"h1", "h2", "r"}},
	{"strangers", 3, []string{"node1", "node2", "p1", "p2", "d1", "d2", "registry1", "registry2", "relay", "proxy1", "proxy2", "store1"}},
	{"leave", 3, []string{"clients"}},
	{"disk-full", 2, []string{"disk1", "disk2", "fs2"}},
	{"read-only", 2, []string{"fs2"}},
	{"redis-oom", 2, []string{"redis"}},
	{"redis-flush", 1, []string{"redis"}},
	{"s3-503", 2, []string{"s3"}},
	{"s3-stale", 2, []string{"s3"}},
	{"shm-full", 2, []string{"shm"}},
	{"fds", 2, []string{"node1", "node2", "p1", "d1", "registry2", "relay", "proxy1", "store2"}},
	{"clear", 2, []string{"node1", "node2"}},
	{"quota", 1, []string{"node1", "node2"}},
	{"resize", 1, []string{"node1", "node2"}},
	{"flip", 2, []string{"node1", "node2"}},
	{"torn", 2, []string{"node1", "node2"}},
	{"clock", 4, []string{"node1", "node2", "p1", "d2", "registry1", "registry2", "relay", "proxy1", "proxy2", "store1"}},
	{"swap", 3, []string{"node1", "node2", "p1", "p2", "d1", "d2", "registry1", "relay", "proxy1", "proxy2", "store2"}},
}

// makeSchedule draws faults: about one a second, several at once, none in the quiet times.
func makeSchedule(o *options) *schedule {
	cycle := time.Minute
	if o.length >= 40*time.Minute {
		cycle = 10 * time.Minute
	} else if o.real != "" {
		cycle = 3 * time.Minute
	}
	cycle = min(cycle, max(o.length, 40*time.Second))
	s := &schedule{Seed: o.seed, For: o.length, Cycle: cycle, Quiet: max(20*time.Second, cycle/10)}
	if cycle >= 10*time.Minute {
		s.Calm = 2 * time.Minute
	}
	if !o.faults {
		return s
	}
	ends := cycle - s.Quiet - s.Calm
	rnd := rand.New(rand.NewPCG(o.seed, 43))
	only := strings.FieldsFunc(o.only, func(r rune) bool { return r == ',' })
	total := 0
	for _, k := range kinds {
		total += k.weight
	}
	for c := range max(1, int(o.length/cycle)) {
		var faults []fault
		for at := time.Second; at < ends; at += time.Duration(100+rnd.IntN(1900)) * time.Millisecond {
			n, i := rnd.IntN(total), 0
			for n >= kinds[i].weight {
				n -= kinds[i].weight
				i++
			}
			k := kinds[i]
			f := fault{Cycle: c, At: at, Kind: k.name, Target: k.targets[rnd.IntN(len(k.targets))], For: time.Duration(200+rnd.IntN(6000)) * time.Millisecond}
			if (k.name == "stop" || k.name == "slow") && rnd.IntN(3) == 0 || k.name == "late" {
				f.For += 8 * time.Second // longer than an engine waits for a transfer; over a slow link it gives up in the middle of one
			}
			f.For = min(f.For, ends-at)
			busy := slices.ContainsFunc(faults, func(g fault) bool { // one of a kind at one target at a time
				return g.Target == f.Target && g.At+g.For+100*time.Millisecond > f.At
			})
			if !busy && (len(only) == 0 || slices.Contains(only, k.name)) {
				faults = append(faults, f)
			}
		}
		s.Faults = append(s.Faults, faults...)
	}
	return s
}

// window is a time in which requests may fail with an error.
type window struct {
	fault fault
	from  time.Time
	to    time.Time // zero: it lasts
}

// hurts reports whether requests may fail with an error because of a fault. Nodes, tiers and memory
// cost misses and time, never a request.
func (f fault) hurts() bool {
	switch f.Kind {
	case "shm-full": // engines and the relay do not start
		return true
	case "strangers":
		return false
	}
	switch f.Target {
	case "node1", "node2", "redis", "replica", "s3", "master", "store1", "store2", "r", "disk1", "disk2", "fs2", "shm", "clients":
		return false
	}
	return true
}

// refusesStarts reports whether a part may refuse to start during a fault, with its reason.
func (f fault) refusesStarts() bool {
	switch f.Kind {
	case "shm-full", "disk-full", "read-only", "cut", "half", "slow", "late": // the last four: a registry that engines do not reach
		return true
	case "kill", "stop", "term", "fds", "resize", "flip", "torn", "swap": // a registry, node or master that is down: engines and store-nodes wait for it, then end
		return strings.HasPrefix(f.Target, "registry") || strings.HasPrefix(f.Target, "node") || f.Target == "master"
	}
	return false
}

type windows struct {
	sync.Mutex
	all []window
}

// open begins the window of a fault. closed ends it.
func (w *windows) open(f fault) (closed func()) {
	w.Lock()
	defer w.Unlock()
	w.all = append(w.all, window{fault: f, from: time.Now()})
	i := len(w.all) - 1
	return func() {
		w.Lock()
		defer w.Unlock()
		w.all[i].to = time.Now()
	}
}

// during reports whether a fault that match wants lay between two times, or within grace before them.
func (w *windows) during(from, to time.Time, grace time.Duration, match func(fault) bool) bool {
	w.Lock()
	defer w.Unlock()
	for _, v := range slices.Backward(w.all) {
		if (match == nil || match(v.fault)) && v.from.Before(to) && (v.to.IsZero() || v.to.Add(grace).After(from)) {
			return true
		}
	}
	return false
}

// inject plays one fault, from its begin to its end, after which parts that it ended are started again.
func (s *soak) inject(ctx context.Context, f fault) {
	closed := s.windows.open(f)
	defer closed()
	s.logf("%v", f)
	killed, err := s.apply(ctx, f)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.record.LeftOut[f.Kind]++
		s.logf("%s %s is left out: %v", f.Kind, f.Target, err)
		return
	}
	s.record.Faults[f.Kind]++
	if killed != "" {
		s.record.Kills[killed]++
	}
}

// apply plays a fault. It returns the kind of the part that it killed with kill -9.
func (s *soak) apply(ctx context.Context, f fault) (killed string, err error) {
	switch f.Kind {
	case "kill", "term", "flip", "torn", "stop", "clock", "swap", "fds", "strangers", "clear", "quota", "resize":
		p, kind, err := s.victim(f)
		if err != nil {
			return "", err
		}
		if err := s.spared(p, f); err != nil {
			return "", err
		}
		if f.Kind == "kill" || f.Kind == "flip" || f.Kind == "torn" {
			killed = kind
		}
		return killed, s.applyTo(ctx, p, f)
	}
	if err := s.spared(nil, f); err != nil {
		return "", err
	}
	return "", s.applyAround(ctx, f)
}

// applyTo plays a fault of one part.
func (s *soak) applyTo(ctx context.Context, p *part, f fault) error {
	switch f.Kind {
	case "kill", "term", "flip", "torn":
		return s.endAndStart(ctx, p, f)
	case "clock":
		return s.stepClock(ctx, p, f)
	case "swap":
		return s.swap(ctx, p, f)
	case "stop":
		p.pause(true)
		defer p.pause(false)
		wait(ctx, f.For)
	case "fds":
		return s.exhaust(ctx, p, f)
	case "strangers":
		return s.visit(ctx, p, strangersAtATime)
	default:
		s.operate(ctx, p, f)
	}
	return nil
}

// applyAround plays a fault of links, file systems, tiers or clients.
func (s *soak) applyAround(ctx context.Context, f fault) error {
	switch f.Kind {
	case "cut":
		return during(ctx, f, cutLink)
	case "half":
		return during(ctx, f, halfLink)
	case "slow":
		return during(ctx, f, slowLink)
	case "late":
		return during(ctx, f, lateLink)
	case "reset":
		return resetLinks(f.Target)
	case "disk-full":
		return s.fillFor(ctx, filepath.Join(s.o.dir, f.Target, "filler"), f.For)
	case "shm-full":
		return s.fillFor(ctx, "/dev/shm/filler", f.For)
	case "read-only":
		at := filepath.Join(s.o.dir, f.Target)
		if err := sh("mount", "-o", "remount,ro", at); err != nil {
			return err
		}
		wait(ctx, f.For)
		return sh("mount", "-o", "remount,rw", at)
	case "redis-oom":
		return s.redisOOM(ctx, f.For)
	case "redis-flush":
		return s.redisFlush()
	case "s3-503", "s3-stale":
		return s.s3Fault(ctx, f)
	case "leave":
		s.load.leaving.Store(true)
		defer s.load.leaving.Store(false)
		s.load.hurry(ctx, f.For, uint64(f.At))
	default:
		return fmt.Errorf("unknown kind %q", f.Kind)
	}
	return nil
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

func during(ctx context.Context, f fault, set func(string, bool) error) error {
	if err := set(f.Target, true); err != nil {
		return err
	}
	wait(ctx, f.For)
	return set(f.Target, false)
}

func (s *soak) fillFor(ctx context.Context, path string, d time.Duration) error {
	defer os.Remove(path)
	if err := fill(path); err != nil {
		return err
	}
	wait(ctx, d)
	return nil
}

// endLimits are how long a part may take to end in order: an engine lets requests end for 10 s, and then takes some more.
var endLimits = map[string]time.Duration{"node": 20 * time.Second, "proxy": 15 * time.Second, "p": 20 * time.Second, "d": 20 * time.Second}

func (s *soak) endAndStart(ctx context.Context, p *part, f fault) error {
	sig, limit := syscall.SIGKILL, 5*time.Second
	if f.Kind == "term" {
		sig, limit = syscall.SIGTERM, cmp.Or(endLimits[p.kind], 10*time.Second)
	}
	if !p.end(sig, limit) && !p.foreign {
		s.violation("%s did not end within %v of %v: its stacks are in %s", p.name, limit, sig, p.log)
	}
	switch f.Kind {
	case "flip":
		s.flip(f)
	case "torn":
		s.tear(f)
	}
	wait(ctx, f.For)
	if ctx.Err() != nil {
		return nil
	}
	err := p.start(s.alone)
	if err == nil && p.isRealEngine() { // the fault lasts until it is well
		s.awaitRealEngine(ctx, p)
	}
	return err
}

// swap runs the previous release in place of this build for a while: both take over the other's files.
func (s *soak) swap(ctx context.Context, p *part, f fault) error {
	if s.o.previous == "" {
		return errors.New("no -previous release is given")
	}
	for _, binary := range []string{s.o.previous, s.o.binary} {
		if limit := cmp.Or(endLimits[p.kind], 10*time.Second); !p.end(syscall.SIGTERM, limit) {
			s.violation("%s did not end within %v of SIGTERM: its stacks are in %s", p.name, limit, p.log)
		}
		p.setBinary(binary, binary == s.o.previous)
		if err := p.start(s.alone); err != nil {
			return err
		}
		wait(ctx, f.For)
	}
	return nil
}

// flip changes bytes of the pool and of the disk of a node that is down: about one in 64 KiB.
func (s *soak) flip(f fault) {
	rnd := rand.New(rand.NewPCG(s.schedule.Seed, uint64(f.At)))
	n := strings.TrimPrefix(f.Target, "node")
	files := []string{"/dev/shm/lmcache_l1_pool_kvasir_n" + n}
	segments, _ := filepath.Glob(filepath.Join(s.o.dir, "disk"+n, "kv", "*.seg")) // the pattern is well formed
	files = append(files, segments...)
	if n == "2" {
		objects, _ := filepath.Glob(filepath.Join(s.o.dir, "fs2", "*"))
		files = append(files, objects[:min(len(objects), 50)]...)
	}
	for _, path := range files {
		flipIn(path, rnd)
	}
}

func flipIn(path string, rnd *rand.Rand) {
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return
	}
	defer file.Close()
	st, err := file.Stat()
	if err != nil || !st.Mode().IsRegular() || st.Size() == 0 {
		return
	}
	for range max(8, st.Size()>>16) {
		var b [1]byte
		at := rnd.Int64N(st.Size())
		if _, err := file.ReadAt(b[:], at); err != nil {
			return
		}
		b[0] ^= 1 << rnd.IntN(8)
		if _, err := file.WriteAt(b[:], at); err != nil {
			return
		}
	}
}

// unsynced is for how long what was written may be lost in a power cut.
const unsynced = 5 * time.Second

// tear cuts off the ends of the files that a node wrote last, as a power cut leaves them.
func (s *soak) tear(f fault) {
	rnd := rand.New(rand.NewPCG(s.schedule.Seed, uint64(f.At)))
	n := strings.TrimPrefix(f.Target, "node")
	files, _ := filepath.Glob(filepath.Join(s.o.dir, "disk"+n, "kv", "*.seg")) // the pattern is well formed
	if n == "2" {
		objects, _ := filepath.Glob(filepath.Join(s.o.dir, "fs2", "*"))
		files = append(files, objects...)
	}
	for _, path := range files {
		st, err := os.Stat(path)
		if err != nil || !st.Mode().IsRegular() || st.Size() == 0 || time.Since(st.ModTime()) > unsynced {
			continue
		}
		_ = os.Truncate(path, st.Size()-min(st.Size(), 1+rnd.Int64N(256<<10))) // a file that is gone is no matter
	}
}

// steps are by how much a clock is set, seconds.
var steps = []int{2, -2, 90, -90, 3600, -3600, 100_000, -100_000}

// stepClock sets the wall clock of a part forward or back, and right again.
func (s *soak) stepClock(ctx context.Context, p *part, f fault) error {
	if !s.o.clocks {
		return errors.New("the build has no clock that can be stepped (-clocks)")
	}
	set := func(by int) error {
		next := p.clock + ".new"
		if err := os.WriteFile(next, []byte(strconv.Itoa(by)), 0o644); err != nil {
			return err
		}
		return os.Rename(next, p.clock)
	}
	if err := set(steps[int(f.For/time.Millisecond)%len(steps)]); err != nil {
		return err
	}
	wait(ctx, f.For)
	return set(0)
}

// s3Fault makes the object store answer 503, or what it had before, for a while.
func (s *soak) s3Fault(ctx context.Context, f fault) error {
	if s.bucket == nil {
		return fmt.Errorf("s3: %w: %s", errNoTarget, s.lackOf("s3"))
	}
	if f.Kind == "s3-stale" {
		s.bucket.setStale(true)
		defer s.bucket.setStale(false)
	} else {
		s.bucket.busy.Store(true)
		defer s.bucket.busy.Store(false)
	}
	wait(ctx, f.For)
	return nil
}

// exhaust sets the limit of descriptors of a running process to what it has open.
func (s *soak) exhaust(ctx context.Context, p *part, f fault) error {
	pid := p.pid()
	if pid == 0 {
		return errDown
	}
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return err
	}
	before, err := exec.Command("prlimit", "--pid", fmt.Sprint(pid), "--nofile", "--output=SOFT,HARD", "--noheadings", "--raw").Output()
	if err != nil {
		return err
	}
	words := strings.Fields(string(before))
	if len(words) != 2 {
		return fmt.Errorf("prlimit prints %q", before)
	}
	if err := sh("prlimit", "--pid", fmt.Sprint(pid), fmt.Sprintf("--nofile=%d:%s", len(open)+1, words[1])); err != nil {
		return err
	}
	wait(ctx, f.For)
	_ = sh("prlimit", "--pid", fmt.Sprint(pid), fmt.Sprintf("--nofile=%s:%s", words[0], words[1])) // the process may have been killed
	return nil
}
