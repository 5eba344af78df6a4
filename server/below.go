// SPDX-License-Identifier: Apache-2.0

package server

import (
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server/explain"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/tiering"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/disk"
	"github.com/kvasir-kv/kvasir/tier/mooncakestore"
	"github.com/kvasir-kv/kvasir/tier/seal"
)

// BelowStatus is the state of the tiers below the pool, with counts since the start.
type BelowStatus struct {
	Tiers         []TierStatus `json:"tiers"` // in the order in which they are asked
	Chunks        uint64       `json:"chunks_loaded"`
	LateLookups   uint64       `json:"late_lookups"` // lookups that ended by LoadTimeout with what was resident then
	WaitingBytes  int64        `json:"waiting_bytes"`
	SkippedChunks uint64       `json:"skipped_chunks"` // chunks that were not queued for the tiers because too many bytes waited
	LostChunks    uint64       `json:"lost_chunks"`    // chunks that were evicted before they were written to the tiers

	Estimate tiering.RateStats `json:"estimate"` // compares loading with computing
}

// TierStatus is one tier.
type TierStatus struct {
	Name       string  `json:"name"`
	State      string  `json:"state"`                 // ok, unreachable, full, over_budget, read_only, nameless
	Since      string  `json:"state_since,omitempty"` // RFC 3339
	LastError  string  `json:"last_error,omitempty"`  // the error that showed the state
	Hits       uint64  `json:"hits"`
	Misses     uint64  `json:"misses"`
	ReadBytes  uint64  `json:"read_bytes"`
	WriteBytes uint64  `json:"write_bytes"`
	ReadRate   float64 `json:"read_gb_per_s"`  // of a single read
	WriteRate  float64 `json:"write_gb_per_s"` // of a single write
	Calls      int64   `json:"calls"`          // calls that are running
	Unsummed   uint64  `json:"reads_without_checksum"`
	Lost       uint64  `json:"lost"`
	Corrupt    uint64  `json:"corrupt"`
	Late       uint64  `json:"late"`
	Failures   uint64  `json:"failures"`
	Dropped    uint64  `json:"dropped"`
	Objects    int64   `json:"objects"`
	UsedBytes  int64   `json:"used_bytes"`
	LimitBytes int64   `json:"limit_bytes"`
	FreeBytes  int64   `json:"free_bytes"`

	Encrypted    bool              `json:"encrypted"`               // at rest
	SealedMisses map[string]uint64 `json:"sealed_misses,omitempty"` // by reason: objects that were there and could not be decrypted
}

// Tiers returns the tiers below the pool.
func (s *Server) Tiers() []*tier.Counting { return s.opts.Tiers }

// Disk returns the disk among the Tiers, or nil.
func (s *Server) Disk() *disk.Disk { return s.opts.Disk }

// Seals returns the tiers that are encrypted if the server has keys, by name.
func (s *Server) Seals() map[string]*seal.Tier { return s.opts.Seals }

// Clusters returns the tiers that are clusters of Mooncake Store, by name.
func (s *Server) Clusters() map[string]*mooncakestore.Tier { return s.opts.Clusters }

// below returns the part of the status about the tiers below the pool.
func (s *Server) below(st *store.Stats) BelowStatus {
	out := BelowStatus{
		Tiers: []TierStatus{}, Chunks: st.BelowChunks, LateLookups: st.LateLookups, WaitingBytes: st.Outbox.WaitingBytes, SkippedChunks: st.Outbox.Skipped, LostChunks: st.LostChunks,
		Estimate: st.Rates,
	}
	for _, t := range s.opts.Tiers {
		row := tierStatus(t.Name(), t.Stats())
		now := t.Condition()
		row.State, row.LastError = string(now.State), safelog.Text(now.Err, safelog.MaxText)
		if !now.Since.IsZero() {
			row.Since = now.Since.UTC().Format(time.RFC3339)
		}
		if sealed := s.opts.Seals[t.Name()]; sealed != nil {
			n := sealed.Stats()
			row.Encrypted, row.SealedMisses = n.Keys > 0, n.Misses
			maps.DeleteFunc(row.SealedMisses, func(_ string, n uint64) bool { return n == 0 })
		}
		out.Tiers = append(out.Tiers, row)
	}
	return out
}

func tierStatus(name string, n tier.Stats) TierStatus {
	return TierStatus{
		Name: name, Hits: n.Hits, Misses: n.Misses, ReadBytes: n.ReadBytes, WriteBytes: n.WrittenBytes, ReadRate: rate(n.ReadBytes, n.ReadTime), WriteRate: rate(n.WrittenBytes, n.WriteTime),
		Calls: n.InFlight, Unsummed: n.Unsummed, Lost: n.Lost, Corrupt: n.Corrupt, Late: n.Late, Failures: n.Failures, Dropped: n.Dropped,
		Objects: n.Objects, UsedBytes: n.Used, LimitBytes: n.Limit, FreeBytes: n.Free,
	}
}

func (t *TierStatus) works() bool { return t.State == "" || t.State == string(tier.Works) }

// Text describes the tier in one line for people.
func (t *TierStatus) Text() string {
	out := ""
	if !t.works() {
		out = strings.ToUpper(strings.ReplaceAll(t.State, "_", " ")) + ": " + t.LastError + "; "
	}
	out += fmt.Sprintf("read %s (%.2f GB/s each), wrote %s (%.2f GB/s each), %d of %d chunks found", kv.FormatBytes(int64(t.ReadBytes)), t.ReadRate,
		kv.FormatBytes(int64(t.WriteBytes)), t.WriteRate, t.Hits, t.Hits+t.Misses)
	if t.Objects > 0 {
		out += fmt.Sprintf(", keeps %d in %s", t.Objects, kv.FormatBytes(t.UsedBytes))
	}
	if t.LimitBytes > 0 {
		out += fmt.Sprintf(" of %s", kv.FormatBytes(t.LimitBytes))
	}
	for _, trouble := range []struct {
		n    uint64
		what string
	}{{t.Corrupt, "corrupt"}, {t.Late, "late"}, {t.Failures, "failed"}, {t.Dropped, "not taken"}} {
		if trouble.n > 0 {
			out += fmt.Sprintf(", %d %s", trouble.n, trouble.what)
		}
	}
	return out
}

// rate returns the speed at which so many bytes moved within the time `in`, in GB per second; 0 without a time.
func rate(bytes uint64, in time.Duration) float64 {
	if in <= 0 {
		return 0
	}
	return float64(bytes) / in.Seconds() / 1e9
}

// stateAdvice says, for each state of a tier, what to do about it.
var stateAdvice = map[tier.State]string{
	tier.Unreachable: "see its address, its credentials and its own log; engines compute what it has until it answers",
	tier.Full:        "its objects are served and none is added: give it room, or an eviction (docs/operate/tiers.md)",
	tier.OverBudget:  "its objects are served and none is added until the budget begins anew: raise the budget that its adapter sets",
	tier.ReadOnly:    "its objects are served and none is added: give this server the right to write, or leave it as a tier to read",
	tier.Nameless:    "chunks of that model are not written there: serve it under a shorter name (--served-model-name), or take a layout of Kvasir's own",
}

// sealedAdvice says, for each reason, what to do about objects that cannot be decrypted.
var sealedAdvice = []struct{ reason, what, do string }{
	{"missing_key", "encrypted with a key that this server does not have", "add that key as a later line of --tier-key-file, or drop the tier (kvasir tier drop)"},
	{"plain", "not encrypted, from before the tier had a key", "they are replaced when engines store them again; kvasir tier drop removes them now"},
	{"damaged", "changed, cut, exchanged, or put back after a clear", "they were removed and are stored again; if their number grows, the disk is faulty or someone writes there"},
	{"newer", "encrypted by a newer build", "start that build"},
}

// findings calls add for each problem of the tiers that keeps hits away: with what is wrong, and what to do about it.
func (b *BelowStatus) findings(add func(what, do string)) {
	for i := range b.Tiers {
		t := &b.Tiers[i]
		if t.Corrupt > 0 {
			add(fmt.Sprintf("tier %s had %s of another length or checksum", t.Name, times(t.Corrupt, "object", "objects")),
				"torn writes of a crash are normal and are replaced; if their number grows, the disk is faulty or another program writes there")
		}
		for _, a := range sealedAdvice {
			if n := t.SealedMisses[a.reason]; n > 0 {
				add(fmt.Sprintf("tier %s missed %s of objects that are %s", t.Name, times(n, "time", "times"), a.what), a.do)
			}
		}
		if do := stateAdvice[tier.State(t.State)]; do != "" {
			add(fmt.Sprintf("tier %s is %s since %s: %s", t.Name, strings.ReplaceAll(t.State, "_", " "), t.Since, t.LastError), do)
		}
		if n := t.Failures + t.Late; n > 0 && t.works() {
			add(fmt.Sprintf("tier %s failed or was too slow in %s", t.Name, times(n, "call", "calls")), "see the log, its disk and its connection; meanwhile engines compute what it has")
		}
		if t.Dropped > 0 && t.WriteBytes == 0 && t.works() {
			do := "see docs/operate/tiers.md for what a tier does not take"
			if t.FreeBytes >= 0 {
				do = fmt.Sprintf("see whether it is full: it has %s free", kv.FormatBytes(t.FreeBytes))
			}
			add(fmt.Sprintf("tier %s has taken nothing of %s", t.Name, times(t.Dropped, "object", "objects")), do)
		}
	}
	if e := b.Estimate; e.LoadRate > 0 && e.ComputeRate > e.LoadRate {
		add(fmt.Sprintf("tiers give %.2f GB/s to a request, engines compute %.2f GB/s", e.LoadRate/1e9, e.ComputeRate/1e9),
			"computing is faster than loading: a faster tier, or --l2-load-if-faster, which leaves it out then")
	}
	if b.SkippedChunks > 0 || b.LostChunks > 0 {
		add(fmt.Sprintf("%s left the pool before they were in a tier", times(b.SkippedChunks+b.LostChunks, "chunk", "chunks")),
			"the tier is slower than engines store, or takes no more: a faster or larger one, or a larger --l1-size-gb")
	}
}

// TierEnds returns the figures of lookups whose hit ended because of the tier with that name.
func (s *Server) TierEnds(name string) explain.TierEnds { return s.n.tierMisses.Stats(name) }

// TierNames returns the names for TierEnds: those of the tiers and, if there are several, explain.AnyTier.
func (s *Server) TierNames() (out []string) {
	for _, t := range s.opts.Tiers {
		out = append(out, t.Name())
	}
	if len(out) > 1 {
		out = append(out, explain.AnyTier)
	}
	return out
}
