// SPDX-License-Identifier: Apache-2.0

package v013

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"reflect"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

func testLog(t testing.TB) *slog.Logger {
	if !testing.Verbose() {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// testCache has layers of n blocks, each layer with memory of its own.
func testCache(layers, n int, payload uint64) *mooncake.Cache {
	c := &mooncake.Cache{Kinds: []mooncake.GroupKind{mooncake.Attention}, KVHeads: 8}
	for i := range layers {
		base := uint64(0x10_0000_0000) + uint64(i)<<32
		c.Storages = append(c.Storages, mooncake.Storage{Addr: base, Mem: make([]byte, uint64(n)*payload)})
		c.Regions = append(c.Regions, wire.Region{
			Layer: fmt.Sprintf("model.layers.%d.attn", i), Index: i, Base: base, Stride: payload, Payload: payload,
			Shared: []int{0}, RowOffset: wire.NoRow,
		})
	}
	return c
}

func fill(c *mooncake.Cache, seed uint64) {
	for i := range c.Storages {
		r := rand.NewChaCha8([32]byte{byte(seed), byte(i)})
		r.Read(c.Storages[i].Mem)
	}
}

// block returns the bytes of one block of every layer.
func block(c *mooncake.Cache, id int) []byte {
	var all []byte
	for _, r := range c.Regions {
		all = append(all, c.Bytes(r.Base+uint64(id)*r.Stride, r.Payload)...)
	}
	return all
}

// begin starts a pull; the channel gets its failure.
func (x *pair) begin(t *testing.T, id string, blocks []int) <-chan error {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
		defer cancel()
		failed, err := x.receiver.Pull(ctx, x.from, map[string]wire.Wanted{id: {Blocks: [][]int{blocks}}})
		done <- errors.Join(err, failed[id])
	}()
	return done
}

func wait(t *testing.T, done <-chan error) error {
	t.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(60 * time.Second):
		t.Fatal("the pull does not end")
		return nil
	}
}

// pull pulls one request and returns its failure.
func (x *pair) pull(t *testing.T, id string, blocks []int) error {
	t.Helper()
	return wait(t, x.begin(t, id, blocks))
}

// sameJSON compares got, marshalled, with recorded JSON; no JSON is null.
func sameJSON(t *testing.T, got any, want json.RawMessage) bool {
	t.Helper()
	b, err := json.Marshal(got)
	if err != nil {
		t.Fatal(err)
	}
	if len(want) == 0 {
		want = json.RawMessage("null")
	}
	var g, w any
	if err := errors.Join(json.Unmarshal(b, &g), json.Unmarshal(want, &w)); err != nil {
		t.Fatal(err)
	}
	return reflect.DeepEqual(g, w) || bytes.Equal(b, want)
}
