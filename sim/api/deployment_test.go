// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/sim/api"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
	"github.com/kvasir-kv/kvasir/sim/sched"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// childEnv makes this test program one process of a deployment: a child as JSON.
const childEnv = "KVASIR_API_TEST_CHILD"

func TestMain(m *testing.M) {
	if v := os.Getenv(streamsEnv); v != "" {
		streamClients(v)
		return
	}
	if v := os.Getenv(childEnv); v != "" {
		if err := runChild(v); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	testkit.Main(m)
}

// child is a process that a test kills and starts again: a cache server, a registry or an engine.
type child struct {
	Name, Kind string
	Port       int
	Dir        string // of shared memory and state
	Separate   bool   // server: an object for each group
	Config     string // engine: its --kv-transfer-config
	TP         int
	Groups     []sched.Group
	First      bool // the dialect of vLLM 0.13

	mu  sync.Mutex
	cmd *exec.Cmd
	out *bytes.Buffer
}

func runChild(v string) error {
	var c child
	if err := json.Unmarshal([]byte(v), &c); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	addr := fmt.Sprintf("127.0.0.1:%d", c.Port)
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	switch c.Kind {
	case "server":
		return serveCache(ctx, &c, addr)
	case "registry":
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return err
		}
		r, err := bootstrap.Open(bootstrap.Options{StateFile: filepath.Join(c.Dir, "registry"), Log: log})
		if err != nil {
			return err
		}
		defer r.Close()
		_ = r.Serve(ctx, l)
		return nil
	}
	connectors, err := kvconfig.Parse([]byte(c.Config))
	if err != nil {
		return err
	}
	e, err := engine.Open(ctx, engine.Options{
		Model: "m", MaxModel: 8192, MaxTokens: 1024, StepTime: time.Millisecond, Groups: c.Groups, First: c.First, ShmDir: c.Dir, Connectors: connectors,
		KV: kvmem.Geometry{Layers: 2, Heads: 4, HeadBytes: 16, BlockTokens: 16, Blocks: 2500, TPSize: c.TP}, Log: log,
		Getenv: func(name string) (string, bool) {
			v, ok := map[string]string{
				"VLLM_HOST_IP": "127.0.0.1", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "3", "VLLM_MOONCAKE_BOOTSTRAP_PORT": strconv.Itoa(c.Port + 1),
			}[name]
			return v, ok
		},
	})
	if err != nil {
		return err
	}
	web := http.Server{Addr: addr, Handler: api.New(e, api.Options{SameIDs: c.First})}
	go func() {
		<-ctx.Done()
		_ = web.Close()
	}()
	if err := web.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return e.Close()
}

// serveCache runs a cache server. When ctx ends, it waits at most 30 s until no transfer or store is pending; a
// quarantine of 2 s bounds each of them. Then it prints how many are left.
func serveCache(ctx context.Context, c *child, addr string) error {
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: 64 << 20, Dir: c.Dir, ChunkTokens: 32})
	if err != nil {
		return err
	}
	st := store.New(p, store.Options{Quarantine: 2 * time.Second})
	srv := server.New(st, server.Options{ChunkTokens: 32, SeparateGroups: c.Separate, ShmDir: c.Dir, Log: slog.New(slog.DiscardHandler)})
	if _, err := srv.Listen(ctx, "tcp://"+addr); err != nil {
		return err
	}
	running, stop := context.WithCancel(context.Background())
	context.AfterFunc(ctx, func() {
		for end := time.Now().Add(30 * time.Second); st.Stats().Transfers+st.Stats().Pending > 0 && time.Now().Before(end); {
			time.Sleep(20 * time.Millisecond)
		}
		stop()
	})
	srv.Run(running)
	s := st.Stats()
	fmt.Printf("transfers %d quarantined %d pending %d\n", s.Transfers, s.Quarantined, s.Pending)
	return errors.Join(srv.Close(), st.Close())
}

func (c *child) start(t testing.TB) {
	c.mu.Lock()
	defer c.mu.Unlock()
	b, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	c.cmd, c.out = exec.Command(os.Args[0], "-test.run=^$"), &bytes.Buffer{}
	c.cmd.Env = append(os.Environ(), childEnv+"="+string(b))
	c.cmd.Stdout, c.cmd.Stderr = c.out, os.Stderr
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
}

// end ends the process by a signal and returns what it printed.
func (c *child) end(s os.Signal) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cmd == nil {
		return "", nil
	}
	_ = c.cmd.Process.Signal(s) // it may have ended
	err := c.cmd.Wait()
	c.cmd = nil
	return c.out.String(), err
}

// resident returns the process's memory in bytes.
func (c *child) resident() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.cmd.Process.Pid))
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "RssAnon:" {
			kib, _ := strconv.ParseInt(f[1], 10, 64)
			return kib << 10
		}
	}
	return 0
}

func (c *child) url() string { return fmt.Sprintf("http://127.0.0.1:%d", c.Port) }

// figures reads the metrics of an engine.
func (c *child) figures() (map[string]float64, error) {
	r, err := http.Get(c.url() + "/metrics")
	if err != nil {
		return nil, err
	}
	defer r.Body.Close()
	out := make(map[string]float64)
	for s := bufio.NewScanner(r.Body); s.Scan(); {
		name, rest, _ := strings.Cut(s.Text(), "{")
		if _, value, ok := strings.Cut(rest, "} "); ok {
			v, _ := strconv.ParseFloat(value, 64)
			out[name] += v
		}
	}
	return out, nil
}

// deployment is a cache server, a registry, and four engines: P, which stores what it computes,
// D, and two that share the cache.
type deployment struct {
	t                testing.TB
	name             string
	children         []*child
	server, registry *child
	engines          []*child // P, D, and the others
	first            bool
	registryURL      string
	retries, aborts  atomic.Int64
}

func deploy(t testing.TB, name string, pTP, dTP int, groups []sched.Group, first bool) *deployment {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvasir_api_test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	port := make([]int, 6)
	for i := range port {
		port[i] = testkit.FreePort(t)
	}
	d := &deployment{t: t, name: name, first: first}
	d.server = &child{Name: "server", Kind: "server", Port: port[0], Separate: true}
	d.registry = &child{Name: "registry", Kind: "registry", Port: port[1]}
	d.registryURL = d.registry.url()
	if first {
		d.registryURL = ""
	}
	cache := func(mode string) string {
		if len(groups) > 0 {
			mode = "lmcache_driven" // engine_driven has one group of full attention
		}
		return fmt.Sprintf(`{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute","kv_connector_extra_config":{
			"lmcache.mp.server_urls":"tcp://127.0.0.1:%d","lmcache.mp.mp_transfer_mode":%q,"lmcache.mp.mq_timeout":3,"lmcache.mp.heartbeat_interval":0.2}}`, port[0], mode)
	}
	extra := fmt.Sprintf(`{"bootstrap_server_address":"127.0.0.1:%d"}`, port[1])
	if first {
		extra = "{}"
	}
	p := fmt.Sprintf(`{"kv_connector":"MultiConnector","kv_role":"kv_both","engine_id":"p","kv_load_failure_policy":"recompute","kv_connector_extra_config":{"connectors":[
		{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_connector_extra_config":%s},%s]}}`, extra, cache("engine_driven"))
	engineOf := func(name string, port, tp int, config string) *child {
		return &child{Name: name, Kind: "engine", Port: port, TP: tp, Config: config, Groups: groups, First: first}
	}
	d.engines = []*child{
		engineOf("P", port[2], pTP, p),
		engineOf("D", port[3], dTP, `{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer","kv_load_failure_policy":"recompute"}`),
		engineOf("E", port[4], 2, cache("lmcache_driven")),
		engineOf("F", port[5], 2, cache("engine_driven")),
	}
	d.children = append([]*child{d.server, d.registry}, d.engines...)
	for _, c := range d.children {
		c.Dir = dir
		c.start(t)
		t.Cleanup(func() { _, _ = c.end(os.Kill) }) // it has ended unless the test failed
	}
	return d
}

// errDown means that an engine is down, stops, or died during a request.
var errDown = errors.New("the engine is down")

// ask posts one completion. It returns the tokens, and P's transfer parameters for D.
func (d *deployment) ask(ctx context.Context, c *child, id string, tokens []uint32, n int, params map[string]any) (got []uint32, said map[string]any, err error) {
	body, err := json.Marshal(map[string]any{"prompt": tokens, "max_tokens": n, "return_token_ids": true, "kv_transfer_params": params})
	if err != nil {
		return nil, nil, err
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url()+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return nil, nil, err
	}
	q.Header.Set("Content-Type", "application/json")
	q.Header.Set("X-Request-Id", id)
	r, err := http.DefaultClient.Do(q)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", errDown, err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", errDown, err)
	}
	var answer struct {
		Choices []struct {
			IDs []uint32 `json:"token_ids"`
		}
		Params map[string]any `json:"kv_transfer_params"`
		Error  struct{ Message string }
	}
	switch err := json.Unmarshal(b, &answer); {
	case r.StatusCode == 503:
		return nil, nil, errDown
	case err != nil || r.StatusCode != 200 || len(answer.Choices) != 1:
		return nil, nil, fmt.Errorf("%s answers %d: %s, %v", c.Name, r.StatusCode, answer.Error.Message, err)
	}
	return answer.Choices[0].IDs, answer.Params, nil
}

// play runs one request. While engines are down it starts the request again, as a router does.
func (d *deployment) play(ctx context.Context, i int, tokens []uint32, n int) ([]uint32, error) {
	for life := 0; ; life++ {
		got, err := d.once(ctx, i, fmt.Sprint("x", i, "-", life), tokens, n)
		if !errors.Is(err, errDown) || ctx.Err() != nil {
			return got, err
		}
		d.retries.Add(1)
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// once runs a request through P and D, or through an engine with the cache.
func (d *deployment) once(ctx context.Context, i int, id string, tokens []uint32, n int) ([]uint32, error) {
	if i%3 > 0 {
		got, _, err := d.ask(ctx, d.engines[2+rand.IntN(2)], id, tokens, n, nil)
		return got, err
	}
	p, dec := d.engines[0], d.engines[1]
	decode := map[string]any{"do_remote_decode": true, "transfer_id": id}
	pull := map[string]any{"do_remote_prefill": true, "transfer_id": id, "remote_engine_id": "p", "remote_bootstrap_addr": d.registryURL}
	if d.first {
		delete(decode, "transfer_id")
	}
	_, said, err := d.ask(ctx, p, id, tokens, 1, decode)
	if err != nil {
		return nil, err
	}
	if d.first {
		pull = said
	}
	got, _, err := d.ask(ctx, dec, id, tokens, n, pull)
	return got, err
}

// P, D, two engines that share a cache server, the server and a registry are each killed with SIGKILL while 16
// requests are in flight and some clients leave. All answers are right, nothing hangs, no
// block is lost, memory stays flat. KVASIR_SOAK is the number of requests of each deployment;
// without it one small deployment is run.
func TestDeploymentKilled(t *testing.T) {
	soak, _ := strconv.Atoi(os.Getenv("KVASIR_SOAK"))
	f := func(name string, pTP, dTP int, groups []sched.Group, first bool) {
		t.Run(name, func(t *testing.T) {
			d := deploy(t, name, pTP, dTP, groups, first)
			d.run(max(soak, 24), soak > 0)
		})
	}
	f("full attention, TP 2 to 2", 2, 2, nil, false)
	if soak > 0 {
		f("full attention, TP 2 to 1", 2, 1, nil, false)
		f("full attention, TP 1 to 4", 1, 4, nil, false)
		f("windows, TP 2 to 2", 2, 2, []sched.Group{{}, {Window: 100}}, false)
		f("windows, TP 2 to 1", 2, 1, []sched.Group{{}, {Window: 100}}, false)
		f("states, TP 2 to 2", 2, 2, []sched.Group{{}, {State: true}}, false)
		f("vLLM 0.13, TP 1 to 1", 1, 1, nil, true)
		f("vLLM 0.13, TP 2 to 2", 2, 2, nil, true)
	}
}

func (d *deployment) run(requests int, soak bool) {
	t := d.t
	alone, err := engine.Open(t.Context(), engine.Options{KV: kvmem.Geometry{Layers: 1, Heads: 1, HeadBytes: 8, BlockTokens: 16, Blocks: 1000}, MaxModel: 8192})
	if err != nil {
		t.Fatal(err)
	}
	defer alone.Close()
	defer http.DefaultClient.CloseIdleConnections()
	chats := workload.Chats(requests, workload.ChatOptions{Seed: 9, Open: 16})
	var next, done atomic.Int64
	var killing atomic.Bool
	killing.Store(true)
	var total atomic.Int64
	total.Store(int64(requests))
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for !t.Failed() {
				i := next.Add(1) - 1
				if i >= total.Load() && !killing.Load() {
					return
				}
				chat := &chats[i%int64(len(chats))]
				longest := 3000
				if !soak {
					longest = 600
				}
				tokens, n := chat.Tokens()[:min(chat.Input, longest)], 1+int(i%5)
				ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
				leaves := i%9 == 4
				if leaves {
					time.AfterFunc(time.Duration(i%31)*time.Millisecond, cancel)
				}
				got, err := d.play(ctx, int(i), tokens, n)
				cancel()
				done.Add(1)
				if leaves {
					d.aborts.Add(1)
					continue
				}
				s, serr := alone.Submit(t.Context(), engine.Request{ID: fmt.Sprint("x", i), Tokens: tokens, MaxTokens: n})
				if serr != nil {
					t.Error(serr)
					return
				}
				want, _, _ := s.Wait(t.Context())
				if err != nil || !slices.Equal(got, want) {
					t.Errorf("%s, request %d: %v, %v, want %v", d.name, i, got, err, want)
				}
			}
		})
	}
	kills := d.kill(func() bool { return soak && done.Load() < int64(requests) && !t.Failed() })
	d.ready()
	before := d.memory()
	total.Store(next.Load() + int64(max(requests/2, 16))) // a quiet time, in which nothing may fail
	killing.Store(false)
	wg.Wait()
	middle := d.memory()
	d.idle()
	var figures []string
	for i, c := range d.children {
		figures = append(figures, fmt.Sprintf("%s %d+%d MB", c.Name, before[i]>>20, (middle[i]-before[i])>>20))
		if soak && middle[i] > before[i]+before[i]/2+40<<20 {
			t.Errorf("%s: %s grew from %d to %d bytes", d.name, c.Name, before[i], middle[i])
		}
	}
	for _, c := range slices.Backward(d.children) { // engines first
		out, err := c.end(syscall.SIGTERM)
		if err != nil {
			t.Errorf("%s: %s ended: %v", d.name, c.Name, err)
		}
		if c == d.server && out != "transfers 0 quarantined 0 pending 0\n" {
			t.Errorf("%s: the server's pool: %s", d.name, out)
		}
	}
	t.Logf("%s: %d requests, %d clients left, %d retries, %d kills; %s", d.name, done.Load(), d.aborts.Load(), d.retries.Load(), kills, strings.Join(figures, ", "))
}

// kill kills one process after the other, each at least once, while there is work.
func (d *deployment) kill(more func() bool) (kills int) {
	for kills < len(d.children) || more() {
		if d.t.Failed() {
			return kills
		}
		time.Sleep(time.Duration(300+rand.IntN(400)) * time.Millisecond)
		c := d.children[kills%len(d.children)]
		_, _ = c.end(os.Kill) // it says that it was killed
		kills++
		time.Sleep(50 * time.Millisecond)
		c.start(d.t)
	}
	return kills
}

func (d *deployment) memory() []int64 {
	var out []int64
	for _, c := range d.children {
		out = append(out, c.resident())
	}
	return out
}

// ready waits until every engine answers.
func (d *deployment) ready() {
	for _, c := range d.engines {
		d.await(c.Name+" answers", func() bool { _, err := c.figures(); return err == nil })
	}
}

// idle waits until no engine has a request or a block in use.
func (d *deployment) idle() {
	for _, c := range d.engines {
		var last map[string]float64
		ok := d.wait(func() bool {
			last, _ = c.figures()
			return last["vllm:kv_cache_usage_perc"] == 0 && last["kvasir_engine_kept_requests"] == 0 &&
				last["vllm:num_requests_running"] == 0 && last["vllm:num_requests_waiting"] == 0 && last["kvasir_engine_free_blocks"] > 0
		})
		if !ok || last["kvasir_engine_wrong_kv_requests_total"] > 0 {
			d.t.Errorf("%s: %s is not idle, or was given wrong bytes: %v", d.name, c.Name, last)
		}
	}
}

func (d *deployment) wait(ok func() bool) bool {
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if ok() {
			return true
		}
	}
	return false
}

func (d *deployment) await(what string, ok func() bool) {
	if !d.wait(ok) {
		d.t.Fatalf("%s: never: %s", d.name, what)
	}
}
