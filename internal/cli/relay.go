package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvasir-kv/kvasir/internal/httpguard"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/relay"
	"github.com/kvasir-kv/kvasir/shm"
)

type relayCmd struct {
	Upstream string  `help:"Bootstrap server that P registers at, http://HOST:PORT." required:"" placeholder:"URL"`
	Host     string  `help:"Address that P and D dial: of the directory, the side channels and the transfer ports." default:"127.0.0.1"`
	Port     int     `help:"Port of the directory (GET /query), /healthz and /metrics. 0 takes a free one." default:"8999"`
	MemoryGB float64 `name:"memory-gb" help:"GiB of KV to keep. What was used longest ago goes first." default:"4"`
	Timeout  float64 `help:"Seconds that a pull from P may take, P's computing included." default:"120"`

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
P is not asked. docs/relay.md has the rules.`
}

// Run relays until it is told to stop.
func (c *relayCmd) Run(e *env) (err error) {
	if !(c.MemoryGB > 0) || c.MemoryGB > 1<<20 || !(c.Timeout > 0) || c.Timeout > 86400 {
		return fmt.Errorf("%w: need --memory-gb above 0, and --timeout above 0 and up to 86400", errUsage)
	}
	if ip := net.ParseIP(c.Host); ip != nil && ip.IsUnspecified() {
		return fmt.Errorf("%w: --host %s: name the one address that P and D dial", errUsage, c.Host)
	}
	bytes := int64(c.MemoryGB * (1 << 30))
	path, err := shm.Path("", "kvasir_relay_"+strconv.Itoa(os.Getpid()))
	if err != nil {
		return err
	}
	if free, err := shm.Free(filepath.Dir(path)); err == nil && free < bytes {
		return fmt.Errorf("relay: --memory-gb %g is more than %s has free, %.1f GiB: lower it, or enlarge %[2]s", c.MemoryGB, filepath.Dir(path), float64(free)/(1<<30))
	}
	metrics := mooncake.NewMetrics()
	registry := prometheus.NewRegistry()
	registry.MustRegister(metrics)
	r, err := relay.Open(relay.Options{
		Upstream: c.Upstream, Host: c.Host, MemoryPath: path, MemoryBytes: bytes,
		AllowHosts: c.AllowHost, KeepAcrossRestarts: c.KeepAcrossRestarts, Prefixes: c.Prefixes, Timeout: seconds(c.Timeout), Metrics: metrics, Log: e.log,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	registry.MustRegister(r)
	mux := http.NewServeMux()
	mux.Handle("/", r)
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	listener, err := net.Listen("tcp", net.JoinHostPort(c.Host, strconv.Itoa(c.Port)))
	if err != nil {
		return fmt.Errorf("listen for D's queries: %w", err)
	}
	web := httpguard.NewServer(mux)
	e.log.Info(fmt.Sprintf("relay: D's remote_bootstrap_addr is http://%s, P's is %s; keeping up to %g GiB", listener.Addr(), c.Upstream, c.MemoryGB))
	if !isLoopback(c.Host) {
		e.log.Warn("there is no authentication: whoever reaches this machine may have any transfer's KV pushed to itself, and write what P pushes; " +
			"let only engines reach it (firewall, network policy)")
	}
	ended := make(chan error, 1)
	go func() { ended <- web.Serve(httpguard.Limit(listener)) }()
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
	e.log.Info(fmt.Sprintf("relay: stopped: %d requests served, %d of them from memory, %d failed, %d transfers pulled from P",
		s.Served, s.FromMemory, s.Failed, s.Pulled))
	return err
}
