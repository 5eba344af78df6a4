// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"maps"
	"sync/atomic"
)

// Stats are the counts of a socket since it was made, over all its connections.
type Stats struct {
	Peers       int               // current connections, including those in their handshake
	Accepted    uint64            // connections accepted (sockets that listen) or made (sockets that connect)
	Handshakes  uint64            // connections of Accepted that finished their handshake
	Closed      map[string]uint64 // connections that ended, by Reason
	MessagesIn  uint64
	MessagesOut uint64 // messages queued for sending
	BytesIn     uint64
	BytesOut    uint64
	Reads       uint64 // read calls that returned bytes
	Writes      uint64 // write calls
	Refused     uint64 // messages refused because a queue was full
}

// counters are a peer's part of Stats; its goroutines add without contention.
type counters struct {
	messagesIn, messagesOut, bytesIn, bytesOut, reads, writes, refused atomic.Uint64
}

func (s *Stats) add(c *counters) {
	s.MessagesIn += c.messagesIn.Load()
	s.MessagesOut += c.messagesOut.Load()
	s.BytesIn += c.bytesIn.Load()
	s.BytesOut += c.bytesOut.Load()
	s.Reads += c.reads.Load()
	s.Writes += c.writes.Load()
	s.Refused += c.refused.Load()
}

func (s Stats) clone() Stats {
	s.Closed = maps.Clone(s.Closed)
	return s
}
