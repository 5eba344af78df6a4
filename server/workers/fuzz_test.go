// SPDX-License-Identifier: Apache-2.0

package workers

import "testing"

// FuzzNote: a note of any bytes is refused or read, and each of its registrations, too.
func FuzzNote(f *testing.F) {
	b, _, err := NewRegistry(4).Encode(Note{Chunks: []int{64}, Mixed: []string{"m"}}, 1<<16)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"Version":2}`))
	f.Add([]byte(`{"Workers":[{"ID":1,"Model":"m","World":1,"Lent":[{"Name":"a"}]},null,7],"PIDs":"x"}`))
	f.Add([]byte(`{"Version":1,"Remains":[{"Name":"a"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := DecodeNote(b)
		if err != nil {
			return
		}
		if n.Version > noteVersion {
			t.Fatalf("version %d is read", n.Version)
		}
		for i := range n.Workers {
			if w, err := n.Worker(i); (w == nil) == (err == nil) {
				t.Fatalf("registration %d: %v, %v", i, w, err)
			}
		}
	})
}
