// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"runtime"
	"runtime/debug"
)

// ErrFault means that mapped memory could not be accessed, because a process
// has truncated the file.
var ErrFault = errors.New("shm: the memory behind a mapping is gone")

// Guard calls f and turns a fault on mapped memory, which would end the process,
// into ErrFault. Guard does not undo what f has done until then. It covers only f's own
// goroutine.
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
