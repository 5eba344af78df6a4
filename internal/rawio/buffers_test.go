// SPDX-License-Identifier: Apache-2.0

package rawio_test

import (
	"net"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/rawio"
	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// What a goroutine did before WriteBuffers happens before the read of the bytes, also for the race detector.
func TestWriteBuffersOrdersMemory(t *testing.T) {
	l := testkit.Listen(t)
	for i := range 20 {
		seen := 0
		read := make(chan int, 1)
		to, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		from, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		if err := from.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		go func() {
			var b [2]byte
			n, _ := from.Read(b[:])
			read <- seen + n
		}()
		go func() {
			seen = i
			bufs := net.Buffers{{1}, {2}}
			_, _ = rawio.WriteBuffers(to, &bufs)
		}()
		if got := <-read; got != i+1 && got != i+2 {
			t.Errorf("%d, want %d and the bytes read", got, i)
		}
		to.Close()
		from.Close()
	}
}
