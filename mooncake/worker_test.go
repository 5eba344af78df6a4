// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// directory is the least bootstrap server: what is registered is shown.
type directory struct {
	mu   sync.Mutex
	text string
}

func (d *directory) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fmt.Fprint(w, d.text)
}

// show lists one worker per TP rank.
func (d *directory) show(engine string, addrs ...string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.text = fmt.Sprintf(`{"0":{"engine_id":%q,"worker_addr":{`, engine)
	for i, a := range addrs {
		if i > 0 {
			d.text += ","
		}
		d.text += fmt.Sprintf(`"%d":{"0":%q}`, i, a)
	}
	d.text += "}}}"
}

func testLog(t testing.TB) *slog.Logger {
	if !testing.Verbose() {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// testCache has layers of n blocks, each layer with memory of its own.
func testCache(layers, n int, payload uint64, kinds ...GroupKind) *Cache {
	if len(kinds) == 0 {
		kinds = []GroupKind{Attention}
	}
	c := &Cache{Kinds: kinds, KVHeads: 8}
	for i := range layers {
		mem := make([]byte, uint64(n)*payload)
		base := uint64(0x10_0000_0000) + uint64(i)<<32
		c.Storages = append(c.Storages, Storage{base, mem})
		c.Regions = append(c.Regions, wire.Region{
			Layer: fmt.Sprintf("model.layers.%d.attn", i), Index: i, Base: base, Stride: payload, Payload: payload,
			Group: i % len(kinds), Shared: []int{i % len(kinds)}, RowOffset: wire.NoRow,
		})
	}
	return c
}

func fill(c *Cache, seed uint64) {
	for i := range c.Storages {
		r := rand.NewChaCha8([32]byte{byte(seed), byte(i)})
		r.Read(c.Storages[i].Mem)
	}
}

// block returns the bytes of one block of every layer of a group.
func block(c *Cache, group, id int) []byte {
	var all []byte
	for _, r := range c.Regions {
		if r.Group == group {
			all = append(all, c.Bytes(r.Base+uint64(id)*r.Stride, r.Payload)...)
		}
	}
	return all
}

// pair is a P and a D of one worker each.
type pair struct {
	p, d     *Cache
	sender   *Sender
	receiver *Receiver
	target   *transfer.Target
	client   *transfer.Client
	dir      *directory
	from     Source
}

func newPair(t testing.TB, p, d *Cache, so SenderOptions, ro ReceiverOptions) *pair {
	t.Helper()
	x := &pair{p: p, d: d, dir: new(directory), client: transfer.New(transfer.Options{})}
	t.Cleanup(x.client.Close)
	so.Transfer, so.Log = x.client, testLog(t)
	var err error
	if x.sender, err = NewSender(p, so); err != nil {
		t.Fatal(err)
	}
	if err := x.sender.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.sender.Close() })
	web := httptest.NewServer(x.dir)
	t.Cleanup(web.Close)
	x.dir.show(x.sender.EngineID(), x.sender.Addr())
	x.from = Source{EngineID: x.sender.EngineID(), Bootstrap: web.URL}
	if x.target, err = transfer.Listen(transfer.TargetOptions{}, transfer.NewTable()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.target.Close() })
	ro.Target, ro.Log = x.target, testLog(t)
	if x.receiver, err = NewReceiver(d, ro); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.receiver.Close() })
	return x
}

// pull pulls one request and returns its failure.
func (x *pair) pull(t testing.TB, id, transferID string, blocks ...[]int) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	failed, err := x.receiver.Pull(ctx, x.from, map[string]wire.Wanted{id: {TransferID: transferID, Blocks: blocks}})
	if err != nil {
		t.Fatal(err)
	}
	return failed[id]
}

func TestPull(t *testing.T) {
	x := newPair(t, testCache(4, 64, 512), testCache(4, 64, 512), SenderOptions{}, ReceiverOptions{})
	fill(x.p, 1)
	for i := range 5 {
		own, wanted := []int{3, 4, 5, 9, 11 + i}, []int{20, 21, 7, 8}
		id := fmt.Sprint("x", i)
		x.sender.Offer("p"+id, id, [][]int{own})
		if err := x.pull(t, "d"+id, id, wanted); err != nil {
			t.Fatal(err)
		}
		for j, b := range wanted {
			if !bytes.Equal(block(x.d, 0, b), block(x.p, 0, own[j+1])) { // D's prefix hit: P's last four
				t.Fatalf("round %d: block %d differs", i, b)
			}
		}
		if got := x.sender.Finished(); len(got) != 1 || got[0] != "p"+id {
			t.Fatalf("finished %v", got)
		}
	}
	s := x.receiver.Stats()
	if s.LayoutsSent != 1 || s.LayoutsNamed != 4 || s.Received != 5 || s.Windows != 1 || s.Fenced != 0 {
		t.Errorf("stats %+v", s)
	}
	if r := x.receiver.Results(); len(r.Received) != 5 || len(r.Failed) != 0 {
		t.Errorf("results %+v", r)
	}
}
