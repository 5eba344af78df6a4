// SPDX-License-Identifier: Apache-2.0

package fair_test

import (
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/fair"
)

// TestTurnsAlternateBetweenPeers has one peer with three members and one with
// one: the second waits for one of the first's, not for all.
func TestTurnsAlternateBetweenPeers(t *testing.T) {
	left := map[string]int{"a1": 2, "a2": 1, "a3": 1, "b1": 3}
	var q fair.Turns[string]
	for _, m := range []string{"a1", "a2", "a3", "b1"} {
		q.Add(m[:1], m)
	}
	var got []string
	for range 10 {
		q.Next(func(m string) bool {
			if left[m] == 0 {
				return false
			}
			left[m]--
			got = append(got, m)
			return true
		})
	}
	if order := strings.Join(got, " "); order != "a1 b1 a2 b1 a3 b1 a1" {
		t.Errorf("the order was %s", order)
	}
	q.Add("b", "b2")
	got = nil
	q.Next(func(m string) bool { got = append(got, m); return true })
	if len(got) != 1 || got[0] != "b2" {
		t.Errorf("of a queue that was empty: %v", got)
	}
}
