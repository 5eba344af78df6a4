// SPDX-License-Identifier: Apache-2.0

package tier

// Requests are the figures of a tier whose provider charges for requests. They show what the
// bill will contain.
type Requests struct {
	Requests map[string]uint64 `counter:"kvasir_tier_requests_total" label:"kind" help:"Requests sent to an object store, retries included, by kind as bills have them. POST begins and ends an upload in parts."`
	Sent     uint64            `counter:"kvasir_tier_request_sent_bytes_total" help:"Bytes of objects sent with them."`
	Received uint64            `counter:"kvasir_tier_request_received_bytes_total" help:"Bytes of objects that came back."`
	Retries  map[string]uint64 `counter:"kvasir_tier_request_retries_total" label:"why" help:"Requests that were sent again: the store was busy, failed, or the connection did."`
	Unspent  map[string]uint64 `counter:"kvasir_tier_requests_spared_total" label:"why" help:"Requests that were not sent: the budget of PUTs was used up, credentials may not write, too many were sent again."`
}

// Billed is a Tier that counts its requests. Requests reports false if its provider does not charge for them.
type Billed interface{ Requests() (Requests, bool) }

func requestsOf(t Tier) (Requests, bool) {
	if b, ok := t.(Billed); ok {
		return b.Requests()
	}
	return Requests{}, false
}

// Requests implements Billed.
func (b *Bounding) Requests() (Requests, bool) { return requestsOf(b.of) }

// Requests implements Billed.
func (c *Counting) Requests() (Requests, bool) { return requestsOf(c.of) }

// Requests implements Billed. It adds up the requests of all tiers.
func (r *Routing) Requests() (sum Requests, any bool) {
	sum = Requests{Requests: make(map[string]uint64), Retries: make(map[string]uint64), Unspent: make(map[string]uint64)}
	add := func(to, from map[string]uint64) {
		for what, n := range from {
			to[what] += n
		}
	}
	for _, t := range r.tiers {
		n, ok := requestsOf(t)
		any = any || ok
		add(sum.Requests, n.Requests)
		add(sum.Retries, n.Retries)
		add(sum.Unspent, n.Unspent)
		sum.Sent, sum.Received = sum.Sent+n.Sent, sum.Received+n.Received
	}
	return sum, any
}
