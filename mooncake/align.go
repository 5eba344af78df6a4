// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// Peer is a worker's place in its engine's tensor and pipeline parallelism.
type Peer struct {
	TPRank, TPSize int
	PPSize         int // 0 means 1
}

// A LayoutError says why the memory layouts of P and D do not fit each other. Text has vLLM's wording: D's users see it.
type LayoutError struct{ Text string }

func (e *LayoutError) Error() string { return e.Text }

func layoutError(format string, args ...any) error {
	return &LayoutError{fmt.Sprintf(format, args...)}
}

// regionPair is a region of P and the region of D that it fills.
type regionPair struct{ p, d wire.Region }

// align pairs each region of P (p) with the region of D (d) that has the same layer name and the same occurrence of that name. It
// ignores layers that only D has. A layer that only P has is an error, unless partial is true. Source: _align_transfer_regions of vLLM
// 0.33.
func align(p, d []wire.Region, partial bool) ([]regionPair, error) {
	if len(d) > 0 && !slices.ContainsFunc(d, func(r wire.Region) bool { return r.Layer != "" }) {
		return zip(p, d)
	}
	type key struct {
		layer      string
		occurrence int
	}
	at := make(map[key]int, len(d))
	seen := make(map[string]int)
	for i := range d {
		at[key{d[i].Layer, seen[d[i].Layer]}] = i
		seen[d[i].Layer]++
	}
	pairs := make([]regionPair, 0, len(p))
	count := make(map[string]int)
	for _, a := range p {
		k := key{a.Layer, count[a.Layer]}
		count[a.Layer]++
		i, ok := at[k]
		if !ok {
			if partial && seen[a.Layer] == 0 {
				continue
			}
			return nil, layoutError("Mooncake producer registered layer has no matching consumer occurrence: %s occurrence %d.",
				k.layer, k.occurrence)
		}
		b := d[i]
		switch {
		case a.Index != b.Index && b.Index != wire.Unsent:
			return nil, layoutError("Mooncake registered layer index mismatch for %s: producer=%d, consumer=%d.", a.Layer, a.Index, b.Index)
		case b.Group == wire.Unsent:
			b.Group = a.Group
		case a.Group != b.Group:
			return nil, layoutError("Mooncake registered group index mismatch for %s: producer=%d, consumer=%d.", a.Layer, a.Group, b.Group)
		case len(a.Shared) > 0 && len(b.Shared) > 0 && !slices.Equal(a.Shared, b.Shared):
			return nil, layoutError("Mooncake shared-group set mismatch for %s: producer=%s, consumer=%s.",
				a.Layer, tuple(a.Shared), tuple(b.Shared))
		}
		pairs = append(pairs, regionPair{a, b})
	}
	return pairs, nil
}

// zip pairs the i-th region of P with the i-th region of D. It is for vLLM releases whose messages carry no layer names.
func zip(p, d []wire.Region) ([]regionPair, error) {
	if len(p) != len(d) {
		return nil, layoutError("the producer has %d KV regions, the consumer %d, and it names no layers", len(p), len(d))
	}
	pairs := make([]regionPair, len(p))
	for i := range p {
		pairs[i] = regionPair{p[i], d[i]}
		pairs[i].d.Group = p[i].Group
		if d[i].Stride == 0 { // before 0.19 both sides have the same blocks
			pairs[i].d.Stride, pairs[i].d.Payload = p[i].Stride, p[i].Payload
		}
	}
	return pairs, nil
}

// tuple writes numbers as Python writes a tuple of them.
func tuple(list []int) string {
	var s strings.Builder
	s.WriteByte('(')
	for i, v := range list {
		if i > 0 {
			s.WriteString(", ")
		}
		s.WriteString(strconv.Itoa(v))
	}
	if len(list) == 1 {
		s.WriteByte(',')
	}
	s.WriteByte(')')
	return s.String()
}

// merge joins neighbouring pairs that lie in the same order in one packed row on both sides, so that one descriptor moves several
// layers. With widen, a joined run that begins its row on both sides is extended to the whole row, so that neighbouring blocks can be
// joined too. Source: _coalesce_contiguous_transfer_regions of vLLM 0.33.
func merge(pairs []regionPair, widen bool) []regionPair {
	joins := func(first, prev, next *wire.Region) bool {
		return prev.Group == next.Group && slices.Equal(prev.Shared, next.Shared) && prev.Stride == next.Stride &&
			next.Base >= prev.Base && next.Base-prev.Base >= prev.Payload &&
			next.Base-first.Base <= first.Stride && next.Payload <= first.Stride-(next.Base-first.Base)
	}
	var out []regionPair
	for first := 0; first < len(pairs); {
		last := first
		for last+1 < len(pairs) &&
			joins(&pairs[first].p, &pairs[last].p, &pairs[last+1].p) &&
			joins(&pairs[first].d, &pairs[last].d, &pairs[last+1].d) {
			last++
		}
		run := pairs[first]
		run.p.Payload = pairs[last].p.Base + pairs[last].p.Payload - run.p.Base
		run.d.Payload = pairs[last].d.Base + pairs[last].d.Payload - run.d.Base
		if widen && run.p.RowOffset == 0 && run.d.RowOffset == 0 && run.p.Stride == run.d.Stride &&
			run.p.Payload <= run.p.Stride && run.d.Payload <= run.d.Stride {
			run.p.Payload, run.d.Payload = run.p.Stride, run.d.Stride
		}
		out = append(out, run)
		first = last + 1
	}
	return out
}

// validate checks that the payloads of each pair have the ratio of the TP sizes of P and D. heads is the model's number of KV heads; 0
// means that blocks have no separate heads (MLA, Mamba). replicated means that every P rank holds the same bytes. Source:
// _validate_asymmetric_region_lengths of vLLM 0.33.
func validate(pairs []regionPair, pTP, dTP int, replicated bool, heads int) error {
	switch {
	case heads > 0:
		pTP, dTP = min(pTP, heads), min(dTP, heads)
	case replicated:
		return nil
	}
	ratio, err := tpRatio(pTP, dTP)
	if err != nil {
		return err
	}
	for i := range pairs {
		p, d := pairs[i].p.Payload, pairs[i].d.Payload
		switch {
		case ratio == 1 && p != d:
			return layoutError("Mooncake KV region length mismatch for homogeneous TP at region %d: local=%d, remote=%d.", i, p, d)
		case ratio > 1 && (d/uint64(ratio) != p || d%uint64(ratio) != 0):
			return layoutError("Mooncake destination KV region length does not match the producer TP ratio at region %d: "+
				"local=%d, remote=%d, tp_ratio=%d.", i, p, d, ratio)
		case ratio < 0 && (p/uint64(-ratio) != d || p%uint64(-ratio) != 0):
			return layoutError("Mooncake source KV region length does not match the consumer TP ratio at region %d: "+
				"local=%d, remote=%d, tp_ratio=%d.", i, p, d, ratio)
		}
	}
	return nil
}

// tpRatio returns p/d when P has at least as many ranks as D, else -(d/p). It returns a *LayoutError if the larger TP size is not a
// multiple of the smaller.
func tpRatio(p, d int) (int, error) {
	switch {
	case p >= d && p%d == 0:
		return p / d, nil
	case p >= d:
		return 0, layoutError("Local tensor parallel size %d is not divisible by remote tensor parallel size %d.", p, d)
	case d%p == 0:
		return -(d / p), nil
	}
	return 0, layoutError("Remote tensor parallel size %d is not divisible by local tensor parallel size %d.", d, p)
}

// pairedRanks returns the TP ranks of the other engine (of remoteTP ranks) with which the worker localRank (of localTP ranks) exchanges
// blocks. Source: TransferTopology.handshake_target_ranks.
func pairedRanks(localRank, localTP, remoteTP int) ([]int, error) {
	ratio, err := tpRatio(localTP, remoteTP)
	if err != nil {
		return nil, err
	}
	if ratio > 0 {
		return []int{localRank / ratio}, nil
	}
	ranks := make([]int, -ratio)
	for i := range ranks {
		ranks[i] = localRank*-ratio + i
	}
	return ranks, nil
}
