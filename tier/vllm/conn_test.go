// SPDX-License-Identifier: Apache-2.0

package vllm_test

import (
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier/vllm"
)

// ends are the two ends of a connection.
func ends(t *testing.T) (ours, theirs *vllm.Conn) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	a, err := net.DialUnix("unix", nil, l.Addr().(*net.UnixAddr))
	if err != nil {
		t.Fatal(err)
	}
	b, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs = vllm.NewConn(a), vllm.NewConn(b)
	t.Cleanup(func() { _, _ = ours.Close(), theirs.Close() })
	return ours, theirs
}

// Stands returns true until the peer ends the connection, also while frames wait in it. Reads return these one by one.
func TestConnectionStandsUntilItsPeerEndsIt(t *testing.T) {
	ours, theirs := ends(t)
	for kind, body := range []string{"", "first", strings.Repeat("x", 10_000)} {
		if err := theirs.Write(byte(kind), func(dst []byte) []byte { return append(dst, body...) }); err != nil {
			t.Fatal(err)
		}
	}
	if !ours.Connected() {
		t.Error("a connection with frames does not stand")
	}
	for want, body := range []string{"", "first", strings.Repeat("x", 10_000)} {
		if kind, got, err := ours.Read(); err != nil || int(kind) != want || string(got) != body {
			t.Errorf("frame %d: kind %d, %d bytes, %v", want, kind, len(got), err)
		}
	}
	if !ours.Connected() {
		t.Error("a connection does not stand")
	}
	_ = theirs.Close()
	testkit.Eventually(t, "the end shows", func() bool { return !ours.Connected() })
}

// A Hello has at most MaxHello bytes, and rows of fewer than 4 GiB.
func TestHelloIsBounded(t *testing.T) {
	h := hello()
	b := h.Append(nil)
	for n, right := range map[int]bool{vllm.MaxHello: true, vllm.MaxHello + 1: false} {
		padded := append(append([]byte(nil), b...), strings.Repeat(" ", n-len(b))...)
		if _, err := vllm.DecodeHello(padded); (err == nil) != right || !right && !errors.Is(err, vllm.ErrMalformed) {
			t.Errorf("a Hello of %d bytes: %v", n, err)
		}
	}
	for n, right := range map[int64]bool{1<<32 - 1: true, 1 << 32: false, kv.MaxChunkBytes + 1: false} {
		h.RowBytes = n
		if err := h.Validate(); (err == nil) != right {
			t.Errorf("rows of %d bytes: %v", n, err)
		}
	}
}

// A simulated engine without a node goes on, and counts its requests as requests without a node.
func TestPlayWithoutANodeCountsItsRequests(t *testing.T) {
	dir := t.TempDir()
	out, err := vllm.RunPlay(t.Context(), vllm.Simulation{Socket: filepath.Join(dir, "none"), EngineID: "e", Model: "m", Dir: dir, RowBytes: 4096, Longest: 2, Requests: 2})
	if err != nil || out.Requests != 2 || out.Without != 2 || out.Stored != 0 {
		t.Errorf("%+v, %v", out, err)
	}
}
