// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/hostmem"
	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/takeover"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/store/tenant"
	"github.com/kvasir-kv/kvasir/tier/adapter"
	"github.com/kvasir-kv/kvasir/tier/seal"
)

// serverCmd runs a server. Its flags have the names of LMCache's.
type serverCmd struct {
	configFlags
	accessFlags
	requiredSaltFlags
	zmqAuthFlags
	tenantFlags
	pageFlags

	Host      string    `help:"Address to listen on for LMCache clients." default:"localhost" group:"Network"`
	Port      int       `help:"ZMQ port." default:"5555" group:"Network"`
	Listen    []string  `name:"listen" help:"Another ZMQ port, for clients with chunks of another size: engines whose blocks do not divide --chunk-size and whose lmcache is older than 0.5.7, which negotiates. Repeatable." group:"Network" placeholder:"PORT:CHUNK"`
	IPC       string    `name:"ipc" help:"Also listen on this UNIX socket path." group:"Network" placeholder:"PATH"`
	VLLMTier  string    `name:"vllm-tier" help:"Also serve engines of vLLM with tiered offloading (kvasir vllm-tier) on this UNIX socket path: those of this server's user on this host." group:"Network" placeholder:"PATH"`
	HTTPHost  string    `name:"http-host" help:"Address of the HTTP interface: /healthcheck /status /metrics /cache/clear." default:"127.0.0.1" group:"Network"`
	HTTPPort  int       `name:"http-port" help:"HTTP port." default:"8080" group:"Network"`
	APIKeys   []string  `name:"api-key-file" aliases:"http-api-key-file" sep:"none" help:"File of one line with a key that HTTP requests need (Authorization: Bearer, or X-LMCache-API-Key); probes and the page need none. Also LMCACHE_API_KEY and LMCACHE_API_KEY_FILE. A key allows everything. Repeatable." group:"Access" placeholder:"FILE"`
	AllowHost []string  `name:"allow-host" help:"Names of this machine, comma-separated, under which /status and /cache/clear are answered besides its addresses, its host name and localhost." group:"Network" placeholder:"NAME"`
	Profiles  bool      `name:"pprof" help:"Serve Go's profiles on the HTTP port, at /debug/pprof/." group:"Network"`
	L1SizeGB  gibSize   `name:"l1-size-gb" help:"Pool size: GiB, or with a unit, as 256MiB." default:"4" group:"Pool"`
	ChunkSize int       `help:"Tokens per chunk; a multiple of the engine's block size." default:"256" group:"Pool"`
	ShmName   string    `help:"Name of the pool under /dev/shm; lmcache_l1_pool_ is put before it when missing. Default: kvasir_PORT_BOOT, where BOOT is the same until this host starts again, and another on other hosts." group:"Pool"`
	Align     byteSize  `name:"l1-align-bytes" help:"Alignment of chunks in the pool, a power of two: bytes, or with a unit." default:"4096" group:"Pool"`
	Cold      coldStart `help:"Start with an empty pool: discard what an earlier server left in it. The tiers keep what they have; all has them serve nothing older than this start." group:"Pool" placeholder:"all" default:"false"`
	Drop      bool      `help:"Remove the pool that an earlier server left, and end." group:"Pool"`
	Pickle    string    `help:"For workers that cannot map the pool (other hosts, containers with a /dev/shm of their own): their chunks pass through the socket as pickled tensors. on: for them; only: for all workers, and none learns the pool's name; off: they are declined; auto: on while only this host can connect (--host is a loopback address), else off." default:"auto" enum:"auto,on,only,off" group:"Pool"`
	PickleMax mibSize   `name:"pickle-max-mib" help:"Largest message of such a worker, MiB or with a unit; memory grows as it arrives." default:"4095" group:"Pool"`
	Trust     []string  `name:"trust-address" help:"Addresses or networks (CIDR), comma-separated, whose peers count as this server's user: they learn the pool's name. For containers that share /dev/shm but not the network." group:"Pool" placeholder:"CIDR"`
	Populate  mibSize   `name:"populate-mib-per-second" help:"Rate at which pool memory is prepared ahead of use, 0 for none. Engines get only memory that was prepared, so they cannot crash when /dev/shm fills up; with 0 they get all of it." default:"1024" group:"Pool"`
	Memo      mibSize   `name:"memo-mib" help:"Memory for the token lists of recent prompts, MiB: a prompt seen before is compared instead of hashed. 32k tokens take 160 KiB; 0 for none." default:"64" group:"Pool"`
	Checksum  mibSize   `name:"checksum-mib-per-second" help:"Rate at which checksums of stored chunks are computed in the background, from 1 s after they were stored; 0: at an orderly stop only. After a restart a chunk that differs from its checksum, or was killed before it had one, is a miss." default:"512" group:"Pool"`
	Unsummed  bool      `name:"trust-unsummed" help:"After a kill, serve chunks that have no checksum yet, unchecked: those of the last 2 seconds, and more where stores outrun --checksum-mib-per-second. Without it they are misses." group:"Pool"`

	Shield bool `name:"timing-shield" help:"Hide by time whether another tenant sent a prompt: token lists are not remembered (--memo-mib), lookups do not look for chunks under other salts, so kvasir explain does not name them. Give tenants salts of their own, best with --require-signed-salts." group:"Access"`

	adapter.Flags
	eventFlags

	Reap    float64 `name:"worker-reap-timeout-seconds" help:"Silence after which no lookup counts on a worker of which no process is seen, until its next request; 0 for never." default:"120" group:"Timers"`
	Grace   float64 `name:"worker-registration-grace-seconds" help:"The same for a worker that has never pinged." default:"3600" group:"Timers"`
	Session float64 `name:"session-ttl-seconds" help:"Idle time after which a request's pins are dropped." default:"600" group:"Timers"`
	Hold    float64 `name:"l1-write-ttl-seconds" help:"Quarantine: time after which memory that a worker may write and has not committed is used again." default:"600" group:"Timers"`
	Drain   float64 `name:"drain-timeout-seconds" help:"Time for transfers in progress to commit at shutdown." default:"10" group:"Timers"`

	CPUViews bool     `name:"allow-sglang-cpu-views" help:"For tests: take SGLang's unified layout (lmcache_driven) from the memory of a CPU, where an engine never sees what is loaded." group:"Pool"`
	Separate bool     `name:"separate-object-groups" help:"Hybrid models: keep an object per kind of attention, so that a hit needs only the windows of sliding-window layers and the last state of recurrent ones." negatable:"" group:"Pool"`
	Mode     string   `name:"supported-transfer-mode" help:"Who copies KV: engine_driven (the engine), lmcache_driven (this server, CPU engines only) or auto (both); workers of the other mode are declined." default:"auto" enum:"engine_driven,auto,lmcache_driven" group:"Compatibility"`
	Client   string   `name:"client-generation" help:"Take every client for one of this lmcache generation; auto recognises each connection's. 0.5.0 stands for 0.5.0 to 0.5.2, 0.5.3 for 0.5.3 and 0.5.4." default:"auto" enum:"auto,0.4.6,0.4.7,0.5.0,0.5.3,0.5.5,0.5.6,0.5.7" group:"Compatibility"`
	Hash     string   `name:"hash-algorithm" help:"Only blake3: the others need Python." default:"blake3" group:"Compatibility"`
	Eviction string   `name:"eviction-policy" help:"Eviction policy. leaf-hazard: evicts the ends of prompts that are the least likely to be used again soon, learned while it runs; lru: the least recently used; also leaf-lru, s3fifo, arc. kvasir sim evict compares them on a trace. LMCache's names LRU, ARC, IsolatedLRU and noop run as lru." default:"leaf-hazard" group:"Pool"`
	TTL      float64  `name:"ttl-seconds" help:"Idle time after which a chunk is dropped, at least 1; 0: chunks stay until they are evicted. A chunk that a lookup or a transfer uses is not dropped." default:"0" group:"Pool"`
	OwnTTL   []string `name:"tenant-ttl" sep:"none" help:"The same for the tenant of a cache salt: 90s, 24h, or never. Repeatable." placeholder:"SALT=TIME" group:"Pool"`
	PinLimit []string `name:"pin-limit" sep:"none" help:"How much of a cache salt's chunks may be pinned (POST /cache/pins), at a time; nothing unless given. Repeatable." placeholder:"SALT=SIZE" group:"Pool"`
	Quota    []string `name:"quota" sep:"none" help:"Guaranteed part of the pool for the tenant of a cache salt, with an eviction policy of its own; a number alone is GiB. _default is the empty salt, __default a tenant called _default. Repeatable." placeholder:"SALT=SIZE" group:"Pool"`
	Revision []string `name:"model-revision" sep:"none" help:"Revision of a model's weights, letters, digits, dot, dash and underscore: chunks of another revision of the same name are not found, in the pool and in the tiers. Repeatable." placeholder:"NAME=REV" group:"Pool"`
	State    string   `help:"File for the settings of tenants that are made at run time (kvasir quota, PUT /tenants, PUT /quota), for the next start; without it they end with the server. A setting made at run time wins until you change the flag for that tenant." placeholder:"FILE" group:"Pool"`
	Wire     string   `name:"transport" help:"Only zmq." default:"zmq" enum:"zmq,grpc" group:"Compatibility"`

	terms    *tenant.Terms
	access   *access
	zmqAuth  *zmqAuth
	tenants  *auth.TenantLimits
	tierKeys *seal.Keys
}

// Help returns the text that kvasir server --help shows. It implements kong's detailed help.
func (serverCmd) Help() string {
	return `Examples:
  kvasir server --l1-size-gb 100
  kvasir server --port 5556 --http-port 8081 --l1-size-gb 0.5 --chunk-size 128
  kvasir server --l1-size-gb 100 --separate-object-groups    (hybrid models, lmcache_driven)
  kvasir server --l1-size-gb 50             (another size: keeps what fits, what was used last)
  kvasir server --l1-size-gb 100 --cold     (forget what an earlier server kept; --cold=all: in the tiers, too)
  kvasir server --l1-size-gb 100 --drop     (remove it and end)
  kvasir server --l1-size-gb 100 --host 10.0.0.5 --allow-from 10.0.0.0/24 --pickle on     (engines on other hosts too)
  kvasir server --l1-size-gb 100 --l2-adapter '{"type":"fs","base_path":"/data/kv"}'    (a directory below the pool)
  kvasir server --l1-size-gb 100 --kv-events tcp://10.0.0.5:5557 --kv-events-replay tcp://10.0.0.5:5558 --allow-from 10.0.0.0/24    (for routers)
  kvasir server --l1-size-gb 100 --vllm-tier /run/kvasir.sock    (vLLM's own tiered offloading: kvasir vllm-tier --help)
  kvasir server --l1-size-gb 100 --disk /mnt/nvme/kv --disk-gb 2000                (a disk of its own)
  kvasir server --l1-size-gb 100 --disk /mnt/nvme/kv --disk-gb 2000 --tier-key-file /etc/kvasir/tier-keys    (encrypted)
  kvasir server --l1-size-gb 100 --quota team-a=40GiB --state /var/lib/kvasir/tenants.state    (what kvasir quota sets holds over restarts)

The pool outlives the server: started again with the same flags, it serves what was stored, and
engines go on without registering again. With another --l1-size-gb it keeps what fits.

Then start vLLM on the same host, as the same user:
  vllm serve MODEL --kv-transfer-config '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both",
    "kv_connector_extra_config":{"lmcache.mp.mp_transfer_mode":"engine_driven"}}'

Models with sliding windows or recurrent layers need mp_transfer_mode=lmcache_driven, in which the
server copies; it can do so for CPU engines. After a restart chunks are compared with their checksums;
after a kill, those of the last 2 seconds are misses (--trust-unsummed serves them).

The flags of "lmcache server" are accepted; those that mean nothing here are named in one warning.`
}

// lmcachePrefix is the prefix that LMCache puts before the names of its pools.
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

// bootMark returns 8 hexadecimal digits that identify this host until its next boot. They are part of the pool's name: a worker that
// gets the name of a pool on another host must not find a pool of that name on its own host.
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

// serverOptions are the options of the packages that make up the server.
type serverOptions struct {
	pool   pool.Options
	store  store.Options
	server server.Options
	tiers  adapter.Options
}

// flagOf maps fields of the options to the flags that set them.
var flagOf = map[string]string{
	"Name": "--shm-name", "Bytes": "--l1-size-gb", "Align": "--l1-align-bytes", "ChunkTokens": "--chunk-size",
	"Quarantine": "--l1-write-ttl-seconds", "TTL": "--ttl-seconds", "SessionIdle": "--session-ttl-seconds",
	"PopulateRate": "--populate-mib-per-second", "ChecksumRate": "--checksum-mib-per-second",
	"WorkerReap": "--worker-reap-timeout-seconds", "RegistrationGrace": "--worker-registration-grace-seconds", "DrainTimeout": "--drain-timeout-seconds",
	"LoadTimeout": "--l2-prefetch-load-timeout", "MemoBytes": "--memo-mib", "PickleBytes": "--pickle-max-mib",
	"Records": "--kv-event-log-size", "TokenBytes": "--kv-events-memory",
}

// options turns the flags into options. The error names every flag that cannot be used, and says what to do about it.
func (c *serverCmd) options(log *slog.Logger) (o serverOptions, _ error) {
	var bad faults
	wrong := func(format string, args ...any) { bad.unless(false, format, args...) }
	c.Host = takeover.WithoutBrackets(c.Host)
	bad.port("--port", c.Port, false)
	const longestSocket = 107 // bytes in the kernel's sockaddr_un
	bad.unless(len(c.IPC) <= longestSocket, "--ipc %s has %d bytes: the path of a socket has at most %d", c.IPC, len(c.IPC), longestSocket)
	bad.unless(len(c.VLLMTier) <= longestSocket, "--vllm-tier %s has %d bytes: the path of a socket has at most %d", c.VLLMTier, len(c.VLLMTier), longestSocket)
	bad.unless(c.VLLMTier == "" || c.VLLMTier != c.IPC, "--vllm-tier and --ipc are one path")
	bad.port("--http-port", c.HTTPPort, true)
	if c.Hash != "blake3" {
		wrong("--hash-algorithm %s is computed by Python code inside vLLM; only blake3 (LMCache's default) is served", c.Hash)
	}
	if c.Wire != "zmq" {
		wrong("--transport %s is not served; use zmq and a tcp:// URL in the engine", c.Wire)
	}
	if !slices.Contains(evict.Names, c.policyName()) {
		wrong("--eviction-policy %s is unknown; known are %s, and LMCache's LRU, ARC, IsolatedLRU and noop", c.Eviction, strings.Join(evict.Names, ", "))
	}
	positive := func(flag string, v float64) time.Duration {
		if !(v > 0) {
			wrong("%s %v is not above 0", flag, v)
		}
		return seconds(v)
	}
	trust, err := c.trusted()
	if err != nil {
		wrong("%v", err)
	}
	clients, err := c.generations()
	if err != nil {
		wrong("%v", err)
	}
	if err := c.checkTenants(int64(c.L1SizeGB)); err != nil {
		wrong("%v", err)
	}
	if err := errors.Join(c.eventFlags.check(), c.pageFlags.check()); err != nil {
		wrong("%v", err)
	}
	ports := map[int]bool{c.Port: true}
	for _, l := range c.Listen {
		port, _, err := portAndChunk(l)
		if err == nil && ports[port] {
			err = fmt.Errorf("--listen %q: the port is taken by --port or another --listen", l)
		}
		if err != nil {
			wrong("%v", err)
		}
		ports[port] = true
	}
	if c.ChunkSize == 0 { // in the options, 0 would mean the default
		wrong("--chunk-size 0 is outside 1 to %d", kv.MaxChunkTokens)
	}
	o.pool = pool.Options{Name: c.poolName(), Bytes: int64(c.L1SizeGB), Align: cmp.Or(int64(c.Align), -1), ChunkTokens: c.ChunkSize, Cold: c.Cold.pool()}
	o.store = store.Options{
		Quarantine: positive("--l1-write-ttl-seconds", c.Hold), SessionIdle: positive("--session-ttl-seconds", c.Session),
		PopulateRate: int64(c.Populate), ChecksumRate: int64(c.Checksum), TrustUnsummed: c.Unsummed, Log: log,
		LoadTimeout: positive("--l2-prefetch-load-timeout", c.Timeout), Write: writePolicies[c.Write], WriteAnswers: answerPolicies[c.Answers], LoadIfFaster: c.Faster,
		OwnNames: c.Shield, TTL: seconds(c.TTL), WarmBytes: int64(c.Warm * (1 << 30)), WarmTime: seconds(c.WarmFor),
	}
	if o.tiers, err = c.Flags.Options(log); err != nil {
		wrong("%s", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	revisions, err := parseRevisions(c.Revision)
	if err != nil {
		wrong("%v", err)
	}
	o.server = server.Options{
		Revisions:   revisions,
		ChunkTokens: c.ChunkSize, WorkerReap: seconds(c.Reap), KeepSilent: c.Reap == 0, RegistrationGrace: seconds(c.Grace), KeepNeverPinged: c.Grace == 0,
		RefuseDriven: c.Mode == "engine_driven", RefuseEngine: c.Mode == "lmcache_driven", SeparateGroups: c.Separate, SGLangCPUViews: c.CPUViews,
		ClientGenerations: clients, MemoBytes: int64(c.Memo), NoMemo: c.Memo == 0 || c.Shield, Pickle: c.pickleMode(), PickleBytes: cmp.Or(int64(c.PickleMax), -1), Trust: trust,
		DrainTimeout: cmp.Or(seconds(c.Drain), 1), Log: log, Version: Version(),
	}
	said := strings.Join(bad, " ")
	options.Each(errors.Join(o.pool.Validate(), o.store.Validate(), o.server.Validate(), c.eventFlags.options().Validate()), func(e *options.Error) {
		flag := cmp.Or(flagOf[e.Field], e.Field)
		if !strings.Contains(said, flag+" ") { // a flag that sets several fields is named only once
			said += " " + flag + " "
			wrong("%s: %s", flag, e.Text)
		}
	})
	return o, bad.err()
}

var writePolicies = map[string]store.WritePolicy{"commit": store.WriteAtCommit, "hit": store.WriteAtFirstHit, "never": store.WriteNever}

var answerPolicies = map[string]store.AnswerPolicy{"yes": store.AnswersAsPrompts, "hit": store.AnswersAfterHit, "no": store.AnswersNever}

// lmcachePolicies are LMCache's names of policies; here each of them means lru.
var lmcachePolicies = []string{"LRU", "ARC", "IsolatedLRU", "noop"}

// policyName returns our name of the eviction policy that the flags ask for.
func (c *serverCmd) policyName() string {
	if slices.Contains(lmcachePolicies, c.Eviction) {
		return "lru"
	}
	return c.Eviction
}

// pickleMode resolves auto to on for a loopback address, which only clients on this host can reach.
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

// trusted parses --trust-address: networks, or single addresses.
func (c *serverCmd) trusted() ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range c.Trust {
		p, err := netip.ParsePrefix(s)
		if a, aerr := netip.ParseAddr(s); aerr == nil {
			p, err = netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen()), nil
		}
		if err != nil {
			return nil, fmt.Errorf("--trust-address %q is no address and no network like 172.17.0.0/16", s)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// generations returns the generations that clients may have; 0 means that the server chooses.
func (c *serverCmd) generations() (lmcache.Generations, error) {
	if c.Client == "auto" {
		return 0, nil
	}
	g, err := lmcache.ParseGenerations(c.Client)
	if err != nil {
		return 0, fmt.Errorf("--client-generation %s: %w", c.Client, err)
	}
	return g, nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// serverListeners are the names of a server's listeners, for --allow-from: LMCache's clients, the HTTP interface, KV events.
var serverListeners = []string{"zmq", "http", "events"}

func (c *serverCmd) check(e *env) error {
	_, err := c.options(e.log)
	_, limits := c.tenantFlags.open(c)
	return errors.Join(err, c.requiredSaltFlags.check(c.VLLMTier), c.accessFlags.check(c.exposed(), serverListeners...), c.zmqAuthFlags.check(c.TokenFile, c.Events), limits)
}

// Run serves until a signal.
func (c *serverCmd) Run(e *env) (err error) {
	o, err := c.options(e.log)
	if err != nil {
		return err
	}
	if len(e.ignored) > 0 {
		e.log.Warn("flags of LMCache without effect here were ignored", "flags", strings.Join(e.ignored, " "))
	}
	if c.Eviction != c.policyName() && c.Eviction != "LRU" && c.Eviction != "IsolatedLRU" {
		e.log.Warn("the --eviction-policy is not available: lru is used", "policy", c.Eviction)
	}
	if c.Drop {
		return c.drop(e)
	}
	if c.access, err = c.accessFlags.open(e.log, c.exposed(), serverListeners...); err != nil {
		return err
	}
	if err := errors.Join(c.requiredSaltFlags.check(c.VLLMTier), c.saltFlags.open(c.access)); err != nil {
		return err
	}
	if c.zmqAuth, err = c.zmqAuthFlags.open(e.log, c.access.tokens); err != nil {
		return err
	}
	if c.tenants, err = c.tenantFlags.open(c); err != nil {
		return err
	}
	c.warnClearText(e.log, c.exposed())
	o.server.Clients = c.zmqAuth.of["zmq"]
	o.server.Networks, o.server.Salts = c.access.networks["zmq"], c.access.salts
	o.server.Tenants = c.tenants
	o.server.CountUnsigned = c.requiredSaltFlags.Count
	if err := c.warnSetup(e); err != nil {
		return err
	}
	flags := make(tenant.Flags)
	_ = c.setTenants(flags) // they were checked
	if c.terms, err = tenant.OpenTerms(c.State, flags, e.log); err != nil {
		return fmt.Errorf("--state: %w", err)
	}
	defer func() { err = errors.Join(err, c.terms.Close()) }()
	o.tiers.Changes = c.changes()
	st, err := c.openStore(&o)
	if err != nil {
		return err
	}
	o.server.Events = c.book(st, o.tiers.Changes)
	events := c.publisherOptions(c.Port, c.ChunkSize, e.log)
	events.Networks, events.Clients = c.access.networks["events"], c.zmqAuth.of["events"]
	events.Tenants = c.tenants
	if o.server.Publisher, err = c.publisher(e, o.server.Events, events); err != nil {
		return failedStart(st, err)
	}
	if was := st.Files().FormerBytes(); was != st.Files().Bytes() {
		e.log.Info("the pool has another size now", "bytes", st.Files().Bytes(), "before_bytes", was, "chunks", st.Stats().Resident)
	}
	srv := server.New(st, o.server)
	if free, ok := hostmem.Available(); ok && c.Populate > 0 && free < st.Files().Bytes()-st.Memory().Provided() {
		e.log.Warn("the pool takes more memory than this machine has left: lower --l1-size-gb",
			"missing_bytes", st.Files().Bytes()-st.Memory().Provided(), "free_bytes", free)
	}
	err = c.serve(e, srv)
	if err != nil && st.Stats().Resident == 0 {
		return failedStart(st, err)
	}
	chunks, bytes := st.Stats().Resident, st.Files().Bytes()
	err = errors.Join(err, st.Close())
	e.log.Info("stopped; the pool stays for the next start with the same flags, and keeps its memory until it is removed",
		"pool", shm.Dir+"/"+c.poolName(), "pool_bytes", bytes, "chunks", chunks, "remove_with", "kvasir pool rm "+c.poolName())
	return err
}

// failedStart closes the store after a failed start. It removes the pool, unless the pool has chunks from an earlier server.
func failedStart(st *store.Store, err error) error {
	if st.Stats().Resident == 0 {
		err = errors.Join(err, st.Files().Remove())
	}
	return errors.Join(err, st.Close())
}

// minFiles and fewFiles are numbers of open files that the system allows the server, which needs them for the connections of engines, one
// per worker and one per scheduler, and for its own files. Below minFiles the server does not start; below fewFiles it warns.
const minFiles, fewFiles = 32, 256

// warnSetup warns about settings with which the server would work badly, and returns an error for those with which it cannot work.
func (c *serverCmd) warnSetup(e *env) error {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err == nil && files.Cur < fewFiles {
		if files.Cur < minFiles {
			return fmt.Errorf("this process may open %d files, a server needs %d and one for each connection: raise it (ulimit -n, LimitNOFILE=)", files.Cur, minFiles)
		}
		e.log.Warn("this process may open few files, and each connection takes one: raise it (ulimit -n, LimitNOFILE=)", "files", files.Cur)
	}
	if c.ChunkSize%16 != 0 {
		e.log.Warn("--chunk-size is no multiple of 16, the block size of most engines: those cannot use it", "chunk_tokens", c.ChunkSize)
	}
	return nil
}

// drop removes the pool, whatever its state is.
func (c *serverCmd) drop(e *env) error {
	taken, err := pool.Drop("", c.poolName())
	switch {
	case errors.Is(err, pool.ErrNothing):
		e.log.Info("nothing to remove: there is no such pool", "path", "/dev/shm/"+c.poolName())
		return nil
	case err != nil:
		return explainPool(err, "--shm-name or --port")
	}
	e.log.Info("removed the pool: its memory comes back when no engine maps it any more", "path", "/dev/shm/"+c.poolName(), "bytes", taken)
	return nil
}

// portAndChunk parses PORT:CHUNK.
func portAndChunk(text string) (port, chunk int, err error) {
	p, n, _ := strings.Cut(text, ":")
	port, err1 := strconv.Atoi(p)
	chunk, err2 := strconv.Atoi(n)
	if err1 != nil || err2 != nil || port < 1 || port > 65535 || chunk < 1 || chunk > kv.MaxChunkTokens {
		return 0, 0, fmt.Errorf("--listen %q is not PORT:CHUNK with a port of 1 to 65535 and 1 to %d tokens", text, kv.MaxChunkTokens)
	}
	return port, chunk, nil
}

// serve listens and serves; at a signal, it drains.
func (c *serverCmd) serve(e *env, srv *server.Server) (err error) {
	defer func() { err = errors.Join(err, srv.Close()) }()
	type place struct {
		endpoint, host, port string // host and port are the flags that set the endpoint
		chunk                int    // chunk size of --listen; 0: --chunk-size, or what an engine negotiated or an earlier server knew
	}
	tcp := func(port int) string { return "tcp://" + net.JoinHostPort(c.Host, strconv.Itoa(port)) }
	places := []place{{tcp(c.Port), "--host", "--port", 0}}
	for _, l := range c.Listen {
		port, chunk, err := portAndChunk(l)
		if err != nil {
			return err
		}
		places = append(places, place{tcp(port), "--host", "--listen", chunk})
	}
	if c.IPC != "" {
		places = append(places, place{"ipc://" + c.IPC, "--ipc", "", 0})
	}
	keys, err := admin.ReadKeys(c.APIKeys, os.Getenv)
	if err != nil {
		return err
	}
	gate := c.access.gateOptions("http")
	gate.Keys, gate.Tenants = keys, c.tenants
	defer c.access.watch()()
	defer watchTenants(c.tenants, e.log)()
	defer c.zmqAuth.watch(e.log)()
	listener, err := takeover.ListenTCP(e.ctx, c.HTTPHost, c.HTTPPort)
	if err != nil {
		return takeover.ExplainListen(err, "--http-host", "--http-port")
	}
	listener = httpserver.Limit(listener, httpserver.MaxConns)
	history := admin.NewHistory(srv)
	web := httpserver.NewServer(admin.Handler(srv, admin.Options{
		History: history, Cost: admin.Cost{PrefillTokens: c.Prefill, GPUHourPrice: c.Price}, Peers: c.Peers, AllowHosts: c.AllowHost, Flags: e.flags, Sources: e.sources, Terms: c.terms,
		Socket: places[0].endpoint, AskSocket: c.zmqAuth.ready(), Profiles: c.Profiles, Parts: e.parts, Access: gate,
		Metrics: func(r *metrics.Registry) { c.zmqAuth.addMetrics(r, c.access.networks) },
	}))
	defer web.Close()
	var addresses []string
	for _, p := range places {
		var addr string
		if err := takeover.ListenAgain(e.ctx, func(ctx context.Context) (err error) {
			addr, err = srv.ListenChunks(ctx, p.endpoint, p.chunk)
			return err
		}); err != nil {
			listener.Close()
			return takeover.ExplainListen(err, p.host, p.port)
		}
		addresses = append(addresses, addr)
	}
	for i, addr := range addresses {
		e.log.Info("serving LMCache clients", "address", addr, "pool", "/dev/shm/"+c.poolName(), "pool_bytes", int64(c.L1SizeGB), "chunk_tokens", cmp.Or(places[i].chunk, c.ChunkSize))
	}
	if c.VLLMTier != "" {
		if err := srv.ListenVLLM(e.ctx, c.VLLMTier); err != nil {
			listener.Close()
			return takeover.ExplainListen(err, "--vllm-tier", "")
		}
		e.log.Info("serving vLLM's tiered offloading", "socket", c.VLLMTier)
	}
	e.log.Info("engines find this server with the flag of vllm serve", "connect_with", engineFlag(c.Host, c.Port))
	e.log.Info("serving HTTP: /status, /healthcheck, /metrics", "address", listener.Addr().String())
	e.isReady()

	background, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	wg.Go(func() { srv.Run(background) })
	wg.Go(func() { history.Run(background) })
	wg.Go(func() { c.tierKeys.Watch(background, e.log) })
	failed := make(chan error, 1)
	wg.Go(func() {
		if err := c.access.serve(web, listener); !errors.Is(err, http.ErrServerClosed) {
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

// isLoopback reports whether an address to listen on can be reached only from this machine.
func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}
