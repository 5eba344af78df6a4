// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"fmt"
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
