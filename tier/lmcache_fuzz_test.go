// SPDX-License-Identifier: Apache-2.0

package tier_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// ParseLMCache accepts a name of another program only if it is written as the same name again.
func FuzzParseLMCache(f *testing.F) {
	name, _ := tier.Name{Model: "org/m", Salt: "a@b"}.LMCache(kv.Key{Chunk: kv.Hash{1}, Rank: 3, Group: 0xff})
	f.Add(name)
	f.Add("m@00000000@0@0123")
	f.Add("@00000000@0@" + name)
	f.Add("m@+0000000@0@0000000000000000000000000000000000000000000000000000000000000000")
	f.Fuzz(func(t *testing.T, text string) {
		n, k, ok := tier.ParseLMCache(text)
		if !ok {
			return
		}
		if again, ok := n.LMCache(k); !ok || again != text || n.Model == "" || k.Namespace != (kv.Namespace{}) {
			t.Errorf("%q is %+v, %+v, which is written %q", text, n, k, again)
		}
	})
}
