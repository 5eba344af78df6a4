// SPDX-License-Identifier: Apache-2.0

package lent_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/lent"
	"github.com/kvasir-kv/kvasir/store"
)

const (
	sglBlocks = 6
	sglPage   = 16
	sglSize   = 4 // elements of a head
)

// sglangRegistration describes two layers of K and V with random bytes in segments of dir.
func sglangRegistration(t *testing.T, dir, list string, heads int, dtype string) (*lmcache.KVCache, [][]byte) {
	t.Helper()
	elements := sglBlocks * sglPage * heads * sglSize
	bytes := elements * map[string]int{"bfloat16": 2, "float8_e4m3fn": 1}[dtype]
	reg := &lmcache.KVCache{InstanceID: 7, Model: "m", WorldSize: 1, EngineType: "sglang", ListLayout: list}
	h := int64(heads)
	shape, stride := []int64{sglBlocks, sglPage, h, sglSize}, []int64{sglPage * h * sglSize, h * sglSize, sglSize, 1}
	if list == "k_v" {
		reg.PageTokens = sglPage
		shape, stride = []int64{sglBlocks * sglPage, h, sglSize}, []int64{h * sglSize, sglSize, 1}
	}
	var planes [][]byte
	for i := range 4 {
		name := fmt.Sprintf("lmcache_kv_1_%d", i)
		plane := make([]byte, bytes)
		rand.NewChaCha8([32]byte{byte(i + 1)}).Read(plane)
		if err := os.WriteFile(filepath.Join(dir, name), plane, 0o600); err != nil {
			t.Fatal(err)
		}
		planes = append(planes, plane)
		reg.Descriptors = append(reg.Descriptors, lmcache.Descriptor{
			Type: lmcache.CPUShm, ShmName: "/" + name, Bytes: int64(bytes), DType: dtype, Device: "cpu", Shape: slices.Clone(shape), Stride: slices.Clone(stride),
		})
	}
	return reg, planes
}

// Both layouts of SGLang are read as they lie, with heads below and as many as the tokens of a page: a chunk is plane after plane, token
// after token, and other pages get those bytes back.
func TestSGLangBytes(t *testing.T) {
	for _, list := range []string{"k_v", "unified"} {
		for _, heads := range []int{1, 2, 8, 16} {
			for _, dtype := range []string{"bfloat16", "float8_e4m3fn"} {
				dir := t.TempDir()
				reg, planes := sglangRegistration(t, dir, list, heads, dtype)
				kv, err := open(t, reg, lent.Options{ChunkTokens: 2 * sglPage, Dir: dir, CPUViews: true})
				if err != nil {
					t.Fatal(err)
				}
				page := len(planes[0]) / sglBlocks
				var want []byte
				for _, plane := range planes {
					want = append(append(want, plane[4*page:5*page]...), plane[2*page:3*page]...)
				}
				chunk := make([]byte, kv.Bytes)
				run := func(pages []int, load bool) {
					b, err := kv.Blocks([][]int{pages}, 1)
					if err != nil {
						t.Fatal(err)
					}
					plan, err := b.Plan([]store.Part{{Bytes: chunk}}, load, 0)
					if err != nil {
						t.Fatal(err)
					}
					if !kv.Use(func() { err = plan.Run(1, func(f func()) error { return shm.Guard(f) }) }) || err != nil {
						t.Fatal(err)
					}
				}
				run([]int{4, 2}, false)
				if !slices.Equal(chunk, want) {
					t.Errorf("%s, %d heads of %s: a chunk has other bytes", list, heads, dtype)
				}
				run([]int{0, 5}, true)
				for i, plane := range planes {
					got, err := os.ReadFile(filepath.Join(dir, fmt.Sprintf("lmcache_kv_1_%d", i)))
					if err != nil {
						t.Fatal(err)
					}
					if !slices.Equal(got[:page], plane[4*page:5*page]) || !slices.Equal(got[5*page:], plane[2*page:3*page]) || !slices.Equal(got[page:5*page], plane[page:5*page]) {
						t.Errorf("%s, %d heads of %s: plane %d has other bytes after a load", list, heads, dtype, i)
					}
				}
			}
		}
	}
}

// The layouts of SGLang have one meaning of bytes, another one than vLLM's.
func TestSGLangFingerprints(t *testing.T) {
	of := func(list string) string {
		dir := t.TempDir()
		reg, _ := sglangRegistration(t, dir, list, 2, "bfloat16")
		kv, err := open(t, reg, lent.Options{ChunkTokens: 16, Dir: dir, CPUViews: true})
		if err != nil {
			t.Fatal(err)
		}
		return kv.Fingerprint()
	}
	if a, b := of("k_v"), of("unified"); a != b || !strings.Contains(a, "4") {
		t.Errorf("%q and %q", a, b)
	}
}

// What SGLang describes must be whole and without contradictions.
func TestSGLangRefusals(t *testing.T) {
	f := func(want, list string, change func(reg *lmcache.KVCache)) {
		t.Helper()
		dir := t.TempDir()
		reg, _ := sglangRegistration(t, dir, list, 2, "bfloat16")
		change(reg)
		_, err := open(t, reg, lent.Options{ChunkTokens: 16, Dir: dir})
		if !errors.Is(err, lent.ErrRegistration) || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	f("engine_driven", "unified", func(*lmcache.KVCache) {})
	f("beside kv_list_layout unified", "unified", func(r *lmcache.KVCache) { r.PageTokens = 16 })
	f("needs the tokens of a page", "k_v", func(r *lmcache.KVCache) { r.PageTokens = 0 })
	f("needs the tokens of a page", "k_v", func(r *lmcache.KVCache) { r.PageTokens = -16 })
	f("no multiple of a page of 7 tokens", "k_v", func(r *lmcache.KVCache) { r.PageTokens = 7 })
	f("3 planes", "k_v", func(r *lmcache.KVCache) { r.Descriptors = r.Descriptors[:3] })
	f("3 axes", "k_v", func(r *lmcache.KVCache) {
		r.Descriptors[1].Shape, r.Descriptors[1].Stride = []int64{6, 16, 2, 4}, []int64{128, 8, 4, 1}
	})
	f("strides", "k_v", func(r *lmcache.KVCache) { r.Descriptors[0].Stride[0] = 1 << 60 })
	f("strides", "k_v", func(r *lmcache.KVCache) { r.Descriptors[0].Stride[0] = -8 })
	f("does not fit", "k_v", func(r *lmcache.KVCache) { r.Descriptors[0].Shape[0] *= 2 })
	f("one", "k_v", func(r *lmcache.KVCache) { r.Groups = make([]lmcache.EngineGroup, 2) })
	f("unified and k_v only", "", func(*lmcache.KVCache) {})
	f("unified and k_v only", "v_k", func(*lmcache.KVCache) {})
	f("kv_layout is vLLM's", "k_v", func(r *lmcache.KVCache) { r.KVLayout = "NHD" })
	f("kv_list_layout", "k_v", func(r *lmcache.KVCache) { r.EngineType = "vllm" })
	f("vllm and sglang only", "k_v", func(r *lmcache.KVCache) { r.EngineType = "trtllm" })
	f("head_dim", "k_v", func(r *lmcache.KVCache) { r.Unread = lmcache.UnreadFields{"layout_hints.head_dim"} })
}
