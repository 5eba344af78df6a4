// SPDX-License-Identifier: Apache-2.0

package lent_test

import (
	"context"
	"crypto/md5"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/lent"
)

// Digests are of each chunk's blocks, all of K and then all of V, layer after layer.
func TestChecksums(t *testing.T) {
	dir := t.TempDir()
	reg := registration(t, dir, lmcache.EngineGroup{Layers: []int{1, 0}, WindowTokens: -1})
	const plane, block = bytes / 2, bytes / 2 / blocks
	memory := make([][]byte, 2)
	for i := range memory {
		memory[i] = make([]byte, bytes)
		for j := range memory[i] {
			memory[i][j] = byte(j>>8 + 7*j + 100*i)
		}
		if err := os.WriteFile(filepath.Join(dir, reg.Descriptors[i].ShmName), memory[i], 0o600); err != nil {
			t.Fatal(err)
		}
	}
	ids, per := []int{7, 0, 3, 3, 1}, 2
	sum := func(wide bool, layers ...int) (out []string) {
		for chunk := range slices.Chunk(ids, per) {
			h := md5.New()
			for _, l := range layers {
				for p := range 2 {
					for _, b := range chunk {
						raw := memory[l][p*plane+b*block:][:block]
						for i := 0; i < len(raw); i += 2 {
							if wide {
								h.Write([]byte{0, 0})
							}
							h.Write(raw[i : i+2])
						}
					}
				}
			}
			out = append(out, hex.EncodeToString(h.Sum(nil)))
		}
		return out
	}
	for _, dtype := range []string{"float16", "bfloat16"} {
		wide := dtype == "bfloat16"
		for i := range reg.Descriptors {
			reg.Descriptors[i].DType = dtype
		}
		kv, err := open(t, reg, lent.Options{ChunkTokens: 16, Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		all, err := kv.Checksums(t.Context(), ids, per, false)
		if err != nil || len(all.Digests) != 1 || all.Layers != nil || !slices.Equal(all.Digests[0], sum(wide, 0, 1)) {
			t.Errorf("%s: %+v, %v; want %v", dtype, all, err, sum(wide, 0, 1))
		}
		each, err := kv.Checksums(t.Context(), ids, per, true)
		if err != nil || !slices.Equal(each.Layers, []int{0, 1}) || !slices.Equal(each.Digests[0], sum(wide, 0)) || !slices.Equal(each.Digests[1], sum(wide, 1)) {
			t.Errorf("%s, by layer: %+v, %v", dtype, each, err)
		}
		for _, bad := range []int{-1, blocks} {
			if _, err := kv.Checksums(t.Context(), []int{0, bad}, per, false); !errors.Is(err, paged.ErrBlocks) {
				t.Errorf("block %d: %v", bad, err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := kv.Checksums(ctx, ids, per, false); !errors.Is(err, context.Canceled) {
			t.Errorf("who has left: %v", err)
		}
		if layers, n := kv.Size(); layers != 2 || n != blocks {
			t.Errorf("%d layers of %d blocks", layers, n)
		}
		if err := kv.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := kv.Checksums(t.Context(), ids, per, false); !errors.Is(err, lent.ErrChecksums) {
			t.Errorf("after its end: %v", err)
		}
	}
}
