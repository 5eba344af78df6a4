// SPDX-License-Identifier: Apache-2.0

//go:build unix

package zmtp

import (
	"io"
	"syscall"

	"github.com/kvasir-kv/kvasir/internal/rawio"
)

const haveRaw = true

// onReadable runs inside RawConn.Read. It reads and handles messages until the socket is empty. It returns false to wait for more; it
// returns true to leave, with p.readErr set to the error, or nil if the peer's state must be checked.
//
// A read that does not fill the buffer has emptied the socket. A ROUTER then does not read again, which saves about 5 % of a small
// request's CPU time. A DEALER does, so that its user learns at once that the server is gone. This works only if the wait and the reads
// are in one RawConn.Read, which arms the poller once, before the first read. If the end of the stream came together with the last
// bytes, the keeper's interrupt finds it. The keeper interrupts only peers that have sent READY, so before READY another read follows
// every read.
func (p *Peer) onReadable(fd uintptr) bool {
	for {
		b := p.in.space()
		n, err := tryRead(fd, b)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			if len(b) == firstBuffer { // wait without a buffer; it is cheap to get a new one
				p.in.release()
			}
			return false
		case err != nil:
			p.readErr = err
			return true
		case n == 0:
			p.readErr = io.EOF
			return true
		}
		if p.readErr = p.received(n); p.readErr != nil || p.mustLook.Load() || p.fresh {
			return true
		}
		if n < len(b) && p.phase == traffic && p.role.own == typeRouter {
			return false
		}
	}
}

// onWritable runs inside RawConn.Write. It writes as much as the socket accepts now.
func (p *Peer) onWritable(fd uintptr) bool {
	b := &p.out
	for len(b.vec) > 0 {
		var n int
		var err error
		if len(b.vec) == 1 {
			n, err = tryWrite(fd, b.vec[0])
		} else {
			n, err = rawio.Writev(fd, b.vec, &p.vec)
		}
		p.count.writes.Add(1)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			return true
		case err != nil:
			p.writeErr = err
			return true
		}
		b.consume(n)
		p.wrote(n)
	}
	return true
}

// tryRead and tryWrite are the calls of the fast path, on a non-blocking
// descriptor.
func tryRead(fd uintptr, b []byte) (int, error)  { return rawio.Read(fd, b) }
func tryWrite(fd uintptr, b []byte) (int, error) { return rawio.Write(fd, b) }
