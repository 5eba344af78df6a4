// SPDX-License-Identifier: Apache-2.0

// Package fleet_test compares `kvasir sim fleet` with real servers over one real Redis. interop/redis.sh runs it.
package fleet_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
	"github.com/kvasir-kv/kvasir/sim/fleet"
)

const program = "../../bin/kvasir" // of make build

const chunkTokens = 512

var layout = kv.Layout{Layers: 1, Slots: chunkTokens, Hidden: 4, DType: "float16"} // 8 KiB a chunk

// node is a `kvasir server` and an engine that plays prompts.
type node struct {
	http   string
	client *lmcache.Client
	worker *connector.PoolClient
	bytes  int64 // of a chunk
	stored int64 // chunks
}

// start starts a server with room for so many chunks over a Redis, under names of the fleet's own.
func start(t *testing.T, socket, prefix string, chunks int) *node {
	t.Helper()
	size, err := layout.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	zmq, web := testkit.FreePort(t), testkit.FreePort(t)
	n := &node{http: fmt.Sprintf("http://127.0.0.1:%d", web), bytes: size}
	var log bytes.Buffer
	args := []string{
		"server", "--host", "127.0.0.1", "--port", strconv.Itoa(zmq), "--http-port", strconv.Itoa(web), "--chunk-size", strconv.Itoa(chunkTokens),
		"--l1-size-gb", fmt.Sprintf("%dB", int64(chunks)*size), "--eviction-policy", "lru", "--cold",
		"--l2-adapter", fmt.Sprintf(`{"type":"redis","unix_socket":%q,"key_prefix":%q,"absent_seconds":0}`, socket, prefix), "--l2-prefetch-load-timeout", "60",
	}
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil || t.Failed() {
			t.Errorf("the server ends with %v:\n%s", err, &log)
		}
		if out, err := exec.Command(program, append(args, "--drop")...).CombinedOutput(); err != nil { // its pool
			t.Errorf("%v: %s", err, out)
		}
	})
	testkit.Eventually(t, "the server answers", func() bool {
		r, err := http.Get(n.http + "/healthcheck")
		if err == nil {
			r.Body.Close()
		}
		return err == nil && r.StatusCode == http.StatusOK
	})
	if n.client, err = lmcache.NewClient(fmt.Sprintf("tcp://127.0.0.1:%d", zmq)); err != nil {
		t.Fatal(err)
	}
	if n.worker, err = connector.OpenPoolClient(t.Context(), n.client, connector.PoolClientOptions{Model: "fleet", Layout: layout}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := n.worker.Close(ctx); err != nil {
			t.Error(err)
		}
		_ = n.client.Close()
	})
	return n
}

// figure returns the sum of a metric's samples.
func (n *node) figure(t *testing.T, name string) (sum int64) {
	t.Helper()
	r, err := http.Get(n.http + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, name); ok && (rest[0] == ' ' || rest[0] == '{') {
			v, err := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndexByte(line, ' '):]), 64)
			if err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			sum += int64(v)
		}
	}
	return sum
}

func content(h kv.Hash, b []byte) {
	for i := range b {
		b[i] = h[i%len(h)] ^ byte(i>>5)
	}
}

// play looks a prompt up, loads what is a hit and compares it, stores the rest, waits until that is in the Redis, and
// returns the hit, chunks.
func (n *node) play(t *testing.T, number int, q *workload.Request) (hit int) {
	t.Helper()
	tokens := q.Tokens()[:q.Input/chunkTokens*chunkTokens]
	hashes := kv.ChunkHashes(tokens, chunkTokens)
	k := lmcache.Key{Tokens: tokens, RequestID: fmt.Sprintf("fleet-%d", number), Readers: 1}
	var err error
	if k.End = (q.Input - 1) / chunkTokens * chunkTokens; k.End > 0 {
		if hit, err = n.worker.Lookup(t.Context(), k); err != nil {
			t.Fatal(err)
		}
	}
	if k.End = hit * chunkTokens; hit > 0 {
		want := make([]byte, n.bytes)
		ok, err := n.worker.Retrieve(t.Context(), k, chunkTokens, func(i int, b []byte) {
			if content(hashes[i], want); !bytes.Equal(b, want) {
				t.Errorf("request %d: chunk %d has wrong bytes", number, i)
			}
		})
		if err != nil || !ok {
			t.Fatalf("request %d: a hit of %d chunks cannot be loaded: %v", number, hit, err)
		}
	}
	if k.Start, k.End = k.End, len(tokens); k.Start < k.End {
		stored, err := n.worker.Store(t.Context(), k, chunkTokens, func(i int, b []byte) { content(hashes[hit+i], b) })
		if err != nil {
			t.Fatal(err)
		}
		n.stored += int64(stored)
	}
	if err := n.client.EndSession(t.Context(), k.RequestID); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "what is new is in the Redis", func() bool { return n.figure(t, "kvasir_below_written_bytes_total") == n.stored*n.bytes })
	return hit
}

// Two and four servers over one Redis have the hits that the simulation says, and read and write as many objects,
// where requests are so far apart that speeds do not matter; every byte is compared. KVASIR_REDIS is unix:PATH.
func TestRealFleet(t *testing.T) {
	socket, ok := strings.CutPrefix(os.Getenv("KVASIR_REDIS"), "unix:")
	if !ok {
		t.Skip("KVASIR_REDIS names no socket")
	}
	p, err := costmodel.Get(costmodel.H100Llama)
	if err != nil {
		t.Fatal(err)
	}
	p.BlockTokens = chunkTokens
	for _, c := range []struct{ nodes, pool int }{{2, 60}, {2, 400}, {4, 60}, {4, 400}} {
		t.Run(fmt.Sprintf("%d nodes of %d blocks", c.nodes, c.pool), func(t *testing.T) {
			list := workload.Chats(250, workload.ChatOptions{Seed: 3})
			for i := range list {
				list[i].Arrival = time.Duration(i) * time.Minute
			}
			got, err := fleet.Run(t.Context(), fleet.Options{Profile: p, Nodes: []int{c.nodes}, Pool: c.pool, Requests: func(int) iter.Seq2[workload.Request, error] { return workload.Each(list) }})
			if err != nil {
				t.Fatal(err)
			}
			want := got[0]
			var nodes []*node
			prefix := fmt.Sprintf("fleet-%d:", time.Now().UnixNano())
			for range c.nodes {
				nodes = append(nodes, start(t, socket, prefix, c.pool))
			}
			hits := 0
			for i := range list {
				hits += nodes[i%c.nodes].play(t, i, &list[i])
			}
			var reads, writes int64
			for _, n := range nodes {
				reads += n.figure(t, "kvasir_below_read_bytes_total") / n.bytes
				writes += n.stored
			}
			slack := 0
			if c.pool < want.Puts { // what goes from a RAM that is full depends on the order in which reads at once end
				slack = want.Blocks / 50
			}
			near := func(a, b int) bool { return a-b <= slack && b-a <= slack }
			says := fmt.Sprintf("%d requests: %.1f %% of %d blocks hit, %d read, %d stored; the simulation says %.1f %%, %d, %d", len(list), 100*float64(hits)/float64(want.Blocks), want.Blocks, reads, writes,
				100*want.Hit, want.Gets, want.Heads)
			if hits != want.RAMBlocks+want.StoreBlocks || !near(int(reads), want.Gets) || int(writes) != want.Heads || reads == 0 {
				t.Error(says)
			}
			t.Log(says)
		})
	}
}
