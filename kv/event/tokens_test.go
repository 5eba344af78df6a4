// SPDX-License-Identifier: Apache-2.0

package event

import (
	"testing"

	"github.com/tinylib/msgp/msgp"
)

func TestTokensIn(t *testing.T) {
	for _, n := range []int{0, 15, 16, 544, 1 << 16} {
		b := msgp.AppendArrayHeader(nil, uint32(n))
		if got := TokensIn(b); got != n {
			t.Errorf("%d tokens are read as %d", n, got)
		}
	}
	for _, b := range [][]byte{nil, {0xc0}, {0xdd, 1}} {
		if got := TokensIn(b); got != 0 {
			t.Errorf("%x: %d tokens", b, got)
		}
	}
}
