// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// listedObject is one object of a list in JSON.
type listedObject struct {
	Name     string `json:"name"`
	Bytes    int64  `json:"bytes"`
	Checksum string `json:"checksum,omitempty"` // 16 digits; empty: the object has none
	Torn     bool   `json:"torn,omitempty"`
}

// listedGroup says what a tier has of one model, shard and object group, in JSON.
type listedGroup struct {
	Model  string `json:"model,omitempty"`
	Salt   string `json:"cache_salt,omitempty"`
	Layout string `json:"namespace,omitempty"`
	Shard  int    `json:"shard"`
	World  int    `json:"world_size"`
	Group  uint32 `json:"group"`
	listedSums
}

type listedSums struct {
	Objects  int64 `json:"objects"`
	Bytes    int64 `json:"bytes"`
	Unsummed int64 `json:"without_checksum"`
	Torn     int64 `json:"torn"`
}

func (s *sums) listed() listedSums { return listedSums{s.objects, s.bytes, s.unsummed, s.torn} }

// ListJSON writes what a tier has as one JSON object. If all is true, it writes one line of JSON for each object instead.
func ListJSON(ctx context.Context, w io.Writer, t tier.Tier, all bool) error {
	out, groups, total := json.NewEncoder(w), make(map[group]*sums), sums{}
	err := each(ctx, t, func(e Entry) error {
		if all {
			o := listedObject{Name: e.Name, Bytes: e.Bytes, Torn: e.Torn()}
			if !e.Torn() && !e.Meta.NoSum {
				o.Checksum = fmt.Sprintf("%016x", e.Meta.Sum)
			}
			return out.Encode(o)
		}
		total.add(&e)
		g := group{e.Object, e.Key.Namespace, e.Key.Rank, e.Key.Group}
		if groups[g] == nil {
			groups[g] = &sums{}
		}
		groups[g].add(&e)
		return nil
	})
	if err != nil || all {
		return err
	}
	answer := struct {
		Groups []listedGroup `json:"groups"`
		Total  listedSums    `json:"total"`
		Free   *int64        `json:"free_bytes"` // null: not known
	}{Groups: []listedGroup{}, Total: total.listed()}
	for _, g := range slices.SortedFunc(maps.Keys(groups), compareGroups) {
		l := listedGroup{Model: g.object.Model, Salt: g.object.Salt, Shard: int(g.rank >> 16 & 0xff), World: int(g.rank >> 24), Group: g.group, listedSums: groups[g].listed()}
		if g.namespace != (kv.Namespace{}) {
			l.Layout = g.namespace.String()
		}
		answer.Groups = append(answer.Groups, l)
	}
	if s, ok := t.(tier.Sized); ok {
		if free := s.Space().Free; free >= 0 {
			answer.Free = &free
		}
	}
	return out.Encode(answer)
}

// VerifyJSON does what Verify does. It writes one line of JSON for each object that is damaged or was not read, and then one with the
// figures.
func VerifyJSON(ctx context.Context, w io.Writer, t tier.Tier, remove bool) error {
	out := json.NewEncoder(w)
	n, err := verify(ctx, t, remove, func(name, why string, read bool) {
		_ = out.Encode(struct { // the error of a closed pipe is seen below
			Name string `json:"name"`
			Read bool   `json:"read"`
			Why  string `json:"why"`
		}{name, read, why})
	})
	if err != nil {
		return err
	}
	if err := out.Encode(n); err != nil {
		return err
	}
	return n.err()
}

// verdicts are the names of the verdicts in JSON.
var verdicts = map[Verdict]string{Good: "good", Partial: "partial", Useless: "useless"}

// CheckJSON writes the result of a check as one JSON object. `said` is the text that the check wrote.
func CheckJSON(w io.Writer, v Verdict, said string) error {
	return json.NewEncoder(w).Encode(struct {
		Verdict   string   `json:"verdict"`
		Exit      int      `json:"exit"`
		Sentences []string `json:"sentences"`
	}{verdicts[v], int(v), strings.Split(strings.TrimSpace(said), "\n")})
}
