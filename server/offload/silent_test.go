// SPDX-License-Identifier: Apache-2.0

package offload_test

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/server/offload"
	"github.com/kvasir-kv/kvasir/tier/vllm"
)

// greeted connects with a Hello, without a client that reads.
func (n *node) greeted(h vllm.Hello) (*net.UnixConn, *vllm.Conn) {
	n.t.Helper()
	c := n.dialRaw()
	n.t.Cleanup(func() { _ = c.Close() }) // it may be closed
	conn := vllm.NewConn(c)
	if err := conn.WriteFile(vllm.TypeHello, h.Append, nil); err != nil {
		n.t.Fatal(err)
	}
	_, _, pool, err := conn.ReadFirst()
	if err != nil {
		n.t.Fatal(err)
	}
	if err := pool.Close(); err != nil {
		n.t.Fatal(err)
	}
	return c, conn
}

// A server ends also when an engine reads none of its answers, as one that is stopped: they fill its socket.
func TestCloseBesideAnEngineThatDoesNotRead(t *testing.T) {
	n := start(t, t.TempDir(), setup{offload: offload.Options{Grace: 20 * time.Millisecond}})
	c, conn := n.greeted(helloOf("a"))
	_ = c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond)) // a server that reads nothing waits for its own write
	var err error
	for id := uint64(1); err == nil; id++ {
		ask := vllm.Ask{ID: id, Keys: keysOf(0, 4096)}
		err = conn.Write(vllm.TypeLookup, func(dst []byte) []byte { return vllm.AppendAsk(dst, &ask, 32) })
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		n.close()
	}()
	select {
	case <-ended:
	case <-time.After(8 * time.Second): // below HelloTime
		t.Error("the server does not end")
		_ = c.Close() // so that it does
		<-ended
	}
}

// What a peer sends that cannot be read is counted and logged at once, also while the peer keeps its side open.
func TestFrameThatCannotBeReadCountsAtOnce(t *testing.T) {
	n := start(t, t.TempDir(), setup{})
	defer n.close()
	_, conn := n.greeted(helloOf("a"))
	if err := conn.Write(99, func(dst []byte) []byte { return dst }); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the frame is counted", func() bool { return n.server.Stats().Malformed == 1 })
}
