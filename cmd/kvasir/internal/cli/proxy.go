// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"strings"
	"time"

	proxytool "github.com/kvasir-kv/kvasir/cmd/kvasir/internal/proxy"
	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/internal/otlp"
	"github.com/kvasir-kv/kvasir/internal/takeover"
	"github.com/kvasir-kv/kvasir/proxy"
	"github.com/kvasir-kv/kvasir/proxy/keys"
	"github.com/kvasir-kv/kvasir/proxy/limits"
)

// proxyCmd runs a proxy in front of engines.
type proxyCmd struct {
	configFlags
	accessFlags
	registryFlags
	saltFlags

	Host string `help:"Address to listen on." default:"127.0.0.1" group:"Network"`
	Port int    `help:"Port of the OpenAI API and /health, and /metrics unless there are keys or --admin-port; 0 takes a free one." default:"8000" group:"Network"`

	APIKeys    string   `name:"api-keys" help:"File of those who may ask: NAME SHA256 [rate=N] [concurrent=N] [salt=off] on each line. Read again when it changes." placeholder:"FILE" group:"Access"`
	Limits     string   `name:"shared-limits" help:"Redis or Valkey in which several proxies count rate and concurrent of keys together: redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE], rediss:// or unix:PATH (best as KVASIR_PROXY_SHARED_LIMITS). While it does not answer, each proxy holds the limits by itself." placeholder:"URL" group:"Access"`
	KeyToFound bool     `name:"engine-api-key-to-found" help:"Engines that a registry names (registry+http) get the key of --engine-api-key and credentials of clients, too: whoever can register learns them." group:"Access"`
	AllowNet   []string `name:"allow-net" help:"Networks (CIDR) in which engines may be that a registry names. Default: loopback and private networks." placeholder:"CIDR" group:"Access"`
	PassHeader []string `name:"pass-header" help:"Header of clients that reaches engines although there are --api-keys; again for more. Credentials never do." placeholder:"NAME" sep:"none" group:"Access"`
	EngineKey  string   `name:"engine-api-key" help:"API key that engines want (best as KVASIR_PROXY_ENGINE_API_KEY)." group:"Access"`
	EngineCA   string   `name:"engine-ca" help:"Authorities (PEM) of engines at https, instead of the system's." placeholder:"FILE" group:"Access"`
	AdminHost  string   `name:"admin-host" help:"Address of --admin-port." default:"127.0.0.1" group:"Access"`
	AdminPort  int      `name:"admin-port" help:"Port of /engines (list, add, remove, drain) and /metrics; none by default." placeholder:"PORT" group:"Access"`
	AllowHost  []string `name:"allow-host" help:"Names under which /metrics is read, besides addresses, localhost and this machine's name." placeholder:"NAME" group:"Access"`
	AdminToken string   `name:"admin-token" help:"Bearer token for /engines (best as KVASIR_PROXY_ADMIN_TOKEN). --token-file is for this port, too." group:"Access"`

	Origins     []string `name:"allowed-origins" help:"Origins whose pages may use the API in browsers, as vLLM's JSON list or again for more; [\"*\"] is any. Default: none." placeholder:"ORIGIN" sep:"none" group:"Browsers"`
	Methods     []string `name:"allowed-methods" help:"Methods that such pages may use; default all." placeholder:"METHOD" sep:"none" group:"Browsers"`
	Headers     []string `name:"allowed-headers" help:"Headers that such pages may send; default all." placeholder:"HEADER" sep:"none" group:"Browsers"`
	Credentials bool     `name:"allow-credentials" help:"Such pages may send credentials." group:"Browsers"`

	Prefill   []string `help:"Prefill engine: its URL, and behind a blank the port of its registry (bootstrap server) on the same host, or behind a comma the registry's URL. Default: port 8998. dns+http://NAME:PORT is each address of a name, registry+http://HOST:PORT?port=API each host in a registry (registry+https://HOST:PORT?port=API&scheme=http for engines at http). Again for more." placeholder:"URL[ PORT]" sep:"none" group:"Engines"`
	Decode    []string `help:"Decode engine, or dns+http://NAME:PORT; again for more." placeholder:"URL" sep:"none" group:"Engines"`
	Engine    []string `help:"Engine that does both, or dns+http://NAME:PORT; again for more." placeholder:"URL" sep:"none" group:"Engines"`
	Connector string   `name:"kv-connector" help:"How P and D learn of each other: mooncake (vLLM 0.16 and later), mooncake-0.13 (its first release), nixl (P first, D gets what P answers), sglang (SGLang's bootstrap rooms); auto is sglang for engines that say so (/server_info), and mooncake for others." enum:"auto,mooncake,mooncake-0.13,nixl,sglang" default:"auto" group:"Engines"`
	DPSize    int      `name:"data-parallel-size" aliases:"intra-node-data-parallel-size" help:"Data-parallel ranks behind each URL, asked for in turn. By default engines choose; P of mooncake is asked for each rank that its registry shows." placeholder:"N" group:"Engines"`

	Policy      string   `help:"How an engine is chosen: round_robin; least_loaded (requests of this proxy and, by the engine's metrics, others); prefix_aware (least left to compute). The names of vllm-router, sglang-router and smg are taken too." enum:"round_robin,least_loaded,prefix_aware,random,power_of_two,cache_aware,consistent_hash,manual,bucket,least_load,prefix_hash,consistent_hashing" default:"round_robin" group:"Policy"`
	PrefillBy   string   `name:"prefill-policy" help:"--policy for P alone." placeholder:"POLICY" group:"Policy"`
	DecodeBy    string   `name:"decode-policy" help:"--policy for D alone." placeholder:"POLICY" group:"Policy"`
	SkipPrefill byteSize `name:"skip-prefill-below" help:"A prompt goes to D alone when D lacks less than this of its KV; 0: never, or with --store of less than 2 KiB." default:"0" placeholder:"SIZE" group:"Policy"`
	EventsPort  int      `name:"kv-events-port" help:"Port at which each engine publishes its KV events (vLLM's --kv-events-config): prefix_aware goes by what engines have; of data-parallel rank r that and r. Engines are asked for the tokens of new prompts (/tokenize)." placeholder:"PORT" group:"Policy"`
	ReplayPort  int      `name:"kv-events-replay-port" help:"Port at which they replay KV events." placeholder:"PORT" group:"Policy"`
	SharedStore bool     `name:"shared-store" help:"D can load what any engine has seen from a cache server (kvasir server): it counts as not lacking, for --skip-prefill-below." group:"Policy"`
	Store       string   `help:"HTTP interface of the cache server (kvasir server --http-port) that P and D share: prompts that it has go to D alone, while it answers, and as long as it has not evicted much." placeholder:"URL" group:"Policy"`
	StoreToken  string   `name:"store-token" help:"Token that this server wants (--token-file there; the scope read), best as KVASIR_PROXY_STORE_TOKEN." placeholder:"TOKEN" group:"Policy"`
	StoreEvents string   `name:"store-events" help:"KV events of the server of --store (kvasir server --kv-events), tcp://HOST:PORT: a prompt goes to D alone when the server says that it has it. Engines are asked for the tokens of new prompts (/tokenize)." placeholder:"ENDPOINT" group:"Policy"`
	StoreReplay string   `name:"store-events-replay" help:"Where it replays them (--kv-events-replay), tcp://HOST:PORT." placeholder:"ENDPOINT" group:"Policy"`
	DecodeAlone bool     `name:"decode-alone" help:"While no P is well, D computes prompts; by default requests are refused." group:"Policy"`

	OTLP string `name:"otlp-endpoint" help:"OpenTelemetry collector (OTLP over HTTP), http://HOST:4318, for a span of each request, P's part and D's." placeholder:"URL" group:"Log"`

	MaxInFlight  int           `name:"max-in-flight" help:"Requests in progress; more are answered 503 at once." default:"16384" group:"Limits"`
	MaxPrompts   int           `name:"max-prompts" help:"Prompts of one request that goes through P and D, each with a transfer of its own; more are answered 400." default:"128" group:"Limits"`
	BodyMemory   byteSize      `name:"body-memory" help:"Memory for requests that are still being read, over all clients; one address or API key may have half of what the others leave, a single request a third, and 64 MiB. More are answered 503 at once." default:"192MiB" group:"Limits"`
	MaxPerEngine int           `name:"max-per-engine" help:"Requests at one engine; others wait." default:"1024" group:"Limits"`
	MaxQueue     int           `name:"max-queue" help:"Requests that wait for a model; more are answered 503 at once. One client may have half of what the others leave." default:"1024" group:"Limits"`
	QueueTimeout time.Duration `name:"queue-timeout" help:"Longest wait for an engine." default:"30s" group:"Limits"`
	Attempts     int           `help:"Attempts of a request before its first byte." default:"3" group:"Limits"`
	FirstByte    time.Duration `name:"first-byte-timeout" help:"Time until the first data of an answer, or the whole of one that is no stream." default:"10m" group:"Limits"`
	PrefillTime  time.Duration `name:"prefill-timeout" help:"Time that P may take." default:"10m" group:"Limits"`
	AnswerTime   time.Duration `name:"answer-timeout" help:"Time that a whole answer may take, from the request to the engine to its end; 0: no limit." default:"0s" group:"Limits"`
	Stall        time.Duration `name:"stall-timeout" help:"Time between bytes of an answer." default:"5m" group:"Limits"`
	KeepAlive    time.Duration `name:"keep-alive" help:"Comments to clients that wait for a stream, one each so often; 0: none." default:"0s" group:"Limits"`
	Drain        time.Duration `name:"drain-timeout" help:"Time that requests in progress have after SIGTERM." default:"30s" group:"Limits"`
}

// Help is shown by kvasir proxy --help.
func (proxyCmd) Help() string {
	return `Sends each request to one engine, or, where prefill and decode are apart, to P and D. The proxy may start before its
engines. A P or D that is started again is found; a request whose engine fails before the first byte is tried with
others; a client that leaves ends its request at both engines. docs/operate/proxy.md has the rules.

Examples:
  kvasir proxy --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200
  kvasir proxy --prefill http://10.0.0.1:8100 8998 --prefill http://10.0.0.3:8100 8998 --decode http://10.0.0.2:8200 --policy prefix_aware
  kvasir proxy --kv-connector nixl --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200
  kvasir proxy --engine http://127.0.0.1:8100 --engine http://127.0.0.1:8101 --policy least_loaded

vllm-router's lines work: --vllm-pd-disaggregation --prefill URL PORT --decode URL --policy cache_aware --kv-connector
mooncake, and --worker-urls URL URL. So do those of sglang-router and smg: --pd-disaggregation --prefill URL PORT
--decode URL --prefill-policy cache_aware --decode-policy power_of_two.

Without GPUs: kvasir engine --help has the lines of a P and a D.`
}

var connectors = map[string]proxy.Dialect{"auto": proxy.Mooncake, "sglang": proxy.SGLang, "mooncake": proxy.Mooncake, "mooncake-0.13": proxy.Mooncake013, "nixl": proxy.NIXL}

var policies = map[string]proxy.Policy{
	"round_robin": proxy.RoundRobin, "random": proxy.RoundRobin, "least_loaded": proxy.LeastLoaded, "power_of_two": proxy.LeastLoaded,
	"prefix_aware": proxy.PrefixAware, "cache_aware": proxy.PrefixAware, "consistent_hash": proxy.PrefixAware,
	"least_load": proxy.LeastLoaded, "bucket": proxy.LeastLoaded, "manual": proxy.PrefixAware, "prefix_hash": proxy.PrefixAware, "consistent_hashing": proxy.PrefixAware,
}

// policyOf returns the policy that a flag names; nil if the flag is not given.
func policyOf(flag, name string) (*proxy.Policy, error) {
	if name == "" {
		return nil, nil
	}
	policy, ok := policies[name]
	if !ok {
		return nil, usagef("%s %q is no policy: round_robin, least_loaded and prefix_aware are", flag, name)
	}
	return &policy, nil
}

// proxyFields maps the fields of proxy.Options to the flags that set them, for errors.
var proxyFields = map[string]string{
	"Prefill": "--prefill", "Decode": "--decode", "Engines": "--engine", "Sources": "dns+ or registry+", "DPSize": "--data-parallel-size", "SkipPrefill": "--skip-prefill-below", "SharedStore": "--shared-store", "DecodeAlone": "--decode-alone", "Store": "--store", "StoreEvents": "--store-events", "StoreReplay": "--store-events-replay", "EventsPort": "--kv-events-port", "ReplayPort": "--kv-events-replay-port",
	"MaxPrompts": "--max-prompts", "MaxInFlight": "--max-in-flight", "BodyMemory": "--body-memory", "MaxPerEngine": "--max-per-engine", "MaxQueue": "--max-queue", "QueueTimeout": "--queue-timeout",
	"Attempts": "--attempts", "FirstByte": "--first-byte-timeout", "PrefillTimeout": "--prefill-timeout", "AnswerTimeout": "--answer-timeout", "Stall": "--stall-timeout", "KeepAlive": "--keep-alive",
}

// clients sets what the proxy trusts, and which credentials it shows, as a client of engines and registries.
func (c *proxyCmd) clients(o *proxy.Options) (err error) {
	if c.EngineCA != "" {
		text, err := os.ReadFile(c.EngineCA)
		if err != nil {
			return err
		}
		o.EngineTLS = &tls.Config{RootCAs: x509.NewCertPool()}
		if !o.EngineTLS.RootCAs.AppendCertsFromPEM(text) {
			return usagef("--engine-ca %s has no certificate in PEM", c.EngineCA)
		}
	}
	o.Registry, err = c.registryFlags.client()
	return err
}

func (c *proxyCmd) options(e *env) (o proxy.Options, err error) {
	o = proxy.Options{
		EngineKey: c.EngineKey, Dialect: connectors[c.Connector], Detect: c.Connector == "auto", DPSize: c.DPSize, Policy: policies[c.Policy],
		SkipPrefill: int(c.SkipPrefill), EventsPort: c.EventsPort, ReplayPort: c.ReplayPort, SharedStore: c.SharedStore, Store: c.Store, StoreToken: c.StoreToken, StoreEvents: c.StoreEvents, StoreReplay: c.StoreReplay, DecodeAlone: c.DecodeAlone, MaxInFlight: c.MaxInFlight, MaxPrompts: c.MaxPrompts, BodyMemory: int64(c.BodyMemory), MaxPerEngine: c.MaxPerEngine, MaxQueue: c.MaxQueue,
		QueueTimeout: c.QueueTimeout, Attempts: c.Attempts, FirstByte: c.FirstByte, PrefillTimeout: c.PrefillTime, AnswerTimeout: c.AnswerTime, Stall: c.Stall, KeepAlive: c.KeepAlive, Log: e.log,
	}
	if o.PrefillPolicy, err = policyOf("--prefill-policy", c.PrefillBy); err != nil {
		return o, err
	}
	if o.DecodePolicy, err = policyOf("--decode-policy", c.DecodeBy); err != nil {
		return o, err
	}
	if err := proxytool.Engines(&o, c.Prefill, c.Decode, c.Engine); err != nil {
		return o, usagef("%v", err)
	}
	var f faults
	if c.AdminPort != 0 {
		f.port("--admin-port", c.AdminPort, false)
	}
	f.unless(c.AdminToken == "" || c.AdminPort != 0, "--admin-token is for --admin-port, which is missing")
	f.unless(c.AdminPort == 0 || c.AdminToken != "" || c.TokenFile != "" || c.ClientCA != "", "--admin-port needs --admin-token, --token-file or --tls-client-ca")
	f.unless(c.TokenFile == "" || c.AdminPort != 0 || c.CertScope != "", "--token-file is for --admin-port, which is missing: the API has --api-keys")
	f.unless(c.StoreToken == "" || c.Store != "", "--store-token is for --store, which is missing")
	f.unless(c.Limits == "" || c.APIKeys != "", "--shared-limits counts keys: --api-keys is missing")
	f.port("--port", c.Port, true)
	f.unless(c.Drain > 0, "--drain-timeout %v is not above 0", c.Drain)
	f.unless(min(c.MaxInFlight, c.MaxPrompts, c.MaxPerEngine, c.MaxQueue, c.Attempts) > 0, "--max-in-flight, --max-prompts, --max-per-engine, --max-queue and --attempts must be above 0")
	f.unless(min(c.QueueTimeout, c.FirstByte, c.PrefillTime, c.Stall) > 0, "--queue-timeout, --first-byte-timeout, --prefill-timeout and --stall-timeout must be above 0")
	f.unless(c.KeepAlive >= 0 && c.AnswerTime >= 0, "--keep-alive and --answer-timeout must not be below 0")
	f.unless(len(c.Prefill)+len(c.Decode)+len(c.Engine)+c.AdminPort > 0, "--prefill and --decode, or --engine, are missing")
	options.Each(o.Validate(), func(e *options.Error) { f.unless(false, "%s %s", proxyFields[e.Field], e.Text) })
	if err := f.err(); err != nil {
		return o, err
	}
	if err := c.clients(&o); err != nil {
		return o, err
	}
	for _, text := range c.AllowNet {
		n, err := netip.ParsePrefix(text)
		if err != nil {
			return o, usagef("--allow-net: %q is not ADDRESS/BITS", text)
		}
		o.FoundNetworks = append(o.FoundNetworks, n.Masked())
	}
	o.EngineKeyToFound, o.PassHeaders = c.KeyToFound, c.PassHeader
	o.CORS.Credentials = c.Credentials
	if err := c.cors(&o.CORS); err != nil {
		return o, err
	}
	if c.APIKeys != "" {
		o.Keys, err = keys.Open(c.APIKeys)
	}
	return o, err
}

// cors sets origins, methods and headers. Each is a list of flag values, or one JSON list.
func (c *proxyCmd) cors(to *proxy.CORS) error {
	for _, f := range []struct {
		name string
		from []string
		to   *[]string
	}{{"--allowed-origins", c.Origins, &to.Origins}, {"--allowed-methods", c.Methods, &to.Methods}, {"--allowed-headers", c.Headers, &to.Headers}} {
		for _, text := range f.from {
			list := []string{text}
			if strings.HasPrefix(text, "[") {
				list = nil
				if err := json.Unmarshal([]byte(text), &list); err != nil {
					return usagef("%s %s is no JSON list of texts", f.name, text)
				}
			}
			*f.to = append(*f.to, list...)
		}
	}
	return nil
}

// proxyListeners are the names of a proxy's listeners, for --allow-from.
var proxyListeners = []string{"api", "admin"}

// exposed returns the listeners of the proxy. Its tokens protect only the admin port.
func (c *proxyCmd) exposed() []exposure {
	out := []exposure{{
		listener: "api", at: "--host " + c.Host, host: c.Host, own: c.APIKeys != "" || c.ClientCA != "", keys: "--api-keys",
		risk: "use the engines, and find out from the time of answers which prompts others sent",
	}}
	if c.AdminPort != 0 {
		out = append(out, exposure{
			listener: "admin", at: "--admin-host " + c.AdminHost, host: c.AdminHost, web: true, own: c.AdminToken != "", keys: "--admin-token",
			risk: "add and remove engines",
		})
	}
	return out
}

func (c *proxyCmd) check(e *env) error {
	_, err := c.options(e)
	return errors.Join(err, c.saltFlags.open(new(access)), c.accessFlags.check(c.exposed(), proxyListeners...))
}

// Run serves until a signal stops it.
func (c *proxyCmd) Run(e *env) (err error) {
	o, err := c.options(e)
	if err != nil {
		return err
	}
	a, err := c.accessFlags.open(e.log, c.exposed(), proxyListeners...)
	if err != nil {
		return err
	}
	if err := c.saltFlags.open(a); err != nil {
		return err
	}
	o.Salts = a.salts
	defer a.watch()()
	if c.OTLP != "" {
		if o.Spans, err = otlp.Open(c.OTLP, "kvasir-proxy", e.log); err != nil {
			return usagef("--otlp-endpoint: %v", err)
		}
		defer o.Spans.Close()
	}
	if c.Limits != "" {
		lo, err := limits.ParseURL(c.Limits)
		if err == nil {
			lo.Log = e.log
			o.Limits, err = limits.New(lo)
		}
		if err != nil {
			return usagef("--shared-limits %v", err)
		}
		defer o.Limits.Close()
	}
	p, err := proxy.New(o)
	if err != nil {
		return err
	}
	defer p.Close()
	registry := metrics.New(Version())
	metrics.Add(registry, p.Stats)
	so := proxytool.Server{
		Proxy: p, Keys: o.Keys, Metrics: registry.Handler(), AdminToken: c.AdminToken, TLS: a.tls, Gate: proxytool.Gate(a.gateOptions("api")), AdminGate: proxytool.AdminGate(a.gateOptions("admin"), c.AdminToken),
		AllowHosts: c.AllowHost, Drain: c.Drain, MaxConns: 2 * c.MaxInFlight, Log: e.log,
	}
	metrics.AddWith(registry, map[string]string{"listener": "api"}, so.Gate.Stats)
	metrics.AddWith(registry, map[string]string{"listener": "admin"}, so.AdminGate.Stats)
	if so.Listener, err = takeover.ListenTCP(e.ctx, c.Host, c.Port); err != nil {
		return takeover.ExplainListen(err, "--host", "--port")
	}
	if c.AdminPort != 0 {
		if so.Admin, err = takeover.ListenTCP(e.ctx, c.AdminHost, c.AdminPort); err != nil {
			return errors.Join(takeover.ExplainListen(err, "--admin-host", "--admin-port"), so.Listener.Close())
		}
	}
	e.parts.Add("proxy", func() any { return p.Stats() })
	e.parts.AddTransfers("proxy", p.Transfers)
	addProxy(e, p)
	e.isReady()
	return so.Serve(e.ctx)
}
