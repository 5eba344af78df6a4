// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"slices"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// GroupKind says what the blocks of a KV cache group are.
type GroupKind int

// The kinds that transfers distinguish. Sliding windows are attention.
const (
	Attention GroupKind = iota
	Mamba               // recurrent state: block 0 is a placeholder, ids never expand
)

// Descriptor is one copy of a push: Len bytes from P's address Src to D's Dst.
type Descriptor struct{ Src, Dst, Len uint64 }

// slicePlan says which bytes of each block one P rank copies to one D rank: length bytes, from offset src of P's block to offset dst of
// D's. send is false if this P rank copies nothing.
type slicePlan struct {
	send             bool
	src, dst, length uint64
}

// planSlice plans the copy between a P rank whose blocks have pLen payload bytes and a D rank whose blocks have dLen. replicated and
// heads mean the same as for validate. Source: _compute_sender_transfer_plan of vLLM 0.33.
func planSlice(p, d Peer, pLen, dLen uint64, replicated bool, heads int) (slicePlan, error) {
	ratio, err := tpRatio(p.TPSize, d.TPSize)
	if err != nil {
		return slicePlan{}, err
	}
	whole := slicePlan{send: true, length: pLen}
	if ratio == 1 {
		return whole, nil
	}
	if dReplicated := d.TPSize > heads; heads > 0 && replicated != dReplicated {
		perHead := pLen / uint64(max(heads/p.TPSize, 1))
		pHead, dHead := p.TPRank*heads/p.TPSize, d.TPRank*heads/d.TPSize
		return slicePlan{
			send:   p.TPRank%max(p.TPSize/heads, 1) == 0,
			src:    uint64(max(dHead-pHead, 0)) * perHead,
			dst:    uint64(max(pHead-dHead, 0)) * perHead,
			length: perHead,
		}, nil
	}
	switch {
	case replicated && ratio > 0:
		whole.send = p.TPRank%ratio == 0
	case replicated:
	case ratio > 0:
		whole.dst = uint64(p.TPRank%ratio) * pLen
	default:
		return slicePlan{send: true, src: uint64(d.TPRank%-ratio) * dLen, length: dLen}, nil
	}
	return whole, nil
}

// PushPlan describes how one P worker fills the memory of one D worker. It holds for all requests; Append applies it to a request's
// blocks. It is immutable.
type PushPlan struct {
	pairs   []regionPair
	slices  []slicePlan // of each pair
	kinds   []GroupKind // of each KV cache group
	perUnit int         // kernel blocks in a logical block of an attention group
}

// Errors that fail a whole pull, with vLLM's texts.
var (
	errSourceSlice = &LayoutError{"Computed source transfer region exceeds local KV block size."}
	errDestSlice   = &LayoutError{"Destination transfer region exceeds remote KV block size."}
)

// requestError says why one request of a pull failed. All but one of the texts are vLLM's.
type requestError string

func (e requestError) Error() string { return string(e) }

const (
	errGroupCount requestError = "KV group count mismatch"
	errFewBlocks  requestError = "P num blocks less than D"
	errGaveUp     requestError = "P gave the request up" // ours
)

func newPushPlan(pairs []regionPair, p, d Peer, replicated bool, heads int, kinds []GroupKind, perUnit int) (*PushPlan, error) {
	plan := &PushPlan{pairs: pairs, kinds: kinds, perUnit: max(perUnit, 1), slices: make([]slicePlan, len(pairs))}
	for i := range pairs {
		s, err := planSlice(p, d, pairs[i].p.Payload, pairs[i].d.Payload, replicated, heads)
		if err != nil {
			return nil, err
		}
		plan.slices[i] = s
	}
	return plan, nil
}

// cuts reports whether the plan copies only parts of blocks.
func (plan *PushPlan) cuts() bool {
	for i, s := range plan.slices {
		if s.send && (s.length != plan.pairs[i].p.Payload || s.length != plan.pairs[i].d.Payload) {
			return true
		}
	}
	return false
}

// check returns an error if the slice does not fit into the blocks of the pair r.
func (s *slicePlan) check(r *regionPair) error {
	switch {
	case s.src+s.length > r.p.Payload:
		return errSourceSlice
	case s.dst+s.length > r.d.Payload:
		return errDestSlice
	}
	return nil
}

// Append appends to `out` the descriptors that fill D's blocks (`wanted`) from P's blocks (`own`); both are lists of block ids by KV cache
// group. If D wants fewer blocks of a group than P has, it gets P's last ones.
//
// A *LayoutError ends the pull. Any other error concerns only this request; the caller must then drop the descriptors that Append added
// for it.
func (plan *PushPlan) Append(out []Descriptor, own, wanted [][]int) ([]Descriptor, error) {
	if empty(wanted) {
		return out, nil // D only wants P to free its blocks
	}
	src, dst, err := plan.match(own, wanted)
	if err != nil || empty(src) {
		return out, err
	}
	for i := range plan.pairs {
		r, s := &plan.pairs[i], &plan.slices[i]
		from, err := regionBlocks(src, &r.p)
		if err != nil {
			return out, err
		}
		to, err := regionBlocks(dst, &r.p) // the pair has one group
		if err != nil {
			return out, err
		}
		if len(from) == 0 || !s.send {
			continue
		}
		if err := s.check(r); err != nil {
			return out, err
		}
		if out, err = s.copies(out, r, from, to); err != nil {
			return out, err
		}
	}
	return out, nil
}

// match cuts `own`, P's block ids by group, to those that fill D's block ids `wanted`, and expands the ids of both to kernel blocks.
func (plan *PushPlan) match(own, wanted [][]int) (src, dst [][]int, err error) {
	if len(own) != len(wanted) || len(own) > len(plan.kinds) {
		return nil, nil, errGroupCount
	}
	src, dst = make([][]int, len(own)), make([][]int, len(own))
	for g := range own {
		a, b := own[g], wanted[g]
		if plan.kinds[g] == Mamba {
			a, b = withoutNull(a), withoutNull(b)
		}
		if len(a) < len(b) {
			return nil, nil, errFewBlocks
		}
		src[g], dst[g] = a[len(a)-len(b):], b
	}
	for g := range src {
		if plan.kinds[g] != Mamba {
			src[g], dst[g] = expand(src[g], plan.perUnit), expand(dst[g], plan.perUnit)
		}
	}
	return src, dst, nil
}

func withoutNull(ids []int) []int {
	if !slices.Contains(ids, 0) {
		return ids
	}
	return slices.DeleteFunc(slices.Clone(ids), func(id int) bool { return id == 0 })
}

// expand turns logical block ids into the n kernel blocks each of them has.
func expand(ids []int, n int) []int {
	if n == 1 {
		return ids
	}
	out := make([]int, 0, len(ids)*n)
	for _, id := range ids {
		for k := range n {
			out = append(out, id*n+k)
		}
	}
	return out
}

// regionBlocks returns the ids of the region's group, or of all groups that share it.
func regionBlocks(byGroup [][]int, r *wire.Region) ([]int, error) {
	if r.Group != wire.SharedGroup {
		if r.Group < 0 || r.Group >= len(byGroup) {
			return nil, layoutError("Transfer region references a missing KV group.")
		}
		return byGroup[r.Group], nil
	}
	if len(r.Shared) == 0 {
		return nil, layoutError("Shared packed region is missing its group ids.")
	}
	var ids []int
	for _, g := range r.Shared {
		if g < 0 || g >= len(byGroup) {
			return nil, layoutError("Transfer region references a missing KV group.")
		}
		ids = append(ids, byGroup[g]...)
	}
	return ids, nil
}

// copies adds the descriptors that copy the blocks `from` of P to the blocks `to` of D in one region. If whole strides are copied, it
// adds one descriptor per span of ids that ascend by one on both sides, otherwise one per block.
func (s *slicePlan) copies(out []Descriptor, r *regionPair, from, to []int) ([]Descriptor, error) {
	one := func(i, n int) Descriptor {
		return Descriptor{
			Src: r.p.Base + uint64(from[i])*r.p.Stride + s.src,
			Dst: r.d.Base + uint64(to[i])*r.d.Stride + s.dst,
			Len: s.length * uint64(n),
		}
	}
	if s.src != 0 || s.dst != 0 || s.length != r.p.Stride || s.length != r.d.Stride {
		for i := range from {
			out = append(out, one(i, 1))
		}
		return out, nil
	}
	spans, err := GroupConcurrentContiguous(nil, from, to)
	for _, span := range spans {
		out = append(out, one(span.From, span.Len()))
	}
	return out, err
}
