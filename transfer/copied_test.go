package transfer

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"
)

// What goes through the buffer arrives as it was, whatever the sizes.
func TestWriteCopied(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	out, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	in, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	in.SetReadDeadline(time.Now().Add(20 * time.Second))
	s, err := newStream(out.(*net.TCPConn), 20*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	d := &dataConn{stream: s}
	for i, n := range []int{0, 1, minAliased, aliasedChunk - 9, aliasedChunk - 8, aliasedChunk, 2*aliasedChunk - 8, maxAliased} {
		body := pattern(n, byte(i))
		sent := make(chan error, 1)
		go func() { sent <- d.writeCopied([][]byte{okFrame[:], body}) }()
		got := make([]byte, statusBytes+n)
		if _, err := io.ReadFull(in, got); err != nil {
			t.Fatalf("%d bytes: %v", n, err)
		}
		if err := <-sent; err != nil || !bytes.Equal(got[:statusBytes], okFrame[:]) || !bytes.Equal(got[statusBytes:], body) {
			t.Fatalf("%d bytes arrived otherwise: %v", n, err)
		}
	}
}
