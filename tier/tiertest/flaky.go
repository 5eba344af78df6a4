// SPDX-License-Identifier: Apache-2.0

package tiertest

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// ErrScript is the error with which a Flaky tier fails.
var ErrScript = errors.New("tiertest: the script makes this call fail")

// Flaky is a Tier that fails as a script says. Faults are separated by semicolons. Each
// names a call, which of these calls (counted from 1, or * for all), and what happens:
//
//	read 3 error        it fails
//	read 4 panic        it has a bug
//	read 2 missing      the object is gone
//	write 1 notkept     the place does not take it
//	read * wrong        a byte of what it reads is wrong
//	stat 1 lost         it knows none of the objects
//	read 1 slow 300ms   it takes that much longer, or until its context ends
//	stat * hang         it does not end, whatever its context does, before Release
type Flaky struct {
	tier.Tier
	faults  []fault
	release chan struct{}
	once    sync.Once
	mu      struct {
		sync.Mutex
		calls map[string]int
	}
}

type fault struct {
	call  string
	which int // 0 is all
	what  string
	wait  time.Duration
}

// NewFlaky returns x, failing by script. The caller must call Release at the end.
func NewFlaky(x tier.Tier, script string) (*Flaky, error) {
	f := &Flaky{Tier: x, release: make(chan struct{})}
	f.mu.calls = make(map[string]int)
	for _, line := range strings.Split(script, ";") {
		words := strings.Fields(line)
		if len(words) == 0 {
			continue
		}
		if len(words) < 3 {
			return nil, fmt.Errorf("tiertest: script %q: a line needs a call, its number and what happens", line)
		}
		ft := fault{call: words[0], what: words[2]}
		var err error
		if words[1] != "*" {
			ft.which, err = strconv.Atoi(words[1])
		}
		if len(words) > 3 && err == nil {
			ft.wait, err = time.ParseDuration(words[3])
		}
		if err != nil {
			return nil, fmt.Errorf("tiertest: script %q: %w", line, err)
		}
		f.faults = append(f.faults, ft)
	}
	return f, nil
}

// Release ends all calls that hang, and later calls do not hang.
func (f *Flaky) Release() { f.once.Do(func() { close(f.release) }) }

// Calls returns how often a call was made.
func (f *Flaky) Calls(call string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.mu.calls[call]
}

// next counts a call, and waits if the script says so. It returns the call's other fault.
func (f *Flaky) next(ctx context.Context, call string) (what string, err error) {
	f.mu.Lock()
	f.mu.calls[call]++
	n := f.mu.calls[call]
	f.mu.Unlock()
	for _, ft := range f.faults {
		if ft.call != call || ft.which != 0 && ft.which != n {
			continue
		}
		switch ft.what {
		case "slow":
			timer := time.NewTimer(ft.wait)
			defer timer.Stop()
			select {
			case <-timer.C:
			case <-ctx.Done():
				return "", ctx.Err()
			}
		case "hang":
			<-f.release
			return "", ErrScript
		case "error":
			return "", ErrScript
		case "panic":
			panic("tiertest: as the script says")
		case "missing":
			return "", tier.ErrMissing
		case "notkept":
			return "", tier.ErrNotKept
		default:
			what = ft.what
		}
	}
	return what, nil
}

// Stat implements tier.Tier.
func (f *Flaky) Stat(ctx context.Context, keys []kv.Key, metas []tier.Meta) error {
	what, err := f.next(ctx, "stat")
	if err != nil {
		return err
	}
	err = f.Tier.Stat(ctx, keys, metas)
	if what == "lost" {
		clear(metas)
	}
	return err
}

// Read implements tier.Tier.
func (f *Flaky) Read(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	what, err := f.next(ctx, "read")
	if err != nil {
		return tier.Meta{}, err
	}
	meta, err := f.Tier.Read(ctx, k, dst)
	if what == "wrong" && err == nil {
		dst[len(dst)/2] ^= 1
	}
	return meta, err
}

// Write implements tier.Tier.
func (f *Flaky) Write(ctx context.Context, k kv.Key, m tier.Meta, src []byte) error {
	if _, err := f.next(ctx, "write"); err != nil {
		return err
	}
	return f.Tier.Write(ctx, k, m, src)
}

// Delete implements tier.Tier.
func (f *Flaky) Delete(ctx context.Context, keys []kv.Key) error {
	if _, err := f.next(ctx, "delete"); err != nil {
		return err
	}
	return f.Tier.Delete(ctx, keys)
}
