// SPDX-License-Identifier: Apache-2.0

package vllm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Conn sends and receives frames over a tier socket. Only one goroutine may read; any goroutine may write.
type Conn struct {
	net  *net.UnixConn
	head [headerBytes]byte
	body []byte

	writing sync.Mutex
	out     []byte
}

// NewConn returns a Conn over c.
func NewConn(c *net.UnixConn) *Conn { return &Conn{net: c} }

// Close ends the connection.
func (c *Conn) Close() error { return c.net.Close() }

// Read returns the next frame. The body is valid until the next Read.
func (c *Conn) Read() (kind byte, body []byte, err error) {
	if _, err := io.ReadFull(c.net, c.head[:]); err != nil {
		return 0, nil, err
	}
	return c.rest()
}

// rest reads the body of the frame whose head was read.
func (c *Conn) rest() (kind byte, body []byte, err error) {
	n := binary.LittleEndian.Uint32(c.head[:])
	if n < 1 || n > MaxFrame {
		return 0, nil, fmt.Errorf("%w: a frame of %d bytes, 1 to %d are possible", ErrMalformed, n, MaxFrame)
	}
	c.body = grown(c.body, int(n)-1)
	_, err = io.ReadFull(c.net, c.body)
	return c.head[4], c.body, err
}

// grown returns a slice of n bytes, in b's memory if that is large enough.
func grown(b []byte, n int) []byte {
	if cap(b) < n {
		return make([]byte, n, max(n, 4096))
	}
	return b[:n]
}

// ReadFirst is Read for the first frame of a peer, which may carry a descriptor; file is nil if it does not.
func (c *Conn) ReadFirst() (kind byte, body []byte, file *os.File, err error) {
	oob := make([]byte, unix.CmsgSpace(4*4))
	n, oobn, _, _, err := c.net.ReadMsgUnix(c.head[:], oob)
	if err == nil && n == 0 {
		err = io.EOF
	}
	file = firstFile(oob[:oobn])
	if err == nil {
		_, err = io.ReadFull(c.net, c.head[n:])
	}
	if err == nil {
		kind, body, err = c.rest()
	}
	if err != nil && file != nil {
		err = errors.Join(err, file.Close())
		file = nil
	}
	return kind, body, file, err
}

// firstFile returns the first descriptor of control messages and closes all others.
func firstFile(oob []byte) (file *os.File) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue
		}
		for _, fd := range fds {
			if unix.CloseOnExec(fd); file == nil {
				file = os.NewFile(uintptr(fd), "descriptor of a peer")
			} else {
				_ = unix.Close(fd) // more than one descriptor
			}
		}
	}
	return file
}

// Connected reports whether the peer has not ended the connection.
func (c *Conn) Connected() bool {
	raw, err := c.net.SyscallConn()
	if err != nil {
		return false
	}
	fds := []unix.PollFd{{Events: pollHangup}}
	if raw.Control(func(fd uintptr) {
		fds[0].Fd = int32(fd)
		_, err = unix.Poll(fds, 0)
	}) != nil {
		return false
	}
	return err == nil && fds[0].Revents&(pollHangup|unix.POLLHUP|unix.POLLERR) == 0
}

// Write sends a frame. write must append the body.
func (c *Conn) Write(kind byte, write func(dst []byte) []byte) error {
	return c.WriteFile(kind, write, nil)
}

// WriteFile is Write with the descriptor of file, unless file is nil.
func (c *Conn) WriteFile(kind byte, write func(dst []byte) []byte, file *os.File) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.out = write(append(c.out[:0], 0, 0, 0, 0, kind))
	binary.LittleEndian.PutUint32(c.out, uint32(len(c.out)-4))
	if file == nil {
		_, err := c.net.Write(c.out)
		return err
	}
	n, _, err := c.net.WriteMsgUnix(c.out, unix.UnixRights(int(file.Fd())), nil)
	if err == nil && n < len(c.out) {
		_, err = c.net.Write(c.out[n:])
	}
	return err
}
