// SPDX-License-Identifier: Apache-2.0

package event

import "github.com/tinylib/msgp/msgp"

// TokensIn returns how many tokens an encoded list of tokens has; 0 where it is none.
func TokensIn(encoded []byte) int {
	n, _, err := msgp.ReadArrayHeaderBytes(encoded)
	if err != nil {
		return 0
	}
	return int(n)
}
