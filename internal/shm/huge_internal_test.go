// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
	"unsafe"
)

// inDevShm makes a segment of n bytes where huge pages can be had without a mount option.
func inDevShm(t *testing.T, n int64) *Segment {
	t.Helper()
	path, err := Path("", fmt.Sprintf("kvasir-test-huge-%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	s, err := Create(path, n)
	if err != nil {
		t.Skip("no segment can be made here: ", err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := s.Unlink(); err != nil {
		t.Fatal(err)
	}
	return s
}

// hugeBytes returns how much of a segment's mapping is in huge pages.
func hugeBytes(t *testing.T, s *Segment) (kib int64) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Skip("no smaps: ", err)
	}
	ours := false
	begin := fmt.Sprintf("%08x-", uintptr(unsafe.Pointer(unsafe.SliceData(s.mem))))
	for line := range strings.Lines(string(b)) {
		if head, _, _ := strings.Cut(line, " "); !strings.HasSuffix(head, ":") {
			ours = strings.HasPrefix(line, begin)
		} else if ours && head == "ShmemPmdMapped:" {
			if _, err := fmt.Sscanf(line, "ShmemPmdMapped: %d kB", &kib); err != nil {
				t.Fatal(err)
			}
		}
	}
	return kib << 10
}

// Untouched memory is provided in huge pages, or in small ones if the kernel has no huge ones. It is all
// zero, and can be used to its last byte.
func TestFreshMemoryIsInHugePages(t *testing.T) {
	const all = 4*hugePage + 12345
	s := inDevShm(t, all)
	if uintptr(unsafe.Pointer(unsafe.SliceData(s.mem)))%hugePage != 0 {
		t.Errorf("the mapping begins at %p", s.mem)
	}
	if err := s.Populate(4096, all-4096, true); err != nil {
		t.Skip("memory cannot be provided here: ", err)
	}
	refused := s.huge.wait.Load() > 0
	if huge := hugeBytes(t, s); !refused && huge != 3*hugePage {
		t.Errorf("%d bytes are in huge pages, want %d", huge, 3*hugePage)
	}
	if i := bytes.IndexFunc(s.mem, func(r rune) bool { return r != 0 }); i >= 0 {
		t.Errorf("byte %d is not zero", i)
	}
	s.mem[all-1], s.mem[0] = 7, 8
	if got := s.Provided(0); got != all {
		t.Errorf("%d of %d bytes have memory", got, int64(all))
	}
}

// Pages that somebody has touched are not moved, also beside pages that Populate provides.
func TestUsedMemoryIsNotMoved(t *testing.T) {
	s := inDevShm(t, 4*hugePage)
	for i := range s.mem[3*hugePage-5 : 3*hugePage+5] {
		s.mem[3*hugePage-5+i] = byte(i + 1)
	}
	if err := s.Populate(0, 4*hugePage, true); err != nil {
		t.Skip("memory cannot be provided here: ", err)
	}
	if got := s.mem[3*hugePage-5 : 3*hugePage+5]; !bytes.Equal(got, []byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}) {
		t.Errorf("it has %v", got)
	}
	if huge := hugeBytes(t, s); huge > 0 {
		t.Errorf("%d bytes were moved to huge pages", huge)
	}
}

// After the kernel had no huge page, the package does not ask it for some time, and then asks again.
func TestHugePagesAreTriedAgain(t *testing.T) {
	s := inDevShm(t, 2*hugePage)
	s.huge.wait.Store(2)
	for want := range 2 {
		s.populateHuge(0, hugePage)
		if huge := s.Provided(0); huge != 0 || s.huge.wait.Load() != int32(1-want) {
			t.Fatalf("try %d: %d bytes are provided, %d tries are to be left out", want, huge, s.huge.wait.Load())
		}
	}
	s.populateHuge(0, hugePage)
	if s.Provided(0) == 0 {
		t.Error("it is not tried again")
	}
}
