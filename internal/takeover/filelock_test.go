// SPDX-License-Identifier: Apache-2.0

package takeover

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

var errHeld = errors.New("held")

// A process that has ended does not count as alive, also before its parent has waited for it.
func TestLives(t *testing.T) {
	if !alive(os.Getpid()) {
		t.Error("this process is taken for dead")
	}
	if alive(1 << 30) {
		t.Error("a process that cannot be is taken for alive")
	}
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Skip("no sleep to run: ", err)
	}
	if !alive(cmd.Process.Pid) {
		t.Error("a process that sleeps is taken for dead")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); alive(cmd.Process.Pid); time.Sleep(time.Millisecond) { // a zombie until Wait
		if time.Now().After(end) {
			t.Error("a process that was killed is taken for alive")
			break
		}
	}
	_ = cmd.Wait()
}

// LockAfter waits for a lock while its owner may be ending: up to 5 s for a
// process that was killed, and 100 ms for a live one.
func TestAfter(t *testing.T) {
	f := func(what string, pid int, held time.Duration, want error, least, most time.Duration) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			err := LockAfter(pid, errHeld, func() error {
				if time.Since(began) < held {
					return fmt.Errorf("lock it: %w", errHeld)
				}
				return nil
			})
			if took := time.Since(began); !errors.Is(err, want) || took < least || took > most {
				t.Errorf("%s: %v after %v", what, err, took)
			}
		})
	}
	f("nobody has it", 1<<30, 0, nil, 0, 0)
	f("a killed one", 1<<30, 2*time.Second, nil, 2*time.Second, 2100*time.Millisecond)
	f("a killed one that does not end", 1<<30, time.Hour, errHeld, 5*time.Second, 5100*time.Millisecond)
	f("nobody knows whose", 0, 2*time.Second, nil, 2*time.Second, 2100*time.Millisecond)
	f("one that lives", os.Getpid(), time.Hour, errHeld, 100*time.Millisecond, 200*time.Millisecond)
	f("one that lives and gives it up", os.Getpid(), 50*time.Millisecond, nil, 50*time.Millisecond, 100*time.Millisecond)
	other := errors.New("other")
	if err := LockAfter(1<<30, errHeld, func() error { return other }); !errors.Is(err, other) {
		t.Errorf("another error: %v", err)
	}
}

// The number in a lock's file is the process id of its last owner. Another text means that the owner is not known.
func TestOwner(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, text := range []string{"", "x", "-1", "1 ", strings.Repeat("1", 100)} {
		_ = f.Truncate(0)
		if _, err := f.WriteAt([]byte(text), 0); err != nil {
			t.Fatal(err)
		}
		if pid := LockOwner(f); pid != 0 {
			t.Errorf("%q is process %d", text, pid)
		}
	}
	SetLockOwner(f)
	if pid := LockOwner(f); pid != os.Getpid() {
		t.Errorf("process %d instead of this one", pid)
	}
}
