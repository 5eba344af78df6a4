// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/kvasir-kv/kvasir/kv"
)

// LMCache returns the name that LMCache servers (0.5.6) give an object in Redis, Valkey
// and S3:
//
//	MODEL@RANK@GROUP@HASH[@SALT]    rank 8 digits, group and hash hexadecimal
//
// It reports false where there can be none.
func (n Name) LMCache(k kv.Key) (string, bool) {
	name := fmt.Sprintf("%s@%08x@%x@%s", Revised(n.Model, n.Revision), uint32(k.Rank), k.Group, k.Chunk)
	if n.Salt != "" {
		name += "@" + n.Salt
	}
	return name, n.Model != "" && !strings.Contains(n.Model, "@")
}

// ParseLMCache reads what Name.LMCache writes. The key has no namespace.
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
