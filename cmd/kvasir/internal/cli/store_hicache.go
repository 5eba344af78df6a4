// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/mooncake/store"
)

// hicacheFlags are for objects of SGLang's HiCache.
type hicacheFlags struct {
	Like   string `help:"Explain keys as those of: hicache (SGLang's HiCache with its mooncake backend)." enum:",hicache" default:"" placeholder:"ENGINE" group:"HiCache"`
	Tokens string `help:"File with the token ids of a prompt, as JSON has a list: show which of its pages are there." placeholder:"FILE" group:"HiCache"`
	Model  string `help:"SGLang's --served-model-name, or its --model-path." placeholder:"MODEL" group:"HiCache"`
	Page   int    `help:"SGLang's --page-size." default:"64" group:"HiCache"`
	TP     int    `name:"tensor-parallel-size" help:"SGLang's --tp-size." default:"1" group:"HiCache"`
	MLA    bool   `name:"mla" help:"The model has MLA: one object a page." group:"HiCache"`
	Tag    string `help:"extra_backend_tag of HiCache's configuration." placeholder:"TAG" group:"HiCache"`
	Salt   string `name:"cache-salt" help:"The request's cache_salt." placeholder:"SALT" group:"HiCache"`
	Extra  string `name:"extra-key" help:"The request's extra_key." placeholder:"KEY" group:"HiCache"`
}

func (c *hicacheFlags) check(keys int) error {
	var f faults
	f.unless(keys > 0 || c.Tokens != "", "name keys, or a prompt with --like hicache --tokens FILE")
	f.unless(c.Tokens == "" || c.Like != "" && c.Model != "" && keys == 0, "--tokens goes with --like hicache and --model MODEL, without keys")
	f.unless(c.Page > 0 && c.Page <= 1<<20, "--page %d is outside 1 to %d", c.Page, 1<<20)
	f.unless(c.TP > 0 && c.TP <= 1024, "--tensor-parallel-size %d is outside 1 to 1024", c.TP)
	return f.err()
}

// explainHiCache returns a sentence that explains a key of HiCache.
func explainHiCache(key string) string {
	k, ok := store.ParseHiCacheKey(key)
	if !ok {
		return printable(key) + ": not a name of HiCache"
	}
	part := map[string]string{"k": "K of", "v": "V of", "": "what belongs to", "temporal": "state after"}[k.Part]
	switch {
	case part == "":
		part = fmt.Sprintf("state (%s) after", k.Part)
	case k.TP < 0 && k.Part == "k":
		part = "MLA of"
	}
	if k.Pool != "" {
		part = k.Pool + ", " + part
	}
	rank := "all ranks"
	switch {
	case k.TP >= 0:
		rank = fmt.Sprintf("rank %d", k.TP)
	case k.Shard != "":
		rank = "shard " + k.Shard
	}
	if k.PP >= 0 {
		rank += fmt.Sprintf(" of stage %d", k.PP)
	}
	return fmt.Sprintf("%s: %s a page of model %s, %s; the hash %s… covers the page and all before it", printable(key), part, printable(k.Model), rank, k.Hash[:8])
}

// pages shows which pages of a prompt are stored. A page counts if all of its objects are there; a prompt hits up to the first page
// that does not count.
func (c *hicacheFlags) pages(ctx context.Context, e *env, m *store.Master) error {
	tokens, err := readTokens(c.Tokens)
	if err != nil {
		return err
	}
	optional := func(s string) *string {
		if s == "" {
			return nil
		}
		return &s
	}
	hashes := store.HiCacheHashes(tokens, c.Page, optional(c.Extra), optional(c.Salt))
	hit := -1
	for i, hash := range hashes {
		found, err := m.Replicas(ctx, c.keys(hash))
		if err != nil {
			return err
		}
		there, bytes := 0, uint64(0)
		var lacks []string
		for j, f := range found {
			whole := slices.IndexFunc(f.Replicas, func(r store.Replica) bool { return r.Complete })
			if f.Err != nil || whole < 0 {
				lacks = append(lacks, printable(c.keys(hash)[j]))
				continue
			}
			there, bytes = there+1, bytes+f.Replicas[whole].Bytes()
		}
		if hit < 0 && there < len(found) {
			hit = i
		}
		line := fmt.Sprintf("tokens %d to %d, %s…: %d of %d objects, %d bytes", i*c.Page, (i+1)*c.Page-1, hash[:8], there, len(found), bytes)
		if there > 0 && len(lacks) > 0 {
			line += ", without " + strings.Join(lacks[:min(len(lacks), 4)], " ")
		}
		fmt.Fprintln(e.stdout, line)
	}
	if hit < 0 {
		hit = len(hashes)
	}
	fmt.Fprintf(e.stdout, "SGLang finds %d of %d tokens: %d of %d pages of %d\n", hit*c.Page, len(tokens), hit, len(hashes), c.Page)
	return nil
}

// keys returns the names of a page's objects.
func (c *hicacheFlags) keys(hash string) (out []string) {
	model := store.HiCacheModel(c.Tag, c.Model)
	if c.MLA {
		return []string{store.HiCacheKey{Model: model, Hash: hash, TP: -1, PP: -1, Part: "k"}.String()}
	}
	for tp := range c.TP {
		for _, part := range []string{"k", "v"} {
			out = append(out, store.HiCacheKey{Model: model, Hash: hash, TP: tp, PP: -1, Part: part}.String())
		}
	}
	return out
}
