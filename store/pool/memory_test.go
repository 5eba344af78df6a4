// SPDX-License-Identifier: Apache-2.0

package pool_test

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/store/pool"
)

const mib = 1 << 20

// fake is a pool of 64 MiB on a file system that has so much for it.
type fake struct {
	mu      sync.Mutex
	has     int64
	why     error // of Populate beyond has
	limit   int64
	mapped  int64
	noted   int64
	already int64
	used    int64
}

func (f *fake) Bytes() int64    { return 64 * mib }
func (f *fake) Provided() int64 { return f.already }

func (f *fake) FreeBytes() int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.Bytes() - f.used
}

func (f *fake) Populate(from, n int64, mapped bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if from+n > f.has {
		return f.why
	}
	if mapped {
		f.mapped += n
	}
	return nil
}

func (f *fake) NoteProvided(to int64) { f.noted = to }

func (f *fake) Limit(bytes int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.limit = bytes
	return nil
}

func (f *fake) grow(to int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.has = to
}

var errFull = errors.New("full")

func memory(f *fake, rate int64) *pool.Memory {
	return pool.NewMemory(f, rate, slog.New(slog.DiscardHandler))
}

// TestOnlyProvidedMemoryIsHandedOut shows a request that the file system can
// serve, one that it cannot, and the end of that.
func TestOnlyProvidedMemoryIsHandedOut(t *testing.T) {
	f := &fake{has: 24 * mib, why: errFull, already: 8 * mib}
	m := memory(f, 1)
	if f.limit != 8*mib || m.Usable() != 8*mib || m.Whole() {
		t.Fatalf("at first %d bytes may be handed out", f.limit)
	}
	m.Prepare(10 * mib)
	if m.Usable() != 16*mib || f.limit != 16*mib || f.noted != 16*mib || m.Trouble() != nil {
		t.Errorf("for 10 MiB %d are usable, %v", m.Usable(), m.Trouble())
	}
	m.Prepare(60 * mib)
	if m.Usable() != 24*mib || !errors.Is(m.Trouble(), errFull) {
		t.Errorf("for 60 MiB %d are usable, %v", m.Usable(), m.Trouble())
	}
	if err := m.More(); !errors.Is(err, errFull) {
		t.Errorf("more of a full file system: %v", err)
	}
	f.grow(64 * mib)
	if err := m.More(); err != nil || m.Trouble() != nil || m.Usable() != 32*mib {
		t.Errorf("when there is room again: %v, %v, %d", err, m.Trouble(), m.Usable())
	}
}

// TestUsedMemoryIsNotReadyForOthers counts what is free below the limit only.
func TestUsedMemoryIsNotReadyForOthers(t *testing.T) {
	f := &fake{has: 64 * mib, already: 16 * mib, used: 16 * mib}
	m := memory(f, 1)
	m.Prepare(1)
	if m.Usable() != 24*mib {
		t.Errorf("%d bytes usable, with all of 16 MiB used", m.Usable())
	}
}

// TestWithoutARateAllIsHandedOut and nothing is provided.
func TestWithoutARateAllIsHandedOut(t *testing.T) {
	f := &fake{why: errFull}
	m := memory(f, 0)
	m.Prepare(64 * mib)
	m.Run(t.Context())
	if !m.Whole() || m.Provided() != 0 || m.Trouble() != nil || f.limit != 0 {
		t.Errorf("usable %d, provided %d, limit %d, %v", m.Usable(), m.Provided(), f.limit, m.Trouble())
	}
}

// TestAKernelThatCannotProvideHandsOutAll as there is nothing to wait for.
func TestAKernelThatCannotProvideHandsOutAll(t *testing.T) {
	f := &fake{why: shm.ErrNoPopulate}
	m := memory(f, 1)
	m.Prepare(1)
	if !m.Whole() || f.noted != 0 {
		t.Errorf("usable %d, noted %d", m.Usable(), f.noted)
	}
}

// TestTheBackgroundProvidesAllAndMapsItOnlyWhenAsked, and tries again after trouble.
func TestTheBackgroundProvidesAllAndMapsItOnlyWhenAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{has: 16 * mib, why: errFull}
		m := memory(f, 16*mib)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go m.Run(ctx)
		time.Sleep(5 * time.Second)
		if m.Usable() != 16*mib || m.Trouble() == nil {
			t.Fatalf("usable %d, %v", m.Usable(), m.Trouble())
		}
		f.grow(64 * mib)
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if !m.Whole() || m.Trouble() != nil || f.mapped != 0 {
			t.Fatalf("usable %d, mapped %d, %v", m.Usable(), f.mapped, m.Trouble())
		}
		m.MapAhead()
		m.MapAhead()
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if f.mapped != 64*mib {
			t.Errorf("mapped %d", f.mapped)
		}
	})
}
