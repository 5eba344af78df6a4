package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
)

// bootstrapCmd is the registry of vLLM's MooncakeConnector.
type bootstrapCmd struct {
	Host  string `help:"Address to listen on." default:"0.0.0.0" group:"Network"`
	Port  int    `help:"HTTP port; 0 takes a free one." default:"8998" group:"Network"`
	Token string `help:"Bearer token, for what --token-guards says. Without one, DELETE is taken from this host only." env:"KVASIR_BOOTSTRAP_TOKEN" group:"Network"`
	Guard string `name:"token-guards" help:"What needs the token: delete; writes (DELETE and POST); all (but /healthz). Stock vLLM cannot send one, so writes and all shut it out." default:"delete" enum:"delete,writes,all" group:"Network"`

	Strict bool    `help:"vLLM's own rule: a restarted P is refused as long as the old one is registered." group:"Registry"`
	TP     int     `name:"tp" help:"TP size of engines that do not state theirs: they are not shown before so many TP ranks are there." placeholder:"N" group:"Registry"`
	PP     int     `name:"pp" help:"The same for PP." placeholder:"N" group:"Registry"`
	Settle float64 `name:"settle-seconds" help:"A restarted engine with fewer ranks than before is shown so long after its last registration." default:"10" group:"Registry"`
	Probe  float64 `name:"probe-timeout-seconds" help:"Time for an old side channel to answer before it counts as alive." default:"0.25" group:"Registry"`
	State  string  `help:"Keep the registry in this file over restarts." placeholder:"FILE" group:"Registry"`

	MaxWorkers int     `help:"Workers registered at a time." default:"16384" group:"Limits"`
	MaxProbes  int     `help:"Side channels tried at a time." default:"64" group:"Limits"`
	MaxWait    float64 `name:"max-wait-seconds" help:"Longest GET /query?wait=." default:"60" group:"Limits"`
	MaxWaiters int     `help:"Requests that wait at a time." default:"1024" group:"Limits"`
	MaxConns   int     `name:"max-connections" help:"Open connections." default:"4096" group:"Limits"`
}

// Help implements kong's detailed help.
func (bootstrapCmd) Help() string {
	return `Stands in for the bootstrap server inside vLLM's MooncakeConnector: workers of P register, D and the proxy query.
Unlike that one it outlives P, takes a restarted P, and never shows half of an engine that it can tell apart.
docs/bootstrap.md has the rules and all requests.

Examples:
  kvasir bootstrap
  kvasir bootstrap --port 9000 --state /var/lib/kvasir/bootstrap.state
  kvasir bootstrap --tp 8                   (show P only when all 8 TP ranks are there)
  KVASIR_BOOTSTRAP_TOKEN=secret kvasir bootstrap
  curl http://127.0.0.1:8998/query
  curl 'http://127.0.0.1:8998/query?wait=60&tp=8'
  curl -X DELETE 'http://127.0.0.1:8998/register?engine_id=ID'

P of vLLM 0.32 and later registers here with
  vllm serve MODEL --kv-transfer-config '{"kv_connector":"MooncakeConnector","kv_role":"kv_producer",
    "kv_connector_extra_config":{"bootstrap_server_address":"HOST:8998"}}'
and D is told by "remote_bootstrap_addr":"http://HOST:8998" in each request's kv_transfer_params.`
}

func (c *bootstrapCmd) check() error {
	switch {
	case c.Port < 0 || c.Port > 65535:
		return fmt.Errorf("%w: --port %d is outside 0 to 65535", errUsage, c.Port)
	case c.TP < 0 || c.TP > bootstrap.MaxSize || c.PP < 0 || c.PP > bootstrap.MaxSize:
		return fmt.Errorf("%w: --tp %d and --pp %d must lie from 0 to %d", errUsage, c.TP, c.PP, bootstrap.MaxSize)
	case !(c.Settle > 0) || c.Settle > 3600 || !(c.Probe > 0) || c.Probe > 5 || !(c.MaxWait > 0) || c.MaxWait > 3600:
		return fmt.Errorf("%w: need --settle-seconds and --max-wait-seconds above 0 and up to 3600, --probe-timeout-seconds above 0 and up to 5", errUsage)
	case min(c.MaxWorkers, c.MaxProbes, c.MaxWaiters, c.MaxConns) < 1 || max(c.MaxWorkers, c.MaxProbes, c.MaxWaiters, c.MaxConns) > 1<<20:
		return fmt.Errorf("%w: limits must lie from 1 to 2^20", errUsage)
	case strings.ContainsFunc(c.Token, func(r rune) bool { return r <= ' ' || r > '~' }):
		return fmt.Errorf("%w: --token may hold printable ASCII without blanks only", errUsage)
	case c.Guard != "delete" && c.Token == "":
		return fmt.Errorf("%w: --token-guards %s without --token guards nothing", errUsage, c.Guard)
	}
	return nil
}

// Run serves until a signal.
func (c *bootstrapCmd) Run(e *env) (err error) {
	if os.Getenv("GOGC") == "" {
		// The heap is a few MB, so that collections would come every few ms while
		// workers register; rarer ones halve the slowest answer.
		debug.SetGCPercent(800)
	}
	if err := c.check(); err != nil {
		return err
	}
	guards := map[string]bootstrap.Guard{"delete": bootstrap.GuardDelete, "writes": bootstrap.GuardWrites, "all": bootstrap.GuardAll}
	r, err := bootstrap.Open(bootstrap.Options{
		Strict: c.Strict, TP: c.TP, PP: c.PP, Settle: seconds(c.Settle), ProbeTimeout: seconds(c.Probe), StateFile: c.State,
		MaxWorkers: c.MaxWorkers, MaxProbes: c.MaxProbes, MaxWait: seconds(c.MaxWait), MaxWaiters: c.MaxWaiters, MaxConns: c.MaxConns,
		Token: c.Token, Guard: guards[c.Guard], Logger: e.log,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	listener, err := bind(func() (net.Listener, error) {
		// Idle connections end anyway, so the kernel need not ask after them.
		return (&net.ListenConfig{KeepAlive: -1}).Listen(e.ctx, "tcp", net.JoinHostPort(c.Host, strconv.Itoa(c.Port)))
	})
	if err != nil {
		return fmt.Errorf("%w: choose another --port, or stop the server that has it (P's own is on VLLM_MOONCAKE_BOOTSTRAP_PORT)", err)
	}
	ctx, stop := context.WithCancel(e.ctx)
	defer stop()
	failed := make(chan error, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { failed <- r.Serve(ctx, listener) })
	if err := selfCheck(ctx, r, listener.Addr()); err != nil {
		stop()
		return errors.Join(fmt.Errorf("self-check: %w", err), <-failed)
	}
	e.log.Info(fmt.Sprintf("serving the Mooncake bootstrap registry on http://%s: /register, /query, /healthz, /metrics", listener.Addr()))
	select {
	case err = <-failed:
	case <-e.ctx.Done():
		e.log.Info("stopping")
		err = <-failed
	}
	return err
}

// selfCheck asks the server for its health over its own port: another process
// may have the same port on a more exact address.
func selfCheck(ctx context.Context, r *bootstrap.Registry, addr net.Addr) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	at, err := netip.ParseAddrPort(addr.String())
	if err != nil {
		return err
	}
	if at.Addr().IsUnspecified() {
		local := netip.AddrFrom4([4]byte{127, 0, 0, 1})
		at = netip.AddrPortFrom(local, at.Port())
	}
	return r.Check(ctx, "http://"+at.String())
}
