// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"sync/atomic"
	"time"
)

// Progress says how far writes have come, for displays. It counts a request when all bytes of the request have been written; a request
// that is sent twice counts twice. Its methods are safe for concurrent use. A nil *Progress counts nothing.
type Progress struct {
	first atomic.Int64 // ns since the epoch: when the first write began
	bytes atomic.Uint64
}

// First returns when the first write began. The zero time means that none has begun.
func (p *Progress) First() time.Time {
	if p == nil || p.first.Load() == 0 {
		return time.Time{}
	}
	return time.Unix(0, p.first.Load())
}

// Bytes returns how many bytes have been written.
func (p *Progress) Bytes() uint64 {
	if p == nil {
		return 0
	}
	return p.bytes.Load()
}

func (p *Progress) begin() {
	if p != nil && p.first.Load() == 0 {
		p.first.CompareAndSwap(0, time.Now().UnixNano())
	}
}

func (p *Progress) add(n uint64) {
	if p != nil {
		p.bytes.Add(n)
	}
}

func (p *Progress) confirmed(n uint64) {
	p.begin()
	p.add(n)
}

// Count makes p count the writes into the region, from now on.
func (r *Region) Count(p *Progress) { r.incoming.Store(p) }
