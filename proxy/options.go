// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"cmp"
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/internal/otlp"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/proxy/keys"
	"github.com/kvasir-kv/kvasir/proxy/limits"
)

// Prefill is the addresses of a prefill engine.
type Prefill struct {
	URL      string // address of its API, http://host:port
	Registry string // address of its bootstrap server, http://host:port; for Mooncake, and for SGLang if P itself reports a wrong one
	Guessed  bool   // Registry is only a default: the address that P itself reports replaces it
}

// guess returns e with the default address of its registry: at P's host, on defaultBootstrapPort.
func (e Prefill) guess() Prefill {
	if u, err := url.Parse(e.URL); err == nil {
		e.Registry, e.Guessed = "http://"+net.JoinHostPort(u.Hostname(), strconv.Itoa(defaultBootstrapPort)), true
	}
	return e
}

// Dialect says how P and D learn of each other.
type Dialect uint8

// The dialects.
const (
	Mooncake    Dialect = iota // vLLM's MooncakeConnector from 0.16 on: P and D get the request at the same time, with a transfer id
	Mooncake013                // its first release: first P, then D with P's answer
	NIXL                       // NixlConnector, and others whose P answers with kv_transfer_params: first P, then D
	SGLang                     // SGLang's P and D: both get the request at the same time, with a bootstrap room
)

// Policy says how the proxy chooses among the engines that are well and have room.
type Policy uint8

// The policies.
const (
	RoundRobin  Policy = iota
	LeastLoaded        // the engine with the fewest requests: of this proxy and, by the engine's metrics, of others
	PrefixAware        // the engine with the least left to compute: counts what it has not seen of the prompt, and what waits there
)

// Options configures a Proxy. A zero field means its default.
type Options struct {
	Prefill []Prefill
	Decode  []string // URLs of decode engines
	Engines []string // URLs of engines that do both
	Sources []Source // where to find more engines; asked again and again

	Dialect Dialect
	Detect  bool // ask each engine whether it is SGLang's; Dialect is that of the other engines
	DPSize  int  // data-parallel ranks behind each URL, chosen in turn; default: the engine chooses. Those of Mooncake's P come from the registry
	Policy  Policy
	// PrefillPolicy and DecodePolicy are the policies for P and for D; nil: Policy.
	PrefillPolicy, DecodePolicy *Policy

	SkipPrefill int    // a prompt of which D lacks fewer bytes goes to D alone; default: 2 KiB with Store, else no prompt does
	SharedStore bool   // engines share a cache server: D can load from it what any engine has seen, so that does not count as lacking
	StoreToken  string // bearer token for the cache server; default none
	Store       string // URL of the cache server's HTTP interface, http://host:port: like SharedStore, but only while it answers, and only for what it has not evicted
	StoreEvents string // address at which the cache server publishes KV events, tcp://host:port; they say what it has. Default: not followed
	StoreReplay string // where it replays these events; default none
	DecodeAlone bool   // while no P is well, D computes prompts itself

	EventsPort int // TCP port of each engine's KV events; data-parallel rank r has this port plus r. Default: not followed
	ReplayPort int // port of the replays of KV events; default none

	MaxBody      int64         // most bytes of a request's body; default 64 MiB, at most a third of BodyMemory
	BodyMemory   int64         // most bytes of buffers for bodies that are being read, over all clients; default 192 MiB
	MaxPrompts   int           // most prompts of a request that goes through P and D; default 128
	MaxInFlight  int           // most requests, including those that wait; more are refused at once; default 16,384
	MaxPerEngine int           // most requests of this proxy at one engine; default 1,024
	MaxQueue     int           // most requests of one model that wait for room; default 1,024
	QueueTimeout time.Duration // longest wait for room; default 30 s
	Attempts     int           // most attempts of a request, before its first byte; default 3
	IndexEntries int           // entries of the index of prefixes, 16 bytes each; default 1<<20

	PrefillTimeout time.Duration // limit for P's whole leg; default 10 min
	FirstByte      time.Duration // limit for the leg that answers, from the request to its first byte; default 10 min
	AnswerTimeout  time.Duration // limit for the whole leg that answers; default: none
	Stall          time.Duration // longest pause between data of an answer; default 5 min
	KeepAlive      time.Duration // interval of comments to a client that waits for a stream; default: none are sent
	SendTimeout    time.Duration // time that a client has to take what was sent; default 60 s
	BodyTimeout    time.Duration // time that a client has to send its request; default 60 s
	HealthInterval time.Duration // interval of the health checks of each engine and registry; default 1 s
	DialTimeout    time.Duration // default 3 s

	Keys      *keys.Set               // the keys with which clients may send requests; nil: any client that reaches the proxy may
	Salts     *auth.SaltSecrets       // secrets that sign the salts of requests; every request then gets a signed salt. nil: none is signed
	Limits    *limits.Limits          // counts the limits of Keys together with other proxies; nil: each proxy counts alone. The caller closes it
	Registry  bootstrap.ClientOptions // Token and TLS for registries and relays
	EngineTLS *tls.Config             // for https engines; nil: the system's authorities
	EngineKey string                  // API key that engines get; "": the one that the client sent

	CORS        CORS
	PassHeaders []string // further header fields of clients with keys that engines get; see passed

	FoundNetworks    []netip.Prefix // networks in which engines named by a registry may be; default loopback and private networks
	EngineKeyToFound bool           // engines named by a registry also get EngineKey and clients' credentials

	Spans *otlp.Exporter // exports spans of requests and their legs; nil: none
	Log   *slog.Logger   // nil discards; one line per request at debug level

	resolve      func(ctx context.Context, host string) ([]string, error) // resolves a host name by DNS
	modelLooks   time.Duration                                            // interval of searches for models that no engine lists; default 1 s
	prefillGrace time.Duration                                            // how long P's leg may outlast D's; default 2 s
	patience     time.Duration                                            // added to the limits of health checks of engines, registries and the cache server, and of requests that wait for them; default 0
}

// Validate returns an error with everything that is wrong with o.
func (o Options) Validate() error {
	var c options.Checks
	o.checkAddresses(&c)
	o.checkNumbers(&c)
	return c.Err()
}

// checkAddresses checks the addresses of engines, of the sources of engines, and of the cache server.
func (o *Options) checkAddresses(c *options.Checks) {
	address := func(field, s string) {
		u, err := url.Parse(s)
		c.That(err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != "" && isPort(u.Port()) && u.RawQuery == "" && u.User == nil, field, "%q is not http://host:port", safelog.HideLogin(s))
	}
	for _, p := range o.Prefill {
		address("Prefill", p.URL)
		if o.Dialect == Mooncake {
			address("Prefill", p.Registry)
		}
		if o.Dialect == SGLang && p.Registry != "" {
			address("Prefill", p.Registry)
		}
	}
	for _, d := range o.Decode {
		address("Decode", d)
	}
	for _, e := range o.Engines {
		address("Engines", e)
	}
	o.checkSources(c)
	if o.Store != "" {
		address("Store", o.Store)
	}
	endpoint := func(field, s, beside string, there bool) {
		u, err := url.Parse(s)
		c.That(s == "" || err == nil && u.Scheme == "tcp" && u.Hostname() != "" && u.Port() != "" && isPort(u.Port()) && u.Path == "", field, "%q is not tcp://host:port", s)
		c.That(s == "" || there, field, "is of no use without %s", beside)
	}
	endpoint("StoreEvents", o.StoreEvents, "the server that publishes them", o.Store != "")
	endpoint("StoreReplay", o.StoreReplay, "the events", o.StoreEvents != "")
}

// isPort reports whether a port can be dialed; "" means the scheme's default port.
func isPort(s string) bool {
	n, err := strconv.ParseUint(s, 10, 16)
	return s == "" || err == nil && n > 0
}

// checkSources checks the sources of engines, and that there are both P and D or neither.
func (o *Options) checkSources(c *options.Checks) {
	sourced := make(map[string]bool)
	for _, s := range o.Sources {
		f, err := newFinder(s, o.Dialect, o.Registry)
		c.That(err == nil, "Sources", "%v", err)
		if sourced[s.Role] = true; err == nil && f.registry != nil {
			_ = f.registry.Close() // the error is always nil
		}
	}
	c.That(len(o.Prefill) == 0 && !sourced["prefill"] || len(o.Decode) > 0 || sourced["decode"], "Decode", "is missing beside prefill engines")
	c.That(len(o.Decode) == 0 && !sourced["decode"] || len(o.Prefill) > 0 || sourced["prefill"], "Prefill", "is missing beside decode engines")
}

// checkNumbers checks limits and durations.
func (o *Options) checkNumbers(c *options.Checks) {
	c.That(o.Dialect <= SGLang, "Dialect", "is unknown")
	for _, r := range []role{both, prefill, decode} {
		c.That(o.policyOf(r) <= PrefixAware, "Policy", "is unknown")
	}
	if o.Dialect == SGLang {
		c.That(o.SkipPrefill == 0, "SkipPrefill", sglangNeedsP)
		c.That(!o.SharedStore, "SharedStore", sglangNeedsP)
		c.That(o.Store == "", "Store", sglangNeedsP)
		c.That(!o.DecodeAlone, "DecodeAlone", sglangNeedsP)
	}
	options.Within(c, "DPSize", o.DPSize, 0, 4096)
	options.Within(c, "EventsPort", o.EventsPort, 0, 65535)
	options.Within(c, "ReplayPort", o.ReplayPort, 0, 65535)
	options.Within(c, "SkipPrefill", o.SkipPrefill, 0, 1<<30)
	options.Within(c, "MaxBody", o.MaxBody, 0, 1<<30)
	options.Within(c, "BodyMemory", o.BodyMemory, 0, 1<<40)
	options.Within(c, "MaxPrompts", o.MaxPrompts, 0, 1<<16)
	options.Within(c, "MaxInFlight", o.MaxInFlight, 0, 1<<20)
	options.Within(c, "MaxPerEngine", o.MaxPerEngine, 0, 1<<20)
	options.Within(c, "MaxQueue", o.MaxQueue, 0, 1<<20)
	options.Within(c, "Attempts", o.Attempts, 0, 100)
	options.Within(c, "IndexEntries", o.IndexEntries, 0, 1<<28)
	for _, t := range []struct {
		field string
		d     time.Duration
	}{
		{"QueueTimeout", o.QueueTimeout},
		{"PrefillTimeout", o.PrefillTimeout},
		{"FirstByte", o.FirstByte},
		{"AnswerTimeout", o.AnswerTimeout},
		{"Stall", o.Stall},
		{"KeepAlive", o.KeepAlive},
		{"SendTimeout", o.SendTimeout},
		{"BodyTimeout", o.BodyTimeout},
		{"HealthInterval", o.HealthInterval},
		{"DialTimeout", o.DialTimeout},
	} {
		options.Within(c, t.field, t.d, 0, 24*time.Hour)
	}
}

func (o Options) withDefaults() Options {
	if o.Store != "" {
		o.Store, o.SharedStore = trimURL(o.Store), false
		o.SkipPrefill = cmp.Or(o.SkipPrefill, 2<<10)
	}
	o.MaxBody = cmp.Or(o.MaxBody, 64<<20)
	o.BodyMemory = cmp.Or(o.BodyMemory, 192<<20)
	o.MaxBody = min(o.MaxBody, o.BodyMemory/3) // see bodyMemory
	o.MaxPrompts = cmp.Or(o.MaxPrompts, 128)
	o.MaxInFlight = cmp.Or(o.MaxInFlight, 16384)
	o.MaxPerEngine = cmp.Or(o.MaxPerEngine, 1024)
	o.MaxQueue = cmp.Or(o.MaxQueue, 1024)
	o.QueueTimeout = cmp.Or(o.QueueTimeout, 30*time.Second)
	o.Attempts = cmp.Or(o.Attempts, 3)
	o.IndexEntries = cmp.Or(o.IndexEntries, 1<<20)
	o.PrefillTimeout = cmp.Or(o.PrefillTimeout, 10*time.Minute)
	o.FirstByte = cmp.Or(o.FirstByte, 10*time.Minute)
	o.Stall = cmp.Or(o.Stall, 5*time.Minute)
	o.SendTimeout = cmp.Or(o.SendTimeout, time.Minute)
	o.BodyTimeout = cmp.Or(o.BodyTimeout, time.Minute)
	o.HealthInterval = cmp.Or(o.HealthInterval, time.Second)
	o.modelLooks = cmp.Or(o.modelLooks, time.Second)
	o.prefillGrace = cmp.Or(o.prefillGrace, prefillGrace)
	o.DialTimeout = cmp.Or(o.DialTimeout, 3*time.Second)
	if o.resolve == nil {
		o.resolve = net.DefaultResolver.LookupHost
	}
	if o.FoundNetworks == nil {
		o.FoundNetworks = privateNetworks
	}
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	return o
}

// sglangNeedsP says why options that send requests to D alone cannot be used in SGLang's dialect.
const sglangNeedsP = "is of no use with SGLang: its D computes no prompt"

// policyOf returns the policy for engines of a role.
func (o *Options) policyOf(r role) Policy {
	switch {
	case r == prefill && o.PrefillPolicy != nil:
		return *o.PrefillPolicy
	case r == decode && o.DecodePolicy != nil:
		return *o.DecodePolicy
	}
	return o.Policy
}

// indexed reports whether the proxy needs the index of prefixes.
func (o *Options) indexed() bool {
	return o.policyOf(both) == PrefixAware || o.policyOf(prefill) == PrefixAware || o.policyOf(decode) == PrefixAware || o.SkipPrefill > 0
}
