// SPDX-License-Identifier: Apache-2.0

//go:build linux

package shm

import (
	"errors"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// hugePage is the length of a huge page, in bytes, on systems with pages of 4 KiB.
const hugePage = 2 << 20

// huge says when to try again to get a segment's memory as huge pages. Direct I/O into huge pages costs half the processor time, and the
// kernel provides them faster.
type huge struct {
	wait atomic.Int32 // calls until the next try
}

// hugePause is how many calls of populateHuge do nothing after the kernel had no huge pages, because its search for them takes long then.
const hugePause = 16

// mapAligned maps n bytes of a file at an address that is a multiple of hugePage; otherwise the mapping could not have huge pages.
func mapAligned(fd, n int) ([]byte, error) {
	const access, plain = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_NORESERVE
	if n < hugePage {
		p, err := unix.MmapPtr(fd, 0, nil, uintptr(n), access, unix.MAP_SHARED)
		return sliceOf(p, n, err)
	}
	room, err := unix.MmapPtr(-1, 0, nil, uintptr(n)+hugePage, unix.PROT_NONE, plain)
	if err != nil {
		return nil, err
	}
	before := -uintptr(room) % hugePage
	p, err := unix.MmapPtr(fd, 0, unsafe.Add(room, before), uintptr(n), access, unix.MAP_SHARED|unix.MAP_FIXED)
	if err != nil {
		return nil, errors.Join(err, unix.MunmapPtr(room, uintptr(n)+hugePage))
	}
	end := (before + uintptr(n) + uintptr(unix.Getpagesize()) - 1) &^ (uintptr(unix.Getpagesize()) - 1)
	if before > 0 {
		err = unix.MunmapPtr(room, before)
	}
	if end < uintptr(n)+hugePage {
		err = errors.Join(err, unix.MunmapPtr(unsafe.Add(room, end), uintptr(n)+hugePage-end))
	}
	return sliceOf(p, n, err)
}

func sliceOf(p unsafe.Pointer, n int, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(p), n), nil
}

func unmap(mem []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(mem)), uintptr(len(mem)))
}

// populateHuge asks for huge pages in the aligned part of the n bytes at off, if that part is untouched, because pages in use must not
// be moved. If there are no free huge pages, the memory gets small ones.
func (s *Segment) populateHuge(off, n int64) {
	from, to := (off+hugePage-1)&^(hugePage-1), (off+n)&^(hugePage-1)
	if from >= to || s.huge.wait.Add(-1) >= 0 {
		return
	}
	s.huge.wait.Store(0)
	data, err := unix.Seek(int(s.file.Fd()), from, unix.SEEK_DATA)
	if err == nil && data < to || err != nil && !errors.Is(err, unix.ENXIO) { // the part was touched; ENXIO means that it has no data
		return
	}
	for at := from; at < to; at += hugePage { // MADV_COLLAPSE needs at least one page in each huge page
		if unix.Madvise(s.Bytes(at, int64(unix.Getpagesize())), unix.MADV_POPULATE_WRITE) != nil {
			return
		}
	}
	if unix.Madvise(s.Bytes(from, to-from), unix.MADV_COLLAPSE) != nil { // the kernel is older than Linux 6.1, huge pages are off, or none is free now
		s.huge.wait.Store(hugePause)
	}
}
