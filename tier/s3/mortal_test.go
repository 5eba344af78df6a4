// SPDX-License-Identifier: Apache-2.0

package s3_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/tier/s3"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// Both layouts keep the ends of lives of the objects that Kvasir writes.
func TestEndsOfLives(t *testing.T) {
	for name, o := range map[string]s3.Options{"native": {}, "LMCache's": {Layout: s3.LMCache}, "parts": {Part: 64 << 10}} {
		t.Run(name, func(t *testing.T) {
			o.URL = newFake(t).url
			tiertest.Mortal(t, open(t, o))
		})
	}
}
