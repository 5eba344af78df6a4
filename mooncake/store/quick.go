// SPDX-License-Identifier: Apache-2.0

package store

import (
	"io"
	"net"
	"syscall"

	"github.com/kvasir-kv/kvasir/internal/rawio"
)

// quickBytes is the size of the first read of an answer. The answer of BatchExistKey for 512 keys has 1,048 bytes.
const quickBytes = 4 << 10

// quick makes a call with system calls that bypass the Go scheduler (package rawio). It reads the header of a short answer together
// with its body.
type quick struct {
	raw  syscall.RawConn
	step func(fd uintptr) bool
	out  []byte // the request of a call in progress
	sent int
	got  int
	err  error
	in   [quickBytes]byte
}

// newQuick returns a quick for the connection c, or nil if c gives no access to its file descriptor.
func newQuick(c net.Conn) *quick {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	q := &quick{raw: raw}
	q.step = q.next
	return q
}

// exchange writes b and reads the first bytes of the answer. If the socket does not take all of b, exchange returns how many bytes it
// took, and nothing of the answer.
func (q *quick) exchange(b []byte) (written int, come []byte, err error) {
	q.out, q.sent, q.got, q.err = b, 0, 0, nil
	// Read arms the poller before the request is written, so the answer cannot come unnoticed.
	err = q.raw.Read(q.step)
	q.out = nil
	if err == nil {
		err = q.err
	}
	return q.sent, q.in[:q.got], err
}

// next writes the request at its first call, and then reads the answer if it has come. It returns true when the exchange is over;
// otherwise the poller calls it again when there is something to read.
func (q *quick) next(fd uintptr) bool {
	for q.sent == 0 {
		n, err := rawio.Write(fd, q.out)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			return true
		case err != nil:
			q.err = err
			return true
		}
		q.sent = n
	}
	if q.sent < len(q.out) {
		return true
	}
	for {
		n, err := rawio.Read(fd, q.in[:])
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			return false
		case err != nil:
			q.err = err
		case n == 0:
			q.err = io.EOF
		}
		q.got = max(n, 0)
		return true
	}
}
