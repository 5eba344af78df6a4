// SPDX-License-Identifier: Apache-2.0

package store

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

// HiCacheKey names an object of SGLang's HiCache with its mooncake backend (SGLang 0.5.23): the K or the V of one page of tokens,
// of one rank.
//
//	[TAG_]MODEL_HASH_TP_k    and _v; with several stages [TAG_]MODEL_HASH_TP_PP_k
//	[TAG_]MODEL_HASH__k      MLA, whose ranks have equal bytes
type HiCacheKey struct {
	Model  string // the served model's name, each / as -, and what stands before it
	Hash   string // of the page and all before it, hexadecimal
	TP, PP int    // ranks; -1 where the name has none
	Part   string // k or v
}

// ParseHiCacheKey reads a name.
func ParseHiCacheKey(name string) (k HiCacheKey, ok bool) {
	k.TP, k.PP = -1, -1
	const digits = 2 * sha256.Size
	for at := 0; at < len(name); at++ { // the hash is the last word of 64 hexadecimal digits
		if name[at] != '_' || len(name)-at-1 <= digits || name[at+1+digits] != '_' {
			continue
		}
		if _, err := hex.DecodeString(name[at+1 : at+1+digits]); err != nil {
			continue
		}
		k.Model, k.Hash = name[:at], name[at+1:at+1+digits]
	}
	if k.Model == "" {
		return k, false
	}
	words := strings.Split(name[len(k.Model)+1+digits+1:], "_")
	words, k.Part = words[:len(words)-1], words[len(words)-1]
	if k.Part != "k" && k.Part != "v" || len(words) < 1 || len(words) > 2 {
		return k, false
	}
	if len(words) == 1 && words[0] == "" {
		return k, true
	}
	for i, rank := range []*int{&k.TP, &k.PP}[:len(words)] {
		n, err := strconv.ParseUint(words[i], 10, 16)
		if err != nil || strconv.FormatUint(n, 10) != words[i] {
			return k, false
		}
		*rank = int(n)
	}
	return k, true
}

// String returns the name.
func (k HiCacheKey) String() string {
	rank := ""
	if k.TP >= 0 {
		rank = strconv.Itoa(k.TP)
	}
	if k.PP >= 0 {
		rank += "_" + strconv.Itoa(k.PP)
	}
	return fmt.Sprintf("%s_%s_%s_%s", k.Model, k.Hash, rank, k.Part)
}

// HiCacheModel returns what HiCache makes of a served model's name and an extra_backend_tag.
func HiCacheModel(tag, model string) string {
	model = strings.ReplaceAll(model, "/", "-")
	if tag != "" {
		return tag + "_" + model
	}
	return model
}

// HiCacheHashes returns the hashes of a prompt's whole pages of page tokens, as SGLang 0.5.23 makes them. nil is no extra_key, or no
// cache_salt.
func HiCacheHashes(tokens []uint32, page int, extraKey, salt *string) []string {
	var parent []byte
	if extraKey != nil || salt != nil {
		h := sha256.New()
		h.Write([]byte("sglang-cache-namespace-v1"))
		for _, part := range []*string{extraKey, salt} {
			if part == nil {
				h.Write([]byte{0})
				continue
			}
			h.Write(binary.LittleEndian.AppendUint64([]byte{1}, uint64(len(*part))))
			h.Write([]byte(*part))
		}
		parent = h.Sum(nil)
	}
	var out []string
	for ; page > 0 && len(tokens) >= page; tokens = tokens[page:] {
		h := sha256.New()
		h.Write(parent)
		for _, t := range tokens[:page] {
			var b [4]byte
			binary.LittleEndian.PutUint32(b[:], t)
			h.Write(b[:])
		}
		parent = h.Sum(nil)
		out = append(out, hex.EncodeToString(parent))
	}
	return out
}
