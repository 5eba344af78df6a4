// SPDX-License-Identifier: Apache-2.0

//go:build linux

package shm_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
)

func TestMakeAligned(t *testing.T) {
	for _, n := range []int{1, 100, 4096, 5000, 1 << 20} {
		b := shm.MakeAligned(n, 4096)
		if len(b) != n || cap(b) != n || !shm.Aligned(b, 4096) {
			t.Errorf("%d bytes: %d of %d, aligned: %v", n, len(b), cap(b), shm.Aligned(b, 4096))
		}
		if n > 1 && shm.Aligned(b[1:], 4096) {
			t.Error("the second byte is aligned, too")
		}
	}
}
