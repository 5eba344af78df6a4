// SPDX-License-Identifier: Apache-2.0

package server

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server/explain"
	"github.com/kvasir-kv/kvasir/server/workers"
	"github.com/kvasir-kv/kvasir/store/miss"
)

// Finding is something that keeps hits away, and the advice about it.
type Finding struct {
	What   string `json:"what"`
	Do     string `json:"do"`
	Normal bool   `json:"normal,omitempty"` // expected in normal use: nothing need be done
}

// normally is the beginning of the advice of a finding that is normal.
const normally = "normal "

// findings returns the findings of a Status. Problems that hinder every hit come first.
func (st *Status) findings() []Finding {
	out := []Finding{}
	add := func(what, do string) { out = append(out, Finding{what, do, strings.HasPrefix(do, normally)}) }
	for _, why := range st.Unhealthy {
		add("the server is not healthy: "+why, "see docs/operate/server.md; engines compute what they cannot load")
	}
	refused := 0
	for _, w := range st.Workers {
		if w.Refused != "" {
			refused++
			add(fmt.Sprintf("worker %d of %s is refused: %s", w.Instance, w.Model, w.Refused), "nothing of it is stored or loaded until that is changed and its engine is restarted")
		}
	}
	for _, r := range st.TurnedAway {
		add(fmt.Sprintf("%s refused: %s", times(r.Count, "registration was", "registrations were"), r.Why), "change that and restart the engine; the last one came at "+r.Last)
	}
	st.vllmFindings(add)
	if st.Strangers > 0 {
		add(fmt.Sprintf("%s not registered, for example worker %d: this server does not know its KV", times(uint64(st.Strangers), "worker sends heartbeats and is", "workers send heartbeats and are"), st.Stranger),
			"restart the engine: SGLang registers once and never again. The server keeps registrations over its restart, but not with --cold, with a larger --l1-size-gb, on another host, or when it cannot read them")
	}
	if len(st.Workers) == refused && st.VLLM == nil {
		add("no worker that can be served is registered", fmt.Sprintf("start vLLM on this host, as this user, with LMCacheMPConnector (kvasir server --help shows how). "+
			"A vLLM that runs comes back within a heartbeat, 10 s, an SGLang must be restarted; this server started %s ago", time.Duration(st.Uptime*float64(time.Second)).Round(time.Second)))
	}
	if n := st.Declined[errModel.label]; n > 0 {
		add(fmt.Sprintf("%s for a model and world size that no worker had registered", times(n, "lookup asked", "lookups asked")),
			"normal while an engine starts. Else the engine's scheduler and its workers use different model names: the log's line \"declined\" has the name")
	}
	if n := st.Declined[errFewWorkers.label]; n > 0 {
		add(fmt.Sprintf("%s answered 0 because fewer workers than the prompt needs could load a hit", times(n, "lookup was", "lookups were")),
			"normal while an engine starts or ends. Else compare the workers listed here with the engine's ranks: each rank of the engine that looks up must be registered and awake")
	}
	if n := st.Declined[refusalLabel(workers.ErrLayouts)]; n > 0 {
		add(fmt.Sprintf("%s declined because engines of the model have several layouts and the connection had named no worker", times(n, "lookup was", "lookups were")),
			"give engines of unlike --dtype, --kv-cache-dtype or heads unlike model names, or a server each. A vLLM and a SGLang may share a name")
	}
	if n := st.Declined[errChunkSize.label]; n > 0 {
		add(fmt.Sprintf("%s from engines that started under another chunk size", times(n, "request came", "requests came")), "restart those engines, or this server with the --chunk-size of before")
	}
	if n := st.Declined[malformed]; n > 0 {
		add(fmt.Sprintf("%s not be read, the last one: %s", times(n, "request could", "requests could"), st.Malformed),
			"such requests are misses. If it names token ids: they have 32 bits here, and an engine that puts hashes of media into larger ids is not served. Else the client speaks a release that is not served: docs/reference/compatibility.md")
	}
	st.lookupFindings(add)
	st.Below.findings(add)
	if n := st.Pool.Failures; n > 0 {
		add(fmt.Sprintf("%s not fit whole: everything else was pinned, in transfer or in quarantine", times(n, "store did", "stores did")), "raise --l1-size-gb")
	}
	if q := st.Pool.QuarantinedBytes; q > st.Pool.TotalBytes/10 {
		add(fmt.Sprintf("%s of the pool wait in quarantine: workers that are gone may still write there", kv.FormatBytes(q)), "they come back after --l1-write-ttl-seconds; see why engines end")
	}
	return out
}

// vllmFindings adds what engines of vLLM's tiered offloading left behind, and a finding if no engine of any kind is connected.
func (st *Status) vllmFindings(add func(what, do string)) {
	if st.VLLM == nil {
		return
	}
	for _, r := range st.VLLM.Left {
		add(fmt.Sprintf("/dev/shm/%s (%s) was left by an engine that is gone: %s", r.Name, kv.FormatBytes(r.Bytes), cmp.Or(r.Why, "it is looked at again in a second")),
			"the server removes it once the process of an engine that it knew has ended and no process maps it; an engine that starts under the same id takes it over")
	}
	if len(st.VLLM.Engines) == 0 && len(st.Workers) == 0 {
		add("no engine is connected to the tier socket", "start vLLM on this host, as this user, with the tier of kvasir vllm-tier (kvasir vllm-tier --help shows how)")
	}
}

// lookupFindings adds why lookups did not find chunks, and a finding if few hits were loaded.
func (st *Status) lookupFindings(add func(what, do string)) {
	l := &st.Lookup
	if l.Short > 0 && l.Short*2 >= l.Lookups {
		add(fmt.Sprintf("%s shorter than a chunk of %d tokens: such prompts are neither stored nor found", times(l.Short, "prompt was", "prompts were"), st.ChunkTokens),
			fmt.Sprintf("send longer prompts, or take a smaller --chunk-size (a multiple of the engine's block size; then restart the engines), for example %d", max(st.ChunkTokens/4, 16)))
	}
	if len(st.Workers) > 0 && l.Lookups == 0 && l.Short == 0 && len(st.Declined) == 0 {
		add("workers are registered, and no prompt was asked for yet", fmt.Sprintf("normal before the first request: send one of at least %d tokens", st.ChunkTokens))
	}
	if l.Hits > 0 && l.Retrieves*4 < l.Hits {
		add(fmt.Sprintf("%s here and %s", times(l.Hits, "lookup hit", "lookups hit"), times(l.Retrieves, "load followed", "loads followed")),
			"normal where vLLM's own prefix cache has answered: it is asked first, and only what is not in the engine's memory is loaded from here. "+
				"To see this cache at work, restart the engine between two prompts")
	}
	if b := &l.Beginnings; l.AskedTokens > 0 && b.LostTokens >= l.AskedTokens/50 && b.LostTokens > 0 {
		add(fmt.Sprintf("%.0f %% of the tokens that were asked for, about %d, were not found because what is before them changes: of such a prompt at most %d tokens differ, and %d behind them are as in earlier prompts",
			100*min(float64(b.LostTokens)/float64(l.AskedTokens), 1), b.LostTokens, b.DifferTokens, b.SameTokens),
			"move what changes (a date, an id, a name) behind what prompts have in common, and cut a long conversation rarely at its front: a prompt hits as far as it equals an earlier one from its first token on")
	}
	if l.Lookups > 0 && l.HitTokens*10 < l.AskedTokens*9 {
		st.missFindings(add)
	}
}

// missFindings adds a finding for each reason of misses, the most frequent first, except reasons for which other findings exist.
func (st *Status) missFindings(add func(what, do string)) {
	type reason struct {
		why string
		n   uint64
	}
	var list []reason
	for why, n := range st.Lookup.MissReasons {
		switch why {
		case miss.Short.String(), miss.Unregistered.String(), miss.Declined.String(), miss.SkipLoad.String(): // see findings
		default:
			list = append(list, reason{why, n})
		}
	}
	slices.SortFunc(list, func(a, b reason) int {
		if a.n != b.n {
			return int(b.n) - int(a.n)
		}
		return strings.Compare(a.why, b.why)
	})
	for _, r := range list {
		add(fmt.Sprintf("%s at a chunk that could not be served: %s", times(r.n, "lookup ended", "lookups ended"), r.why), st.adviceFor(r.why))
	}
}

func (st *Status) adviceFor(why string) string {
	switch why {
	case miss.NeverStored.String():
		do := "normal for new prompts, and for the last tokens of any. A prompt hits as far as it equals an earlier one from its first token on (a date at its " +
			"beginning makes every prompt new), with the same model name, world size and cache salt"
		if n := st.Lookup.Salted; n > 0 {
			do += fmt.Sprintf("; %s with a salt", times(n, "lookup came", "lookups came"))
		}
		return do
	case miss.Evicted.String():
		if r := st.Recent; r.EvictedBytes > 0 && r.Seconds >= 10 {
			turn := time.Duration(float64(st.Pool.TotalBytes) / float64(r.EvictedBytes) * r.Seconds * float64(time.Second))
			return fmt.Sprintf("the pool is too small for what comes again: in the last %.0f s %d chunks were evicted, at that rate all %s are new after %s. Raise --l1-size-gb", r.Seconds, r.EvictedChunks, kv.FormatBytes(st.Pool.TotalBytes), turn.Round(time.Second))
		}
		return "the pool was too small for what came again: raise --l1-size-gb"
	}
	if do := explain.Do(why); do != "" {
		return do
	}
	if _, of, named := strings.Cut(why, ": "); named { // of is the tier's part of the reason
		why = of
	}
	switch why {
	case miss.BelowSlow.String():
		return "what lies below the pool is slower than a lookup waits: raise --l1-size-gb, or find out why it is slow"
	case miss.BelowSlower.String():
		return "--l2-load-if-faster leaves the tier out while engines compute faster than it gives: a faster tier, or without that flag every hit is loaded"
	case miss.NoRoom.String():
		return "all of the pool is pinned by prompts in progress, being written or within other tenants' quotas: raise --l1-size-gb, let engines run fewer requests at a time, or lower those quotas"
	case miss.BelowFailed.String(), miss.BelowCorrupt.String():
		return "see the log for what the tier below answered; engines compute these chunks again"
	}
	return "see docs/operate/server.md"
}

// times returns a number and the word for what it counts: `one` if n is 1, otherwise `many`.
func times(n uint64, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
