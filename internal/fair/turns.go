// SPDX-License-Identifier: Apache-2.0

package fair

import "slices"

// Turns is a queue of members, grouped by peers (users or addresses). The peers take turns, and within a peer's turns its members take
// turns. So a peer with many members does not keep others waiting. Its zero value is empty.
type Turns[M any] struct{ peers []*members[M] }

type members[M any] struct {
	peer string
	of   []M
}

// Add adds a member after the other members of its peer.
func (q *Turns[M]) Add(peer string, m M) {
	i := slices.IndexFunc(q.peers, func(p *members[M]) bool { return p.peer == peer })
	if i < 0 {
		i = len(q.peers)
		q.peers = append(q.peers, &members[M]{peer: peer})
	}
	q.peers[i].of = append(q.peers[i].of, m)
}

// Next calls take for one member after another until take returns true. That member and its peer move to the end of the queue. Members
// for which take returns false are removed from the queue.
func (q *Turns[M]) Next(take func(m M) bool) {
	for len(q.peers) > 0 {
		p := q.peers[0]
		q.peers = q.peers[1:]
		taken := p.next(take)
		if len(p.of) > 0 {
			q.peers = append(q.peers, p)
		}
		if taken {
			return
		}
	}
}

func (p *members[M]) next(take func(m M) bool) bool {
	for len(p.of) > 0 {
		m := p.of[0]
		p.of = p.of[1:]
		if take(m) {
			p.of = append(p.of, m)
			return true
		}
	}
	return false
}
