// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"runtime"
	"runtime/debug"
)

// ErrFault means that mapped memory could not be accessed because a process has truncated the file.
var ErrFault = errors.New("shm: the memory behind a mapping is gone")

// Guard calls f. If f touches mapped memory that is gone, which would end the process, Guard returns ErrFault instead. It does not undo
// what f has done before. It protects only f's own goroutine.
func Guard(f func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch r := recover().(type) {
		case nil:
		case interface {
			runtime.Error
			Addr() uintptr
		}:
			err = ErrFault
		default:
			panic(r)
		}
	}()
	f()
	return nil
}
