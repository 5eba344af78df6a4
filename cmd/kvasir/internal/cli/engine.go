// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"os"
	"slices"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/internal/takeover"
	"github.com/kvasir-kv/kvasir/sim/api"
	"github.com/kvasir-kv/kvasir/sim/costmodel"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// engineCmd runs a simulated vLLM engine.
type engineCmd struct {
	configFlags
	accessFlags
	registryFlags
	zmqClientFlags
	peerFlags

	KeepAlive float64 `name:"sse-keep-alive-interval" help:"Seconds without an event after which a stream gets a comment; 0: never." default:"0" placeholder:"SECONDS" group:"Network"`

	Host string `help:"Address to listen on." default:"127.0.0.1" group:"Network"`
	Port int    `help:"Port of the OpenAI API; 0 takes a free one." default:"8100" group:"Network"`

	Model     string `help:"Name of the model in requests." default:"simulated" aliases:"served-model-name" group:"Model"`
	TP        int    `name:"tensor-parallel-size" help:"Ranks, each a worker with its share of the KV heads." default:"1" aliases:"tp" group:"Model"`
	Layers    int    `help:"Layers." default:"4" group:"Model"`
	KVHeads   int    `name:"kv-heads" help:"KV heads, over all ranks." default:"4" group:"Model"`
	HeadBytes int    `name:"head-bytes" help:"Bytes of K and V of one head and token." default:"64" group:"Model"`

	Layout string `name:"kv-layout" help:"How a layer's KV lies in memory. mla is one KV for all heads, whole on every rank." enum:"fused,nhd,hnd,flashinfer,mla" default:"fused" group:"Model"`
	PPSize int    `name:"pipeline-parallel-size" help:"Stages that share the layers; an LMCacheMPConnector registers a worker for each." default:"1" aliases:"pp" group:"Model"`
	DPSize int    `name:"data-parallel-size" help:"Data-parallel ranks that requests may name (X-Data-Parallel-Rank); all of them are this engine." default:"1" aliases:"dp" group:"Model"`
	DPRank int    `name:"data-parallel-rank" help:"This engine's rank among --data-parallel-size, under which a MooncakeConnector registers." default:"0" group:"Model"`

	Windows []int `name:"window" help:"Size in tokens of the sliding window of a further group of layers; again for more groups." placeholder:"TOKENS" group:"Model"`
	States  int   `help:"Further groups of layers with recurrent states, as Mamba's." default:"0" placeholder:"N" group:"Model"`

	MaxModel  int  `name:"max-model-len" help:"Longest sequence, in tokens; 0 is 32768, or as many as the KV blocks hold." default:"0" group:"Scheduler"`
	MaxSeqs   int  `name:"max-num-seqs" help:"Requests in a step." default:"256" group:"Scheduler"`
	MaxTokens int  `name:"max-num-batched-tokens" help:"Tokens of a step; 0 is 8192, or the profile's." default:"0" group:"Scheduler"`
	Block     int  `name:"block-size" help:"Tokens of a KV block." default:"16" group:"Scheduler"`
	Blocks    int  `name:"num-gpu-blocks-override" help:"KV blocks." default:"4096" aliases:"kv-blocks" group:"Scheduler"`
	NoCache   bool `name:"no-enable-prefix-caching" help:"Do not keep prefixes of requests that have ended." group:"Scheduler"`

	Profile string        `help:"Steps take as long as on this hardware: a name of kvasir sim profile, or a file of kvasir engine calibrate." placeholder:"NAME" group:"Time"`
	Prefill float64       `name:"prefill-tokens-per-second" help:"Prompt tokens that a second computes; 0 is at once." default:"0" group:"Time"`
	Step    time.Duration `name:"step-time" help:"Time of each step, and so between tokens." default:"0s" group:"Time"`

	Transfer string `name:"kv-transfer-config" help:"Connectors, in the JSON that vLLM takes: MooncakeConnector, MooncakeStoreConnector, LMCacheMPConnector, or several in a MultiConnector." placeholder:"JSON" group:"KV transfer"`
	Release  string `help:"Dialect of the MooncakeConnector: that of vLLM 0.16 and later, or 0.13's; keys and decisions of the MooncakeStoreConnector: ours with the keys of 0.24 and later, or 0.23's." enum:"current,0.13,0.23" default:"current" group:"KV transfer"`
	LMCache  string `name:"lmcache-release" help:"Protocol of the LMCacheMPConnector: that of 0.5.7, where the server negotiates chunk sizes, or always 0.5.6's." enum:"current,0.5.6" default:"current" group:"KV transfer"`
	Events   string `name:"kv-events-config" help:"KV events to publish, in the JSON that vLLM takes: {\"enable_kv_cache_events\":true,\"endpoint\":\"tcp://*:5557\"}." placeholder:"JSON" group:"KV transfer"`
	Like     string `help:"Whose API and P/D the engine has: vllm, or sglang with /generate, bootstrap rooms and a bootstrap server. vllm-tiering has no API: it is the engine's side of --vllm-tier alone." enum:"vllm,sglang,vllm-tiering" default:"vllm" group:"KV transfer"`
	Mode     string `name:"disaggregation-mode" help:"With --like sglang: prefill, decode, or null for an engine that does both." enum:"null,prefill,decode" default:"null" group:"KV transfer"`
	BootPort int    `name:"disaggregation-bootstrap-port" help:"Port of the bootstrap server of a P with --like sglang, on --host." default:"8998" group:"KV transfer"`
	VLLMTier string `name:"vllm-tier" help:"With --like vllm-tiering: the socket of kvasir server --vllm-tier. Requests of shared prefixes are stored and loaded there, and every byte is compared." placeholder:"PATH" group:"KV transfer"`
	Requests int    `help:"With --like vllm-tiering: end after so many requests; 0: at a signal." default:"0" group:"KV transfer"`
	Retain   *int   `name:"prefix-cache-retention-interval" help:"What a MooncakeStoreConnector keeps of windows: one tail per this number of tokens, and the prompt's; 0: the prompt's alone. Default: all." placeholder:"TOKENS" group:"KV transfer"`
}

// Help is shown by kvasir engine --help.
func (engineCmd) Help() string {
	return `A vLLM engine without a model or a GPU: OpenAI API, vLLM's scheduler, paged KV with real bytes, the real
connectors. The next token and all KV follow from the tokens before, so every KV byte that comes from the prefix
cache, another engine or a cache server is checked; a wrong one fails its request and is counted.

Examples:
  kvasir engine
  curl http://127.0.0.1:8100/v1/completions -H 'Content-Type: application/json' -d '{"prompt":"hello there","max_tokens":8}'
  kvasir engine --profile a10-qwen2.5-7b
  kvasir engine calibrate mine.json --write mine-profile.json
  kvasir engine --kv-transfer-config '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both"}'
  kvasir engine --port 8100 --kv-transfer-config '{"kv_connector":"MooncakeConnector","kv_role":"kv_producer",
    "kv_connector_extra_config":{"bootstrap_server_address":"127.0.0.1:8998"}}'
  kvasir engine --port 8200 --kv-transfer-config '{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}'
  kvasir engine --like vllm-tiering --vllm-tier /run/kvasir.sock --requests 1000
  MOONCAKE_CONFIG_PATH=mooncake.json kvasir engine --window 1024 --kv-transfer-config '{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both"}'

Without bootstrap_server_address P has a registry of its own, on VLLM_MOONCAKE_BOOTSTRAP_PORT (8998).
VLLM_HOST_IP names the address that other engines dial. docs/reference/engine.md has more.`
}

func (c *engineCmd) options(e *env) (o engine.Options, err error) {
	var bad faults
	if bad.port("--port", c.Port, true); bad.err() != nil {
		return o, bad.err()
	}
	layout, err := kvmem.ParseLayout(c.Layout)
	if err != nil {
		return o, usagef("--kv-layout: %v", err)
	}
	if layout == kvmem.MLA {
		c.KVHeads = 1
	}
	o = engine.Options{
		PPSize: c.PPSize, DPSize: c.DPSize, DPRank: c.DPRank,
		Model: c.Model, MaxModel: c.MaxModel, MaxSeqs: c.MaxSeqs, MaxTokens: c.MaxTokens, NoCache: c.NoCache,
		KV: kvmem.Geometry{
			Layers: c.Layers, Heads: c.KVHeads, HeadBytes: c.HeadBytes, BlockTokens: c.Block, Blocks: c.Blocks, TPSize: c.TP, Layout: layout,
		},
		StepTime: c.Step, PrefillRate: c.Prefill, First: c.Release == "0.13", Unnegotiated: c.LMCache == "0.5.6", StoreRelease: releases[c.Release], Retention: c.Retain, Getenv: c.getenv, Log: e.log,
	}
	if o.Registry, err = c.registryFlags.client(); err != nil {
		return o, err
	}
	if c.Profile != "" {
		if o.Clock, err = costmodel.Open(c.Profile); err != nil {
			return o, usagef("--profile: %v", err)
		}
		if o.MaxTokens == 0 {
			o.MaxTokens = o.Clock.TokenBudget
		}
		if c.Step != 0 || c.Prefill != 0 {
			return o, usagef("--profile says how long steps take: --step-time and --prefill-tokens-per-second cannot stand beside it")
		}
	}
	o.Groups = []sched.Group{{}}
	for _, w := range c.Windows {
		o.Groups = append(o.Groups, sched.Group{Window: w})
	}
	for range c.States {
		o.Groups = append(o.Groups, sched.Group{State: true})
	}
	if c.Retain != nil && (*c.Retain < 0 || *c.Retain%max(c.Block, 1) != 0) {
		return o, usagef("--prefix-cache-retention-interval %d is no multiple of --block-size %d", *c.Retain, c.Block)
	}
	if c.Transfer != "" {
		if o.Connectors, err = kvconfig.Parse([]byte(c.Transfer)); err != nil {
			return o, usagef("--%v", err)
		}
	}
	if c.DPSize < 1 || c.DPRank < 0 || c.DPRank >= c.DPSize || c.PPSize < 1 || c.Layers%max(c.PPSize, 1) != 0 {
		return o, usagef("--data-parallel-rank %d must be 0 or more and below --data-parallel-size %d, and --layers %d a multiple of --pipeline-parallel-size %d", c.DPRank, c.DPSize, c.Layers, c.PPSize)
	}
	if err := c.likeSGLang(&o); err != nil {
		return o, err
	}
	if c.KeepAlive < 0 {
		return o, usagef("--sse-keep-alive-interval %v is below 0", c.KeepAlive)
	}
	if err := o.KV.Validate(); err != nil {
		return o, usagef("%v", err)
	}
	return o, nil
}

// getenv returns variables of the environment. For an engine on loopback, VLLM_HOST_IP is 127.0.0.1 by default.
func (c *engineCmd) getenv(name string) (string, bool) {
	v, ok := os.LookupEnv(name)
	if name == "VLLM_HOST_IP" && v == "" && isLoopback(c.Host) {
		return "127.0.0.1", true
	}
	return v, ok
}

func (c *engineCmd) check(e *env) error {
	if c.Like == likeTiering {
		return c.checkTiering()
	}
	_, err := c.options(e)
	if err == nil {
		_, err = c.events()
	}
	return errors.Join(err, c.peerFlags.check(), c.accessFlags.check(c.exposed(), engineListeners...))
}

// exposed returns the listeners of the engine, as far as its flags can be parsed.
func (c *engineCmd) exposed() []exposure {
	out := []exposure{{listener: "http", at: "--host " + c.Host, host: c.Host, web: true, risk: "use the engine"}}
	if events, err := c.events(); err == nil && events != nil {
		out = append(out, exposedEvents([2]string{"--kv-events-config", events.Endpoint}, [2]string{"--kv-events-config", events.Replay})...)
	}
	const risk = "receive the KV of transfers"
	if c.Like == "sglang" && c.Mode == "prefill" {
		out = append(out, exposure{listener: "transfer", at: "--host " + c.Host, host: c.Host, risk: risk})
	}
	connectors, err := kvconfig.Parse([]byte(c.Transfer))
	mooncake := func(k *kvconfig.Config) bool { return k.Connector == kvconfig.MooncakeConnector }
	if err == nil && slices.ContainsFunc(connectors, mooncake) || c.Like == "sglang" && c.Mode != "null" {
		if host, err := kvconfig.Host(c.getenv); err == nil { // without a host, the engine does not start
			out = append(out, exposure{listener: "transfer", at: "VLLM_HOST_IP, " + host, host: host, risk: risk})
		}
	}
	return out
}

// engineListeners are the names of an engine's listeners, for --allow-from: the API, KV events, and what other engines use (registry,
// side channels, transfer ports).
var engineListeners = []string{"http", "events", "transfer"}

// engineNeed returns which right a request to an engine needs.
func engineNeed(r *http.Request) auth.Need {
	switch r.URL.Path {
	case "/health", "/healthz", "/healthcheck", "/ping":
		return auth.NeedNothing
	case "/reset_prefix_cache":
		return auth.NeedAdmin
	}
	if r.Method == http.MethodGet || r.Method == http.MethodHead {
		return auth.NeedRead
	}
	return auth.NeedWrite
}

// events returns the configuration of the KV events to be published; nil: none.
func (c *engineCmd) events() (*kvconfig.Events, error) {
	if c.Events == "" {
		return nil, nil
	}
	o, err := kvconfig.ParseEvents([]byte(c.Events))
	if err != nil {
		return nil, usagef("--%v", err)
	}
	return o, nil
}

// Run serves until a signal stops it.
func (c *engineCmd) Run(e *env) (err error) {
	if c.Like == likeTiering {
		return c.playTiering(e)
	}
	o, err := c.options(e)
	if err != nil {
		return err
	}
	events, err := c.events()
	if err != nil {
		return err
	}
	a, err := c.accessFlags.open(e.log, c.exposed(), engineListeners...)
	if err != nil {
		return err
	}
	if a.peers, err = c.peerFlags.open(e.log); err != nil {
		return err
	}
	defer a.watch()()
	o.Networks, o.Secrets = a.networks["transfer"], a.peers
	if o.Cache, err = c.zmqClientFlags.options(); err != nil {
		return err
	}
	if events != nil {
		p, err := openEnginePublisher(e.ctx, *events, c.DPRank, a.networks["events"], e.log)
		if err != nil {
			return takeover.ExplainListen(err, "--kv-events-config", "--kv-events-config")
		}
		defer func() { err = errors.Join(err, p.Close()) }()
		o.OnEvents = p.publish
	}
	listener, err := takeover.ListenTCP(e.ctx, c.Host, c.Port)
	if err != nil {
		return takeover.ExplainListen(err, "--host", "--port")
	}
	if c.Like == "sglang" && c.Mode == "prefill" {
		closeBoot, err := c.openBoot(e, &o)
		if err != nil {
			return errors.Join(err, listener.Close())
		}
		defer func() { err = errors.Join(err, closeBoot()) }()
	}
	eng, err := engine.Open(e.ctx, o)
	if e.ctx.Err() != nil && err != nil { // stopped before it served
		e.log.Info("the engine stopped while it started", "err", err)
		return listener.Close()
	}
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	defer func() { err = errors.Join(err, eng.Close()) }()
	guards := a.gateOptions("http")
	guards.Need = engineNeed
	gate := auth.New(guards)
	figures := func(r *metrics.Registry) {
		metrics.AddWith(r, map[string]string{"listener": "http"}, gate.Stats)
		a.addMetrics(r, "events", "transfer")
	}
	var handler http.Handler = api.New(eng, api.Options{
		Metrics: figures, Version: Version(), SameIDs: o.First, Ranks: c.DPSize, KeepAlive: time.Duration(c.KeepAlive * float64(time.Second)), Log: e.log,
	})
	if c.Like == "sglang" {
		s := api.NewSGLang(eng, api.SGLangOptions{Metrics: figures, Version: Version(), Mode: c.Mode, Page: c.Block, Bootstrap: c.BootPort, Log: e.log})
		defer s.Close()
		handler = s
	}
	web := httpserver.NewServer(gate.Handler(handler))
	e.log.Info("the engine serves", "address", a.url(listener.Addr()), "model", c.Model, "blocks", c.Blocks,
		"kv_bytes", int64(c.Blocks)*int64(c.Block)*int64(o.KV.TokenBytes()))
	e.isReady()
	ended := make(chan error, 1)
	go func() { ended <- a.serve(web, httpserver.Limit(listener, 4096)) }()
	select {
	case err := <-ended:
		return err
	case <-e.ctx.Done():
	}
	s := eng.Stats()
	e.log.Info("stopping: requests in progress may finish for 10 s", "running", s.Running, "waiting", s.Waiting)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if late := web.Shutdown(ctx); late != nil {
		eng.AbortAll() // streams then end with a reason
		short, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		if late = web.Shutdown(short); late != nil { // clients that do not read are cut
			err = cmp.Or(err, web.Close())
		}
	}
	<-ended
	s = eng.Stats()
	e.log.Info("the engine stopped", "finished", s.Finished, "aborted", s.Aborted, "failed", s.Failed, "prompt_tokens", s.PromptTokens,
		"not_computed", s.CachedTokens, "loaded", s.LoadedTokens, "wrong_kv", s.WrongBytes)
	return err
}
