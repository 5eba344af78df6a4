// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// strangersAtATime is how many strangers one fault sends to each port.
const strangersAtATime = 12

// visit has n strangers connect to every port of a part; each cuts its connection at another moment of its protocol.
func (s *soak) visit(ctx context.Context, p *part, n int) error {
	pid := p.pid()
	if pid == 0 {
		return errDown
	}
	ports, err := listeners(pid)
	if err != nil {
		return err
	}
	if len(ports) == 0 {
		return fmt.Errorf("%s listens nowhere", p.name)
	}
	rnd := rand.New(rand.NewPCG(s.schedule.Seed, uint64(len(p.name))))
	return inHost(p.host, func() error {
		for range n {
			for _, at := range ports {
				if ctx.Err() != nil {
					return nil
				}
				intrude(at, rnd)
			}
		}
		return nil
	})
}

// openings are what strangers send before they leave. A part of one is sent, too.
var openings = [][]byte{
	nil,
	zmtpOpening(),
	[]byte("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{\"model\":"),
	[]byte("GET /health HTTP/1.1\r\nHost: x\r\n\r\n"),
	bytes.Repeat([]byte{0xff, 0, 1, 0x7f}, 64),
}

// zmtpOpening is the greeting of a ZeroMQ peer without security, and its handshake as a DEALER.
func zmtpOpening() []byte {
	greeting := make([]byte, 64)
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:], "NULL")
	ready := append([]byte("\x05READY\x0bSocket-Type"), 0, 0, 0, 6)
	ready = append(ready, "DEALER"...)
	return append(append(greeting, 4, byte(len(ready))), ready...)
}

// intrude opens one connection, sends the whole of an opening or its beginning, and resets the connection. A part may refuse
// or close it.
func intrude(at netip.AddrPort, rnd *rand.Rand) {
	c, err := net.DialTimeout("tcp", at.String(), time.Second)
	if err != nil {
		return
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(200 * time.Millisecond))
	text := openings[rnd.IntN(len(openings))]
	if rnd.IntN(2) == 0 && len(text) > 0 {
		text = text[:rnd.IntN(len(text))]
	}
	if _, err := c.Write(text); err == nil && len(text) > 0 && rnd.IntN(2) == 0 {
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		_, _ = c.Read(make([]byte, 256)) // the peer has begun to serve it
	}
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0) // a reset
	}
}

// inHost calls f on a thread of a host's network. f must not hand its connections to other goroutines before they are there.
func inHost(host string, f func() error) error {
	if host == "" {
		return f()
	}
	ended := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		ns, err := os.Open("/run/netns/" + host)
		if err != nil {
			ended <- err
			return
		}
		defer ns.Close()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			ended <- fmt.Errorf("enter the network of %s: %w", host, err)
			return
		}
		ended <- f()
	}()
	return <-ended
}

// listeners returns where a process listens for TCP over IPv4.
func listeners(pid int) ([]netip.AddrPort, error) {
	dir := fmt.Sprintf("/proc/%d", pid)
	entries, err := os.ReadDir(dir + "/fd")
	if err != nil {
		return nil, err
	}
	own := map[string]bool{}
	for _, e := range entries {
		to, _ := os.Readlink(filepath.Join(dir, "fd", e.Name())) // it may have been closed
		if inode, ok := strings.CutPrefix(to, "socket:["); ok {
			own[strings.TrimSuffix(inode, "]")] = true
		}
	}
	text, err := os.ReadFile(dir + "/net/tcp")
	if err != nil {
		return nil, err
	}
	return listening(string(text), own)
}

// listening reads the sockets that listen from /proc/PID/net/tcp, those whose inodes are in own.
func listening(text string, own map[string]bool) (out []netip.AddrPort, err error) {
	const listens = "0A"
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		if len(words) < 10 || words[3] != listens || !own[words[9]] {
			continue
		}
		at, port, _ := strings.Cut(words[1], ":")
		b, err1 := hex.DecodeString(at)
		n, err2 := strconv.ParseUint(port, 16, 16)
		if err := errors.Join(err1, err2); err != nil || len(b) != 4 {
			return nil, fmt.Errorf("a line of /proc/PID/net/tcp is %q", line)
		}
		addr := netip.AddrFrom4([4]byte(binary.NativeEndian.AppendUint32(nil, binary.BigEndian.Uint32(b))))
		if addr.IsUnspecified() {
			addr = netip.AddrFrom4([4]byte{127, 0, 0, 1})
		}
		out = append(out, netip.AddrPortFrom(addr, uint16(n)))
	}
	return out, nil
}
