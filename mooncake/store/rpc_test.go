// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	sp "github.com/kvasir-kv/kvasir/mooncake/store/structpack"
)

// calls returns a function that makes one call over a connection made by dial. The peer reads the request, and writes
// what answer returns for its sequence number, in pieces of so many bytes.
func calls(t *testing.T, dial func() (ours, theirs net.Conn)) func(request, pieces int, answer func(seq uint32) []byte) ([]byte, error) {
	ours, theirs := dial()
	c := &conn{c: ours, quick: newQuick(ours)}
	t.Cleanup(func() { ours.Close(); theirs.Close() })
	return func(request, pieces int, answer func(seq uint32) []byte) ([]byte, error) {
		w := c.begin(batchExist, sp.Form{}, 0)
		w.B = append(w.B, make([]byte, request)...)
		done := make(chan struct{})
		go func() {
			defer close(done)
			got := make([]byte, requestHeader+request)
			if _, err := io.ReadFull(theirs, got); err != nil {
				return
			}
			for b := range slices.Chunk(answer(binary.LittleEndian.Uint32(got[4:])), pieces) {
				if _, err := theirs.Write(b); err != nil {
					return
				}
				if pieces < 100 {
					time.Sleep(time.Microsecond)
				}
			}
		}()
		b, err := c.call(t.Context(), batchExist, time.Minute)
		if err != nil {
			ours.Close()
		}
		<-done
		return b, err
	}
}

func frame(seq uint32, body, attachment []byte) []byte {
	b := make([]byte, responseHeader)
	b[0] = magic
	binary.LittleEndian.PutUint32(b[4:], seq)
	binary.LittleEndian.PutUint32(b[8:], uint32(len(body)))
	binary.LittleEndian.PutUint32(b[12:], uint32(len(attachment)))
	return slices.Concat(b, body, attachment)
}

func tcp(t *testing.T) func() (net.Conn, net.Conn) {
	return func() (net.Conn, net.Conn) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		ours, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		return ours, theirs
	}
}

// Requests that the socket does not take at once, answers of any length in any pieces, and what is attached to them: with
// the quick calls as over a connection that has none.
func TestAnswersInPieces(t *testing.T) {
	for name, dial := range map[string]func() (net.Conn, net.Conn){"tcp": tcp(t), "pipe": net.Pipe} {
		t.Run(name, func(t *testing.T) {
			call := calls(t, dial)
			for _, n := range []int{0, 1, 15, 3000, 4 << 10, 5000, 100_000} {
				for _, attached := range []int{0, 7, 5000} {
					for _, pieces := range []int{1, 16, 17, 1 << 20} {
						if n+attached > 100*pieces {
							continue
						}
						body := bytes.Repeat([]byte{byte(n), 3}, n)[:n]
						got, err := call(n*30, pieces, func(seq uint32) []byte { return frame(seq, body, make([]byte, attached)) })
						if err != nil || !bytes.Equal(got, body) {
							t.Fatal(n, attached, pieces, len(got), err)
						}
					}
				}
			}
		})
	}
}

// What follows an answer, belongs to another question, or ends early is no answer.
func TestInvalidAnswersAreRefused(t *testing.T) {
	for name, answer := range map[string]func(seq uint32) []byte{
		"more":     func(seq uint32) []byte { return append(frame(seq, []byte("abc"), nil), 1) },
		"another":  func(seq uint32) []byte { return frame(seq+1, []byte("abc"), nil) },
		"too long": func(seq uint32) []byte { b := frame(seq, nil, nil); b[11] = 0x7f; return b },
		"http":     func(uint32) []byte { return []byte("HTTP/1.1 400 Bad Request\r\n\r\n") },
	} {
		t.Run(name, func(t *testing.T) {
			if b, err := calls(t, tcp(t))(10, 1<<20, answer); !errors.Is(err, errProtocol) {
				t.Error(b, err)
			}
		})
	}
	ours, theirs := tcp(t)()
	defer ours.Close()
	theirs.Close()
	c := &conn{c: ours, quick: newQuick(ours)}
	c.begin(batchExist, sp.Form{}, 0)
	if b, err := c.call(t.Context(), batchExist, time.Minute); err == nil {
		t.Error(b)
	}
}

// A quick call over a connection that the peer has closed is an error at once.
func TestQuickCallOverAClosedConnectionFails(t *testing.T) {
	ours, theirs := tcp(t)()
	defer ours.Close()
	theirs.Close()
	if _, come, err := newQuick(ours).exchange([]byte("request")); err == nil || len(come) > 0 {
		t.Errorf("%q, %v", come, err)
	}
}

// A call ends with its time, and with its context, however often the connection was used before.
func TestCallsEndInTime(t *testing.T) {
	call := calls(t, tcp(t))
	for range 3 {
		if _, err := call(1, 1<<20, func(seq uint32) []byte { return frame(seq, nil, nil) }); err != nil {
			t.Fatal(err)
		}
	}
	ours, theirs := tcp(t)()
	defer ours.Close()
	defer theirs.Close()
	c := &conn{c: ours, quick: newQuick(ours)}
	for _, timeout := range []time.Duration{time.Minute, 20 * time.Millisecond} {
		go func() {
			if timeout == time.Minute {
				b := make([]byte, requestHeader)
				if _, err := io.ReadFull(theirs, b); err == nil {
					_, _ = theirs.Write(frame(binary.LittleEndian.Uint32(b[4:]), nil, nil))
				}
			}
		}()
		c.begin(batchExist, sp.Form{}, 0)
		begin := time.Now()
		_, err := c.call(t.Context(), batchExist, timeout)
		if took := time.Since(begin); took > 30*time.Second { // the end of the first call's minute
			t.Errorf("a call of %v took %v", timeout, took)
		}
		if late, timed := errors.AsType[net.Error](err); (timeout == time.Minute) != (err == nil) || err != nil && (!timed || !late.Timeout()) {
			t.Fatal(timeout, err)
		}
	}
}
