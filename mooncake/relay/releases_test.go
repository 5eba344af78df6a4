// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/relay"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// oldD is a D of an earlier release beside world's P: one group, blocks without gaps.
func (w *world) oldD(release wire.Release) (*mooncake.Cache, *mooncake.Receiver, *transfer.Target) {
	one := func(c *mooncake.Cache) *mooncake.Cache {
		c.Kinds = c.Kinds[:1]
		for i := range c.Regions {
			c.Regions[i].Group, c.Regions[i].Shared, c.Regions[i].Payload = 0, []int{0}, c.Regions[i].Stride
		}
		return c
	}
	one(w.p)
	d := one(memory(payload))
	target, err := transfer.Listen(transfer.TargetOptions{}, transfer.NewTable())
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { target.Close() })
	r, err := mooncake.NewReceiver(d, mooncake.ReceiverOptions{
		Target: target, Release: release, Log: logger(), Timeout: 20 * time.Second, ArrivalTimeout: time.Second,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { r.Close() })
	return d, r, target
}

// A D of vLLM 0.16 to 0.24 leaves out what came later: groups of regions, names of
// layers, groups of block ids, sizes of blocks. It gets two transfers from P, and again
// from memory.
func TestEarlierReleases(t *testing.T) {
	for _, release := range []wire.Release{16, 18, 19, 20, 23, 24} {
		o := relay.Options{}
		if release < 19 {
			o.BlockBytes = payload
		}
		w := newWorld(t, o)
		d, r, target := w.oldD(release)
		w.sender.Offer("p", "x", [][]int{{5, 6}})
		w.sender.Offer("q", "y", [][]int{{7, 8}})
		for i, id := range []string{"x", "x#2", "y", "y#2"} {
			from, at := 5+i/2*2, []int{10 * i, 10*i + 1}
			failed, err := r.Pull(t.Context(), w.source(), map[string]wire.Wanted{"d": {TransferID: id, Blocks: [][]int{at}}})
			if err != nil || len(failed) > 0 {
				t.Fatalf("release %d: %v %v", release, err, failed)
			}
			target.Table().Observe()
			for j := range at {
				if !bytes.Equal(block(d, 0, at[j]), block(w.p, 0, from+j)) {
					t.Fatalf("release %d, %s: wrong bytes", release, id)
				}
			}
		}
	}
}

// A D of an old release does not send the size of its blocks. The relay refuses it at once where
// Options.BlockBytes is not set. Where that size is wrong, D gets no transfer, neither from P nor from memory.
func TestBlocksOfUnknownSize(t *testing.T) {
	for _, size := range []uint64{0, payload / 2, payload - 8, payload + 8, 2 * payload} {
		w := newWorld(t, relay.Options{BlockBytes: size})
		_, r, _ := w.oldD(18)
		w.sender.Offer("p", "x", [][]int{{5, 6}})
		w.sender.Offer("q", "y", [][]int{{7, 8}})
		for _, id := range []string{"x", "y", "x#2"} {
			failed, err := r.Pull(t.Context(), w.source(), map[string]wire.Wanted{"d": {TransferID: id, Blocks: [][]int{{1, 2}}}})
			if err != nil || !errors.Is(failed["d"], mooncake.ErrPeer) || size == 0 && !strings.Contains(failed["d"].Error(), "--block-bytes") {
				t.Fatalf("blocks of %d: %v %v", size, err, failed)
			}
			w.sender.Offer("p", "x", [][]int{{5, 6}}) // to be asked for again
		}
		testkit.Eventually(t, "no transfer is kept", func() bool { return w.relay.Stats().Kept == 0 })
	}
}
