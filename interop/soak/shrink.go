// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// replays is how often the shortest schedule is played, to see how often it fails.
const replays = 5

// shrink leaves faults out as long as the run still breaks a promise, and writes the shortest schedule that does.
func shrink(ctx context.Context, o *options) error {
	if o.replay == "" {
		return fmt.Errorf("-shrink needs -replay FILE")
	}
	if err := o.paths(); err != nil {
		return err
	}
	var s schedule
	if err := readJSON(o.replay, &s); err != nil {
		return err
	}
	tries := 0
	fails := func(faults []fault) bool {
		if ctx.Err() != nil {
			return false
		}
		tries++
		t := s
		t.Faults, t.For = faults, min(s.For, 2*time.Minute)
		t.Cycle = min(t.Cycle, t.For)
		t.For = t.Cycle // one cycle
		one := *o
		one.shrink, one.length = false, t.For
		one.dir = filepath.Join(o.dir, fmt.Sprintf("try%d", tries))
		one.replay = filepath.Join(one.dir, "schedule.json")
		if err := os.MkdirAll(one.dir, 0o755); err != nil {
			return false
		}
		if err := writeJSON(one.replay, &t); err != nil {
			return false
		}
		failed := outer(ctx, &one) != nil && ctx.Err() == nil
		fmt.Printf("try %d: %d faults, fails: %v\n", tries, len(faults), failed)
		return failed
	}
	faults := oneCycle(s.Faults, filepath.Dir(o.replay))
	if len(faults) > 0 && !fails(faults) {
		return fmt.Errorf("the cycle that failed passes alone: replay %s as it is", o.replay)
	}
	faults = minimal(faults, fails)
	s.Faults, s.For = faults, min(s.For, 2*time.Minute)
	s.Cycle = min(s.Cycle, s.For)
	to := filepath.Join(o.dir, "shrunk.json")
	if err := writeJSON(to, &s); err != nil {
		return err
	}
	for _, f := range faults {
		fmt.Println(" ", f)
	}
	fmt.Printf("%d faults after %d tries: -replay %s\n", len(faults), tries, to)
	failed := 0
	for range replays {
		if fails(faults) {
			failed++
		}
	}
	fmt.Printf("%d of %d replays fail\n", failed, replays)
	return ctx.Err()
}

// oneCycle returns the faults of the cycle that failed, as those of cycle 0: the one that the record beside the schedule names, else the
// last one that has faults. Faults that began after the failure are left out.
func oneCycle(faults []fault, dir string) (out []fault) {
	last, until := 0, time.Duration(1<<62)
	for _, f := range faults {
		last = max(last, f.Cycle)
	}
	var r record
	if readJSON(filepath.Join(dir, "record.json"), &r) == nil && r.FailedAt > 0 && r.Cycles <= last {
		last, until = r.Cycles, r.FailedAt-r.CycleBegan
	}
	for _, f := range faults {
		if f.Cycle == last && f.At <= until {
			f.Cycle = 0
			out = append(out, f)
		}
	}
	return out
}

// minimal returns a part of the faults that still fails, from which no half, quarter and so on can be left out.
func minimal(faults []fault, fails func([]fault) bool) []fault {
	for n := max(1, len(faults)/2); n >= 1; {
		shorter := false
		for at := 0; at < len(faults) && len(faults) > 1; at += n {
			rest := append(append([]fault{}, faults[:at]...), faults[min(at+n, len(faults)):]...)
			if len(rest) > 0 && fails(rest) {
				faults, shorter = rest, true
				break
			}
		}
		if !shorter {
			if n == 1 {
				break
			}
			n /= 2
		}
		n = min(n, max(1, len(faults)/2))
	}
	return faults
}
