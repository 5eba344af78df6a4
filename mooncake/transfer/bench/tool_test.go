// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/hostmem"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// start runs Serve until the test ends and returns what its peer file says.
func start(t *testing.T, n int64) PeerFile {
	t.Helper()
	path := filepath.Join(t.TempDir(), "peer.json")
	ctx, stop := context.WithCancel(t.Context())
	ready, lines := io.Pipe()
	served := make(chan error, 1)
	go func() { served <- Serve(ctx, ServeOptions{Bytes: n, PeerFile: path, Out: lines}) }()
	if _, err := ready.Read(make([]byte, 200)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Error("the peer file stays behind")
		}
	})
	info, err := ReadPeerFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return info
}

// What Write sends Read gets, across several steps of copyStep.
func TestWriteRead(t *testing.T) {
	const n = copyStep + 12345
	peer := start(t, n+1)
	src := make([]byte, n)
	fill(src, 1)
	o := CopyOptions{Peer: peer.Peer, Addr: peer.Base + 1, Bytes: n, BlockBytes: 100_000, Timeout: 30 * time.Second}
	if done, err := Write(t.Context(), o, bytes.NewReader(src)); done != n || err != nil {
		t.Fatal(done, err)
	}
	var dst bytes.Buffer
	if done, err := Read(t.Context(), o, &dst); done != n || err != nil {
		t.Fatal(done, err)
	}
	if !bytes.Equal(src, dst.Bytes()) {
		t.Error("bytes differ")
	}
	o.Addr++ // one byte past the region, in the second step
	if done, err := Write(t.Context(), o, bytes.NewReader(src)); done != copyStep || !errors.Is(err, transfer.ErrRejected) {
		t.Error(done, err)
	}
	if done, err := Write(t.Context(), o, strings.NewReader("")); done != 0 || err != nil {
		t.Error(done, err)
	}
	o.Bytes = -1
	if _, err := Read(t.Context(), o, io.Discard); err == nil {
		t.Error("Read without a length never ends")
	}
}

// Bench measures each cell, verifies it, and prints lines that benchstat reads.
func TestBench(t *testing.T) {
	peers := []PeerFile{start(t, 8<<20), start(t, 8<<20)}
	for _, layout := range []Layout{Packed, Reversed, Scattered} {
		var out bytes.Buffer
		o := BenchOptions{
			Peers: peers, Callers: 2, Layout: layout, For: time.Millisecond, Verify: true,
			Ops: []string{"write", "read", "socket"}, Sizes: []int{4096, 100_000}, Batches: []int{1, 10, 10_000},
		}
		cells, err := Bench(t.Context(), o, &out)
		if err != nil || len(cells) != 12 { // 10,000 do not fit
			t.Fatalf("%d cells, %v", len(cells), err)
		}
		for line := range strings.Lines(out.String()) {
			if f := strings.Fields(line); len(f) != 12 || !strings.HasPrefix(f[0], "BenchmarkTransfer/op=") || f[3] != "ns/op" || f[5] != "MB/s" {
				t.Errorf("line %q", line)
			}
		}
	}
	if _, err := Bench(t.Context(), BenchOptions{Ops: []string{"dance"}, Peers: peers}, io.Discard); err == nil {
		t.Error("an unknown operation passes")
	}
	if _, err := Bench(t.Context(), BenchOptions{Layout: "heap", Peers: peers}, io.Discard); err == nil {
		t.Error("an unknown layout passes")
	}
}

func TestServeFails(t *testing.T) {
	f := func(o ServeOptions) {
		t.Helper()
		ctx, stop := context.WithTimeout(t.Context(), 60*time.Second)
		defer stop()
		if err := Serve(ctx, o); err == nil {
			t.Error("Serve is content")
		}
	}
	f(ServeOptions{Bytes: -1})
	f(ServeOptions{Bytes: 10, Base: 1<<63 - 5})
	f(ServeOptions{Bytes: 10, PeerFile: filepath.Join(t.TempDir(), "no", "dir")})
	f(ServeOptions{Bytes: 10, Target: transfer.TargetOptions{Host: "127.0.0.9", Bind: "127.0.0.1"}}) // nobody answers there
}

func TestReadPeerFile(t *testing.T) {
	f := func(text string, want bool) {
		t.Helper()
		path := filepath.Join(t.TempDir(), "p")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadPeerFile(path); err == nil != want {
			t.Errorf("%s: %v", text, err)
		}
	}
	good, _ := json.Marshal(PeerFile{"h:1", 1 << 62, 5})
	f(string(good), true)
	f(`{"peer":"h:1","base":9223372036854775807,"len":5}`, true)
	f(`{"peer":"","base":1,"len":1}`, false)
	f(`{"peer":"h:1","base":1}`, false)
	f(`{"peer":"h:1","base":1.5,"len":1}`, false)
	f(`{`, false)
}

// A region that the machine cannot hold is refused with a line; one that it can is
// served at the same time.
func TestServeMoreThanMemory(t *testing.T) {
	have, ok := hostmem.Available()
	if !ok {
		t.Skip("the kernel does not tell how much memory there is")
	}
	start(t, 4096)
	err := Serve(t.Context(), ServeOptions{Bytes: have + 16<<30})
	if err == nil || !strings.Contains(err.Error(), "lower --size") {
		t.Fatal(err)
	}
}

// A command that is started together with serve waits for its peer file; without a
// serve it says so in the end.
func TestAwaitPeerFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "peer.json")
	if _, err := AwaitPeerFile(t.Context(), path, 30*time.Millisecond); !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	want := PeerFile{Peer: "127.0.0.1:1", Base: 4096, Len: 1}
	wrote := make(chan error, 1)
	go func() {
		time.Sleep(50 * time.Millisecond)
		wrote <- writePeerFile(path, want)
	}()
	got, err := AwaitPeerFile(t.Context(), path, 60*time.Second)
	if err != nil || got != want || <-wrote != nil {
		t.Fatal(got, err)
	}
}
