// SPDX-License-Identifier: Apache-2.0

// Command soak runs a whole deployment and injects faults by a seeded schedule: two nodes over disks, a Redis Cluster, S3 and a
// Mooncake Store, two P, two D, registries, relay, two proxies, readers of KV events, an operator. Engines check every byte of KV, the
// driver checks every answer, and in quiet times nothing may fail, nothing may be held, and readers' lists must equal the servers'.
// docs/soak.md has the faults, the checks and the runs.
//
//	go build -o bin/kvasir ./cmd/kvasir && go run ./interop/soak -for 3m -seed 1 -clocks
//
// The driver needs root on Linux: it runs in namespaces of its own (network, processes, mounts, shared memory), which end with it. What
// else the machine lacks is left out of the deployment and said. -keep-going reports all violations instead of the first.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// innerEnv marks the process inside the namespaces.
const innerEnv = "KVASIR_SOAK_INNER"

type options struct {
	length    time.Duration
	seed      uint64
	binary    string
	previous  string
	bug       string
	clocks    bool
	dir       string
	replay    string
	resume    string
	compare   string
	shrink    bool
	faults    bool
	only      string
	clients   int
	keepGoing bool
	redis     string            // cluster, one, none; auto: the most that the machine has
	store     string            // the object store's program; none; auto: build it
	master    string            // mooncake_master; none; auto: find it
	real      string            // Python of an environment with vLLM; auto: find it; "": simulated engines
	lacks     map[string]string // what the machine lacks of these, and why
	lacking   string            // lacks as JSON, for the process inside the namespaces
	collects  bool              // the build collects when it is asked to
	built     bool              // binary is a build with -bug or -clocks that is there
	output    io.Writer         // of the run; nil: the standard output
}

func main() {
	var o options
	flag.DurationVar(&o.length, "for", 3*time.Minute, "length of the run")
	flag.Uint64Var(&o.seed, "seed", 1, "seed of schedule and load")
	flag.StringVar(&o.binary, "binary", "bin/kvasir", "the build under test")
	flag.StringVar(&o.previous, "previous", "", "the previous release's binary, for swaps; without it they are left out")
	flag.StringVar(&o.bug, "bug", "", "build with the change of this `PATCH` (interop/soak/bugs) and run that, to see that the soak finds it")
	flag.BoolVar(&o.clocks, "clocks", false, "build with a wall clock that the driver steps, and run that; without it those faults are left out")
	flag.StringVar(&o.dir, "dir", "", "directory for logs, schedule and record; default a new one under the system's for temporary files")
	flag.StringVar(&o.replay, "replay", "", "run the schedule of this `FILE` (schedule.json of a run) instead of a new one")
	flag.StringVar(&o.resume, "resume", "", "go on with the run of this `DIR` that was interrupted: at the cycle after the last whole one")
	flag.StringVar(&o.compare, "compare", "", "the record.json of a run of the same seed with -faults=false: the hit rate in calm times may be 3 points lower")
	flag.BoolVar(&o.shrink, "shrink", false, "with -replay DIR/schedule.json of a run that failed: leave faults out as long as it still fails, with the build of that run unless another one is named; at most 5 faults and 2 minutes, of which 3 of 5 replays fail")
	flag.BoolVar(&o.faults, "faults", true, "inject faults; false gives the hit rate without any")
	flag.StringVar(&o.only, "only", "", "kinds of faults to inject, comma-separated; default all")
	flag.IntVar(&o.clients, "clients", 6, "requests at a time")
	flag.StringVar(&o.redis, "redis", auto, "Redis below the nodes: cluster (six servers), one, none; auto: a cluster where redis-server and redis-cli are installed")
	flag.StringVar(&o.store, "s3-store", auto, "`PROGRAM` of the S3 store below the nodes; none; auto: build interop/s3")
	flag.StringVar(&o.master, "mooncake-master", auto, "`PROGRAM` of the Mooncake Store's master, below the nodes; none; auto: one in PATH or in the cache of the interop scripts")
	flag.StringVar(&o.real, "real", map[string]string{"1": auto}[os.Getenv("REAL")], "run vLLM engines (CPU builds) of this `PYTHON` in place of simulated ones, two clients where -clients does not say more; auto, as REAL=1: one in the cache of the interop scripts")
	flag.StringVar(&o.lacking, "lacking", "", "internal: what the machine lacks")
	flag.BoolVar(&o.collects, "collects", false, "internal: the build collects when it is asked to")
	flag.BoolVar(&o.keepGoing, "keep-going", false, "go on after a violation")
	flag.Parse()
	if err := run(&o); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

func run(o *options) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if os.Getenv(innerEnv) != "" {
		if err := json.Unmarshal([]byte(o.lacking), &o.lacks); err != nil {
			return err
		}
		return inner(ctx, o)
	}
	if !slices.Contains([]string{auto, "cluster", "one", none}, o.redis) {
		return fmt.Errorf("-redis %q is none of cluster, one, none, auto", o.redis)
	}
	if o.resume != "" || o.shrink && o.replay != "" {
		if err := o.goOn(); err != nil {
			return err
		}
	}
	if err := o.findEngines(ctx); err != nil {
		return err
	}
	if (o.bug != "" || o.clocks) && !o.built {
		if err := o.paths(); err != nil {
			return err
		}
		binary, err := buildWith(ctx, o.bug, o.clocks, o.dir)
		if err != nil {
			return err
		}
		o.binary, o.collects = binary, true
	}
	if o.shrink {
		return shrink(ctx, o)
	}
	return outer(ctx, o)
}

// paths makes the options' paths absolute, and the directory.
func (o *options) paths() (err error) {
	if o.resume != "" {
		o.dir = o.resume
	}
	if o.dir == "" {
		if o.dir, err = os.MkdirTemp("", "kvasir-soak-"); err != nil {
			return err
		}
	}
	for _, p := range []*string{&o.binary, &o.previous, &o.bug, &o.dir, &o.replay, &o.resume, &o.compare, &o.store, &o.master, &o.real} {
		if *p == "" || *p == auto || *p == none {
			continue
		}
		if *p, err = filepath.Abs(*p); err != nil {
			return err
		}
	}
	if _, err := os.Stat(o.binary); err != nil {
		return fmt.Errorf("%w: build it with go build -o bin/kvasir ./cmd/kvasir", err)
	}
	return os.MkdirAll(o.dir, 0o755)
}

// outer starts this program again inside namespaces of its own. All processes inside end with the inner one,
// which is the first of its namespace, and that one ends with this.
func outer(ctx context.Context, o *options) error {
	if err := o.paths(); err != nil {
		return err
	}
	if o.lacks == nil {
		o.lacks = o.machine(ctx)
	}
	if err := o.save(); err != nil {
		return err
	}
	lacking, err := json.Marshal(o.lacks)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	args := []string{
		fmt.Sprintf("-for=%v", o.length), fmt.Sprintf("-seed=%d", o.seed), "-binary=" + o.binary, "-previous=" + o.previous, "-dir=" + o.dir, "-replay=" + o.replay, "-resume=" + o.resume, "-compare=" + o.compare,
		fmt.Sprintf("-clocks=%v", o.clocks), fmt.Sprintf("-collects=%v", o.collects), fmt.Sprintf("-faults=%v", o.faults), "-only=" + o.only, fmt.Sprintf("-clients=%d", o.clients), fmt.Sprintf("-keep-going=%v", o.keepGoing),
		"-redis=" + o.redis, "-s3-store=" + o.store, "-mooncake-master=" + o.master, "-real=" + o.real, "-lacking=" + string(lacking),
	}
	cmd := exec.Command(self, args...)
	cmd.Env = append(withoutFlags(os.Environ()), innerEnv+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if o.output != nil {
		cmd.Stdout, cmd.Stderr = o.output, o.output
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC,
		Pdeathsig:  syscall.SIGKILL, Setpgid: true,
	}
	runtime.LockOSThread() // Pdeathsig is of the thread that starts the process
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start in namespaces of its own (root on Linux is needed; all faults of links, disks and shared memory would be left out, so nothing is run): %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err = <-ended:
	case <-ctx.Done():
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		select {
		case err = <-ended:
		case <-time.After(30 * time.Second):
			_ = cmd.Process.Kill()
			err = <-ended
		}
	}
	if err != nil {
		return fmt.Errorf("the run failed (%w); schedule, logs and record: %s", err, o.dir)
	}
	return nil
}

// withoutFlags removes the variables that are flags of Kvasir's commands.
func withoutFlags(env []string) (out []string) {
	for _, v := range env {
		if !strings.HasPrefix(v, "KVASIR_") && !strings.HasPrefix(v, "LMCACHE_") && !strings.HasPrefix(v, "VLLM_") {
			out = append(out, v)
		}
	}
	return out
}

func inner(ctx context.Context, o *options) error {
	s, err := newSoak(o)
	if err != nil {
		return err
	}
	err = s.play(ctx)
	s.stop()
	s.record.Ended = time.Now().UTC()
	if err != nil {
		s.record.Failure = err.Error()
	}
	_, s.record.Single = s.record.killed()
	s.record.Singles = map[string]int{}
	for _, kind := range singlePoints {
		s.record.Singles[kind] = s.record.Kills[kind]
	}
	if werr := writeJSON(filepath.Join(o.dir, "record.json"), &s.record); werr != nil {
		err = errors.Join(err, werr)
	}
	s.print()
	return err
}

func writeJSON(path string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}

func readJSON(path string, v any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}
