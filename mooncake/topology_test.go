// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"bytes"
	"context"
	"fmt"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

const headBytes = 32

// headsOf returns the KV heads that a TP rank holds: its share, or with more ranks
// than heads a whole one.
func headsOf(rank, size, heads int) []int {
	if size >= heads {
		return []int{rank * heads / size}
	}
	var list []int
	for h := range heads / size {
		list = append(list, rank*heads/size+h)
	}
	return list
}

// content is what a head of a block of a layer holds.
func content(layer, block, head int) []byte {
	b := make([]byte, headBytes)
	for i := range b {
		b[i] = byte(layer*31 + block*7 + head*3 + i)
	}
	return b
}

// rankCache is one TP rank's cache; filled with its content or zero.
func rankCache(rank, size, heads, layers, blocks int, filled bool) *Cache {
	own := headsOf(rank, size, heads)
	c := testCache(layers, blocks, uint64(len(own)*headBytes))
	c.KVHeads = heads
	if !filled {
		return c
	}
	for l := range layers {
		for b := range blocks {
			mem := block(&Cache{Storages: c.Storages, Regions: c.Regions[l : l+1]}, 0, b)
			mem = mem[:0]
			for _, h := range own {
				mem = append(mem, content(l, b, h)...)
			}
			r := c.Regions[l]
			copy(c.Bytes(r.Base+uint64(b)*r.Stride, r.Payload), mem)
		}
	}
	return c
}

// P and D of unequal TP size: each D rank gets its heads from the P ranks that have
// them, and each P rank frees its blocks once, when all its D ranks have theirs.
func TestUnequalTP(t *testing.T) {
	const heads, layers, blocks = 4, 2, 16
	f := func(pSize, dSize int) {
		t.Helper()
		t.Run(fmt.Sprintf("P%d_D%d", pSize, dSize), func(t *testing.T) {
			client := transfer.New(transfer.Options{})
			t.Cleanup(client.Close)
			dir := new(directory)
			web := httptest.NewServer(dir)
			t.Cleanup(web.Close)
			senders := make([]*Sender, pSize)
			addrs := make([]string, pSize)
			for rank := range senders {
				s, err := NewSender(rankCache(rank, pSize, heads, layers, blocks, true), SenderOptions{
					Engine: Engine{ID: "e"}, Self: Peer{TPRank: rank, TPSize: pSize}, Transfer: client, Log: testLog(t),
				})
				if err != nil {
					t.Fatal(err)
				}
				if err := s.Start(t.Context()); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { s.Close() })
				senders[rank], addrs[rank] = s, s.Addr()
			}
			dir.show("e", addrs...)
			from := Source{EngineID: "e", Bootstrap: web.URL}
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			own, wanted := []int{5, 6, 7, 9}, []int{1, 2, 11}
			for _, s := range senders {
				s.Offer("p", "x", [][]int{own})
			}
			for rank := range dSize {
				cache := rankCache(rank, dSize, heads, layers, blocks, false)
				target, err := transfer.Listen(transfer.TargetOptions{}, transfer.NewTable())
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { target.Close() })
				r, err := NewReceiver(cache, ReceiverOptions{Self: Peer{TPRank: rank, TPSize: dSize}, Target: target, Log: testLog(t)})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { r.Close() })
				failed, err := r.Pull(ctx, from, map[string]wire.Wanted{"d": {TransferID: "x", Blocks: [][]int{wanted}}})
				if err != nil || len(failed) > 0 {
					t.Fatal(failed, err)
				}
				target.Table().Observe()
				for i, b := range wanted {
					for l := range layers {
						var want []byte
						for _, h := range headsOf(rank, dSize, heads) {
							want = append(want, content(l, own[i+1], h)...)
						}
						reg := cache.Regions[l]
						if got := cache.Bytes(reg.Base+uint64(b)*reg.Stride, reg.Payload); !bytes.Equal(got, want) {
							t.Fatalf("D rank %d, layer %d, block %d:\n got %x\nwant %x", rank, l, b, got, want)
						}
					}
				}
			}
			for rank, s := range senders {
				testkit.Eventually(t, "blocks freed", func() bool { return slices.Equal(s.Finished(), []string{"p"}) })
				if n := s.Stats().Transfers; n != 0 {
					t.Fatalf("P rank %d: %d transfers left", rank, n)
				}
			}
		})
	}
	for _, sizes := range [][2]int{{1, 1}, {2, 2}, {2, 1}, {4, 1}, {4, 2}, {1, 2}, {1, 4}, {2, 4}, {8, 4}, {8, 8}, {8, 2}, {2, 8}, {4, 8}} {
		f(sizes[0], sizes[1])
	}
}
