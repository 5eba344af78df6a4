// SPDX-License-Identifier: Apache-2.0

//go:build crashpoints

package pool

import (
	"os"
	"strconv"
	"sync/atomic"
	"syscall"
)

// crashAfter counts down to the crash point at which this process kills itself. It begins with the value of KVASIR_CRASH_AT; without that
// variable the process never kills itself.
var crashAfter = func() *atomic.Int64 {
	left := new(atomic.Int64)
	left.Store(-1)
	if n, err := strconv.ParseInt(os.Getenv("KVASIR_CRASH_AT"), 10, 64); err == nil {
		left.Store(n)
	}
	return left
}()

func crashPoint() {
	if crashAfter.Load() >= 0 && crashAfter.Add(-1) < 0 {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // until the signal arrives
	}
}
