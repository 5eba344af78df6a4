// SPDX-License-Identifier: Apache-2.0

//go:build linux

package rawio_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"unsafe"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/rawio"
)

const page = 4096

// aligned returns memory for direct I/O.
func aligned(n int) []byte {
	b := make([]byte, n+page)
	at := -int(uintptr(unsafe.Pointer(&b[0]))) & (page - 1)
	return b[at:][:n:n]
}

// directFile makes a file of random bytes, and opens it for direct I/O if its file system can.
func directFile(t *testing.T, n int) (fd int, content []byte) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	content = make([]byte, n)
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(content) // never fails
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.EINVAL) {
		t.Log("no direct I/O here: the reads pass through the page cache")
		fd, err = unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd, content
}

func newQueue(t *testing.T, most int) *rawio.Queue {
	t.Helper()
	q, err := rawio.NewQueue(most)
	if err != nil {
		t.Skip("this kernel queues no reads: ", err)
	}
	return q
}

// More readers than a Queue has places get the bytes of the file, each into its own memory, in one piece or several.
func TestQueue(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	const all, readers = 4 << 20, 24
	fd, content := directFile(t, all)
	q := newQueue(t, 5)
	var wg sync.WaitGroup
	for i := range readers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 1))
			dst := aligned(256 << 10)
			for range 40 {
				n := page * (1 + r.IntN(len(dst)/page))
				off := page * r.IntN((all-n)/page+1)
				bufs := [][]byte{dst[:n]}
				if cut := page * r.IntN(n/page); cut > 0 {
					bufs = [][]byte{dst[:cut], dst[cut:n]}
				}
				clear(dst)
				if got, err := q.Preadv(fd, bufs, int64(off)); err != nil || got != n || !bytes.Equal(dst[:n], content[off:off+n]) {
					t.Errorf("%d bytes at %d: %d, %v, equal bytes: %v", n, off, got, err, bytes.Equal(dst[:n], content[off:off+n]))
				}
			}
		})
	}
	wg.Wait()
	if err := q.Close(); err != nil {
		t.Error(err)
	}
}

// Ends and errors are those of preadv: a file that ends early, memory that is not there. For a descriptor without a file the Queue
// returns ErrQueue, so that the caller uses the ordinary call, and the Queue goes on.
func TestQueueErrors(t *testing.T) {
	fd, content := directFile(t, 3*page)
	q := newQueue(t, 1)
	defer func() {
		if err := q.Close(); err != nil {
			t.Error(err)
		}
	}()
	dst := aligned(4 * page)
	if n, err := q.Preadv(fd, [][]byte{dst}, page); err != nil || n != 2*page || !bytes.Equal(dst[:n], content[page:]) {
		t.Errorf("beyond the end: %d, %v", n, err)
	}
	if n, err := q.Preadv(fd, [][]byte{dst}, 3*page); err != nil || n != 0 {
		t.Errorf("behind the end: %d, %v", n, err)
	}
	gone, err := unix.Mmap(-1, 0, page, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(gone)
	if n, err := q.Preadv(fd, [][]byte{gone}, 0); !errors.Is(err, unix.EFAULT) {
		t.Errorf("into memory that is not there: %d, %v", n, err)
	}
	if n, err := q.Preadv(1<<20, [][]byte{dst}, 0); !errors.Is(err, rawio.ErrQueue) {
		t.Errorf("of no file: %d, %v", n, err)
	}
	if n, err := q.Preadv(fd, [][]byte{dst[:page]}, 0); err != nil || n != page || !bytes.Equal(dst[:page], content[:page]) {
		t.Errorf("afterwards: %d, %v", n, err)
	}
}

// A Queue that cannot be made is an error, and leaves nothing behind.
func TestNoQueue(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	if _, err := rawio.NewQueue(1 << 30); err == nil {
		t.Error("a queue of a thousand million reads")
	}
}
