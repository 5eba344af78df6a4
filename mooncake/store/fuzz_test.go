// SPDX-License-Identifier: Apache-2.0

package store

import (
	"testing"

	sp "github.com/kvasir-kv/kvasir/mooncake/store/structpack"
)

// Answers of a hostile master: an error or a value, in memory that the answer's own length bounds.
func FuzzAnswers(f *testing.F) {
	for _, v := range vectors(f) {
		if b := unhex(f, v.Response); len(b) > responseHeader {
			f.Add(b[responseHeader:])
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		read := func(g func(r *sp.Reader, t *sp.Type)) {
			if r, typ, err := sp.Open(b); err == nil {
				g(r, typ)
			}
		}
		read(func(r *sp.Reader, typ *sp.Type) { r.Skip(typ); _ = r.End() })
		for _, n := range []int{0, 1, 3} {
			read(func(r *sp.Reader, typ *sp.Type) {
				all := make([]Found, n)
				_ = results(r, typ, n, func(i int, typ *sp.Type) error { return found(r, typ, &all[i]) }, func(i int, c Code) { all[i].Err = c })
				for _, f := range all {
					if len(f.Replicas) > len(b) {
						t.Fatal("more replicas than bytes")
					}
					for i := range f.Replicas {
						if len(f.Replicas[i].Pieces) > len(b) {
							t.Fatal("more pieces than bytes")
						}
						f.Replicas[i].Bytes()
					}
				}
			})
			read(func(r *sp.Reader, typ *sp.Type) {
				_ = results(r, typ, n, func(i int, typ *sp.Type) error { _, err := replicas(r, typ); return err }, func(int, Code) {})
			})
			read(func(r *sp.Reader, typ *sp.Type) {
				_ = results(r, typ, n, func(int, *sp.Type) error { r.Bool(); return nil }, func(int, Code) {})
			})
		}
		var code error
		read(func(r *sp.Reader, typ *sp.Type) { _ = coded(&code, r, typ) })
	})
}
