// SPDX-License-Identifier: Apache-2.0

package store

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"regexp"
	"strconv"
	"strings"
)

// HiCacheKey is the name of an object that SGLang's HiCache stores with its mooncake backend (SGLang 0.5.23): the K or the V of one
// page of tokens, of one rank.
//
//	[TAG_]MODEL_HASH_TP_k      and _v; with several stages [TAG_]MODEL_HASH_TP_PP_k
//	[TAG_]MODEL_HASH__k        MLA, whose ranks have equal bytes; with several stages [TAG_]MODEL_HASH_PP_k, the form of a rank's name
//	…_HASH_dcpN_cpN[_PP]_k     MLA in shards of decode context parallelism
//	…_HASH_RANKS_POOL[_k|_v]   windows, indexers, drafts of a model
//	…_HASH_RANKS_temporal      and _conv_N: states
type HiCacheKey struct {
	Model  string // the tag, if any, and the served model's name with - in place of /
	Hash   string // hexadecimal hash of the page and of all pages before it
	TP, PP int    // ranks; -1 where the name has none
	Shard  string // dcpN_cpN; "": none
	Pool   string // "": the KV of full attention
	Part   string // k, v, temporal or conv_N; "": the pool has one object per page
}

var (
	hicacheRanks = regexp.MustCompile(`^(?:(dcp\d+_cp\d+)(?:_(\d+))?|(\d+)(?:_(\d+))?|)_(.+)$`)
	hicachePart  = regexp.MustCompile(`^(?:([kv]|temporal|conv_\d+)|((?:auxiliary_|draft_)?swa|(?:draft_)?indexer|draft|deepseek_v4_[a-z0-9_]*[a-z0-9])(?:_([kv]))?)$`)
)

// ParseHiCacheKey parses the name of an object. ok is false if the name has another form.
func ParseHiCacheKey(name string) (k HiCacheKey, ok bool) {
	k.TP, k.PP = -1, -1
	const digits = 2 * sha256.Size
	for at := 0; at < len(name); at++ { // the hash is the last word with 64 hexadecimal digits
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
	ranks := hicacheRanks.FindStringSubmatch(name[len(k.Model)+1+digits+1:])
	if ranks == nil {
		return k, false
	}
	part := hicachePart.FindStringSubmatch(ranks[5])
	if part == nil {
		return k, false
	}
	k.Shard, k.Pool, k.Part = ranks[1], part[2], part[1]+part[3]
	for text, rank := range map[string]*int{"tp" + ranks[3]: &k.TP, "pp" + ranks[2] + ranks[4]: &k.PP} {
		if text = text[2:]; text == "" {
			continue
		}
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil || strconv.FormatUint(n, 10) != text {
			return k, false
		}
		*rank = int(n)
	}
	return k, true
}

// String returns the name.
func (k HiCacheKey) String() string {
	words := []string{k.Model, k.Hash, k.Shard}
	if k.TP >= 0 {
		words[2] = strconv.Itoa(k.TP)
	}
	if k.PP >= 0 {
		words = append(words, strconv.Itoa(k.PP))
	}
	for _, w := range []string{k.Pool, k.Part} {
		if w != "" {
			words = append(words, w)
		}
	}
	return strings.Join(words, "_")
}

// HiCacheModel returns the Model of HiCacheKey for an extra_backend_tag and a served model's name.
func HiCacheModel(tag, model string) string {
	model = strings.ReplaceAll(model, "/", "-")
	if tag != "" {
		return tag + "_" + model
	}
	return model
}

// HiCacheHashes returns the hashes of a prompt's full pages, each of `page` tokens, as SGLang 0.5.23 computes them. A nil extraKey or
// salt means that the request has no extra_key or cache_salt.
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
