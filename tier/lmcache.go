// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/kvasir-kv/kvasir/kv"
)

// Digested returns a short name without characters that separate parts of names, for an object whose own name is
// too long or has such a character: sha256-DIGEST, and after ~ the generation, so that objects of earlier generations can be recognized.
// LMCache's servers do not find such objects.
func (n Name) Digested() Name {
	model := n.Kept()
	sum := sha256.Sum256([]byte(model + "\x00" + n.Salt))
	out := "sha256-" + hex.EncodeToString(sum[:])
	const longestTag = 80
	if at := strings.LastIndexByte(model, '~'); at >= 0 && len(model)-at <= longestTag && !strings.ContainsAny(model[at:], "@/\x00") {
		out += model[at:]
	}
	return Name{Model: out, Mixed: n.Mixed}
}

// LMCache returns the name that LMCache servers (0.5.6) give an object in Redis, Valkey
// and S3:
//
//	MODEL@RANK@GROUP@HASH[@SALT]    rank 8 digits, group and hash hexadecimal
//
// A model whose name has an @ gets its Digested name. LMCache reports false without a model, and for a mixed model.
func (n Name) LMCache(k kv.Key) (string, bool) {
	if strings.Contains(n.Model, "@") {
		n = n.Digested()
	}
	name := fmt.Sprintf("%s@%08x@%x@%s", n.Kept(), uint32(k.Rank), k.Group, k.Chunk)
	if n.Salt != "" {
		name += "@" + n.Salt
	}
	return name, n.Model != "" && !n.Mixed
}

// ParseLMCache parses a name that Name.LMCache returned. The key has no namespace.
func ParseLMCache(name string) (n Name, k kv.Key, ok bool) {
	parts := strings.SplitN(name, "@", 5)
	if len(parts) < 4 || parts[0] == "" {
		return n, k, false
	}
	rank, err1 := strconv.ParseUint(parts[1], 16, 32)
	group, err2 := strconv.ParseUint(parts[2], 16, 32)
	hash, err3 := hex.DecodeString(parts[3])
	if err1 != nil || err2 != nil || err3 != nil || len(hash) != len(k.Chunk) {
		return n, k, false
	}
	n.Model = parts[0]
	if len(parts) == 5 {
		n.Salt = parts[4]
	}
	k.Rank, k.Group, k.Chunk = kv.Rank(rank), uint32(group), kv.Hash(hash)
	again, ok := n.LMCache(k)
	return n, k, ok && again == name
}
