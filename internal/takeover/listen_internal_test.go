// SPDX-License-Identifier: Apache-2.0

package takeover

import (
	"net"
	"os"
	"syscall"
	"testing"
)

// On a kernel without IPv6, "::" means all IPv4 addresses; on a machine without the name localhost, localhost means 127.0.0.1. After any
// other error no other address is used.
func TestInstead(t *testing.T) {
	f := func(host string, err error, want string) {
		t.Helper()
		if got := fallbackHost(host, &net.OpError{Op: "listen", Net: "tcp", Err: err}); got != want {
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
	if got := fallbackHost("::", nil); got != "" {
		t.Errorf("no error: %q", got)
	}
}
