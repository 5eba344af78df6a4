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
	lockEnding = 5 * time.Second        // how long a process that ends may keep its locks
	lockAlive  = 100 * time.Millisecond // how long one that lives is looked at: it may have been killed this moment
)

// LockAfter calls lock until it returns something else than held. A process that was killed keeps its locks until the
// kernel has taken it apart, some milliseconds to seconds with a large mapping, and gives no sign when it has. So
// LockAfter waits for the lock of process pid while that process ends, 5 s at most; 0 is an unknown process. The lock of a live
// process is held.
func LockAfter(pid int, held error, lock func() error) error {
	for wait := time.Duration(0); ; wait += lockStep {
		err := lock()
		if !errors.Is(err, held) || wait >= lockEnding || wait >= lockAlive && alive(pid) {
			return err
		}
		time.Sleep(lockStep)
	}
}

// lives reports whether a process is there and not about to end.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, after, _ := bytes.Cut(stat, []byte(") ")) // after the command's name
	return len(after) > 0 && after[0] != 'Z' && after[0] != 'X'
}

// SetLockOwner writes this process's number into a lock's file, for LockOwner and for people. On a full file system it cannot, and the
// owner is not known.
func SetLockOwner(f *os.File) {
	_ = f.Truncate(0)
	_, _ = f.WriteAt(strconv.AppendInt(nil, int64(os.Getpid()), 10), 0)
}

// LockOwner returns the process whose number a lock's file has, 0 where it has none.
func LockOwner(f io.ReaderAt) int {
	b := make([]byte, 32)
	n, _ := f.ReadAt(b, 0)
	pid, err := strconv.Atoi(string(b[:n]))
	if err != nil || pid < 0 {
		return 0
	}
	return pid
}
