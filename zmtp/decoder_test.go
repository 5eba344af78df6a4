// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvasir-kv/kvasir/internal/invariant"
)

func testDecoder() *decoder {
	return &decoder{maxFrame: 1 << 20, maxMessage: 1 << 21, maxFrames: 8}
}

// decodeAll feeds stream, a greeting and frames, in pieces of the given sizes
// (the last repeats) and describes what comes out.
func decodeAll(stream []byte, pieces []int, d *decoder) (got []string, err error) {
	greeted, at := false, 0
	for i := 0; at < len(stream); i++ {
		space := d.space()
		n := min(max(1, pieces[min(i, len(pieces)-1)]), len(stream)-at, len(space))
		copy(space, stream[at:at+n])
		at += n
		d.wrote(n)
		if len(d.buf) > max(firstBuffer, 4*at) {
			return got, fmt.Errorf("BUG: a buffer of %d bytes for %d", len(d.buf), at)
		}
		if !greeted {
			_, ok, err := d.greeting()
			if err != nil {
				return got, err
			}
			if greeted = ok; !ok {
				continue
			}
		}
		for {
			ev, err := d.next()
			if err != nil {
				return got, err
			}
			if ev == evMore {
				break
			}
			if ev == evCommand {
				name, _, err := splitCommand(d.cmd)
				if err != nil {
					return got, err
				}
				got = append(got, "cmd "+string(name))
				continue
			}
			got = append(got, "msg |"+string(bytes.Join(d.msg, []byte("|"))))
			d.done()
		}
	}
	return got, nil
}

func TestDecodeLimits(t *testing.T) {
	header := func(flags byte, n uint64) []byte {
		return binary.BigEndian.AppendUint64([]byte{flags | flagLong}, n)
	}
	small := []byte{flagMore, 1, 'x'}
	f := func(stream []byte, want error) {
		t.Helper()
		d := testDecoder()
		_, err := decodeAll(append(appendGreeting(nil), stream...), []int{64, 3}, d)
		if !errors.Is(err, want) {
			t.Fatalf("got %v, want %v", err, want)
		}
		if len(d.buf) > firstBuffer {
			t.Fatalf("%d bytes taken for a claim", len(d.buf))
		}
	}
	f(header(0, 1<<20), nil) // allowed, and no memory yet
	f(header(0, 1<<20+1), errTooLarge)
	f(header(0, 1<<63), errTooLarge)
	f(header(0, 1<<64-1), errTooLarge)
	f(header(flagCommand, maxCommandBytes+1), errTooLarge)
	f(bytes.Repeat(small, 8), nil)
	f(bytes.Repeat(small, 9), errTooLarge)
	f([]byte{0x08, 0}, errProtocol)
	f([]byte{0x08}, errProtocol)
	f([]byte{flagCommand | flagMore, 0}, errProtocol)
	f([]byte{flagCommand, 0}, errProtocol)

	d := &decoder{maxFrame: 100, maxMessage: 150, maxFrames: 8}
	part := append([]byte{flagMore, 100}, make([]byte, 100)...)
	last := append([]byte{0, 51}, make([]byte, 51)...)
	if _, err := decodeAll(slices.Concat(appendGreeting(nil), part, last), []int{1000}, d); !errors.Is(err, errTooLarge) {
		t.Fatal(err)
	}
	// The first frame of a message has a bound of its own, at its header.
	for size, want := range map[byte]error{5: nil, 6: errTooLarge} {
		d = &decoder{maxFrame: 100, maxMessage: 150, maxFrames: 8, maxFirst: 5}
		stream := slices.Concat(appendGreeting(nil), append([]byte{flagMore, size}, make([]byte, 5)...), part[1:1])
		if size == 5 {
			stream = append(stream, last...)
		}
		if _, err := decodeAll(stream, []int{1000}, d); !errors.Is(err, want) {
			t.Errorf("a first frame of %d bytes: %v, want %v", size, err, want)
		}
	}
	// Commands between the frames of a message fill its buffer: they count.
	d = &decoder{maxFrame: 100, maxMessage: 150, maxFrames: 8}
	flood := slices.Concat(appendGreeting(nil), small, bytes.Repeat(appendPing(nil, 0, nil), 30))
	if _, err := decodeAll(flood, []int{1000}, d); !errors.Is(err, errTooLarge) {
		t.Fatal(err)
	}
}

// The decoder returns the messages that the queue got, wherever the stream is split,
// also with commands between the frames.
func TestDecodeProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var q queue
		var want []string
		stream := appendGreeting(nil)
		for range rapid.IntRange(0, 6).Draw(t, "messages") {
			var m [][]byte
			for range rapid.IntRange(1, 4).Draw(t, "frames") {
				size := rapid.OneOf(rapid.IntRange(0, 4), rapid.IntRange(250, 260), rapid.IntRange(8000, 60000)).Draw(t, "size")
				m = append(m, bytes.Repeat([]byte{byte('a' + size%26)}, size))
			}
			want = append(want, "msg |"+string(bytes.Join(m, []byte("|"))))
			before := len(q.buf)
			if rapid.Bool().Draw(t, "owned") {
				q = queue{}
				before = 0
				q.ownFrames(m)
				var b batch
				q.take(&b)
				stream = append(stream, bytes.Join(b.vec, nil)...)
			} else {
				q.copyFrames(m)
				stream = append(stream, q.buf[before:]...)
			}
			if rapid.Bool().Draw(t, "ping") {
				stream = appendPing(stream, 1, nil)
				want = append(want, "cmd PING")
			}
		}
		pieces := rapid.SliceOfN(rapid.IntRange(1, 40000), 1, 8).Draw(t, "pieces")
		got, err := decodeAll(stream, pieces, testDecoder())
		if err != nil || !slices.Equal(got, want) {
			t.Fatalf("%v: got %d events, want %d", err, len(got), len(want))
		}
	})
}

// A decoder continues in the same place when its buffer moves and grows, and releases
// the buffer only when it is empty.
func TestDecodeRelease(t *testing.T) {
	d := testDecoder()
	copy(d.space(), []byte{0, 5, 'h', 'e'})
	d.wrote(4)
	d.release()
	if ev, err := d.next(); ev != evMore || err != nil || d.buf == nil {
		t.Fatal("a partial message was released", ev, err)
	}
	copy(d.space(), "llo")
	d.wrote(3)
	if ev, err := d.next(); ev != evMessage || err != nil || string(d.msg[0]) != "hello" {
		t.Fatal(ev, err)
	}
	d.done()
	d.release()
	if d.buf != nil {
		t.Fatal("an empty buffer was kept")
	}
}

func TestMangle(t *testing.T) {
	d := testDecoder()
	copy(d.space(), "\x00\x02hi")
	d.wrote(4)
	if ev, _ := d.next(); ev != evMessage {
		t.Fatal(ev)
	}
	lent := d.msg[0]
	d.done()
	if want := map[bool]string{true: "\xff\xff", false: "hi"}[invariant.Enabled]; string(lent) != want {
		t.Fatalf("after done %q, want %q", lent, want)
	}
}

func FuzzDecode(f *testing.F) {
	for _, s := range decodeSeeds() {
		f.Add(s, uint16(1), uint16(13))
	}
	f.Fuzz(func(t *testing.T, stream []byte, a, b uint16) {
		whole, wholeErr := decodeAll(stream, []int{len(stream)}, testDecoder())
		split, splitErr := decodeAll(stream, []int{int(a), int(b)}, testDecoder())
		if !slices.Equal(whole, split) || (wholeErr == nil) != (splitErr == nil) {
			t.Fatalf("whole: %d events, %v; split: %d events, %v", len(whole), wholeErr, len(split), splitErr)
		}
	})
}

func decodeSeeds() [][]byte {
	hello := appendReady(appendGreeting(nil), typeDealer, []byte("id"))
	var q queue
	q.copyFrames([][]byte{[]byte("a"), nil, bytes.Repeat([]byte("b"), 300)})
	return [][]byte{
		hello,
		appendPing(slices.Concat(hello, q.buf), 3, nil),
		slices.Concat(hello, []byte{flagMore, 1, 'x'}, appendPong(nil, []byte("ctx")), []byte{0, 0}),
		slices.Concat(hello, []byte{flagLong, 0, 0, 0, 0, 0, 16, 0, 0, 1}),
		[]byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
		appendError(appendGreeting(nil), "no"),
	}
}

func FuzzReady(f *testing.F) {
	f.Add(appendProperty(appendProperty(nil, "Socket-Type", []byte("DEALER")), "Identity", []byte("x")))
	f.Add([]byte("\x0bSocket-Type\xff\xff\xff\xffDEALER"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := parseReady(b)
		if err != nil {
			return
		}
		if len(r.identity) > maxIdentity || len(r.socketType) > len(b) {
			t.Fatalf("%+v", r)
		}
		back := appendProperty(appendProperty(nil, "Socket-Type", []byte(r.socketType)), "Identity", []byte(r.identity))
		if again, err := parseReady(back); err != nil || again != r {
			t.Fatalf("%+v, %v; want %+v", again, err, r)
		}
	})
}
