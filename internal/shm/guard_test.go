// SPDX-License-Identifier: Apache-2.0

package shm_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
)

// If a segment is truncated while it is mapped, reads and writes of the missing part return an error. The rest
// can still be used.
func TestGuard(t *testing.T) {
	path := filepath.Join(t.TempDir(), "seg")
	s, err := shm.Create(path, 16*4096)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := os.Truncate(path, 4096); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 16*4096)
	mem := s.Bytes(0, s.Len())
	if err := shm.Guard(func() { copy(b, mem) }); !errors.Is(err, shm.ErrFault) {
		t.Errorf("reading: %v", err)
	}
	if err := shm.Guard(func() { copy(mem, b) }); !errors.Is(err, shm.ErrFault) {
		t.Errorf("writing: %v", err)
	}
	if err := shm.Guard(func() { copy(mem[:4096], b) }); err != nil {
		t.Errorf("what is left: %v", err)
	}
	defer func() {
		if recover() != "mine" {
			t.Error("a panic of f's own is swallowed")
		}
	}()
	_ = shm.Guard(func() { panic("mine") })
}
