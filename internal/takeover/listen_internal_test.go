// SPDX-License-Identifier: Apache-2.0

package takeover

import (
	"net"
	"os"
	"syscall"
	"testing"
)

// A kernel without IPv6 listens on all IPv4 addresses for "::", and a machine without the name localhost on 127.0.0.1. No other error has
// another address listened on.
func TestInstead(t *testing.T) {
	f := func(host string, err error, want string) {
		t.Helper()
		if got := instead(host, &net.OpError{Op: "listen", Net: "tcp", Err: err}); got != want {
			t.Errorf("%s, %v: %q, want %q", host, err, got, want)
		}
	}
	family, used := os.NewSyscallError("socket", syscall.EAFNOSUPPORT), os.NewSyscallError("bind", syscall.EADDRINUSE)
	unknown := &net.DNSError{Err: "no such host", IsNotFound: true}
	f("::", family, "0.0.0.0")
	f("::1", family, "")
	f("::", used, "")
	f("localhost", unknown, "127.0.0.1")
	f("localhost", used, "")
	f("localhost.example", unknown, "")
	if got := instead("::", nil); got != "" {
		t.Errorf("no error: %q", got)
	}
}
