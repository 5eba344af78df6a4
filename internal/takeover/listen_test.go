// SPDX-License-Identifier: Apache-2.0

package takeover_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/takeover"
	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// For 3 s the call tries an address that is in use again. It returns other errors at once, and ends at once when its context does.
func TestAgain(t *testing.T) {
	inUse, other := fmt.Errorf("listen: %w", syscall.EADDRINUSE), errors.New("other")
	f := func(what string, ctx context.Context, used time.Duration, then, want error, least, most time.Duration) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			began := time.Now()
			err := takeover.ListenAgain(ctx, func(ctx context.Context) error {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				if time.Since(began) < used {
					return inUse
				}
				return then
			})
			if took := time.Since(began); !errors.Is(err, want) || took < least || took > most {
				t.Errorf("%s: %v after %v", what, err, took)
			}
		})
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	f("free", t.Context(), 0, nil, nil, 0, 0)
	f("another error", t.Context(), 0, other, other, 0, 0)
	f("of one that ends", t.Context(), 2*time.Second, nil, nil, 2*time.Second, 2100*time.Millisecond)
	f("of one that lives", t.Context(), time.Hour, nil, syscall.EADDRINUSE, 3*time.Second, 3100*time.Millisecond)
	f("told to end", ended, 0, nil, nil, 0, 0)
	f("told to end, in use", ended, time.Hour, nil, syscall.EADDRINUSE, 0, 0)
}

// ListenTCP gets a port that becomes free while it waits.
func TestTCP(t *testing.T) {
	l, err := takeover.ListenTCP(t.Context(), "127.0.0.1", 0)
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	time.AfterFunc(200*time.Millisecond, func() { _ = l.Close() })
	testkit.Eventually(t, "the port is listened on", func() bool { // the timer may be later than ListenTCP waits
		began := time.Now()
		next, err := takeover.ListenTCP(t.Context(), "127.0.0.1", port)
		if took := time.Since(began); err != nil && took < 3*time.Second {
			t.Fatalf("after %v: %v", took, err)
		} else if err != nil {
			return false
		}
		_ = next.Close()
		return true
	})
}

// 0.0.0.0 means all IPv4 addresses and no IPv6 one. An IPv6 address may have the brackets of a URL.
func TestTCPAddresses(t *testing.T) {
	all, err := takeover.ListenTCP(t.Context(), "0.0.0.0", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer all.Close()
	port := all.Addr().(*net.TCPAddr).Port
	if c, err := net.Dial("tcp", fmt.Sprint("127.0.0.1:", port)); err != nil {
		t.Error(err)
	} else {
		c.Close()
	}
	if !all.Addr().(*net.TCPAddr).IP.Equal(net.IPv4zero) {
		t.Errorf("it listens on %v", all.Addr())
	}
	if c, err := net.Dial("tcp", fmt.Sprint("[::1]:", port)); err == nil {
		c.Close()
		t.Error("it listens on IPv6 addresses, too")
	}
	for in, want := range map[string]string{"[::1]": "::1", "::1": "::1", "[host]": "[host]", "127.0.0.1": "127.0.0.1", "": ""} {
		if got := takeover.WithoutBrackets(in); got != want {
			t.Errorf("%q without brackets is %q, want %q", in, got, want)
		}
	}
}

// "::" means all addresses of both families; if the machine has no address 127.0.0.1, it still means those of IPv6.
func TestAllAddresses(t *testing.T) {
	alone := os.Getenv("TEST_IPV6_ALONE") != ""
	if !alone {
		c := exec.Command("unshare", "--net", "sh", "-euc", `ip link set lo up; ip -4 address del 127.0.0.1/8 dev lo; exec "$0" -test.run '^TestAllAddresses$' -test.v`, os.Args[0])
		c.Env = append(os.Environ(), "TEST_IPV6_ALONE=1")
		if out, err := c.CombinedOutput(); err != nil && !strings.Contains(string(out), "=== RUN") {
			t.Logf("IPv6 alone was left out: %v, %s", err, out)
		} else if err != nil {
			t.Errorf("IPv6 alone: %v: %s", err, out)
		}
	}
	l, err := takeover.ListenTCP(t.Context(), "::", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for host, reached := range map[string]bool{"127.0.0.1": !alone, "::1": true} {
		c, err := net.Dial("tcp", net.JoinHostPort(host, fmt.Sprint(l.Addr().(*net.TCPAddr).Port)))
		if (err == nil) != reached {
			t.Errorf("%s, IPv6 alone %v: %v", host, alone, err)
		}
		if err == nil {
			_ = c.Close()
		}
	}
}

// Without /etc/hosts, as in an image from scratch, localhost is 127.0.0.1.
func TestLocalhostWithoutHosts(t *testing.T) {
	if os.Getenv("TEST_WITHOUT_HOSTS") == "" {
		c := exec.Command("unshare", "--mount", "--net", "sh", "-euc", `ip link set lo up; mount --bind /dev/null /etc/hosts; mount --bind /dev/null /etc/resolv.conf; exec "$0" -test.run '^TestLocalhostWithoutHosts$' -test.v`, os.Args[0])
		c.Env = append(os.Environ(), "TEST_WITHOUT_HOSTS=1")
		if out, err := c.CombinedOutput(); err != nil && !strings.Contains(string(out), "=== RUN") {
			t.Skipf("no namespaces: %v, %s", err, out)
		} else if err != nil {
			t.Errorf("%v: %s", err, out)
		}
		return
	}
	if _, err := net.LookupHost("localhost"); err == nil {
		t.Skip("the resolver knows it all the same")
	}
	l, err := takeover.ListenTCP(t.Context(), "localhost", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if a := l.Addr().(*net.TCPAddr); !a.IP.Equal(net.IPv4(127, 0, 0, 1)) {
		t.Errorf("it listens on %v", a)
	}
}
