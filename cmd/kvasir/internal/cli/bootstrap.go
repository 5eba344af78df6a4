// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/takeover"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
)

// bootstrapCmd runs a registry for vLLM's MooncakeConnector.
type bootstrapCmd struct {
	configFlags
	accessFlags

	Host  string `help:"Address to listen on; 0.0.0.0 for engines on other hosts." default:"127.0.0.1" group:"Network"`
	Port  int    `help:"HTTP port; 0 takes a free one." default:"8998" group:"Network"`
	Token string `help:"Bearer token, for what --token-guards says. Without one, DELETE is taken from this host only. Best given as KVASIR_BOOTSTRAP_TOKEN: other users see command lines." group:"Network"`
	Guard string `name:"token-guards" help:"What needs the token: delete; writes (DELETE and POST); all (but /healthz). Stock vLLM cannot send one, so writes and all shut it out." default:"delete" enum:"delete,writes,all" group:"Network"`

	AllowHost []string `help:"Names under which DELETE is taken, besides addresses, localhost and this machine's name." placeholder:"NAME" group:"Network"`

	Strict   bool     `help:"As vLLM 0.16 to 0.18: a restarted P is refused as long as the old one is registered, and so is a repeat." group:"Registry"`
	TP       int      `name:"tp" help:"TP size of engines that do not state theirs: an engine is not shown before this number of TP ranks has registered." placeholder:"N" group:"Registry"`
	PP       int      `name:"pp" help:"The same for PP." placeholder:"N" group:"Registry"`
	Settle   float64  `name:"settle-seconds" help:"A restarted engine with fewer ranks than before is shown so long after its last registration." default:"10" group:"Registry"`
	Probe    float64  `name:"probe-timeout-seconds" help:"Time for an old side channel to answer before it counts as alive." default:"0.25" group:"Registry"`
	ProbeNet []string `help:"Networks (CIDR) in which the server probes old side channels of any registrant. By default it probes only those that their own host, or this one, registered." placeholder:"CIDR" group:"Registry"`
	State    string   `help:"Keep the registry in this file over restarts." placeholder:"FILE" group:"Registry"`

	MaxWorkers int     `help:"Workers registered at a time." default:"16384" group:"Limits"`
	MaxProbes  int     `help:"Side channels tried at a time." default:"64" group:"Limits"`
	MaxWait    float64 `name:"max-wait-seconds" help:"Longest GET /query?wait=." default:"60" group:"Limits"`
	MaxWaiters int     `help:"Requests that wait at a time." default:"1024" group:"Limits"`
	MaxConns   int     `name:"max-connections" help:"Open connections." default:"4096" group:"Limits"`
}

// Help returns the text that kvasir bootstrap --help shows. It implements kong's detailed help.
func (bootstrapCmd) Help() string {
	return `Stands in for the bootstrap server inside vLLM's MooncakeConnector: workers of P register, D and the proxy query.
Unlike that one it outlives P, takes a restarted P, and never shows half of an engine that it can tell apart.
docs/operate/bootstrap.md has the rules and all requests.

Examples:
  kvasir bootstrap --host 0.0.0.0 --allow-from 10.0.0.0/24,127.0.0.1           (engines on other hosts)
  kvasir bootstrap --port 9000 --state /var/lib/kvasir/bootstrap.state
  kvasir bootstrap --tp 8                   (show P only when all 8 TP ranks are there)
  KVASIR_BOOTSTRAP_TOKEN=secret kvasir bootstrap
  curl http://127.0.0.1:8998/query
  curl 'http://127.0.0.1:8998/query?wait=60&tp=8'
  curl -X DELETE 'http://127.0.0.1:8998/register?engine_id=ID'

P of vLLM 0.32 and later registers here with
  vllm serve MODEL --kv-transfer-config '{"kv_connector":"MooncakeConnector","kv_role":"kv_producer",
    "kv_connector_extra_config":{"bootstrap_server_address":"HOST:8998"}}'
and D learns its address from "remote_bootstrap_addr":"http://HOST:8998" in each request's kv_transfer_params.`
}

// options turns the flags into options. The error names the flags that cannot be used.
func (c *bootstrapCmd) options() (o bootstrap.Options, _ error) {
	guards := map[string]bootstrap.Guard{"delete": bootstrap.GuardDelete, "writes": bootstrap.GuardWrites, "all": bootstrap.GuardAll}
	o = bootstrap.Options{
		Strict: c.Strict, TP: c.TP, PP: c.PP, Settle: seconds(c.Settle), ProbeTimeout: seconds(c.Probe), StateFile: c.State,
		MaxWorkers: c.MaxWorkers, MaxProbes: c.MaxProbes, MaxWait: seconds(c.MaxWait), MaxWaiters: c.MaxWaiters, MaxConns: c.MaxConns,
		Token: c.Token, Guard: guards[c.Guard], AllowHosts: c.AllowHost,
	}
	var f faults
	f.port("--port", c.Port, true)
	for _, t := range []struct {
		flag    string
		seconds float64
	}{{"--settle-seconds", c.Settle}, {"--probe-timeout-seconds", c.Probe}, {"--max-wait-seconds", c.MaxWait}} {
		f.unless(t.seconds > 0 && t.seconds <= maxSeconds, "%s %g is not above 0", t.flag, t.seconds)
	}
	for _, t := range []struct {
		flag string
		n    int
	}{{"--max-workers", c.MaxWorkers}, {"--max-probes", c.MaxProbes}, {"--max-waiters", c.MaxWaiters}, {"--max-connections", c.MaxConns}} {
		f.unless(t.n >= 1, "%s %d is less than 1", t.flag, t.n)
	}
	if err := f.err(); err != nil {
		return o, err
	}
	for _, text := range c.ProbeNet {
		n, err := netip.ParsePrefix(text)
		if err != nil {
			return o, usagef("--probe-net: %q is not ADDRESS/BITS", text)
		}
		o.ProbeNetworks = append(o.ProbeNetworks, n)
	}
	named := o
	if c.TokenFile != "" || c.ClientCA != "" { // these credentials are opened later
		named.Guard = bootstrap.GuardDelete
	}
	if err := named.Validate(); err != nil {
		return o, usagef("%s", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return o, nil
}

// registryListeners are the names of a registry's listeners, for --allow-from.
var registryListeners = []string{"http"}

// exposed returns the listeners of the registry. Stock vLLM registers and queries without a token, unless --token-guards forbids that.
func (c *bootstrapCmd) exposed() []exposure {
	return []exposure{{
		listener: "http", at: "--host " + c.Host, host: c.Host, own: c.Guard != "delete", // other values need --token
		risk: "register workers, and so receive the KV of prompts",
	}}
}

func (c *bootstrapCmd) check(*env) error {
	_, err := c.options()
	return errors.Join(err, c.accessFlags.check(c.exposed(), registryListeners...))
}

// Run serves until a signal.
func (c *bootstrapCmd) Run(e *env) (err error) {
	o, err := c.options()
	if err != nil {
		return err
	}
	a, err := c.accessFlags.open(e.log, c.exposed(), registryListeners...)
	if err != nil {
		return err
	}
	defer a.watch()()
	o.Log, o.Access, o.TLS, o.Version = e.log, a.gateOptions("http"), a.tls, Version()
	r, err := bootstrap.Open(o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	var listener net.Listener
	if err := takeover.ListenAgain(e.ctx, func(ctx context.Context) (err error) {
		// Idle connections are closed after a time, so the kernel need not probe them.
		listener, err = (&net.ListenConfig{KeepAlive: -1}).Listen(ctx, "tcp", net.JoinHostPort(c.Host, strconv.Itoa(c.Port)))
		return err
	}); err != nil {
		return takeover.ExplainListen(err, "--host", "--port (P's own server is on VLLM_MOONCAKE_BOOTSTRAP_PORT)")
	}
	e.parts.Add("bootstrap", func() any { return r.Stats() })
	e.parts.AddEngines(r.Engines)
	e.isReady()
	return r.Serve(e.ctx, listener)
}
