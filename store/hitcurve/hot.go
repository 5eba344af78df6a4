// SPDX-License-Identifier: Apache-2.0

package hitcurve

// hotChunks finds chunks that more than a third of all prompts have, such as those of a system prompt. A cache of any useful size has them,
// and in a sample each would weigh too much. For each position in a prompt it counts the two most frequent chunks (J. Misra, D. Gries,
// 1982).
type hotChunks [hotPositions][2]struct {
	id    uint64
	count uint32
}

const (
	hotPositions = 64   // from the start of a prompt
	hotFrom      = 32   // count from which on a chunk is hot
	mostHot      = 1024 // largest count; it bounds how long a chunk stays hot once prompts have others
)

// note counts a lookup of the chunk at a position below hotPositions, and reports whether the chunk is hot.
func (h *hotChunks) note(position int, id uint64) bool {
	p := &h[position]
	for i := range p {
		if p[i].id == id && p[i].count > 0 {
			p[i].count = min(p[i].count+1, mostHot)
			return p[i].count >= hotFrom
		}
	}
	for i := range p {
		if p[i].count == 0 {
			p[i].id, p[i].count = id, 1
			return false
		}
	}
	p[0].count--
	p[1].count--
	return false
}
