// SPDX-License-Identifier: Apache-2.0

package event

import "github.com/tinylib/msgp/msgp"

// TokensIn returns the number of tokens in an encoded list; 0 if encoded is no list.
func TokensIn(encoded []byte) int {
	n, _, err := msgp.ReadArrayHeaderBytes(encoded)
	if err != nil {
		return 0
	}
	return int(n)
}
