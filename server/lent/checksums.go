// SPDX-License-Identifier: Apache-2.0

package lent

import (
	"context"
	"crypto/md5"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"slices"

	"github.com/kvasir-kv/kvasir/kv/paged"
)

// ErrChecksums means that LMCache's checksums cannot be computed for the memory.
var ErrChecksums = errors.New("checksums are not supported for this KV")

// Checksums are MD5 digests of a worker's blocks, with a fixed number of blocks in each, as POST /cache/checksums of lmcache 0.5.6 computes
// them (http_apis/cache_api.py, _compute_block_checksums): over each layer's part of a chunk in the order in which it lies in memory, with
// bfloat16 widened to float32.
type Checksums struct {
	Digests [][]string // by layer, then by chunk; one list for all layers if they have one digest together
	Layers  []int      // the worker's layer of each list; nil if the layers have one digest together
}

// Checksums computes the digests: one for each layer if `apart` is set, otherwise one for all layers together. It reads memory that the
// engine may be writing. Errors wrap paged.ErrBlocks for ids that do not exist, ErrChecksums, and ctx's error.
func (d *KV) Checksums(ctx context.Context, blocks []int, perChunk int, apart bool) (*Checksums, error) {
	type layer struct {
		*paged.Layer
		index int
		wide  bool
	}
	var layers []layer
	for i := range d.groups {
		g := &d.groups[i]
		for j := range g.Layers {
			l := &g.Layers[j]
			if l.View.Form == paged.FusedNHD || l.View.Form == paged.FusedHND {
				return nil, fmt.Errorf("%w: layer %d has keys and values in one row", ErrChecksums, g.layers[j])
			}
			for _, b := range blocks {
				if b < 0 || b >= l.View.Blocks {
					return nil, fmt.Errorf("%w: block id %d of layer %d, which has %d blocks", paged.ErrBlocks, b, g.layers[j], l.View.Blocks)
				}
			}
			layers = append(layers, layer{l, g.layers[j], g.dtype == "bfloat16"})
		}
	}
	if len(layers) != len(d.reg.Descriptors) {
		return nil, fmt.Errorf("%w: %d of %d layers are in no group", ErrChecksums, len(d.reg.Descriptors)-len(layers), len(d.reg.Descriptors))
	}
	slices.SortFunc(layers, func(a, b layer) int { return a.index - b.index })
	out := &Checksums{Digests: make([][]string, 1)}
	if apart {
		out.Digests = make([][]string, len(layers))
		for _, l := range layers {
			out.Layers = append(out.Layers, l.index)
		}
	}
	var scratch []byte
	for ids := range slices.Chunk(blocks, perChunk) {
		sum := md5.New()
		for i, l := range layers {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if apart {
				sum.Reset()
			}
			ok := d.Use(func() { scratch = sumLayer(sum, l.Layer, ids, l.wide, scratch) })
			if !ok {
				return nil, fmt.Errorf("%w: the worker's memory is no longer mapped", ErrChecksums)
			}
			if apart {
				out.Digests[i] = append(out.Digests[i], hex.EncodeToString(sum.Sum(nil)))
			}
		}
		if !apart {
			out.Digests[0] = append(out.Digests[0], hex.EncodeToString(sum.Sum(nil)))
		}
	}
	return out, nil
}

// sumLayer adds one layer's blocks to sum. With wide it writes each bfloat16 as the equal float32.
func sumLayer(sum hash.Hash, l *paged.Layer, blocks []int, wide bool, scratch []byte) []byte {
	write := func(row []byte) {
		if !wide {
			_, _ = sum.Write(row) // a hash takes all bytes
			return
		}
		scratch = scratch[:0]
		for i := 0; i+1 < len(row); i += 2 {
			scratch = append(scratch, 0, 0, row[i], row[i+1])
		}
		_, _ = sum.Write(scratch)
	}
	if v := &l.View; v.BlocksFirst() {
		for _, b := range blocks {
			for plane := range v.Planes {
				v.Rows(l.Memory, plane, b, write)
			}
		}
	} else {
		for plane := range v.Planes {
			for _, b := range blocks {
				v.Rows(l.Memory, plane, b, write)
			}
		}
	}
	return scratch
}

// Size returns the number of layers, and the number of blocks that the first group's layers have.
func (d *KV) Size() (layers, blocks int) {
	return len(d.reg.Descriptors), d.groups[0].Layers[0].View.Blocks
}
