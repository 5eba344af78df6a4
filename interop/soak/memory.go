// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// sample is the memory of all parts in one quiet time, after a forced collection.
type sample struct {
	At     time.Time
	KiB    map[string]int // private memory of Kvasir's parts: neither the program's file nor shared pools
	AllMiB int            // resident memory of all processes, others' programs too
}

// slope is how memory grew over the last samples.
type slope struct {
	PercentPerDay float64 // of the mean
	Uncertainty   float64 // the true slope is within this of PercentPerDay in 95 of 100 runs
	MeanMiB       float64
	Samples       int
	Minutes       float64
}

const (
	maxGrowth     = 5.0              // per cent of the mean a day
	judgedRun     = time.Hour        // a shorter run shows no slope: its samples are few, and pools and caches still fill
	judgedMinutes = 45 * time.Minute // the end of a run whose samples count
)

// measure takes a sample. The build has a handler that collects; without it no sample is taken.
func (s *soak) measure(ctx context.Context) {
	if !s.collect(ctx) {
		return
	}
	now := sample{At: time.Now().UTC(), KiB: map[string]int{}}
	for _, p := range s.parts {
		anon, all, err := residentKiB(p.pid())
		if err != nil {
			s.logf("%s has no sample of memory: %v", p.name, err)
			return
		}
		now.AllMiB += all >> 10
		if !p.foreign {
			now.KiB[p.name] = anon
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.record.Memory = append(s.record.Memory, now)
}

// collect lets all parts of the build collect, and waits until they have. It reports whether the build can.
func (s *soak) collect(ctx context.Context) bool {
	if !s.o.collects || ctx.Err() != nil {
		return false
	}
	for _, p := range s.parts {
		if pid := p.pid(); pid != 0 && !p.foreign && !p.isOld() {
			_ = syscall.Kill(pid, collectSignal) // it may have ended
		}
	}
	wait(ctx, 2*time.Second)
	return ctx.Err() == nil
}

// residentKiB reads what a process has in memory: private to it, and in all.
func residentKiB(pid int) (anon, all int, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) < 2 {
			continue
		}
		var to *int
		switch words[0] {
		case "RssAnon:":
			to = &anon
		case "VmRSS:":
			to = &all
		default:
			continue
		}
		if *to, err = strconv.Atoi(words[1]); err != nil {
			return 0, 0, err
		}
	}
	return anon, all, nil
}

// judgeMemory computes the slope of the whole deployment over the end of the run, and says what the run cannot show.
func (s *soak) judgeMemory() {
	if !s.o.collects {
		s.cannotShow("that memory is flat: only a build with -clocks collects when it is asked to")
		return
	}
	got, ok := slopeOf(s.record.Memory)
	if !ok {
		s.cannotShow("that memory is flat: of %d samples fewer than 3 lie in its last three quarters", len(s.record.Memory))
		return
	}
	s.record.Slope = &got
	s.logf("memory: %.1f MiB, %+.0f ± %.0f %% of it a day over %d samples in %.0f minutes", got.MeanMiB, got.PercentPerDay, got.Uncertainty, got.Samples, got.Minutes)
	if s.schedule.For < judgedRun {
		s.cannotShow("that memory is flat: a run of %v has samples of %.0f minutes, and caches still fill in them; an hour is needed", s.schedule.For, got.Minutes)
		return
	}
	if got.PercentPerDay-got.Uncertainty >= maxGrowth {
		s.violation("memory grows by %.1f ± %.1f %% of %.1f MiB a day over %.0f minutes, at most %v %% is allowed", got.PercentPerDay, got.Uncertainty, got.MeanMiB, got.Minutes, maxGrowth)
	} else if got.PercentPerDay+got.Uncertainty >= maxGrowth {
		s.cannotShow("growth of memory below %.0f %% a day: %d samples scatter by as much", got.PercentPerDay+got.Uncertainty, got.Samples)
	}
}

func (s *soak) cannotShow(format string, args ...any) {
	s.record.CannotShow = append(s.record.CannotShow, fmt.Sprintf(format, args...))
}

// slopeOf fits a line to the sums of the samples in the last 45 minutes, or the last three quarters of a shorter run.
func slopeOf(samples []sample) (out slope, ok bool) {
	if len(samples) < 3 {
		return out, false
	}
	last := samples[len(samples)-1].At
	span := min(judgedMinutes, last.Sub(samples[0].At)*3/4)
	var days, mib []float64
	for _, m := range samples {
		if last.Sub(m.At) > span {
			continue
		}
		sum := 0
		for _, n := range m.KiB {
			sum += n
		}
		days, mib = append(days, m.At.Sub(last).Hours()/24), append(mib, float64(sum)/1024)
	}
	n := len(days)
	if n < 3 {
		return out, false
	}
	meanX, meanY := mean(days), mean(mib)
	xx, xy := 0.0, 0.0
	for i := range days {
		xx += (days[i] - meanX) * (days[i] - meanX)
		xy += (days[i] - meanX) * (mib[i] - meanY)
	}
	if xx == 0 || meanY == 0 {
		return out, false
	}
	b, rest := xy/xx, 0.0
	for i := range days {
		d := mib[i] - meanY - b*(days[i]-meanX)
		rest += d * d
	}
	uncertain := student(n-2) * math.Sqrt(rest/float64(n-2)/xx)
	return slope{
		PercentPerDay: 100 * b / meanY, Uncertainty: 100 * uncertain / meanY, MeanMiB: meanY, Samples: n, Minutes: -days[0] * 24 * 60,
	}, true
}

func mean(v []float64) (sum float64) {
	for _, x := range v {
		sum += x
	}
	return sum / float64(len(v))
}

// student is the quantile of Student's distribution for a two-sided interval of 95 %.
func student(freedom int) float64 {
	table := []float64{12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23}
	if freedom <= len(table) {
		return table[freedom-1]
	}
	return 2.2
}
