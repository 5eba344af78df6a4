// SPDX-License-Identifier: Apache-2.0

package s3_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/s3"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

func TestSealed(t *testing.T) {
	for name, o := range map[string]s3.Options{"whole": {}, "in parts": {Part: 64 << 10}} {
		t.Run(name, func(t *testing.T) {
			tiertest.Sealed(t, func(t *testing.T) (tier.Tier, func([]byte) bool) {
				f := newFake(t)
				o := o
				o.URL, o.Keys = f.url, keys()
				x, err := s3.Open(o)
				if err != nil {
					t.Fatal(err)
				}
				return x, func(b []byte) bool {
					f.mu.Lock()
					defer f.mu.Unlock()
					for name, s := range f.objects {
						if strings.Contains(name+" "+s.meta, string(b)) || bytes.Contains(s.data, b) {
							return true
						}
					}
					return false
				}
			})
		})
	}
}
