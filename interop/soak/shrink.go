// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

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
	faults := oneCycle(s.Faults, o.dir)
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
	return ctx.Err()
}

// oneCycle returns the faults of the last cycle that has some, as those of cycle 0.
func oneCycle(faults []fault, dir string) (out []fault) {
	last := 0
	for _, f := range faults {
		last = max(last, f.Cycle)
	}
	var r record
	if readJSON(filepath.Join(filepath.Dir(dir), "record.json"), &r) == nil && r.Cycles <= last {
		last = r.Cycles
	}
	for _, f := range faults {
		if f.Cycle == last {
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
