// SPDX-License-Identifier: Apache-2.0

// Package verify checks on running engines that restored KV is the KV of its prompt. It sends prompts of its own, under salts of its
// own, and compares an engine's answer from restored KV with its answer from computed KV.
//
// It restarts and clears nothing. A step counts as not tested, never as passed, if its answers may not have come from restored KV.
package verify

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"
)

// Status says how a step ended.
type Status string

// The ways in which a step can end.
const (
	Passed    Status = "passed"
	Failed    Status = "failed"
	NotTested Status = "not tested"
)

// Step is the result of checking one way in which KV comes back to an engine.
type Step struct {
	Name        string       `json:"name"`
	Status      Status       `json:"status"`
	Restored    bool         `json:"restored"`      // it compared KV that came from outside the engine
	Why         string       `json:"why,omitempty"` // why nothing was tested, or what failed other than an answer
	Prompts     int          `json:"prompts"`       // prompts that were compared
	Cached      int          `json:"cached_tokens"`
	Worst       float64      `json:"largest_logprob_difference"`
	Tolerance   float64      `json:"tolerance"`
	Differences []Difference `json:"differences,omitempty"`
}

// Report is the result of a run.
type Report struct {
	Verdict Status    `json:"verdict"`
	Time    time.Time `json:"time"`
	URL     string    `json:"url"`
	Model   string    `json:"model"`
	Noise   float64   `json:"largest_difference_of_cold_runs"`
	Steps   []Step    `json:"steps"`
	Left    string    `json:"left,omitempty"` // what could not be removed from the server
}

// Server is what verify needs of a kvasir server.
type Server interface {
	// Ask sends a request to a path of the server, with body as JSON unless it is nil. It returns the body of the answer.
	Ask(ctx context.Context, method, path string, body any) ([]byte, error)
}

// Options say what Run tries. A zero field means its default, or that a step is left out.
type Options struct {
	URL       string
	SecondURL string // an engine that shares the cache and has not seen the prompts
	SingleURL string // one engine that does prefill and decode, if URL is a pair of P and D
	Server    Server // nil: the steps that need a server are not tested
	Key       string // API key of the engines
	Model     string // default: the first model that the engine names

	Prompts      int           // prompts in each step; default 3
	PromptTokens int           // about how many tokens a prompt has; default 1200
	MaxTokens    int           // tokens of an answer; default 16
	FillTokens   int           // how many tokens push the prompts out of the engine's own cache; 0: this step is left out
	Pause        time.Duration // how long stores may take to end
	Rate         float64       // requests a second; default 4
	Tolerance    float64       // smallest tolerance of log-probabilities; default 0.1

	Sign func(tenant string) (salt string, err error) // makes the salt of a tenant; nil: the tenant's name is the salt
	Kept *Kept                                        // prompts of an earlier run: only they are checked
	Keep bool                                         // Run returns the prompts as Kept, and removes nothing
	HTTP *http.Client
}

// Kept are prompts that a run stored, and the answers to them.
type Kept struct {
	Time    time.Time `json:"time"`
	Model   string    `json:"model"`
	Salt    string    `json:"salt"`
	Prompts []Prompt  `json:"prompts"`
	Answers []Answer  `json:"answers"`
	Noise   float64   `json:"noise"`
}

// defaultTolerance is larger than the differences that come from another order of sums in 16 bits. An engine computes a prompt whose
// beginning is restored in other shapes than a whole prompt. On vLLM 0.32 in bfloat16, where cold runs are equal, the log-probabilities
// of restored prompts differ by up to 0.06.
const defaultTolerance = 0.1

// maxNoise is the largest difference between cold runs at which a wrong block could still be noticed. With a larger one, the steps count
// as not tested.
const maxNoise = 0.5

// run is one verification.
type run struct {
	Options
	rnd     *rand.Rand
	first   *engine
	report  Report
	tenants []string // the tenants under which the run stored KV
	noise   float64
	parted  bool // cold runs chose different tokens, although these were not equally likely
}

// group holds prompts, and the answers of an engine that computed them.
type group struct {
	prompts []Prompt
	cold    []Answer
}

// Run verifies the engines that the options name. Kept is nil unless Options.Keep is set. The error says why the verification could not
// be carried out; what fails in a step is in the report.
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

// judge sets the verdict. It is Failed if a step failed, else Passed if a step with restored KV passed, else NotTested.
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

// open connects to the engine at a URL.
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

// newSalt returns a new random salt, and remembers its tenant for the removal.
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

// ask sends all prompts of a group to an engine. An error means that one request failed. It ends the step, but not the run.
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

// learn sends an engine a prompt that it has just computed, to find out whether it reports cached tokens. A failed request tells
// nothing.
func (r *run) learn(ctx context.Context, e *engine, g *group, salt string) {
	if !e.reports {
		_, _ = r.ask(ctx, e, &group{prompts: g.prompts[:1]}, salt)
	}
}

// step adds the result of a step to the report.
func (r *run) step(s Step) { r.report.Steps = append(r.report.Steps, s) }

// failed adds a failed step because a request got an error. A working engine answers such prompts, so the error is a failure of the
// step.
func (r *run) failed(name string, err error) {
	r.step(Step{Name: name, Status: Failed, Why: "a request failed: " + err.Error()})
}

func (r *run) notTested(name, why string) { r.step(Step{Name: name, Status: NotTested, Why: why}) }

func (r *run) tolerance() float64 { return max(2*r.noise, r.Tolerance) }

// check compares the answers `got` with the computed ones of the group, and adds the step. restored is how many tokens came from outside the
// engine, as the engine or the server reports it; -1: not known. If restored is 0, nothing was tested, and the text `none` is the reason.
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

// checkSalts checks that an engine computes prompts under a salt under which nobody sent them before: `got` are its answers under that
// salt. It measures the noise of cold runs by these answers.
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

// runSteps runs every step that the options allow. It returns the prompts if Options.Keep is set.
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
	warm, warmErr := r.ask(ctx, r.first, &main, salt) // also shows whether the engine reports cached tokens
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
