// SPDX-License-Identifier: Apache-2.0

package zmtp

const (
	refBytes    = 8 << 10   // SendOwned keeps frames of at least this size without a copy
	keepBytes   = 64 << 10  // a buffer above this size is not kept for reuse
	stallBytes  = 256 << 10 // bytes that a slow peer must take within WriteTimeout; else it is closed
	maxVecs     = 64        // slices per writev
	flushRounds = 8         // how often a Send writes what others have queued meanwhile, before a goroutine takes over
)

// queue holds bytes to send, in order. Short frames and headers are copied into buf; long frames that the caller has given away stand
// in vec without a copy.
//
// vec has all bytes to send before buf[mark:]. When append moves buf, slices in vec keep
// the old array, whose bytes no longer change.
type queue struct {
	buf  []byte
	mark int
	vec  [][]byte
}

func (q *queue) empty() bool { return len(q.vec) == 0 && q.mark == len(q.buf) }

// copyFrames copies a message into the queue. It returns the number of bytes added.
func (q *queue) copyFrames(frames [][]byte) int {
	before, flags := len(q.buf), byte(flagMore)
	for i, f := range frames {
		if i == len(frames)-1 {
			flags = 0
		}
		q.buf = appendHeader(q.buf, flags, len(f))
		q.buf = append(q.buf, f...)
	}
	return len(q.buf) - before
}

// ownFrames adds a message to the queue, its long frames without a copy. It returns the number of bytes added.
func (q *queue) ownFrames(frames [][]byte) int {
	added, flags := 0, byte(flagMore)
	for i, f := range frames {
		if i == len(frames)-1 {
			flags = 0
		}
		before := len(q.buf)
		q.buf = appendHeader(q.buf, flags, len(f))
		if len(f) < refBytes {
			q.buf = append(q.buf, f...)
			added += len(q.buf) - before
			continue
		}
		added += len(q.buf) - before + len(f)
		q.seal()
		q.vec = append(q.vec, f)
	}
	return added
}

// seal appends to vec what was copied into buf since the last seal.
func (q *queue) seal() {
	if q.mark < len(q.buf) {
		q.vec = append(q.vec, q.buf[q.mark:len(q.buf):len(q.buf)])
		q.mark = len(q.buf)
	}
}

// batch holds the bytes that a flush took from the queue. The goroutine that set mu.writing owns it.
type batch struct {
	buf []byte   // from the queue, given back for reuse
	vec [][]byte // what is left to write
	all [][]byte // vec's array, for reuse
}

// take moves the queue's content to b, which must be empty, and gives b's old arrays to the queue.
func (q *queue) take(b *batch) {
	q.seal()
	b.vec, b.all, q.vec = q.vec, q.vec, b.all[:0]
	b.buf, q.buf, q.mark = q.buf, b.buf[:0], 0
}

// consume removes the first n bytes, which were written.
func (b *batch) consume(n int) {
	for n > 0 {
		if n < len(b.vec[0]) {
			b.vec[0] = b.vec[0][n:]
			return
		}
		n -= len(b.vec[0])
		b.vec = b.vec[1:]
	}
}

// reset clears the batch after it was written, so that no reference to frames stays.
func (b *batch) reset() {
	clear(b.all)
	b.vec, b.all = nil, b.all[:0]
	if cap(b.buf) > keepBytes {
		b.buf = nil
	}
}

// chunk returns the next up to limit bytes of the batch, as at most maxVecs slices.
func (b *batch) chunk(dst [][]byte, limit int) [][]byte {
	dst = dst[:0]
	for _, v := range b.vec {
		if limit == 0 || len(dst) == maxVecs {
			break
		}
		v = v[:min(len(v), limit)]
		limit -= len(v)
		dst = append(dst, v)
	}
	return dst
}
