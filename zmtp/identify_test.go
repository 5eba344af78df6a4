// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// Who may connect to a socket file does not depend on the umask.
func TestSocketFileIsItsUsersAlone(t *testing.T) {
	old := syscall.Umask(0)
	defer syscall.Umask(old)
	r, _, _ := startRouter(t, echo, RouterOptions{})
	path := filepath.Join(t.TempDir(), "s")
	if _, err := r.Listen(t.Context(), "ipc://"+path); err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
}

// A Router identifies each connection once, before that has sent a byte, and every message
// comes with the identity of its own connection.
func TestIdentify(t *testing.T) {
	asked := make(chan string, 8)
	_, addr, _ := startRouter(t, func(p *Peer, _ Message) { _ = p.Send([]byte(p.Identity().(string))) }, RouterOptions{
		Identify: func(c net.Conn) any {
			asked <- c.RemoteAddr().String()
			return c.RemoteAddr().String()
		},
	})
	a, b := dialRaw(t, addr), dialRaw(t, addr)
	seen := map[string]bool{recv(t, asked): true, recv(t, asked): true}
	for _, c := range []*client{a, b} {
		own := c.LocalAddr().String()
		if !seen[own] {
			t.Fatalf("%s was not identified while it was silent: %v", own, seen)
		}
		c.send(dealerHello)
		hello := make([]byte, len(appendReady(appendGreeting(nil), typeRouter, nil)))
		if _, err := io.ReadFull(c.r, hello); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			c.send(frames("who am I"))
			c.want(own)
		}
	}
	if len(asked) > 0 {
		t.Errorf("asked again for %s", <-asked)
	}
}
