// SPDX-License-Identifier: Apache-2.0

package pool_test

import (
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// All fields that cannot be used are named at once.
func TestValidate(t *testing.T) {
	f := func(o pool.Options, want string) {
		t.Helper()
		var got []string
		options.Each(o.Validate(), func(e *options.Error) { got = append(got, e.Field) })
		if strings.Join(got, " ") != want {
			t.Errorf("%+v: %v, want %s", o, o.Validate(), want)
		}
	}
	f(pool.Options{Name: "p", Bytes: 1 << 20}, "")
	f(pool.Options{Name: "p", Bytes: 4096, Align: 4096, ChunkTokens: 256}, "")
	f(pool.Options{Name: "p", Bytes: 4095}, "Bytes")
	f(pool.Options{Name: "p", Bytes: 1 << 51}, "Bytes")
	f(pool.Options{Name: "p", Bytes: 1 << 20, Align: 1000}, "Align")
	f(pool.Options{Name: "p", Bytes: 1 << 20, Align: 32}, "Align")
	f(pool.Options{Name: "../p", Bytes: -1, Align: -1, ChunkTokens: -1}, "Name Align Bytes ChunkTokens")
}
