// SPDX-License-Identifier: Apache-2.0

// Package verify proves on running engines that KV which was stored and restored is that of its prompt: it sends prompts of its own, under
// salts of its own, and compares what an engine answers from restored KV with what it computes.
//
// It restarts and clears nothing. A step whose answers may not have come from restored KV is not tested, never passed.
package verify

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"
)

// Status is how a step ended.
type Status string

// The ways in which a step ends.
const (
	Passed    Status = "passed"
	Failed    Status = "failed"
	NotTested Status = "not tested"
)

// Step is one way in which KV came back.
type Step struct {
	Name        string       `json:"name"`
	Status      Status       `json:"status"`
	Restored    bool         `json:"restored"`      // it compared KV that came from outside the engine
	Why         string       `json:"why,omitempty"` // of not tested, or what failed beside answers
	Prompts     int          `json:"prompts"`       // that were compared
	Cached      int          `json:"cached_tokens"`
	Worst       float64      `json:"largest_logprob_difference"`
	Tolerance   float64      `json:"tolerance"`
	Differences []Difference `json:"differences,omitempty"`
}

// Report is the outcome.
type Report struct {
	Verdict Status    `json:"verdict"`
	Time    time.Time `json:"time"`
	URL     string    `json:"url"`
	Model   string    `json:"model"`
	Noise   float64   `json:"largest_difference_of_cold_runs"`
	Steps   []Step    `json:"steps"`
	Left    string    `json:"left,omitempty"` // what could not be removed
}

// Server is a kvasir server, as far as verify uses it.
type Server interface {
	// Ask sends a request for a path, with a body of JSON or nil.
	Ask(ctx context.Context, method, path string, body any) ([]byte, error)
}

// Options say what is tried. A zero field means its default, or that it is left out.
type Options struct {
	URL       string
	SecondURL string // an engine that shares the cache and has not seen the prompts
	SingleURL string // an engine alone, for a URL that is P and D
	Server    Server // nil: steps that need it are not tested
	Key       string // API key of the engines
	Model     string // default: the first that the engine names

	Prompts      int           // of each step; default 3
	PromptTokens int           // about; default 1200
	MaxTokens    int           // of an answer; default 16
	FillTokens   int           // that push prompts out of the engine's own cache; 0: none
	Pause        time.Duration // that stores have to end
	Rate         float64       // requests a second; default 4
	Tolerance    float64       // the least of log-probabilities; default 0.1

	Sign func(tenant string) (salt string, err error) // makes salts; nil: the tenant itself
	Kept *Kept                                        // prompts of an earlier run, which are checked and nothing else
	Keep bool                                         // fills Run's Kept, and removes nothing
	HTTP *http.Client
}

// Kept are prompts that were stored, and their answers.
type Kept struct {
	Time    time.Time `json:"time"`
	Model   string    `json:"model"`
	Salt    string    `json:"salt"`
	Prompts []Prompt  `json:"prompts"`
	Answers []Answer  `json:"answers"`
	Noise   float64   `json:"noise"`
}

// defaultTolerance is above the differences that another order of sums makes in 16 bits: an engine computes a prompt whose beginning is
// restored in other shapes than a whole one. On vLLM 0.32 in bfloat16, where cold runs are equal, restored prompts differ by up to 0.06.
const defaultTolerance = 0.1

// maxNoise is the largest difference of cold runs with which a wrong block could still be seen.
const maxNoise = 0.5

// run is one verification.
type run struct {
	Options
	rnd     *rand.Rand
	first   *engine
	report  Report
	tenants []string // that the run has stored under
	noise   float64
	parted  bool // cold runs chose different tokens that were not equally likely
}

// group has prompts, and the answers to them when they were computed.
type group struct {
	prompts []Prompt
	cold    []Answer
}

// Run verifies. Kept is nil unless Options.Keep is set. The error is for what cannot be begun.
func Run(ctx context.Context, o Options) (*Report, *Kept, error) {
	if o.HTTP == nil {
		o.HTTP = &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	}
	if o.Sign == nil {
		o.Sign = func(tenant string) (string, error) { return tenant, nil }
	}
	orElse(&o.Prompts, 3)
	orElse(&o.PromptTokens, 1200)
	orElse(&o.MaxTokens, 16)
	orElse(&o.Rate, 4)
	orElse(&o.Tolerance, defaultTolerance)
	r := &run{Options: o, rnd: rand.New(rand.NewPCG(rand.Uint64(), rand.Uint64()))}
	var err error
	if r.first, err = r.open(ctx, o.URL); err != nil {
		return nil, nil, err
	}
	r.report = Report{Time: time.Now().UTC().Truncate(time.Second), URL: o.URL, Model: r.first.model}
	var kept *Kept
	if o.Kept != nil {
		err = r.expect(ctx, o.Kept)
	} else {
		kept, err = r.runSteps(ctx)
	}
	if kept == nil {
		r.cleanUp(context.WithoutCancel(ctx))
	}
	if err != nil {
		return nil, nil, err
	}
	r.report.Noise = r.noise
	r.report.judge()
	return &r.report, kept, nil
}

func orElse[T int | float64](v *T, otherwise T) {
	if *v == 0 {
		*v = otherwise
	}
}

// judge makes the verdict: passed needs a step with restored KV that passed, and none that failed.
func (r *Report) judge() {
	r.Verdict = NotTested
	for _, s := range r.Steps {
		switch {
		case s.Status == Failed:
			r.Verdict = Failed
			return
		case s.Status == Passed && s.Restored:
			r.Verdict = Passed
		}
	}
}

// open reaches an engine.
func (r *run) open(ctx context.Context, url string) (*engine, error) {
	interval := time.Duration(float64(time.Second) / r.Rate)
	next := time.Now()
	e := &engine{url: strings.TrimSuffix(url, "/"), key: r.Key, model: r.Model, max: r.MaxTokens, http: r.HTTP, wait: func(ctx context.Context) error {
		left := time.Until(next)
		next = time.Now().Add(max(0, left) + interval)
		return pause(ctx, left)
	}}
	return e, e.open(ctx)
}

func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// newSalt makes a new random salt.
func (r *run) newSalt() (string, error) {
	tenant := fmt.Sprintf("kvasir-verify-%016x", r.rnd.Uint64())
	r.tenants = append(r.tenants, tenant)
	return r.Sign(tenant)
}

func (r *run) newPrompts() (g group) {
	for range r.Prompts {
		g.prompts = append(g.prompts, newPrompt(r.rnd, r.PromptTokens))
	}
	return g
}

// ask sends all prompts to an engine. The error is of a request; it ends a step, not the run.
func (r *run) ask(ctx context.Context, e *engine, g *group, salt string) (out []Answer, err error) {
	for _, p := range g.prompts {
		a, err := e.ask(ctx, p.Text, salt)
		if err != nil {
			return out, err
		}
		out = append(out, a)
	}
	return out, nil
}

// learn sends an engine a prompt that it has just computed, to see whether it reports cached tokens. A request that fails
// shows nothing.
func (r *run) learn(ctx context.Context, e *engine, g *group, salt string) {
	if !e.reports {
		_, _ = r.ask(ctx, e, &group{prompts: g.prompts[:1]}, salt)
	}
}

// step adds a step.
func (r *run) step(s Step) { r.report.Steps = append(r.report.Steps, s) }

// failed adds a failed step for a request that got an error. A working engine answers prompts like these, so the error is a failure of the step.
func (r *run) failed(name string, err error) {
	r.step(Step{Name: name, Status: Failed, Why: "a request failed: " + err.Error()})
}

func (r *run) notTested(name, why string) { r.step(Step{Name: name, Status: NotTested, Why: why}) }

func (r *run) tolerance() float64 { return max(2*r.noise, r.Tolerance) }

// check compares answers with the computed ones. restored is the number of tokens that came from outside the engine, as the engine or the
// server reports it; 0: none, so nothing was tested, for the reason none.
func (r *run) check(name string, g *group, got []Answer, restored int, none string) {
	switch {
	case restored == 0:
		r.notTested(name, none)
		return
	case r.parted || r.noise > maxNoise:
		r.notTested(name, fmt.Sprintf("cold runs of one prompt differ by %.4f, or choose other tokens: answers of this engine cannot be compared", r.noise))
		return
	}
	s := Step{Name: name, Status: Passed, Restored: true, Prompts: len(got), Cached: restored, Tolerance: r.tolerance()}
	for i := range got {
		d, worst := compare(i, g.prompts[i].Needle, &g.cold[i], &got[i], s.Tolerance)
		s.Differences = append(s.Differences, d...)
		s.Worst = max(s.Worst, worst)
	}
	if len(s.Differences) > 0 {
		s.Status = Failed
	}
	r.step(s)
}

// checkSalts checks that an engine computes prompts under a salt that never sent them, and measures the noise of cold runs by the answers.
func (r *run) checkSalts(name string, e *engine, g *group, got []Answer) {
	s := Step{Name: name, Status: Passed, Prompts: len(got)}
	cached := e.cached(got)
	switch {
	case cached > 0:
		s.Status, s.Cached, s.Why = Failed, cached, fmt.Sprintf("%d tokens were found under a salt that never sent the prompts", cached)
	case cached < 0:
		s.Status, s.Why = NotTested, saysNothing
	}
	for i := range got {
		r.noise = max(r.noise, spread(&g.cold[i], &got[i]))
	}
	for i := range got {
		if d, _ := compare(i, "", &g.cold[i], &got[i], r.tolerance()); len(d) > 0 && cached == 0 {
			r.parted = true
		}
	}
	r.step(s)
}

const saysNothing = "the engine does not report cached_tokens (vLLM: --enable-prompt-tokens-details; SGLang: --enable-cache-report)"

// runSteps makes every step that can be made.
func (r *run) runSteps(ctx context.Context) (*Kept, error) {
	salt, err := r.newSalt()
	if err != nil {
		return nil, err
	}
	main, filled, below := r.newPrompts(), r.newPrompts(), r.newPrompts()
	for _, g := range []*group{&main, &filled, &below} {
		if g == &filled && r.FillTokens == 0 || g == &below && (r.Server == nil || r.SecondURL == "") {
			continue
		}
		if g.cold, err = r.ask(ctx, r.first, g, salt); err != nil {
			return nil, err // an engine that does not compute cannot be verified
		}
	}
	warm, warmErr := r.ask(ctx, r.first, &main, salt) // it also shows whether the engine reports what was cached
	r.cold(ctx, &main)
	r.warm(&main, warm, warmErr)
	if err := pause(ctx, r.Pause); err != nil {
		return nil, err
	}
	if err := r.second(ctx, &main, &below, salt); err != nil {
		return nil, err
	}
	r.fill(ctx, &filled, salt)
	if err := r.single(ctx, &main); err != nil {
		return nil, err
	}
	if !r.Keep {
		return nil, ctx.Err()
	}
	return &Kept{r.report.Time, r.first.model, salt, main.prompts, main.cold, r.noise}, ctx.Err()
}
