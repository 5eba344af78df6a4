// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/tier/vllm"
)

// The server's KV events list the rows of vLLM's tiered offloading that it has, per group, in vLLM's form without tokens: after stores,
// after a restart when lookups have found the rows again, and after a clear.
func TestServerPublishesRowsOfVLLM(t *testing.T) {
	dir, name := t.TempDir(), fmt.Sprintf("kvasir_test_tier_events_%d", os.Getpid())
	t.Cleanup(func() {
		left, _ := filepath.Glob("/dev/shm/lmcache_l1_pool_" + name + "*")
		for _, f := range left {
			_ = os.Remove(f)
		}
	})
	socket, endpoint := dir+"/tier", "ipc://"+dir+"/events"
	start := func() *serving {
		return serve(t, "--shm-name", name, "--trust-unsummed", "--vllm-tier", socket, "--kv-events", endpoint, "--kv-events-topic", "kv@here@{model}")
	}
	s := start()
	r := readEvents(t, endpoint, "kv@here@org/model", event.CPU)
	hello := vllm.Hello{Protocol: vllm.Protocol, VLLM: "test", EngineID: "e", Model: "org/model", Namespace: "{}", RowBytes: 8192, Rows: 8, Groups: 2, ChunkTokens: 16}
	key := func(group uint32, i int) vllm.Key {
		return vllm.Key{Hash: kv.Hash(sha256.Sum256(fmt.Append(nil, i))), Group: group}
	}
	keys := []vllm.Key{key(0, 1), key(0, 2), key(1, 1), key(1, 3)}
	knows := func(keys ...vllm.Key) {
		t.Helper()
		want := map[string]bool{}
		for _, k := range keys {
			want[rowName(int(k.Group), k.Hash[:])] = true
		}
		testkit.Eventually(t, fmt.Sprintf("the reader knows %d rows", len(keys)), func() bool { r.take(); return maps.Equal(r.has, want) })
	}
	connect := func() *vllm.Client {
		t.Helper()
		c, err := vllm.Dial(socket, hello, nil, 32)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	found := func(c *vllm.Client, keys ...vllm.Key) (n int) {
		t.Helper()
		id, places, err := c.Lookup("", "lookup", keys, 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range places {
			if p.Offset != vllm.NoPlace {
				n++
			}
		}
		if err := c.Release(vllm.Released{ID: id}); err != nil {
			t.Fatal(err)
		}
		if _, _, err := c.Lookup("", "after", nil, 10*time.Second); err != nil { // the release has been read
			t.Fatal(err)
		}
		return n
	}

	c := connect()
	id, _, err := c.Store("", "store", keys, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Commit(id, true); err != nil {
		t.Fatal(err)
	}
	knows(keys...)
	_ = c.Close()

	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
	s = start()
	c = connect()
	defer c.Close()
	for _, n := range []int{3, 4} { // after the restart a row is listed only when a lookup has found it
		if got := found(c, keys[:n]...); got != n {
			t.Fatalf("%d rows are found after a restart, want %d", got, n)
		}
		knows(keys[:n]...)
	}

	answer, err := http.Post(fmt.Sprintf("http://127.0.0.1:%d/cache/clear", s.http), "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	knows()
}
