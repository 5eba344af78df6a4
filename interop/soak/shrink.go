// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// What a shrunk schedule must be.
const (
	maxShrunk  = 5               // faults
	longest    = 2 * time.Minute // its length
	replays    = 5               // at most; as many as decide it
	mustFail   = 3               // of the replays
	plays      = 2               // of the same faults in the search, until one fails: some failures need luck
	pause      = 3 * time.Second // between faults and the same faults once more
	firstFault = time.Second     // after the begin of the shrunk schedule
	afterwards = 15 * time.Second
)

// failure is where in a run a promise was broken.
type failure struct {
	cycle int
	after time.Duration // the begin of its cycle
	quiet bool          // in the quiet time of the cycle
	end   bool          // after all cycles: what is left behind was compared
}

// shrink leaves faults out as long as the run still breaks a promise, and writes the shortest schedule that does.
func shrink(ctx context.Context, o *options) error {
	if o.replay == "" {
		return errors.New("-shrink needs -replay FILE, the schedule.json of a run that failed")
	}
	if err := o.paths(); err != nil {
		return err
	}
	var s schedule
	if err := readJSON(o.replay, &s); err != nil {
		return err
	}
	faults, where := failedCycle(&s, filepath.Dir(o.replay))
	if o.lacks == nil {
		o.lacks = o.machine(ctx)
	}
	tries := 0
	var last schedule
	var unplayed error // of a try that says nothing about its faults
	play := func(t *schedule) bool {
		if ctx.Err() != nil || unplayed != nil {
			return false
		}
		tries++
		what, err := tryTwice(ctx, o, t, filepath.Join(o.dir, fmt.Sprintf("try%d", tries)))
		if err != nil {
			unplayed = fmt.Errorf("try %d could not be played: %w", tries, err)
			return false
		}
		fmt.Printf("try %d: %d faults in %v: %s\n", tries, len(t.Faults), t.For, cmp.Or(what, "nothing broke"))
		return what != ""
	}
	fails := func(faults []fault) bool {
		t, err := shorter(&s, faults, where)
		if err != nil {
			fmt.Printf("%d faults: %v\n", len(faults), err)
			return false
		}
		for range plays {
			if play(t) {
				last = *t
				return true
			}
		}
		return false
	}
	ok := fewest(faults, fails, func() bool {
		fmt.Println("each fault alone, as often as the bounds allow")
		one := alone(&s, faults, where, play)
		if one != nil {
			last = *one
		}
		return one != nil
	})
	switch {
	case ctx.Err() != nil || unplayed != nil:
		return errors.Join(ctx.Err(), unplayed)
	case !ok:
		return fmt.Errorf("the cycle that failed passes alone, in %d tries: replay %s as it is", tries, o.replay)
	}
	to := filepath.Join(o.dir, "shrunk.json")
	failed := 0
	for t, times := &last, 1; t != nil; times++ {
		if err := writeJSON(to, t); err != nil {
			return err
		}
		for _, f := range t.Faults {
			fmt.Println(" ", f)
		}
		fmt.Printf("%d faults in %v after %d tries: -replay %s\n", len(t.Faults), t.For, tries, to)
		passed := 0
		for failed = 0; failed < mustFail && passed <= replays-mustFail && ctx.Err() == nil && unplayed == nil; {
			if play(t) {
				failed++
			} else {
				passed++
			}
		}
		fmt.Printf("%d of %d replays fail\n", failed, failed+passed)
		if err := errors.Join(ctx.Err(), unplayed); err != nil {
			return err
		}
		if err := bounds(t, failed); err == nil {
			return nil
		}
		t = repeated(&last, times+1)
	}
	return bounds(&last, failed)
}

// alone returns a schedule that fails and has only one of the faults, as often as the bounds allow, or nil. What fails now and then with many
// faults may be what one of them does, if it has enough chances. The faults right before the failure are tried first, and each kind of fault once for each part.
func alone(s *schedule, faults []fault, where failure, fails func(*schedule) bool) *schedule {
	var tried []fault
	for _, f := range slices.Backward(faults) {
		if slices.ContainsFunc(tried, func(o fault) bool { return o.Kind == f.Kind && o.Target == f.Target }) {
			continue
		}
		tried = append(tried, f)
		t, err := shorter(s, []fault{f}, where)
		for times := maxShrunk; err == nil && times > 0; times-- {
			if many := repeated(t, times); many != nil {
				if fails(many) {
					return many
				}
				break
			}
		}
	}
	return nil
}

// repeated makes a schedule with its faults so many times, one after the other, so that a failure that needs luck has more chances. It
// returns nil where there is nothing to repeat, and where that would be too many faults, or too long.
func repeated(s *schedule, times int) *schedule {
	if len(s.Faults) == 0 || len(s.Faults)*times > maxShrunk {
		return nil
	}
	var ends time.Duration
	for _, f := range s.Faults {
		ends = max(ends, f.At+f.For)
	}
	span := (ends - s.Faults[0].At + pause).Round(time.Second)
	t := *s
	t.Faults = nil
	for n := range times {
		for _, f := range s.Faults {
			f.At += time.Duration(n) * span
			t.Faults = append(t.Faults, f)
		}
	}
	t.Cycle += time.Duration(times-1) * span
	if t.For = t.Cycle; t.For > longest {
		return nil
	}
	return &t
}

// bounds reports why a shrunk schedule is not short or not sure enough.
func bounds(s *schedule, failed int) error {
	switch {
	case len(s.Faults) > maxShrunk:
		return fmt.Errorf("not shrunk: %d faults are left, at most %d are wanted", len(s.Faults), maxShrunk)
	case s.For > longest:
		return fmt.Errorf("not shrunk: it takes %v, at most %v is wanted", s.For, longest)
	case failed < mustFail:
		return fmt.Errorf("not shrunk: %d replays fail, %d of %d are wanted", failed, mustFail, replays)
	}
	return nil
}

// tryTwice plays a schedule, and once more if that says nothing about its faults: on a busy machine a part may not be well in time.
func tryTwice(ctx context.Context, o *options, t *schedule, dir string) (what string, err error) {
	if what, err = try(ctx, o, t, dir); err == nil || ctx.Err() != nil {
		return what, err
	}
	fmt.Printf("played again: %v\n", err)
	return try(ctx, o, t, dir)
}

// try plays a schedule in a directory of its own, and returns the first promise that it breaks.
func try(ctx context.Context, o *options, t *schedule, dir string) (what string, err error) {
	one := *o
	one.shrink, one.length, one.keepGoing, one.compare = false, t.For, false, ""
	one.dir, one.replay = dir, filepath.Join(dir, "schedule.json")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if err := writeJSON(one.replay, t); err != nil {
		return "", err
	}
	out, err := os.Create(filepath.Join(dir, "output"))
	if err != nil {
		return "", err
	}
	defer out.Close()
	one.output = out
	ended := outer(ctx, &one)
	if ended == nil {
		return "", nil
	}
	var r record
	if err := readJSON(filepath.Join(dir, "record.json"), &r); err != nil {
		return "", errors.Join(ended, err)
	}
	if len(r.Violations) == 0 {
		return "", fmt.Errorf("%w: %s", ended, r.Failure)
	}
	return r.Violations[0], nil
}

// failedCycle returns the faults of the cycle that failed, as those of cycle 0, and where in it the run failed: that which the record
// beside the schedule names, else the last one that has faults. Faults that began after the failure are left out,
// and kinds that the machine could not make.
func failedCycle(s *schedule, dir string) (out []fault, where failure) {
	cycle, until := 0, time.Duration(1<<62)
	for _, f := range s.Faults {
		cycle = max(cycle, f.Cycle)
	}
	where = failure{after: s.Cycle, quiet: true}
	var r record
	if readJSON(filepath.Join(dir, "record.json"), &r) == nil && r.FailedAt > 0 {
		until = r.FailedAt - r.CycleBegan
		where = failure{after: until, quiet: until > s.Cycle-s.Quiet-s.Calm}
		if r.Cycles > cycle {
			where.end = true
		} else {
			cycle = r.Cycles
		}
	}
	where.cycle = cycle
	for _, f := range s.Faults {
		never := r.LeftOut[f.Kind] > 0 && r.Faults[f.Kind] == 0
		if f.Cycle == cycle && f.At <= until && !never {
			f.Cycle = 0
			out = append(out, f)
		}
	}
	return out, where
}

var errTooFar = errors.New("its faults and its failure are too far apart for two minutes")

// shorter makes a schedule of one short cycle with some of the faults: the first one comes at once, and the quiet time soon after the
// moment of the failure, with the checks of that cycle. What is left behind at the end is compared only if that is how the run failed.
func shorter(s *schedule, faults []fault, where failure) (*schedule, error) {
	const quiet = 20 * time.Second
	t := &schedule{Seed: s.Seed, Quiet: quiet, NoEnd: !where.end, Checks: s.Checks + where.cycle}
	begin, ends := where.after-firstFault-afterwards, firstFault
	if len(faults) > 0 {
		begin = faults[0].At
	}
	for _, f := range faults {
		f.At += firstFault - begin
		t.Faults = append(t.Faults, f)
		ends = max(ends, f.At+f.For)
	}
	busy := max(ends+firstFault, afterwards)
	if !where.quiet && !where.end {
		busy = max(busy, where.after-begin+firstFault+afterwards)
	}
	t.Cycle = (busy + quiet).Round(time.Second)
	if t.For = t.Cycle; t.For > longest {
		return nil, errTooFar
	}
	return t, nil
}

// fewest looks for the fewest faults that still fail, and reports whether some do. It tries no fault, the last five, the last ten; then one, which
// tries single faults; then the last twenty and so on. The schedule that failed last is the result.
func fewest(faults []fault, fails func([]fault) bool, one func() bool) bool {
	if fails(nil) {
		return true
	}
	asked := false
	for n := maxShrunk; len(faults) > 0; n *= 2 {
		if n > 2*maxShrunk && !asked {
			if asked = true; one() {
				return true
			}
		}
		last := faults[max(0, len(faults)-n):]
		if fails(last) {
			minimal(last, fails)
			return true
		}
		if n >= len(faults) {
			break
		}
	}
	return !asked && one()
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
