// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Real engines: with -real the two P and two D are vLLM's (CPU builds), and a fifth one, which no fault reaches, computes each answer.
// They are others' programs: their own ends and hangs are counted (Alone) and mended by a restart. What is
// Kvasir's is judged as with simulated engines. They start in a minute where simulated ones take a moment, so all patience is longer.
const (
	realBlockTokens = 32
	alonePort       = 8103
	realPatience    = 3 // times what simulated engines have
	realStart       = 10 * time.Minute
	realClients     = 2
	realRest        = 3 * time.Minute // between two faults that end one real engine
	realAbort       = 30              // seconds after which P frees the blocks that D has not asked for
	realTokenFirst  = 300             // token ids below are bytes and special ones
	realTokens      = 1700
)

// findReal looks for the Python of a vLLM environment that the interop scripts keep.
func findReal() (string, error) {
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	found, _ := filepath.Glob(filepath.Join(cache, "vllm-*-lmcache-*", "bin", "python")) // the pattern is well formed
	if len(found) == 0 {
		return "", fmt.Errorf("no environment with vLLM below %s: interop/vllm/setup_venv.sh DIR makes one, and -real DIR/bin/python names it", cache)
	}
	return slices.Max(found), nil
}

// findEngines finds the real engines that are asked for, and makes their model.
func (o *options) findEngines(ctx context.Context) (err error) {
	if o.real == "" {
		return nil
	}
	if o.real == auto {
		if o.real, err = findReal(); err != nil {
			return err
		}
	}
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "clients" })
	if !given {
		o.clients = min(o.clients, realClients)
	}
	if err := o.paths(); err != nil {
		return err
	}
	return o.makeModel(ctx)
}

// makeModel writes the model of the real engines, with random weights, where there is none yet.
func (o *options) makeModel(ctx context.Context) error {
	if _, err := os.Stat(filepath.Join(o.model(), "config.json")); err == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, o.real, filepath.Join("interop", "vllm", "make_model.py"), o.model(), "--kind", "qwen2", "--layers", "2")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("make a model for real engines: %w: %s", err, lastLines(out))
	}
	return nil
}

func lastLines(b []byte) string {
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-3):], "; ")
}

// model is the folder of the real engines' model.
func (o *options) model() string { return filepath.Join(o.dir, "model") }

// modelName is the model's name in the keys of a node: real vLLM's is the folder.
func (o *options) modelName() string {
	if o.real != "" {
		return o.model()
	}
	return "m"
}

// patience lengthens a time by what real engines take.
func (o *options) patience(d time.Duration) time.Duration {
	if o.real != "" {
		return realPatience * d
	}
	return d
}

// nodePatience is how many seconds an engine waits for an answer of its node. A real one ends when a store is not answered in time
// (LMCacheTimeoutError), a simulated one counts a miss.
func (o *options) nodePatience() int {
	if o.real != "" {
		return 60
	}
	return 3
}

// startLimit is how long a part may take until it is well.
func (p *part) startLimit(d time.Duration) time.Duration {
	if p.isRealEngine() {
		return realStart
	}
	return d
}

func (p *part) isRealEngine() bool {
	return p.foreign && (p.kind == "p" || p.kind == "d" || p.kind == "alone")
}

// realPart is a vLLM with the connectors of the simulated engine in its place, or without any.
func realPart(o *options, name, kind, host string, port int, transfer string) *part {
	shim, _ := filepath.Abs(filepath.Join("interop", "vllm", "shim")) // the working directory is the repository's, which exists
	addr, blocks := addrOf(host), 200
	if kind == "p" {
		blocks = 350
	}
	args := []string{
		o.real, "-m", "vllm.entrypoints.cli.main", "serve", o.model(), "--served-model-name", "m", "--host", addr, "--port", fmt.Sprint(port),
		"--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--block-size", fmt.Sprint(realBlockTokens), "--seed", "0", "--max-num-seqs", "8",
		"--generation-config", "vllm", "--num-gpu-blocks-override", fmt.Sprint(blocks), "--enable-prompt-tokens-details",
		"--disable-log-stats", // vLLM 0.32 ends at the first transfer: its metrics do not know the MooncakeConnector inside a MultiConnector
	}
	if transfer != "" {
		args = append(args, "--kv-transfer-config", transfer)
	}
	link := "e0"
	if host == "" {
		link = "br0"
	}
	return &part{
		name: name, kind: kind, host: host, foreign: true, health: fmt.Sprintf("http://%s:%d/health", addr, port), args: args,
		env: []string{
			"VLLM_HOST_IP=" + addr, "GLOO_SOCKET_IFNAME=" + link, fmt.Sprintf("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=%d", realAbort), "KV_CPU_SHIM=device", "PYTHONPATH=" + shim,
			"HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1", "LMCACHE_TRACK_USAGE=false", "VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind",
			"OMP_NUM_THREADS=1", "VLLM_ENABLE_V1_MULTIPROCESSING=0", "TOKENIZERS_PARALLELISM=false",
		},
	}
}

var errRealEngine = errors.New("the engines are real ones")

// spared says why a fault is left out where engines are real: what it shows would be theirs, or they could hardly ever be up.
func (s *soak) spared(p *part, f fault) error {
	if s.o.real == "" {
		return nil
	}
	switch {
	case p == nil && (f.Kind == "late" || f.Kind == "slow") && f.Target != "r":
		return fmt.Errorf("%w: bytes that reach D after it gave up are written by its transfer engine", errRealEngine)
	case f.Kind == "leave":
		return fmt.Errorf("%w: vLLM 0.32 ends when a client leaves while its KV arrives", errRealEngine)
	case p == nil || !p.isRealEngine():
		return nil
	}
	switch f.Kind {
	case "clock", "swap", "fds", "strangers":
		return fmt.Errorf("%w: this fault is for Kvasir's parts", errRealEngine)
	case "kill", "term":
		p.mu.Lock()
		defer p.mu.Unlock()
		if time.Since(p.mu.began) < realRest {
			return fmt.Errorf("%w: %s started less than %v ago", errRealEngine, p.name, realRest)
		}
	}
	return nil
}

// awaitRealEngines waits until all real engines are well.
func (s *soak) awaitRealEngines(ctx context.Context) error {
	for _, p := range s.parts {
		if !p.isRealEngine() {
			continue
		}
		if err := p.await(ctx, realStart); err != nil {
			return err
		}
	}
	return nil
}

// awaitRealEngine waits until an engine is well, and logs why it is not: that is no violation.
func (s *soak) awaitRealEngine(ctx context.Context, p *part) {
	if err := p.await(ctx, realStart); err != nil && ctx.Err() == nil {
		s.logf("%v", err)
	}
}

// reviveEngines restarts the real engines that do not answer: that fault is theirs.
func (s *soak) reviveEngines(ctx context.Context) {
	for _, p := range s.parts {
		if !p.isRealEngine() || ctx.Err() != nil {
			continue
		}
		_, err := askEngine(ctx, p, []uint32{realTokenFirst, realTokenFirst + 1}, 1, time.Minute)
		if err == nil || ctx.Err() != nil {
			continue
		}
		s.logf("%s is started again: %v", p.name, err)
		s.mu.Lock()
		s.record.Alone[p.name]++
		s.mu.Unlock()
		p.end(syscall.SIGKILL, 5*time.Second)
		if err := p.start(s.alone); err != nil {
			s.violation("%v", err)
			return
		}
		s.awaitRealEngine(ctx, p)
	}
}

// chosen is one token of an answer with its log-probability.
type chosen struct {
	token string
	logp  float64
}

// rounding is how far log-probabilities of one token may be apart: engines compute prompts in other batches.
const rounding = 0.01

// differ says where two answers part. Where two tokens are equally likely, within rounding, either is right, and nothing after it is compared.
func differ(got, want []chosen) string {
	for i := range min(len(got), len(want)) {
		g, w := got[i], want[i]
		apart := math.Abs(g.logp-w.logp) > rounding
		switch {
		case g.token != w.token && apart:
			return fmt.Sprintf("token %d is %q (%.4f), want %q (%.4f)", i, g.token, g.logp, w.token, w.logp)
		case g.token != w.token:
			return ""
		case apart:
			return fmt.Sprintf("token %d, %q, has the log-probability %.4f, want %.4f", i, g.token, g.logp, w.logp)
		}
	}
	if len(got) != len(want) {
		return fmt.Sprintf("%d tokens, want %d", len(got), len(want))
	}
	return ""
}

// vocabulary maps the tokens of the load to those that the real model has as words.
func vocabulary(tokens []uint32) []uint32 {
	out := make([]uint32, len(tokens))
	for i, t := range tokens {
		out[i] = realTokenFirst + t%realTokens
	}
	return out
}

// realFields adds what makes an answer the same each time, and makes it say how likely each token is.
func realFields(fields map[string]any) {
	fields["temperature"], fields["ignore_eos"], fields["logprobs"], fields["return_tokens_as_token_ids"] = 0, true, 1, true // bytes have no text of their own
}

// askEngine asks an engine itself, without a proxy, for n tokens after a prompt.
func askEngine(ctx context.Context, p *part, prompt []uint32, n int, limit time.Duration) ([]chosen, error) {
	fields := map[string]any{"model": "m", "prompt": prompt, "max_tokens": n}
	realFields(fields)
	body, err := json.Marshal(fields)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url("/v1/completions"), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	q.Header.Set("Content-Type", "application/json")
	a, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(q)
	if err != nil {
		return nil, err
	}
	defer a.Body.Close()
	b, err := io.ReadAll(a.Body)
	if err != nil {
		return nil, err
	}
	got := judge(a.StatusCode, b)
	if got.kind != "ok" {
		return nil, fmt.Errorf("%s: %s", got.kind, got.text)
	}
	return got.tokens[0], nil
}

// engineEnded reports whether a real engine ended by itself near a request.
func (l *load) engineEnded(ctx context.Context, began, ends time.Time) bool {
	if l.s.o.real == "" {
		return false
	}
	wait(ctx, time.Second) // until its end is noticed
	return l.s.windows.during(began, ends.Add(time.Second), l.s.o.patience(grace), func(f fault) bool { return f.Kind == "kill" && f.hurts() })
}

// differsFromReal names the first answer that is not what a real engine without peers gives.
func (l *load) differsFromReal(ctx context.Context, r *ask, got map[int][]chosen) string {
	if len(got) != len(r.prompts) {
		return fmt.Sprintf("%d answers, want %d", len(got), len(r.prompts))
	}
	for j, prompt := range r.prompts {
		want, err := askEngine(ctx, l.s.part("alone"), prompt, r.tokens, realStart)
		if err != nil {
			return fmt.Sprintf("what it must be is not known: %v", err)
		}
		if what := differ(got[j], want); what != "" {
			return fmt.Sprintf("answer %d: %s", j, what)
		}
	}
	return ""
}
