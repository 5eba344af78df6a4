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
)

// An address that is in use is asked for again for 3 s, other errors are told at once; who is told to end waits for nothing.
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

// A port that comes free is listened on.
func TestTCP(t *testing.T) {
	l, err := takeover.ListenTCP(t.Context(), "127.0.0.1", 0)
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	time.AfterFunc(200*time.Millisecond, func() { _ = l.Close() })
	next, err := takeover.ListenTCP(t.Context(), "127.0.0.1", port)
	if err != nil {
		t.Fatal(err)
	}
	_ = next.Close()
}

// 0.0.0.0 is all IPv4 addresses and no IPv6 one; an IPv6 address may have the brackets of a URL.
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

// "::" is all addresses, of both families; on a kernel without IPv6, which strace plays, all IPv4 addresses.
func TestAllAddresses(t *testing.T) {
	if os.Getenv("TEST_WITHOUT_IPV6") == "" {
		// The second to fourth socket: net asks for IPv6 twice when it looks what there is, and then listens.
		c := exec.Command("strace", "-f", "-qq", "-o", os.DevNull, "-e", "trace=socket", "-e", "inject=socket:error=EAFNOSUPPORT:when=2..4", os.Args[0], "-test.run=^TestAllAddresses$", "-test.v")
		c.Env = append(os.Environ(), "TEST_WITHOUT_IPV6=1")
		if out, err := c.CombinedOutput(); errors.Is(err, exec.ErrNotFound) {
			t.Log("strace is not installed: a kernel without IPv6 was left out")
		} else if err != nil || !strings.Contains(string(out), "--- PASS") {
			t.Errorf("without IPv6: %v: %s", err, out)
		}
	}
	l, err := takeover.ListenTCP(t.Context(), "::", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a := l.Addr().(*net.TCPAddr)
	if without := os.Getenv("TEST_WITHOUT_IPV6") != ""; without != (a.IP.To4() != nil) {
		t.Errorf("it listens on %v, without IPv6: %v", a, without)
	}
	c, err := net.Dial("tcp4", fmt.Sprintf("127.0.0.1:%d", a.Port))
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}
