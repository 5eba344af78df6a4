package pool

import (
	"errors"
	"os"
	"os/exec"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/shm"
)

// A process that has ended lives no longer, also while its parent has not noticed.
func TestLives(t *testing.T) {
	if !lives(os.Getpid()) {
		t.Error("this process is taken for dead")
	}
	if lives(1 << 30) {
		t.Error("a process that cannot be is taken for alive")
	}
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Skip("no sleep to run: ", err)
	}
	if !lives(cmd.Process.Pid) {
		t.Error("a process that sleeps is taken for dead")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); lives(cmd.Process.Pid); time.Sleep(time.Millisecond) { // a zombie until Wait
		if time.Now().After(end) {
			t.Error("a process that was killed is taken for alive")
			break
		}
	}
	_ = cmd.Wait()
}

// The lock of a pool is waited for as long as the process that has it may be ending: for a
// killed one seconds, for one that lives hardly.
func TestLockIsWaitedForWhileItsProcessEnds(t *testing.T) {
	f := func(what string, pid int, held time.Duration, want error, least, most time.Duration) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			err := lockAfter(func() error {
				if time.Since(began) < held {
					return shm.ErrLocked
				}
				return nil
			}, pid)
			if took := time.Since(began); !errors.Is(err, want) || took < least || took > most {
				t.Errorf("%s: %v after %v", what, err, took)
			}
		})
	}
	f("nobody has it", 1<<30, 0, nil, 0, 0)
	f("a killed one", 1<<30, 2*time.Second, nil, 2*time.Second, 2100*time.Millisecond)
	f("a killed one that does not end", 1<<30, time.Hour, shm.ErrLocked, 5*time.Second, 5100*time.Millisecond)
	f("one that lives", os.Getpid(), time.Hour, shm.ErrLocked, 100*time.Millisecond, 200*time.Millisecond)
	f("one that lives and gives it up", os.Getpid(), 50*time.Millisecond, nil, 50*time.Millisecond, 100*time.Millisecond)
	other := errors.New("other")
	if err := lockAfter(func() error { return other }, 1<<30); !errors.Is(err, other) {
		t.Errorf("another error: %v", err)
	}
}

// What its owner must never do to a slot is a panic, and nothing has changed.
func TestMisuseOfASlotPanics(t *testing.T) {
	p, err := Open(Options{Name: "p", Bytes: 4 * 4096, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	reserve := func(n byte) Slot {
		s, err := p.Reserve(&kv.Key{Chunk: kv.Hash{n}}, 4096, Writer{})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	staged, resident, free := reserve(1), reserve(2), reserve(3)
	p.Commit(resident)
	p.Drop(free)
	p.Unhold(free)
	before := p.Usage()
	f := func(what string, misuse func()) {
		t.Helper()
		defer func() {
			t.Helper()
			if v := recover(); v == nil {
				t.Errorf("%s is no panic", what)
			}
			if got := p.Usage(); got != before {
				t.Errorf("%s changed %+v to %+v", what, before, got)
			}
		}()
		misuse()
	}
	f("a commit of what is resident", func() { p.Commit(resident) })
	f("a commit of what is free", func() { p.Commit(free) })
	f("a checksum of what is staged", func() { p.SetSum(staged, 1) })
	f("a place below of what is staged", func() { p.SetBelow(staged, 1) })
	f("a drop of what is free", func() { p.Drop(free) })
	f("a hold on what is free", func() { p.Hold(free) })
	f("the end of a hold that is none", func() { p.Unhold(resident) })
	if _, ok := p.Sum(staged); ok || p.Below(staged) != 0 {
		t.Error("what is staged has a checksum")
	}
	p.Drop(staged) // condemned: held still
	f("a second drop", func() { defer func() { before = p.Usage(); panic(recover()) }(); p.Drop(staged) })
}

// Chunks hash to places that a peer cannot foretell, the same while a table grows.
func TestTableIsSeeded(t *testing.T) {
	seeds := map[uint64]bool{}
	for range 2 {
		p, err := Open(Options{Name: "p", Bytes: 256 * 64, Align: 64, Dir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		for n := range uint32(200) {
			if _, err := p.Reserve(tableKey(n), 64, Writer{}); err != nil {
				t.Fatal(err)
			}
			seeds[p.table.seed] = true
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if len(seeds) != 2 || seeds[0] {
		t.Errorf("two pools have the seeds %v", seeds)
	}
}
