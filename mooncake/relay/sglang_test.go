// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/mooncake/relay"
)

// lines is a log that a test reads while it is written.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// SGLang's P and D connect with a PUSH socket. The relay closes such a connection and logs one line about it.
func TestRelayClosesSGLang(t *testing.T) {
	var log lines
	w := newWorld(t, relay.Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	c, err := bootstrap.NewClient(w.web.URL, bootstrap.ClientOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	d, err := c.Query(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	greeting := "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + strings.Repeat("\x00", 16+32)
	ready := "\x05READY\x0bSocket-Type\x00\x00\x00\x04PUSH"
	for range 3 {
		conn, err := net.Dial("tcp", strings.TrimPrefix(d[0].Workers[0][0], "tcp://"))
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err := io.WriteString(conn, greeting+"\x04"+string(rune(len(ready)))+ready); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, conn); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("the connection stays: %v", err)
		}
		conn.Close()
	}
	if text := log.String(); strings.Count(text, "SGLang") != 1 || !strings.Contains(text, "level=WARN") {
		t.Errorf("the log: %s", text)
	}
}
