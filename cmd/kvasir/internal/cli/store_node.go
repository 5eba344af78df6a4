// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/takeover"
	"github.com/kvasir-kv/kvasir/mooncake/store"
)

// masterFlags name the masters of a cluster.
type masterFlags struct {
	Master []string `help:"Masters of the cluster, HOST:PORT; of several the one that answers leads." required:"" placeholder:"HOST:PORT"`
}

func (m *masterFlags) options() store.MasterOptions { return store.MasterOptions{Addresses: m.Master} }

func (m *masterFlags) faults(f *faults) {
	options.Each(m.options().Validate(), func(e *options.Error) { f.unless(false, "--master %s", e.Text) })
}

type storeNodeCmd struct {
	configFlags
	accessFlags
	masterFlags
	peerFlags

	Host     string  `help:"Address that clients and other nodes dial." default:"127.0.0.1"`
	Bind     string  `help:"Address to listen on; default that of --host." placeholder:"ADDRESS"`
	MemoryGB gibSize `name:"memory-gb" help:"Memory to give: GiB, or with a unit, as 512MiB; rounded down to 16 MiB." default:"4"`
	Name     string  `help:"Name of the segment, for puts that prefer it; default its address." placeholder:"NAME"`
	Grace    float64 `help:"Seconds that objects stay readable after a signal to stop; new puts are refused meanwhile." default:"0"`
	HTTPPort int     `help:"Port of /healthz and /metrics, on the address that is listened on; 0 takes a free one." default:"9004"`
}

// Help is shown by kvasir store-node --help.
func (storeNodeCmd) Help() string {
	return `Gives memory of this machine to a Mooncake Store cluster, without a driver and without Python: vLLM's
MooncakeStoreConnector and other clients keep KV there over TCP. A node that is killed takes its objects
with it; the others go on.

Examples:
  mooncake_master --rpc_port 50051
  kvasir store-node --master 10.0.0.1:50051 --host 10.0.0.7 --allow-from 10.0.0.0/24,127.0.0.1 --memory-gb 64
  kvasir store put greeting --master 10.0.0.1:50051 < FILE`
}

func (c *storeNodeCmd) check(*env) error {
	var f faults
	c.faults(&f)
	f.unless(c.MemoryGB >= 16<<20, "--memory-gb %v is less than 16MiB", c.MemoryGB)
	f.unless(c.Grace >= 0 && c.Grace <= 3600, "--grace %g is outside 0 to 3600", c.Grace)
	f.port("--http-port", c.HTTPPort, true)
	ip := net.ParseIP(c.Host)
	f.unless(ip == nil || !ip.IsUnspecified(), "--host %s is every address: name the one that others dial", c.Host)
	return errors.Join(f.err(), c.peerFlags.check(), c.accessFlags.check(c.exposed(), storeNodeListeners...))
}

// storeNodeListeners are the names of a node's listeners, for --allow-from: "http" is the pages, "transfer" the transfer ports.
var storeNodeListeners = []string{"http", "transfer"}

// address returns the host at which the node listens, and the flag that sets it.
func (c *storeNodeCmd) address() (host, flag string) {
	if c.Bind != "" {
		return c.Bind, "--bind"
	}
	return c.Host, "--host"
}

// exposed returns the listeners of the node.
func (c *storeNodeCmd) exposed() []exposure {
	host, flag := c.address()
	at := flag + " " + host
	return []exposure{
		{listener: "http", at: at, host: host, web: true, risk: "read the node's figures"},
		{listener: "transfer", at: at, host: host, own: c.defends(), keys: "--transfer-secret-file", risk: "read and write the memory"},
	}
}

// pagesNeed returns which right a request needs at a listener that only has pages to read.
func pagesNeed(r *http.Request) auth.Need {
	if r.URL.Path == "/healthz" || r.URL.Path == "/healthcheck" {
		return auth.NeedNothing
	}
	return auth.NeedRead
}

// Run serves until a signal stops it.
func (c *storeNodeCmd) Run(e *env) (err error) {
	if err := c.check(e); err != nil {
		return err
	}
	a, err := c.accessFlags.open(e.log, c.exposed(), storeNodeListeners...)
	if err != nil {
		return err
	}
	if a.peers, err = c.peerFlags.open(e.log); err != nil {
		return err
	}
	defer a.watch()()
	bytes := int64(c.MemoryGB)
	path, err := memoryPath("kvasir_store_node_", c.MemoryGB)
	if err != nil {
		return err
	}
	memory, err := shm.Create(path, bytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, memory.Close()) }()
	if err := memory.Unlink(); err != nil { // a killed node leaves no file
		return err
	}
	master, err := store.NewMaster(c.options())
	if err != nil {
		return err
	}
	defer master.Close()
	node, err := store.NewNode(master, store.NodeOptions{
		Memory: memory.Bytes(0, bytes), Host: c.Host, Bind: c.Bind, Name: c.Name, Grace: seconds(c.Grace), Networks: a.networks["transfer"], Secrets: a.peers, Log: e.log,
	})
	if err != nil {
		return err
	}
	registry := metrics.New(Version())
	metrics.Add(registry, node.Stats)
	guards := a.gateOptions("http")
	guards.Need = pagesNeed
	gate := auth.New(guards)
	metrics.AddWith(registry, map[string]string{"listener": "http"}, gate.Stats)
	a.addMetrics(registry, "transfer")
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", registry.Handler())
	health := func(w http.ResponseWriter, _ *http.Request) {
		if node.Stats().Mounted == 0 {
			http.Error(w, "the master does not know this node's memory", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	}
	mux.HandleFunc("GET /healthz", health)
	mux.HandleFunc("GET /healthcheck", health)
	address, flag := c.address()
	listener, err := takeover.ListenTCP(e.ctx, address, c.HTTPPort)
	if err != nil {
		return takeover.ExplainListen(err, flag, "--http-port")
	}
	web := httpserver.NewServer(gate.Handler(mux))
	go a.serve(web, httpserver.Limit(listener, httpserver.MaxConns))
	defer web.Close()
	e.log.Info("giving memory to the cluster", "memory_bytes", bytes, "masters", c.Master, "http", listener.Addr().String())
	e.isReady()
	ctx, cancel := context.WithCancel(e.ctx)
	populated := make(chan error, 1)
	go func() { // in the background, because the cluster may use the memory at once
		err := provide(ctx, memory, bytes)
		if errors.Is(err, shm.ErrNoPopulate) {
			e.log.Warn("memory is not provided ahead of its use", "err", err)
			err = nil
		}
		if populated <- err; err != nil {
			cancel() // a write into a page that the file system cannot provide would end the process
		}
	}()
	start := time.Now()
	err = node.Run(ctx)
	cancel()
	err = errors.Join(err, <-populated)
	s := node.Stats()
	e.log.Info("the node stopped", "after", time.Since(start).Round(time.Second), "writes", s.Writes, "reads", s.Reads, "lives", s.Lives)
	return err
}

const populateStep = 64 << 20

// provide makes the kernel allocate the pages of the memory, until ctx ends.
func provide(ctx context.Context, memory *shm.Segment, bytes int64) error {
	for off := int64(0); off < bytes && ctx.Err() == nil; off += populateStep {
		if err := memory.Populate(off, min(populateStep, bytes-off), true); err != nil {
			return fmt.Errorf("no memory for --memory-gb: %w", err)
		}
	}
	return nil
}
