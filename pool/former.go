package pool

import (
	"slices"

	"github.com/kvasir-kv/kvasir/shm"
)

// An engine asks for the chunk size once, when it starts, and goes by it for life.
// So the index keeps which sizes earlier servers of this pool told, also when the
// pool is made anew with another: header bytes 88 to 119, eight numbers of 4
// bytes, 0 for none.
const (
	headerFormer = 88
	maxFormer    = 8
)

// FormerChunkTokens returns the chunk sizes other than its own that earlier
// servers of the pool told engines, which may still run.
func (p *Pool) FormerChunkTokens() []int { return formerOf(p.index) }

// ForgetFormer says that no engine goes by a former chunk size any more.
func (p *Pool) ForgetFormer() { setFormer(p.index, nil) }

func formerOf(index *shm.Segment) (out []int) {
	for i := range int64(maxFormer / 2) {
		w := index.Word(headerFormer + 8*i).Load()
		for _, n := range []uint32{uint32(w), uint32(w >> 32)} {
			if n != 0 {
				out = append(out, int(n))
			}
		}
	}
	return out
}

func setFormer(index *shm.Segment, sizes []int) {
	for i := range int64(maxFormer / 2) {
		w := uint64(0)
		for half := range int64(2) {
			if at := int(2*i + half); at < len(sizes) {
				w |= uint64(uint32(sizes[at])) << (32 * half)
			}
		}
		index.Word(headerFormer + 8*i).Store(w)
	}
}

// toldBy returns what the servers of an index told that is not ours, the latest
// first.
func toldBy(index *shm.Segment, h header, ours int) []int {
	told := append([]int{h.opts.ChunkTokens}, formerOf(index)...)
	told = slices.DeleteFunc(told, func(n int) bool { return n == ours || n == 0 })
	return told[:min(len(told), maxFormer)]
}
