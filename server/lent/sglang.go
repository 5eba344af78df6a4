// SPDX-License-Identifier: Apache-2.0

package lent

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// SGLang registers planes: first all K layers, then all V layers, each a tensor of its own. Its two clients for LMCache (lmcache 0.5.6)
// give the form of a plane in kv_list_layout:
//
//	unified  [blocks, page, heads, size], [blocks, page, size] of MLA
//	k_v      [blocks × page, heads, size], with the page in tokens_per_block
const (
	sglang  = "sglang"
	unified = "unified"
	listKV  = "k_v"
)

// maxPage bounds the tokens of a page. A registration with larger pages is refused.
const maxPage = 1 << 20

// understoodSGLang returns an error for an engine of SGLang whose hints are missing or contradict each other.
func understoodSGLang(reg *lmcache.KVCache, cpuViews bool) error {
	switch {
	case reg.ListLayout != unified && reg.ListLayout != listKV:
		return fmt.Errorf("kv_list_layout %.64q of an engine of type sglang: this server reads unified and k_v only", reg.ListLayout)
	case reg.KVLayout != "":
		return errors.New("layout_hints.kv_layout is vLLM's, the engine is of type sglang")
	case reg.ListLayout == unified && reg.PageTokens != 0:
		return errors.New("layout_hints.tokens_per_block beside kv_list_layout unified, whose tensors show their pages")
	case reg.ListLayout == unified && !cpuViews && reg.OnCPU():
		return errors.New("on a CPU this client of SGLang lends views of its memory, and the engine itself never sees what is loaded: set " +
			"lmcache.mp.mp_transfer_mode: engine_driven in extra_config of SGLang's --lmcache-config-file")
	case reg.ListLayout == unified:
		return nil
	case reg.PageTokens < 1 || reg.PageTokens > maxPage:
		return fmt.Errorf("layout_hints.tokens_per_block is %d, kv_list_layout k_v needs the tokens of a page", reg.PageTokens)
	case len(reg.Descriptors)%2 != 0:
		return fmt.Errorf("%d planes: kv_list_layout k_v has as many of V as of K", len(reg.Descriptors))
	case len(reg.Groups) > 1:
		return fmt.Errorf("%d KV groups: kv_list_layout k_v has one", len(reg.Groups))
	}
	return nil
}

// sglangTensor returns the tensor of a plane with a dimension for pages, and its form.
func sglangTensor(reg *lmcache.KVCache, t paged.Tensor) (paged.Form, paged.Tensor, error) {
	if len(t.Stride) != len(t.Shape) {
		return 0, t, fmt.Errorf("shape %v and strides %v have different lengths", t.Shape, t.Stride)
	}
	if reg.ListLayout == unified {
		switch len(t.Shape) {
		case 3:
			return paged.MLA, t, nil
		case 4:
			return paged.FusedNHD, t, nil
		}
		return 0, t, fmt.Errorf("shape %v: planes of kv_list_layout unified have 3 or 4 axes", t.Shape)
	}
	page := int64(reg.PageTokens)
	if len(t.Shape) != 3 {
		return 0, t, fmt.Errorf("shape %v: planes of kv_list_layout k_v have 3 axes", t.Shape)
	}
	if t.Shape[0]%page != 0 {
		return 0, t, fmt.Errorf("%d slots are no multiple of a page of %d tokens", t.Shape[0], page)
	}
	if t.Stride[0] < 0 || t.Stride[0] > maxStride/page {
		return 0, t, fmt.Errorf("strides %v: the first one is negative or too large", t.Stride)
	}
	t.Stride = slices.Concat([]int64{t.Stride[0] * page}, t.Stride)
	t.Shape = slices.Concat([]int64{t.Shape[0] / page, page}, t.Shape[1:])
	return paged.FusedNHD, t, nil
}

// maxStride bounds a stride before it is multiplied, in elements; paged allows less.
const maxStride = 1 << 46
