// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// Rules returns the rules of a release, one by one, with their texts, and which of them
// no recorded event shows.
func Rules(r wire.Release) (bits []uint32, does []string, unseen []bool) {
	for _, d := range departures {
		for _, in := range d.in {
			if in == r {
				bits, does, unseen = append(bits, uint32(d.rule)), append(does, d.does), append(unseen, d.read)
			}
		}
	}
	return bits, does, unseen
}

// Follow makes a Scheduler follow just these rules.
func (s *Scheduler) Follow(bits uint32) { s.rules = rule(bits) }
