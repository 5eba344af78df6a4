// SPDX-License-Identifier: Apache-2.0

package prefix_test

import (
	"encoding/binary"
	"testing"

	"github.com/kvasir-kv/kvasir/proxy/prefix"
)

func key(i int) (k prefix.RelayedKey) {
	binary.LittleEndian.PutUint64(k[:], uint64(i))
	return k
}

// The last 8,192 prompts are known, as are those that were asked for since; at most twice as many are.
// Each time a prompt is found it has another id.
func TestPrompts(t *testing.T) {
	const set = 8192
	var s prefix.RelayedPrompts
	if _, _, ok := s.Find(key(0)); ok {
		t.Error("found in nothing")
	}
	ids := map[string]bool{}
	for i := range 5 * set {
		s.Add(key(i), prefix.RelayedKV{Registry: "http://r", Engine: "p", Transfer: "t"})
		if i%(set/2) == 0 {
			r, id, ok := s.Find(key(0))
			if !ok || r != (prefix.RelayedKV{Registry: "http://r", Engine: "p", Transfer: "t"}) || ids[id] {
				t.Fatalf("after %d: %+v, %q, %v", i, r, id, ok)
			}
			ids[id] = true
		}
	}
	for i := 4 * set; i < 5*set; i++ {
		if _, _, ok := s.Find(key(i)); !ok {
			t.Fatalf("%d is gone", i)
		}
	}
	known := 0
	for i := range 5 * set {
		if _, _, ok := s.Find(key(i)); ok {
			known++
		}
	}
	if known > 2*set {
		t.Errorf("%d are known", known)
	}
	s.Add(key(0), prefix.RelayedKV{})
	s.Add(key(5*set-1), prefix.RelayedKV{})
	s.Forget(key(0))
	s.Forget(key(5*set - 1))
	for _, i := range []int{0, 5*set - 1} {
		if _, _, ok := s.Find(key(i)); ok {
			t.Errorf("%d is not forgotten", i)
		}
	}
}
