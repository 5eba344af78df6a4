// SPDX-License-Identifier: Apache-2.0

package takeover

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"
)

const (
	lockStep   = 10 * time.Millisecond
	lockEnding = 5 * time.Second        // longest wait for a process that is ending
	lockAlive  = 100 * time.Millisecond // longest wait for a process that seems alive: it may have been killed just now
)

// LockAfter calls lock again and again until it returns another result than the error `held`. A killed process keeps its locks until the
// kernel has torn it down, which takes milliseconds, or seconds with a large mapping, and nothing signals the end. So LockAfter waits, at
// most 5 s, while the process pid, which holds the lock, is ending; pid 0 means that the process is unknown, and counts as ending. If the
// process is alive, LockAfter returns `held` after 100 ms.
func LockAfter(pid int, held error, lock func() error) error {
	for wait := time.Duration(0); ; wait += lockStep {
		err := lock()
		if !errors.Is(err, held) || wait >= lockEnding || wait >= lockAlive && alive(pid) {
			return err
		}
		time.Sleep(lockStep)
	}
}

// alive reports whether a process exists and is not a zombie.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, after, _ := bytes.Cut(stat, []byte(") ")) // after the command's name
	return len(after) > 0 && after[0] != 'Z' && after[0] != 'X'
}

// SetLockOwner writes this process's number into a lock file, for LockOwner and for people. It ignores errors: on a full file system
// the owner stays unknown.
func SetLockOwner(f *os.File) {
	_ = f.Truncate(0)
	_, _ = f.WriteAt(strconv.AppendInt(nil, int64(os.Getpid()), 10), 0)
}

// LockOwner returns the process number in a lock file; 0: there is none.
func LockOwner(f io.ReaderAt) int {
	b := make([]byte, 32)
	n, _ := f.ReadAt(b, 0)
	pid, err := strconv.Atoi(string(b[:n]))
	if err != nil || pid < 0 {
		return 0
	}
	return pid
}
