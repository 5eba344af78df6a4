// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// cold makes the same engine compute the prompts again, under another salt. Differences between the answers are noise.
func (r *run) cold(ctx context.Context, g *group) {
	const name = "another salt, the same engine"
	if found := r.first.cached(g.cold); found > 0 {
		r.step(Step{Name: name, Status: Failed, Cached: found, Why: fmt.Sprintf("%d tokens of prompts that were never sent were found", found)})
		return
	}
	if err := pause(ctx, r.Pause); err != nil {
		r.failed(name, err)
		return
	}
	other, err := r.newSalt()
	if err != nil {
		r.failed(name, err)
		return
	}
	got, err := r.ask(ctx, r.first, g, other)
	if err != nil {
		r.failed(name, err)
		return
	}
	r.checkSalts(name, r.first, g, got)
}

// warm checks `got`, the second answers of the engine, which had the prompts in its own cache then.
func (r *run) warm(g *group, got []Answer, err error) {
	const name = "warm, the same engine"
	if err != nil {
		r.failed(name, err)
		return
	}
	cached := r.first.cached(got)
	if cached < 0 {
		r.notTested(name, saysNothing)
		return
	}
	r.check(name, g, got, cached, "the engine found nothing: prefix caching is off, or the prompts are shorter than a block")
	r.report.Steps[len(r.report.Steps)-1].Restored = false
}

// serverFigures are figures of a server that grow when it serves KV.
type serverFigures struct {
	Lookup struct {
		Retrieves uint64 `json:"retrieves"`
		HitTokens uint64 `json:"hit_tokens"`
	} `json:"lookup"`
	L2 struct {
		Waiting int64 `json:"waiting_bytes"`
		Tiers   []struct {
			Name string `json:"name"`
			Hits uint64 `json:"hits"`
		} `json:"tiers"`
	} `json:"l2"`
}

func (r *run) figures(ctx context.Context) (f serverFigures, err error) {
	text, err := r.Server.Ask(ctx, http.MethodGet, "/status", nil)
	if err == nil {
		err = json.Unmarshal(text, &f)
	}
	return f, err
}

// askAndLook sends the prompts to an engine, and then asks the server for its figures. If one of them does not answer, it adds the step
// with that result, and ok is false.
func (r *run) askAndLook(ctx context.Context, name string, e *engine, g *group, salt string) (got []Answer, after serverFigures, ok bool) {
	got, err := r.ask(ctx, e, g, salt)
	if err != nil {
		r.failed(name, err)
		return nil, after, false
	}
	if after, err = r.figures(ctx); err != nil {
		r.notTested(name, err.Error())
		return nil, after, false
	}
	return got, after, true
}

// second asks a second engine, which has not seen the prompts. The tokens of prompts that it does not compute come from the shared
// cache.
func (r *run) second(ctx context.Context, g, below *group, salt string) error {
	const name, otherSalt, tier = "restored by a second engine", "another salt, a second engine", "restored from a tier"
	if r.SecondURL == "" {
		r.notTested(name, "no --second-url")
		r.notTested(tier, "no --second-url")
		return nil
	}
	e, err := r.open(ctx, r.SecondURL)
	if err != nil {
		return err
	}
	got, err := r.ask(ctx, e, g, salt)
	if err != nil {
		r.failed(name, err)
		return nil
	}
	other, err := r.newSalt()
	if err != nil {
		return err
	}
	if computed, err := r.ask(ctx, e, g, other); err != nil {
		r.failed(otherSalt, err)
	} else {
		r.learn(ctx, e, g, other)
		r.checkSalts(otherSalt, e, g, computed)
	}
	if cached := e.cached(got); cached < 0 {
		r.notTested(name, saysNothing)
	} else {
		r.check(name, g, got, cached, "the second engine computed the prompts: it does not share the cache, or the stores had not ended (--pause)")
	}
	r.below(ctx, tier, e, below, salt)
	return nil
}

// below checks KV that a tier serves: it removes the prompts from the server's pool before it asks the engine.
func (r *run) below(ctx context.Context, name string, e *engine, g *group, salt string) {
	if r.Server == nil {
		r.notTested(name, "no --server")
		return
	}
	before, err := r.figures(ctx)
	if err != nil {
		r.notTested(name, err.Error())
		return
	}
	if len(before.L2.Tiers) == 0 {
		r.notTested(name, "the server has no tier")
		return
	}
	for limit := time.Now().Add(30 * time.Second); before.L2.Waiting > 0 && time.Now().Before(limit); { // until the tier has stored all objects
		if err := pause(ctx, 200*time.Millisecond); err != nil {
			break
		}
		if before, err = r.figures(ctx); err != nil {
			r.notTested(name, err.Error())
			return
		}
	}
	if n, err := r.remove(ctx, "l1"); err != nil || n == 0 {
		r.notTested(name, fmt.Sprintf("nothing could be removed from the pool alone: %d objects, %v", n, err))
		return
	}
	got, after, ok := r.askAndLook(ctx, name, e, g, salt)
	if !ok {
		return
	}
	var served []string
	for i, t := range after.L2.Tiers {
		if i < len(before.L2.Tiers) && t.Hits > before.L2.Tiers[i].Hits {
			served = append(served, t.Name)
		} else {
			r.notTested("restored from the tier "+t.Name, "it was not asked, or had nothing: a tier before it served the prompts")
		}
	}
	if len(served) == 0 {
		r.notTested(name, "no tier served the prompts")
		return
	}
	r.check("restored from the tier "+strings.Join(served, ", "), g, got, max(e.cached(got), 1), "")
}

// fill sends other prompts to the engine until its own cache has evicted the prompts of the group. Then it checks that they are
// restored.
func (r *run) fill(ctx context.Context, g *group, salt string) {
	const name = "restored after the engine's eviction"
	switch {
	case r.FillTokens == 0:
		r.notTested(name, "no --fill-tokens")
		return
	case r.Server == nil:
		r.notTested(name, "no --server: nothing shows whether KV came from the engine's own cache")
		return
	}
	other, err := r.newSalt()
	if err != nil {
		r.failed(name, err)
		return
	}
	for sent := 0; sent < r.FillTokens; {
		a, err := r.first.ask(ctx, newPrompt(r.rnd, r.PromptTokens).Text, other)
		if err != nil {
			r.notTested(name, "a request to fill the engine failed: "+err.Error())
			return
		}
		sent += max(a.Prompt, 1)
	}
	before, err := r.figures(ctx)
	if err != nil {
		r.notTested(name, err.Error())
		return
	}
	got, after, ok := r.askAndLook(ctx, name, r.first, g, salt)
	if !ok {
		return
	}
	restored := 0
	if after.Lookup.Retrieves > before.Lookup.Retrieves {
		restored = max(r.first.cached(got), 1)
	}
	r.check(name, g, got, restored, fmt.Sprintf("the server loaded nothing: %d tokens did not push the prompts out of the engine's cache, or the server evicted them", r.FillTokens))
}

// single compares the answers of P and D with those of one engine that does both.
func (r *run) single(ctx context.Context, g *group) error {
	const name = "prefill and decode engines against one engine"
	if r.SingleURL == "" {
		return nil
	}
	e, err := r.open(ctx, r.SingleURL)
	if err != nil {
		return err
	}
	salt, err := r.newSalt()
	if err != nil {
		return err
	}
	got, err := r.ask(ctx, e, g, salt)
	if err != nil {
		r.failed(name, err)
		return nil
	}
	alone := group{g.prompts, got}
	r.check(name, &alone, g.cold, -1, "")
	return nil
}

// expect checks the prompts that an earlier run kept: whether the engine now restores their KV, and answers as when it computes them anew.
func (r *run) expect(ctx context.Context, k *Kept) error {
	const name, weights = "kept prompts, restored", "kept prompts, computed again"
	if len(k.Prompts) == 0 || len(k.Prompts) != len(k.Answers) {
		return errors.New("the file of --expect has no prompts, or not as many answers")
	}
	r.noise = k.Noise
	g := group{prompts: k.Prompts}
	restored, err := r.ask(ctx, r.first, &g, k.Salt)
	if err != nil {
		r.failed(name, err)
		return nil
	}
	other, err := r.newSalt()
	if err != nil {
		return err
	}
	if g.cold, err = r.ask(ctx, r.first, &g, other); err != nil {
		r.failed(weights, err)
		return nil
	}
	r.learn(ctx, r.first, &g, other)
	if found := r.first.cached(g.cold); found > 0 {
		r.step(Step{Name: weights, Status: Failed, Cached: found, Why: fmt.Sprintf("%d tokens were found under a salt that never sent the prompts", found)})
	}
	changed := 0
	for i := range g.cold {
		if d, _ := compare(i, "", &k.Answers[i], &g.cold[i], r.tolerance()); len(d) > 0 {
			changed++
		}
	}
	cached := r.first.cached(restored)
	none := "nothing of the prompts was found: the KV was evicted, or cleared"
	if changed > 0 {
		none = fmt.Sprintf("the model answers %d of %d prompts in another way than before, and nothing of them was found, as it should be after a change of weights", changed, len(g.cold))
	}
	if cached < 0 {
		r.notTested(name, saysNothing)
		return nil
	}
	r.check(name, &g, restored, cached, none)
	if s := &r.report.Steps[len(r.report.Steps)-1]; s.Status == Failed && changed > 0 {
		s.Why = "the model answers in another way than when the KV was stored: KV of other weights is served (kvasir clear --model NAME, or --model-revision)"
	}
	return nil
}
