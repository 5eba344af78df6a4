// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package rawio

import "errors"

// ErrQueue means that a Queue does not take a read: the ordinary call may do it.
var ErrQueue = errors.New("rawio: the kernel queues no such read")

// Queue is for Linux; here there is none.
type Queue struct{}

// NewQueue fails.
func NewQueue(int) (*Queue, error) { return nil, ErrQueue }

// Preadv fails.
func (*Queue) Preadv(int, [][]byte, int64) (int, error) { return 0, ErrQueue }

// Close does nothing.
func (*Queue) Close() error { return nil }
