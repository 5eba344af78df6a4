// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"errors"
	"runtime"
	"runtime/debug"
)

// ErrFault means that mapped memory was gone when it was touched: a process
// has truncated the file.
var ErrFault = errors.New("shm: the memory behind a mapping is gone")

// Guard calls f and turns a fault on mapped memory, which would end the process,
// into ErrFault. What f had done until then stays done. It covers only f's own
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
