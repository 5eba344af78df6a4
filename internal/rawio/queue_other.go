// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package rawio

import "errors"

// ErrQueue means that a Queue cannot do a read. The ordinary system call may still work.
var ErrQueue = errors.New("rawio: the kernel queues no such read")

// Queue has no function on this system; see queue_linux.go.
type Queue struct{}

// NewQueue always fails with ErrQueue.
func NewQueue(int) (*Queue, error) { return nil, ErrQueue }

// Preadv always fails with ErrQueue.
func (*Queue) Preadv(int, [][]byte, int64) (int, error) { return 0, ErrQueue }

// Close does nothing.
func (*Queue) Close() error { return nil }
