// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"net"
	"testing"
	"time"
)

// What readFrame takes, appendFrame gives back, and it takes no more than its
// length says.
func FuzzFrame(f *testing.F) {
	for _, text := range []string{"\x01{}\n", "\x03{}", "{}", "\x02{\"name\":\"a\",\"notify_msg\":\"b\"}", "\x00", "\x04x"} {
		f.Add(append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...))
	}
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 0})
	f.Add(binary.LittleEndian.AppendUint64(nil, maxHandshakeBytes+1))
	target, _ := listen(f, 64, TargetOptions{})
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		kind, text, err := readFrame(r)
		if err != nil {
			return
		}
		n := binary.LittleEndian.Uint64(b)
		if n == 0 || n > maxHandshakeBytes || uint64(len(b)-r.Len()) != 8+n {
			t.Fatalf("took %d bytes of a frame of %d", len(b)-r.Len(), n)
		}
		reply, err := target.handshakeReply(kind, text)
		if err != nil {
			return
		}
		if !json.Valid(text) {
			t.Fatal("answered what is not JSON")
		}
		got, _, err := readFrame(bytes.NewReader(reply))
		if err != nil || got != kind {
			t.Fatalf("our own reply: type %d to %d, %v", got, kind, err)
		}
	})
}

// What parseDescriptor takes is usable.
func FuzzDescriptor(f *testing.F) {
	f.Add([]byte(`{"buffers":[{"addr":1,"length":2,"name":"x"}],"name":"h:1","protocol":"tcp","tcp_data_port":5}`), uint64(1), uint64(2))
	f.Add([]byte(`{"buffers":[],"name":"h:1","protocol":["tcp","rdma"],"tcp_data_port":65535,"tcp_proto_version":2,"tcp_data_host":"::1"}`), uint64(0), uint64(0))
	f.Add([]byte(`{"buffers":[{"addr":18446744073709551615,"length":18446744073709551615,"name":"x"}],"protocol":"tcp","tcp_data_port":5}`), uint64(1<<63), uint64(1<<63))
	f.Add([]byte(`{"buffers":null,"protocol":"tcp","tcp_data_port":1e3}`), uint64(1), uint64(1))
	f.Fuzz(func(t *testing.T, text []byte, addr, n uint64) {
		d, err := parseDescriptor(text)
		if err != nil {
			return
		}
		if _, err := d.dataAddr("127.0.0.1:1"); err != nil || d.DataPort < 1 || d.DataPort > 65535 {
			t.Fatalf("data address of %+v: %v", d, err)
		}
		if at := (Range{addr, n}); at.valid() {
			d.covers(addr, n)
		}
		if b, err := json.Marshal(d); err != nil {
			t.Fatal(err)
		} else if _, err := parseDescriptor(b); err != nil {
			t.Fatalf("%s: %v", b, err)
		}
	})
}

// Any bytes on a data connection: what is outside the open region stays as it
// is, the answers are those of a naive target, and the connection ends.
func FuzzDataPort(f *testing.F) {
	const open, n = testBase + 256, 256 // of 768 bytes, the middle is open
	req := func(op byte, addr, size uint64, body int) []byte {
		return append(header{size, addr, op}.appendTo(nil), make([]byte, body)...)
	}
	f.Add(req(opWrite|opAcked, open, 16, 16))
	f.Add(append(req(opRead|opAcked, open, 256, 0), req(opWrite, open+255, 1, 1)...))
	f.Add(req(opWrite|opAcked, open-1, 2, 2))
	f.Add(req(opRead, ^uint64(0), ^uint64(0), 0))
	f.Add(req(opWrite|opAcked, open, 0, 0))
	f.Add(req(opWrite, open, 0, 0))
	f.Add([]byte("short"))
	table := NewTable()
	mem := make([]byte, 768)
	if _, err := table.Register(open, mem[256:512]); err != nil {
		f.Fatal(err)
	}
	target, err := Listen(TargetOptions{}, table)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { target.Close() })
	f.Fuzz(func(t *testing.T, b []byte) {
		clear(mem)
		want := make([]byte, n)
		answer, torn := naive(b, want, open)
		table.Observe()
		c, err := net.Dial("tcp", target.data.Addr().String())
		if err != nil {
			t.Skip("no connection to be had: ", err)
		}
		defer c.Close()
		c.(*net.TCPConn).SetLinger(0) // spares the fuzzer's ports
		c.SetDeadline(time.Now().Add(60 * time.Second))
		c.Write(b)
		c.(*net.TCPConn).CloseWrite()
		got, err := io.ReadAll(c)
		table.Fence(t.Context(), Range{open, n})
		defer table.Reopen(Range{open, n})
		if !bytes.Equal(mem[256:512], want) || bytes.ContainsFunc(mem[:256], nonzero) || bytes.ContainsFunc(mem[512:], nonzero) {
			t.Fatal("memory differs from the naive target's")
		}
		if !torn && (err != nil || !bytes.Equal(got, answer)) {
			t.Fatalf("answer %x (%v), want %x", got, err, answer)
		}
	})
}

func nonzero(r rune) bool { return r != 0 }

// naive is a target over mem at base. torn means that the end is a reset, which
// may take the answers along.
func naive(b, mem []byte, base uint64) (answer []byte, torn bool) {
	for len(b) >= headerBytes {
		h := parseHeader(b)
		b = b[headerBytes:]
		if h.size == 0 && !h.acked() {
			continue
		}
		off := h.addr - base
		if h.addr < base || h.size == 0 || off >= uint64(len(mem)) || h.size > uint64(len(mem))-off {
			frame := statusFrame(statusRejected)
			return append(answer, frame[:]...), !h.acked()
		}
		if h.isWrite() {
			if k := copy(mem[off:off+h.size], b); uint64(k) < h.size {
				return answer, true
			}
			b = b[h.size:]
		}
		if h.acked() {
			answer = append(answer, okFrame[:]...)
		}
		if !h.isWrite() {
			answer = append(answer, mem[off:off+h.size]...)
		}
	}
	return answer, false
}
