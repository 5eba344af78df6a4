// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/takeover"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/relay"
)

type relayCmd struct {
	configFlags
	accessFlags
	registryFlags
	peerFlags

	Upstream string  `help:"Bootstrap server that P registers at, http://HOST:PORT or https://HOST:PORT." required:"" placeholder:"URL"`
	Host     string  `help:"Address that P and D dial: of the directory, the side channels and the transfer ports." default:"127.0.0.1"`
	Port     int     `help:"Port of the directory (GET /query), /healthz and /metrics. 0 takes a free one." default:"8999"`
	MemoryGB gibSize `name:"memory-gb" help:"Memory for KV: GiB, or with a unit, as 512MiB. The least recently used KV is evicted first." default:"4"`
	Timeout  float64 `help:"Seconds that a pull from P may take, P's computing included." default:"120"`

	BlockBytes byteSize `help:"Bytes, or with a unit, of a block of one layer's keys or values, of engines before vLLM 0.19, which do not say it; without, these are refused."`

	AllowHost []string `help:"Further names by which D reaches the directory, besides addresses, localhost and --host." placeholder:"NAME"`

	KeepAcrossRestarts bool `help:"Serve what an earlier life of P sent, also without P. Only where P's weights never change and no transfer id comes twice."`
	Prefixes           bool `help:"Understand transfer ids T^PREFIX:n: n blocks of PREFIX from memory, the rest of T from P. P is asked for one block too many first."`
}

// Help is shown by kvasir relay --help.
func (relayCmd) Help() string {
	return `D pulls from the relay, the relay from P: same transfer ids, both unmodified. D's kv_transfer_params
carry the relay's engine id and address:

  kvasir bootstrap --port 8998
  kvasir relay --upstream http://127.0.0.1:8998 --port 8999
  curl http://127.0.0.1:8999/query        # engine ids for remote_engine_id
  "remote_bootstrap_addr": "http://127.0.0.1:8999"

The transfer id with # and digits behind it (xfer-1#2) asks for the same KV again: it comes from memory,
P is not asked. docs/operate/relay.md has the rules.`
}

func (c *relayCmd) check(*env) error {
	var f faults
	f.unless(c.MemoryGB > 0, "--memory-gb %v is not above 0", c.MemoryGB)
	f.unless(c.Timeout > 0 && c.Timeout <= 86400, "--timeout %g is not above 0 and up to 86400", c.Timeout)
	f.port("--port", c.Port, true)
	up, err := url.Parse(c.Upstream)
	f.unless(err == nil && (up.Scheme == "http" || up.Scheme == "https") && up.Port() != "" && up.Hostname() != "", "--upstream %q is not http://HOST:PORT or https://HOST:PORT", c.Upstream)
	ip := net.ParseIP(c.Host)
	f.unless(ip == nil || !ip.IsUnspecified(), "--host %s is every address: name the one that P and D dial", c.Host)
	_, err = c.registryFlags.client()
	return errors.Join(f.err(), err, c.peerFlags.check(), c.accessFlags.check(c.exposed(), relayListeners...))
}

// relayListeners are the names of a relay's listeners, for --allow-from: "http" is the directory, "transfer" the side channels and
// transfer ports.
var relayListeners = []string{"http", "transfer"}

// exposed returns the listeners of the relay. Stock vLLM queries the directory without a token.
func (c *relayCmd) exposed() []exposure {
	at := "--host " + c.Host
	return []exposure{
		{listener: "http", at: at, host: c.Host, risk: "learn which engines there are"},
		{listener: "transfer", at: at, host: c.Host, risk: "receive the KV of transfers, and write what P pushes"},
	}
}

// relayNeed returns which right a request to a relay needs. Stock vLLM queries the directory without a token.
func relayNeed(r *http.Request) auth.Need {
	switch r.URL.Path {
	case "/healthz", "/healthcheck":
		return auth.NeedNothing
	case "/query", "/kept":
		return auth.NeedPeer
	}
	return auth.NeedRead
}

// Run relays until a signal stops it.
func (c *relayCmd) Run(e *env) (err error) {
	if err := c.check(e); err != nil {
		return err
	}
	a, err := c.accessFlags.open(e.log, c.exposed(), relayListeners...)
	if err != nil {
		return err
	}
	if a.peers, err = c.peerFlags.open(e.log); err != nil {
		return err
	}
	defer a.watch()()
	registryOptions, err := c.registryFlags.client()
	if err != nil {
		return err
	}
	bytes := int64(c.MemoryGB)
	path, err := memoryPath("kvasir_relay_", c.MemoryGB)
	if err != nil {
		return err
	}
	pushes := mooncake.NewMetrics()
	r, err := relay.Open(relay.Options{
		Upstream: c.Upstream, Registry: registryOptions, Host: c.Host, MemoryPath: path, MemoryBytes: bytes,
		Networks: a.networks["transfer"], Secrets: a.peers, AllowHosts: c.AllowHost, BlockBytes: uint64(c.BlockBytes), KeepAcrossRestarts: c.KeepAcrossRestarts, Prefixes: c.Prefixes, Timeout: seconds(c.Timeout), Metrics: pushes, Log: e.log,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	registry := metrics.New(Version())
	metrics.Add(registry, pushes.Stats)
	metrics.Add(registry, r.Stats)
	guards := a.gateOptions("http")
	guards.Need = relayNeed
	gate := auth.New(guards)
	metrics.AddWith(registry, map[string]string{"listener": "http"}, gate.Stats)
	a.addMetrics(registry, "transfer")
	mux := http.NewServeMux()
	mux.Handle("/", r)
	mux.Handle("GET /metrics", registry.Handler())
	listener, err := takeover.ListenTCP(e.ctx, c.Host, c.Port)
	if err != nil {
		return takeover.ExplainListen(err, "--host", "--port")
	}
	web := httpserver.NewServer(gate.Handler(mux))
	e.parts.Add("relay", func() any { return r.Stats() })
	e.parts.AddTransfers("relay", r.Transfers)
	e.isReady()
	e.log.Info("the relay serves: its address is D's remote_bootstrap_addr", "address", a.url(listener.Addr()), "upstream", c.Upstream, "memory_bytes", bytes)
	ended := make(chan error, 1)
	go func() { ended <- a.serve(web, httpserver.Limit(listener, httpserver.MaxConns)) }()
	select {
	case err := <-ended:
		return err
	case <-e.ctx.Done():
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	err = web.Shutdown(ctx)
	<-ended
	s := r.Stats()
	e.log.Info("the relay stopped", "served", s.Served, "from_memory", s.FromMemory, "failed", s.Failed, "pulled", s.Pulled)
	return err
}

// memoryPath returns the path for the memory of this process. It returns an error if there is no room for the size in --memory-gb.
func memoryPath(prefix string, size gibSize) (string, error) {
	if err := fitsLimit("/", "--memory-gb", size); err != nil {
		return "", err
	}
	path, err := shm.Path("", prefix+strconv.Itoa(os.Getpid()))
	if err != nil {
		return "", err
	}
	if free, err := shm.Free(filepath.Dir(path)); err == nil && free < int64(size) {
		return "", fmt.Errorf("--memory-gb %v is more than %s has free, %s: lower it, or enlarge %[2]s", size, filepath.Dir(path), sizeWords(free))
	}
	return path, nil
}
