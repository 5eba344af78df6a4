// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/kvasir-kv/kvasir/internal/invariant"
)

const (
	firstBuffer = 16 << 10 // size of a peer's first receive buffer
	minRead     = 4 << 10  // space makes room when less than this is left
	keepBuffer  = 1 << 20  // a receive buffer above this size is dropped ...
	keepReads   = 64       // after this many reads in a row that need at most a quarter of it
)

// firstBuffers holds first buffers for reuse. An idle peer has no buffer.
var firstBuffers = sync.Pool{New: func() any { return new([firstBuffer]byte) }}

type event byte

const (
	evMore    event = iota // more bytes are needed
	evMessage              // a whole message is in decoder.msg
	evCommand              // the body of a command is in decoder.cmd
)

type span struct{ off, size int } // off counts from decoder.start

// decoder cuts a byte stream into messages and commands. It does no I/O: the caller reads into space(), reports the bytes with wrote,
// and calls next until next returns evMore. The results of next point into buf; they are valid until the next space().
//
//	buf:  ....[start: message being received ... pos)[next frame ... end)....
type decoder struct {
	maxFrame, maxMessage int64
	maxFrames            int
	maxFirst             int64       // limit of the first frame of a message; 0: maxFrame
	large                int64       // limit of a frame for which `allow` is not asked
	allow                func() bool // asked before a frame of more than `large` bytes; nil allows all

	buf             []byte
	start, pos, end int
	roomy           int    // reads in a row for which a far smaller buffer would have sufficed
	missing         int    // bytes that the frame at pos still needs; 0 = unknown
	spans           []span // frames of the message being received
	size            int64  // bytes of these frames, and of commands between them
	msg             Message
	cmd             []byte
}

// space returns the part of buf to read into; it is never empty. The buffer grows to at most four times what the peer has sent of the
// current message, so a length that the peer only claims takes no memory.
func (d *decoder) space() []byte {
	if d.buf == nil {
		d.buf = firstBuffers.Get().(*[firstBuffer]byte)[:]
	}
	if d.start == d.end {
		d.shrink()
		d.start, d.pos, d.end = 0, 0, 0
	}
	want := max(d.missing, minRead)
	if len(d.buf)-d.end >= want {
		return d.buf[d.end:]
	}
	held := d.end - d.start
	switch {
	case d.start > 0 && (len(d.buf)-held >= want || d.end == len(d.buf)):
		copy(d.buf, d.buf[d.start:d.end])
	case d.end == len(d.buf) || d.missing > 0 && 2*held >= len(d.buf):
		next := make([]byte, 2*len(d.buf))
		copy(next, d.buf[d.start:d.end])
		d.drop()
		d.buf = next
	default:
		return d.buf[d.end:]
	}
	d.pos, d.end, d.start = d.pos-d.start, held, 0
	return d.buf[d.end:]
}

// shrink drops an empty buffer that one large message has made large, once small messages follow. A busy peer is never silent for long
// enough for release.
func (d *decoder) shrink() {
	if len(d.buf) <= keepBuffer || d.end > len(d.buf)/4 {
		d.roomy = 0
		return
	}
	if d.roomy++; d.roomy == keepReads {
		d.drop()
		d.buf = firstBuffers.Get().(*[firstBuffer]byte)[:]
		d.roomy = 0
	}
}

func (d *decoder) wrote(n int) { d.end += n }

// release gives the buffer back if it holds no bytes.
func (d *decoder) release() {
	if d.start == d.end && d.buf != nil {
		d.start, d.pos, d.end = 0, 0, 0
		d.drop()
	}
}

func (d *decoder) drop() {
	if len(d.buf) == firstBuffer {
		firstBuffers.Put((*[firstBuffer]byte)(d.buf))
	}
	clear(d.msg[:cap(d.msg)]) // otherwise the last message would keep the buffer in memory
	d.buf, d.msg, d.cmd = nil, d.msg[:0], nil
}

// greeting consumes the peer's greeting. ok is false until the whole greeting has come.
func (d *decoder) greeting() (minor byte, ok bool, err error) {
	b := d.buf[d.start:d.end]
	minor, err = checkGreeting(b[:min(len(b), greetingBytes)], mechanismNull)
	if err != nil || len(b) < greetingBytes {
		return 0, false, err
	}
	d.start += greetingBytes
	d.pos = d.start
	return minor, true, nil
}

// next returns the next event. After evMessage the caller must call done when it no longer needs the message.
func (d *decoder) next() (event, error) {
	for {
		flags, size, header, err := d.header()
		if err != nil || header == 0 {
			return evMore, err
		}
		at := d.pos + header
		if flags&flagCommand != 0 {
			d.cmd = d.buf[at : at+size : at+size]
			d.pos = at + size
			if len(d.spans) == 0 {
				d.start = d.pos
			}
			return evCommand, nil
		}
		d.spans = append(d.spans, span{at - d.start, size})
		d.pos = at + size
		if flags&flagMore == 0 {
			d.msg = d.msg[:0]
			for _, s := range d.spans {
				off := d.start + s.off
				d.msg = append(d.msg, d.buf[off:off+s.size:off+s.size])
			}
			return evMessage, nil
		}
	}
}

// header checks the frame at pos against the grammar and the limits as soon as its header has come. It returns header = 0 until the
// whole frame has come.
func (d *decoder) header() (flags byte, size, header int, err error) {
	b := d.buf[d.pos:d.end]
	d.missing = 0
	if len(b) < 2 {
		if len(b) == 1 && badFlags(b[0]) {
			return 0, 0, 0, fmt.Errorf("%w: a frame has the impossible flags %#02x", errProtocol, b[0])
		}
		return 0, 0, 0, nil
	}
	flags = b[0]
	if badFlags(flags) {
		return 0, 0, 0, fmt.Errorf("%w: a frame has the impossible flags %#02x", errProtocol, flags)
	}
	n, header := uint64(b[1]), 2
	if flags&flagLong != 0 {
		if len(b) < maxHeader {
			return 0, 0, 0, nil
		}
		n, header = binary.BigEndian.Uint64(b[1:]), maxHeader
	}
	if err := d.limits(flags, n); err != nil {
		return 0, 0, 0, err
	}
	size = int(n) // limits keep it far below the range of int
	if have := len(b) - header; have < size {
		d.missing = size - have
		return 0, 0, 0, nil
	}
	// The bytes of a message stay in the buffer until the message is whole, and so do the bytes of commands between its frames: all of
	// them count.
	if flags&flagCommand == 0 || len(d.spans) > 0 {
		d.size += int64(n)
	}
	return flags, size, header, nil
}

func (d *decoder) limits(flags byte, n uint64) error {
	if flags&flagCommand != 0 {
		if n > maxCommandBytes {
			return fmt.Errorf("%w: command of %d bytes, at most %d", errTooLarge, n, maxCommandBytes)
		}
		if len(d.spans) > 0 && d.size+int64(n) > d.maxMessage {
			return fmt.Errorf("%w: message of more than %d bytes", errTooLarge, d.maxMessage)
		}
		return nil
	}
	switch {
	case d.allow != nil && n > uint64(d.large) && !d.allow():
		return fmt.Errorf("%w: frame of %d bytes, at most %d from this peer", errTooLarge, n, d.large)
	case d.maxFirst > 0 && len(d.spans) == 0 && n > uint64(d.maxFirst):
		return fmt.Errorf("%w: first frame of %d bytes, at most %d", errTooLarge, n, d.maxFirst)
	case n > uint64(d.maxFrame):
		return fmt.Errorf("%w: frame of %d bytes, at most %d", errTooLarge, n, d.maxFrame)
	case len(d.spans) == d.maxFrames:
		return fmt.Errorf("%w: message of more than %d frames", errTooLarge, d.maxFrames)
	case d.size+int64(n) > d.maxMessage:
		return fmt.Errorf("%w: message of more than %d bytes", errTooLarge, d.maxMessage)
	}
	return nil
}

func badFlags(f byte) bool {
	return f&^(flagMore|flagLong|flagCommand) != 0 || f&(flagMore|flagCommand) == flagMore|flagCommand
}

// done ends the use of the message that next returned.
func (d *decoder) done() {
	invariant.Poison(d.buf[d.start:d.pos])
	d.spans, d.size, d.start = d.spans[:0], 0, d.pos
}
