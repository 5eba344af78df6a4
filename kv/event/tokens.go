// SPDX-License-Identifier: Apache-2.0

package event

import "github.com/tinylib/msgp/msgp"

// TokensIn returns the number of tokens in a msgpack array; 0 if encoded is no array.
func TokensIn(encoded []byte) int {
	n, _, err := msgp.ReadArrayHeaderBytes(encoded)
	if err != nil {
		return 0
	}
	return int(n)
}
