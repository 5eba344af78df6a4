package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/internal/httpguard"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/pool"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/shm"
	"github.com/kvasir-kv/kvasir/store"
)

// serverCmd has LMCache's flag names.
type serverCmd struct {
	Host      string   `help:"Address to listen on for LMCache clients." default:"localhost" group:"Network"`
	Port      int      `help:"ZMQ port." default:"5555" group:"Network"`
	IPC       string   `name:"ipc" help:"Also listen on this UNIX socket path." group:"Network" placeholder:"PATH"`
	HTTPHost  string   `name:"http-host" help:"Address of the HTTP interface: /healthcheck /status /metrics /cache/clear." default:"127.0.0.1" group:"Network"`
	HTTPPort  int      `name:"http-port" help:"HTTP port." default:"8080" group:"Network"`
	AllowHost []string `name:"allow-host" help:"Names of this machine, comma-separated, under which /status and /cache/clear are answered besides its addresses, its host name and localhost." group:"Network" placeholder:"NAME"`
	L1SizeGB  float64  `name:"l1-size-gb" help:"Pool size in GiB." default:"4" group:"Pool"`
	ChunkSize int      `help:"Tokens per chunk; a multiple of the engine's block size." default:"256" group:"Pool"`
	ShmName   string   `help:"Name of the pool under /dev/shm; lmcache_l1_pool_ is put before it when missing. Default: kvasir_PORT_BOOT, where BOOT is the same until this host starts again, and another on other hosts." group:"Pool"`
	Align     int64    `name:"l1-align-bytes" help:"Alignment of chunks in the pool, a power of two." default:"4096" group:"Pool"`
	Cold      bool     `help:"Start empty: discard the pool that an earlier server left." group:"Pool"`
	Drop      bool     `help:"Remove the pool that an earlier server left, and end." group:"Pool"`
	Pickle    string   `help:"For workers that cannot map the pool (other hosts, containers with a /dev/shm of their own): their chunks pass through the socket as pickled tensors. on: for them; only: for all, nobody is told of the pool; off: they are declined; auto: on while only this host can connect (--host is a loopback address), else off." default:"auto" enum:"auto,on,only,off" group:"Pool"`
	PickleMax int64    `name:"pickle-max-mib" help:"Largest message of such a worker, MiB; memory grows as it arrives." default:"4095" group:"Pool"`
	Trust     []string `name:"trust-address" help:"Addresses or networks (CIDR), comma-separated, whose peers are taken for this server's user: they are told where the pool is. For containers that share /dev/shm but not the network." group:"Pool" placeholder:"CIDR"`
	Populate  int64    `name:"populate-mib-per-second" help:"Rate at which pool memory is prepared ahead of use, 0 for none. Only what was prepared is handed out, so a /dev/shm that fills up ends no engine; with 0 everything is." default:"1024" group:"Pool"`
	Memo      int64    `name:"memo-mib" help:"Memory for the token lists of recent prompts, MiB: a prompt seen before is compared instead of hashed. 32k tokens take 160 KiB; 0 for none." default:"64" group:"Pool"`
	Checksum  int64    `name:"checksum-mib-per-second" help:"Rate at which checksums of stored chunks are computed in the background, 0 for none: after a restart a chunk that differs from its checksum is a miss." default:"512" group:"Pool"`

	Reap    float64 `name:"worker-reap-timeout-seconds" help:"Silence after which a worker is dropped, 0 for never." default:"120" group:"Timers"`
	Grace   float64 `name:"worker-registration-grace-seconds" help:"The same for a worker that has never pinged." default:"3600" group:"Timers"`
	Session float64 `name:"session-ttl-seconds" help:"Idle time after which a request's pins are dropped." default:"600" group:"Timers"`
	Hold    float64 `name:"l1-write-ttl-seconds" help:"Quarantine: time after which memory that a worker was told about and never committed is used again." default:"600" group:"Timers"`
	Drain   float64 `name:"drain-timeout-seconds" help:"Time for transfers in progress to commit at shutdown." default:"10" group:"Timers"`

	Separate bool   `name:"separate-object-groups" help:"Hybrid models: keep an object per kind of attention, so that a hit needs only the windows of sliding-window layers and the last state of recurrent ones." negatable:"" group:"Pool"`
	Mode     string `name:"supported-transfer-mode" help:"Who copies KV: engine_driven (the engine), lmcache_driven (this server, CPU engines only) or auto (both); workers of the other mode are declined." default:"auto" enum:"engine_driven,auto,lmcache_driven" group:"Compatibility"`
	Client   string `name:"client-generation" help:"Take every client for one of this lmcache generation; auto recognises each connection's. 0.5.0 stands for 0.5.0 to 0.5.2, 0.5.3 for 0.5.3 and 0.5.4." default:"auto" enum:"auto,0.4.6,0.4.7,0.5.0,0.5.3,0.5.5,0.5.6" group:"Compatibility"`
	Hash     string `name:"hash-algorithm" help:"Only blake3: the others need Python." default:"blake3" group:"Compatibility"`
	Eviction string `name:"eviction-policy" help:"Only LRU; the others run as LRU." default:"LRU" enum:"LRU,ARC,IsolatedLRU,noop" group:"Compatibility"`
	Wire     string `name:"transport" help:"Only zmq." default:"zmq" enum:"zmq,grpc" group:"Compatibility"`
}

// Help implements kong's detailed help.
func (serverCmd) Help() string {
	return `Examples:
  kvasir server --l1-size-gb 100
  kvasir server --port 5556 --http-port 8081 --l1-size-gb 0.5 --chunk-size 128
  kvasir server --l1-size-gb 100 --separate-object-groups    (hybrid models, lmcache_driven)
  kvasir server --l1-size-gb 100 --cold     (forget what an earlier server kept)
  kvasir server --l1-size-gb 100 --drop     (remove it and end)
  kvasir server --l1-size-gb 100 --host 10.0.0.5 --pickle on     (engines on other hosts too)

The pool outlives the server: started again with the same flags, it serves what was stored, and
engines go on without registering again.

Then start vLLM on the same host, as the same user:
  vllm serve MODEL --kv-transfer-config '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both",
    "kv_connector_extra_config":{"lmcache.mp.mp_transfer_mode":"engine_driven"}}'

Models with sliding windows or recurrent layers need mp_transfer_mode=lmcache_driven, in which the
server copies; it can do so for CPU engines. After a restart chunks are compared with their checksums.

The flags of "lmcache server" are accepted; those that mean nothing here are named in one warning.`
}

// lmcachePrefix is what LMCache puts before the names of its pools.
const lmcachePrefix = "lmcache_l1_pool_"

func (c *serverCmd) poolName() string {
	name := strings.TrimPrefix(c.ShmName, "/")
	if name == "" {
		name = fmt.Sprintf("kvasir_%d_%s", c.Port, bootMark())
	}
	if !strings.HasPrefix(name, lmcachePrefix) {
		name = lmcachePrefix + name
	}
	return name
}

// bootMark is 8 hexadecimal digits that are the same on this host until it starts
// again, and others elsewhere: a worker that is told of a pool of another host must
// not find one of that name on its own.
func bootMark() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if id := strings.TrimSpace(string(b)); err == nil && len(id) >= 8 {
		return id[:8]
	}
	host, _ := os.Hostname()
	h := fnv.New32a()
	_, _ = h.Write([]byte(host))
	return fmt.Sprintf("%08x", h.Sum32())
}

// check refuses what cannot work, with what to do about it.
func (c *serverCmd) check() error {
	bytes := c.L1SizeGB * (1 << 30)
	switch {
	case c.Hash != "blake3":
		return fmt.Errorf("%w: --hash-algorithm %s is computed by Python code inside vLLM; only blake3 (LMCache's default) is served", errUsage, c.Hash)
	case c.Wire != "zmq":
		return fmt.Errorf("%w: --transport %s is not served; use zmq and a tcp:// URL in the engine", errUsage, c.Wire)
	case c.ChunkSize < 1 || c.ChunkSize > kv.MaxChunkTokens:
		return fmt.Errorf("%w: --chunk-size %d is outside 1 to %d", errUsage, c.ChunkSize, kv.MaxChunkTokens)
	case c.Align < 64 || c.Align > 1<<30 || c.Align&(c.Align-1) != 0:
		return fmt.Errorf("%w: --l1-align-bytes %d is not a power of two from 64 to 2^30", errUsage, c.Align)
	case !(bytes >= float64(c.Align)) || bytes > 1<<50:
		return fmt.Errorf("%w: --l1-size-gb %v is outside one alignment (%d bytes) to 2^20 GiB", errUsage, c.L1SizeGB, c.Align)
	case c.PickleMax < 1 || c.PickleMax > 4095:
		return fmt.Errorf("%w: --pickle-max-mib %d is outside 1 to 4095", errUsage, c.PickleMax)
	case c.Memo < 0 || c.Memo > 1<<20:
		return fmt.Errorf("%w: --memo-mib %d is outside 0 to 2^20", errUsage, c.Memo)
	case c.Populate < 0 || c.Checksum < 0 || min(c.Reap, c.Grace, c.Session, c.Hold, c.Drain) < 0:
		return fmt.Errorf("%w: negative rate or time", errUsage)
	}
	return nil
}

// pickleMode resolves auto: whoever can reach a loopback address is on this host.
func (c *serverCmd) pickleMode() server.PickleMode {
	switch c.Pickle {
	case "on":
		return server.PickleOn
	case "only":
		return server.PickleOnly
	case "auto":
		if isLoopback(c.Host) {
			return server.PickleOn
		}
	}
	return server.PickleOff
}

// trusted reads --trust-address: networks, or addresses for networks of one.
func (c *serverCmd) trusted() ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range c.Trust {
		p, err := netip.ParsePrefix(s)
		if a, aerr := netip.ParseAddr(s); aerr == nil {
			p, err = netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen()), nil
		}
		if err != nil {
			return nil, fmt.Errorf("%w: --trust-address %q is no address and no network like 172.17.0.0/16", errUsage, s)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// generations returns what clients can be of; 0 leaves it to the server.
func (c *serverCmd) generations() (lmcache.Generations, error) {
	if c.Client == "auto" {
		return 0, nil
	}
	g, err := lmcache.ParseGenerations(c.Client)
	if err != nil {
		return 0, fmt.Errorf("%w: --client-generation %s: %w", errUsage, c.Client, err)
	}
	return g, nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// orNever turns LMCache's 0 = never into a negative duration.
func orNever(s float64) time.Duration {
	if s == 0 {
		return -1
	}
	return seconds(s)
}

// Run serves until a signal.
func (c *serverCmd) Run(e *env) error {
	if err := c.check(); err != nil {
		return err
	}
	trust, err := c.trusted()
	if err != nil {
		return err
	}
	clients, err := c.generations()
	if err != nil {
		return err
	}
	if len(e.ignored) > 0 {
		e.log.Warn("flags without meaning here were ignored: " + strings.Join(e.ignored, " "))
	}
	if c.Eviction != "LRU" {
		e.log.Warn(fmt.Sprintf("--eviction-policy %s is not available: LRU by bytes is used", c.Eviction))
	}
	if c.Drop {
		return c.drop(e)
	}
	p, err := pool.Open(pool.Options{
		Name: c.poolName(), Bytes: int64(c.L1SizeGB * (1 << 30)), Align: c.Align, ChunkTokens: c.ChunkSize, Cold: c.Cold,
	})
	if err != nil {
		return c.explain(err)
	}
	st := store.New(p, store.Options{Quarantine: seconds(c.Hold), SessionIdle: seconds(c.Session), Checksums: c.Checksum > 0})
	srv := server.New(st, server.Options{
		ChunkTokens: c.ChunkSize, WorkerReap: orNever(c.Reap), RegistrationGrace: orNever(c.Grace),
		RefuseDriven: c.Mode == "engine_driven", RefuseEngine: c.Mode == "lmcache_driven", SeparateGroups: c.Separate,
		ClientGenerations: clients, MemoBytes: cmp.Or(c.Memo<<20, -1), Pickle: c.pickleMode(), PickleBytes: c.PickleMax << 20, Trust: trust,
		PopulateRate: c.Populate << 20, ChecksumRate: c.Checksum << 20, DrainTimeout: seconds(c.Drain), AllowHosts: c.AllowHost, Logger: e.log, Version: Version(),
	})
	if free, err := memAvailable(); err == nil && c.Populate > 0 && free < st.PoolBytes()-st.Provided() {
		e.log.Warn(fmt.Sprintf("the pool takes %s more, this machine has %s of memory left: lower --l1-size-gb",
			kv.FormatBytes(st.PoolBytes()-st.Provided()), kv.FormatBytes(free)))
	}
	err = c.serve(e, srv)
	if err != nil && st.Stats().Resident == 0 {
		err = errors.Join(err, st.Remove()) // a start that failed leaves nothing behind
	}
	return errors.Join(err, st.Close())
}

// memAvailable returns the memory that this machine can still give, in bytes.
func memAvailable() (int64, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == "MemAvailable:" {
			kib, err := strconv.ParseInt(f[1], 10, 64)
			return kib << 10, err
		}
	}
	return 0, errors.New("no MemAvailable")
}

// drop removes the pool, whatever state it is in.
func (c *serverCmd) drop(e *env) error {
	taken, err := pool.Drop("", c.poolName())
	switch {
	case errors.Is(err, pool.ErrNothing):
		e.log.Info(fmt.Sprintf("nothing to remove: there is no /dev/shm/%s", c.poolName()))
		return nil
	case err != nil:
		return c.explain(err)
	}
	e.log.Info(fmt.Sprintf("removed /dev/shm/%s: %s come back when no engine maps it any more", c.poolName(), kv.FormatBytes(taken)))
	return nil
}

// serve listens, works and, at a signal, drains.
func (c *serverCmd) serve(e *env, srv *server.Server) (err error) {
	defer func() { err = errors.Join(err, srv.Close()) }()
	endpoints := []string{"tcp://" + net.JoinHostPort(c.Host, strconv.Itoa(c.Port))}
	if c.IPC != "" {
		endpoints = append(endpoints, "ipc://"+c.IPC)
	}
	listener, err := bind(func() (net.Listener, error) {
		return net.Listen("tcp", net.JoinHostPort(c.HTTPHost, strconv.Itoa(c.HTTPPort)))
	})
	if err != nil {
		return fmt.Errorf("%w: choose another --http-port", err)
	}
	web := httpguard.NewServer(srv.HTTPHandler())
	listener = httpguard.Limit(listener)
	defer web.Close()
	for _, endpoint := range endpoints {
		addr, err := bind(func() (string, error) { return srv.Listen(e.ctx, endpoint) })
		if err != nil {
			listener.Close()
			return fmt.Errorf("%w: choose another --port, or stop the server that has it", err)
		}
		e.log.Info(fmt.Sprintf("serving LMCache clients on %s: %s pool /dev/shm/%s, %d tokens per chunk",
			addr, kv.FormatBytes(int64(c.L1SizeGB*(1<<30))), c.poolName(), c.ChunkSize))
	}
	e.log.Info(fmt.Sprintf("http://%s/status, /healthcheck, /metrics", listener.Addr()))
	c.sayOpen(e, listener.Addr())

	background, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	wg.Go(func() { srv.Run(background) })
	failed := make(chan error, 1)
	wg.Go(func() {
		if err := web.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			failed <- fmt.Errorf("http: %w", err)
		}
	})
	defer web.Close()
	select {
	case err = <-failed:
	case <-e.ctx.Done():
		e.log.Info("stopping: transfers in progress may finish")
	}
	return errors.Join(err, srv.Shutdown(context.Background()))
}

// sayOpen warns where others than this machine's users can connect: there is no
// authentication.
func (c *serverCmd) sayOpen(e *env, web net.Addr) {
	var open []string
	if !isLoopback(c.Host) {
		open = append(open, fmt.Sprintf("port %d (store, replace and read the cache of any prompt that they can name, and clear it)", c.Port))
	}
	if a, ok := web.(*net.TCPAddr); ok && !a.IP.IsLoopback() {
		open = append(open, fmt.Sprintf("port %d (read the status, clear the cache)", a.Port))
	}
	if len(open) > 0 {
		e.log.Warn("there is no authentication: whoever reaches this machine may use " + strings.Join(open, " and ") +
			"; let only engines reach it (firewall, network policy)")
	}
}

// isLoopback reports whether only this machine reaches an address to listen on.
func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// bind tries again for a moment while an address is in use: a server that was
// killed keeps its ports until the kernel has taken it apart.
func bind[T any](listen func() (T, error)) (T, error) {
	const step = 20 * time.Millisecond
	for wait := time.Duration(0); ; wait += step {
		v, err := listen()
		if !errors.Is(err, syscall.EADDRINUSE) || wait >= time.Second {
			return v, err
		}
		time.Sleep(step)
	}
}

// explain adds what to do to an error of pool.Open.
func (c *serverCmd) explain(err error) error {
	switch {
	case errors.Is(err, pool.ErrInUse):
		return fmt.Errorf("%w: choose another --shm-name or --port, or stop that server", err)
	case errors.Is(err, pool.ErrChanged):
		return fmt.Errorf("%w: start with the old flags, or with --cold to discard it", err)
	case errors.Is(err, pool.ErrOwner):
		return fmt.Errorf("%w: run as that user, or choose another --shm-name", err)
	case errors.Is(err, pool.ErrIndex), errors.Is(err, shm.ErrNotOurs):
		return fmt.Errorf("%w: start with --cold to discard it, or remove it with --drop", err)
	case errors.Is(err, pool.ErrForeign):
		return fmt.Errorf("%w: choose another --shm-name, or remove the file if nothing uses it", err)
	case errors.Is(err, pool.ErrNoSpace):
		return fmt.Errorf("%w: lower --l1-size-gb, or enlarge /dev/shm (containers: --shm-size or --ipc=host)", err)
	}
	return err
}
