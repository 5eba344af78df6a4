// SPDX-License-Identifier: Apache-2.0

//go:build linux

package rawio

import (
	"errors"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Queue reads files that are open for direct I/O with Linux AIO, so that no thread waits in the kernel. A waiting thread costs the Go
// scheduler more than the read of a chunk: the scheduler's monitor looks every 20 µs, and wakes another thread in its place. Its
// methods are safe for concurrent use, except Close, which must be the last call.
type Queue struct {
	ctx   uintptr  // aio_context_t
	ready *os.File // an eventfd that signals ended reads, on which the runtime's poller waits
	reads []read
	free  chan int // indices of the free elements of reads
	ended chan struct{}
}

// read is the state of one read. The kernel keeps pointers to it while the read runs.
type read struct {
	cb   iocb
	ref  *iocb
	bufs [][]byte // keeps the memory alive
	vec  []unix.Iovec
	done chan int64
}

// iocb is the kernel's struct of that name.
type iocb struct {
	data    uint64
	_       [2]uint32 // key, and flags of the read
	opcode  uint16
	_       int16 // priority
	fd      uint32
	buf, n  uint64
	off     int64
	_       uint64
	flags   uint32
	eventfd uint32
}

// event is the kernel's io_event.
type event struct {
	data, _ uint64 // data of the iocb, and its address
	res, _  int64
}

const (
	preadv    = 7 // IOCB_CMD_PREADV
	toEventfd = 1 // IOCB_FLAG_RESFD
)

// NewQueue returns a Queue for at most `most` concurrent reads. It fails if the kernel has no AIO (ENOSYS), forbids it (EPERM), or has
// no request left of fs.aio-max-nr (EAGAIN).
func NewQueue(most int) (*Queue, error) {
	q := &Queue{ended: make(chan struct{})}
	if _, _, errno := syscall.Syscall(unix.SYS_IO_SETUP, uintptr(most), uintptr(unsafe.Pointer(&q.ctx)), 0); errno != 0 {
		return nil, os.NewSyscallError("io_setup", errno)
	}
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return nil, errors.Join(os.NewSyscallError("eventfd", err), q.destroy())
	}
	q.reads, q.free = make([]read, most), make(chan int, most)
	q.ready = os.NewFile(uintptr(fd), "eventfd")
	for i := range q.reads {
		r := &q.reads[i]
		r.ref, r.done = &r.cb, make(chan int64, 1)
		r.cb = iocb{data: uint64(i), opcode: preadv, flags: toEventfd, eventfd: uint32(fd)}
		q.free <- i
	}
	go q.collect()
	return q, nil
}

// collect wakes the callers whose reads have ended, until Close.
func (q *Queue) collect() {
	defer close(q.ended)
	var count [8]byte
	events := make([]event, 32)
	for {
		if _, err := q.ready.Read(count[:]); err != nil {
			return
		}
		for n := len(events); n == len(events); {
			var now unix.Timespec // so that the call does not wait
			got, _, errno := syscall.RawSyscall6(unix.SYS_IO_GETEVENTS, q.ctx, 0, uintptr(len(events)), uintptr(unsafe.Pointer(&events[0])), uintptr(unsafe.Pointer(&now)), 0)
			if errno == unix.EINTR {
				continue
			}
			if n = int(got); errno != 0 {
				panic("BUG: rawio: io_getevents: " + errno.Error())
			}
			for _, e := range events[:n] {
				q.reads[e.data].done <- e.res
			}
		}
	}
}

// Preadv fills bufs, at most 1,024 buffers and none empty, from offset off of the file fd. It returns how many bytes it has read, and
// the errors of preadv(2). It waits for a free place in the Queue, then for the disk. ErrQueue means that the file cannot be read in
// this way.
func (q *Queue) Preadv(fd int, bufs [][]byte, off int64) (int, error) {
	i := <-q.free
	r := &q.reads[i]
	r.bufs, r.vec = bufs, r.vec[:0]
	for _, b := range bufs {
		v := unix.Iovec{Base: &b[0]}
		v.SetLen(len(b))
		r.vec = append(r.vec, v)
	}
	r.cb.fd, r.cb.off, r.cb.n, r.cb.buf = uint32(fd), off, uint64(len(r.vec)), uint64(uintptr(unsafe.Pointer(&r.vec[0])))
	_, _, errno := syscall.Syscall(unix.SYS_IO_SUBMIT, q.ctx, 1, uintptr(unsafe.Pointer(&r.ref)))
	res := int64(-1)
	if errno == 0 {
		res = <-r.done
	}
	r.bufs = nil
	clear(r.vec)
	q.free <- i
	switch {
	case errno != 0:
		return 0, ErrQueue
	case res < 0:
		return 0, syscall.Errno(-res)
	}
	return int(res), nil
}

// ErrQueue means that a Queue cannot do a read. The ordinary system call may still work.
var ErrQueue = errors.New("rawio: the kernel queues no such read")

// Close waits until the running reads have ended, and frees the Queue.
func (q *Queue) Close() error {
	for range q.reads {
		<-q.free
	}
	err := q.ready.Close()
	<-q.ended
	return errors.Join(err, q.destroy())
}

func (q *Queue) destroy() error {
	if _, _, errno := syscall.Syscall(unix.SYS_IO_DESTROY, q.ctx, 0, 0); errno != 0 {
		return os.NewSyscallError("io_destroy", errno)
	}
	return nil
}
