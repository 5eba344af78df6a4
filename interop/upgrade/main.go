// SPDX-License-Identifier: Apache-2.0

// Command upgrade swaps a deployment between the previous release and this build, over the same files, under load: first a node and its
// registry, with pool, index, note of registrations, disk, directory, Redis, S3, settings of tenants, registry and event socket; then D,
// P, the relay and two proxies, one after the other. It compares each answer with that of an engine alone, the pool's objects and the
// settings before and after each swap. Then it clears the pool: what the other release wrote into the tiers is found there.
//
//	go build -o bin/kvasir ./cmd/kvasir && go run ./interop/upgrade -previous /tmp/kvasir-release -swaps 5
//	go run ./interop/upgrade -previous /tmp/kvasir-release -swaps 5 -below s3
//
// With several tiers only the first one that has an object is read, so -below names one alone. Each second swap in a direction is by
// kill -9. Redis needs redis-server. It ends with status 1 if a promise is broken.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
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
	"time"

	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
)

const (
	settled  = 2500 * time.Millisecond // what was stored so long before a kill -9 outlives it
	grace    = 20 * time.Second        // after a swap, in which requests may fail with an error
	deadline = 90 * time.Second        // of a request
	clients  = 4
	longest  = 1500 // tokens of a prompt

	systemTokens = 1024 // of each chat's beginning that is left out
)

func main() {
	previous := flag.String("previous", "", "the previous release's binary")
	binary := flag.String("binary", "bin/kvasir", "this build")
	swaps := flag.Int("swaps", 5, "swaps in each direction")
	seed := flag.Uint64("seed", 1, "seed of the load")
	between := flag.Duration("between", 12*time.Second, "load between two swaps")
	below := flag.String("below", "disk,fs,redis,s3", "tiers below the node, comma-separated")
	store := flag.String("s3-store", "", "`PROGRAM` of the S3 store; default: build interop/s3")
	flag.Parse()
	d := &driver{binary: *binary, previous: *previous, store: *store, below: strings.Split(*below, ","), client: &http.Client{Timeout: deadline}}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals
		d.removePool()
		os.Exit(130) // its processes end with it
	}()
	err := d.run(*swaps, *seed, *between)
	d.end()
	for _, why := range slices.Sorted(maps.Keys(d.counts.why)) {
		fmt.Printf("%d requests ended with: %s\n", d.counts.why[why], why)
	}
	if err != nil || d.broken.Load() > 0 {
		fmt.Fprintln(os.Stderr, "upgrade:", d.broken.Load(), "broken promises;", err)
		os.Exit(1)
	}
}

type driver struct {
	binary, previous, dir string
	store                 string   // the S3 store's program
	below                 []string // tiers
	client                *http.Client
	node, registry        *service
	others                []*service // D, P, relay, proxies, in the order of swaps
	proxies               []string   // URLs
	started               []*service
	shm                   string
	alone                 *engine.Engine
	broken                atomic.Int64
	events                atomic.Int64 // messages
	swapped               atomic.Int64 // Unix ms of the last swap's end; during one it is in the future
	counts                struct {
		sync.Mutex
		ok, failed, prompt, cached int64
		why                        map[string]int // of those that ended with an error
	}
}

// service is a process that is started again.
type service struct {
	name, health string
	args         []string // without the binary
	log          string
	cmd          *exec.Cmd
}

func (s *service) start(binary string) error {
	f, err := os.OpenFile(s.log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	s.cmd = exec.Command(binary, s.args...)
	s.cmd.Stdout, s.cmd.Stderr = f, f
	// P's blocks are few: it gives up soon what a proxy that was killed had it compute.
	s.cmd.Env = append(os.Environ(), "VLLM_HOST_IP=127.0.0.1", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=8")
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return s.cmd.Start()
}

func (s *service) end(sig syscall.Signal) {
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Signal(sig) // it may have ended
	_ = s.cmd.Wait()
	s.cmd = nil
}

func (d *driver) end() {
	for _, s := range slices.Backward(d.started) {
		s.end(syscall.SIGKILL)
	}
	d.removePool()
	if d.alone != nil {
		_ = d.alone.Close()
	}
}

func (d *driver) removePool() {
	for _, suffix := range []string{"", ".kvasir", ".workers"} {
		_ = os.Remove(d.shm + suffix)
	}
}

func (d *driver) violation(format string, args ...any) {
	d.broken.Add(1)
	fmt.Printf("BROKEN "+format+"\n", args...)
}

func freePort() string {
	for {
		port := strconv.Itoa(20000 + rand.IntN(10000))
		if l, err := net.Listen("tcp", "127.0.0.1:"+port); err == nil {
			_ = l.Close()
			return port
		}
	}
}

func await(what string, limit time.Duration, f func() error) error {
	var err error
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if err = f(); err == nil {
			return nil
		}
	}
	return fmt.Errorf("%s: %w", what, err)
}

func (d *driver) ask(method, url, body string, into any) error {
	q, err := http.NewRequestWithContext(context.Background(), method, url, strings.NewReader(body))
	if err != nil {
		return err
	}
	q.Header.Set("Content-Type", "application/json")
	a, err := d.client.Do(q)
	if err != nil {
		return err
	}
	defer a.Body.Close()
	b, err := io.ReadAll(a.Body)
	if err != nil {
		return err
	}
	if a.StatusCode/100 != 2 {
		return fmt.Errorf("%s %s: %s: %.300s", method, url, a.Status, b)
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(b, into)
}

func (d *driver) begin(s *service, binary string) error {
	s.log = filepath.Join(d.dir, s.name+".log")
	d.started = append(d.started, s)
	if err := s.start(binary); err != nil {
		return err
	}
	return d.well(s)
}

func (d *driver) well(s *service) error {
	return await(s.name, 60*time.Second, func() error {
		if s.health == "" {
			return nil
		}
		if at, ok := strings.CutPrefix(s.health, "tcp:"); ok {
			c, err := net.Dial("tcp", at)
			if err == nil {
				err = c.Close()
			}
			return err
		}
		return d.ask("GET", s.health, "", nil)
	})
}

func (d *driver) run(swaps int, seed uint64, between time.Duration) (err error) {
	if d.previous == "" {
		return errors.New("-previous names no binary")
	}
	if d.dir, err = os.MkdirTemp("", "kvasir-upgrade-"); err != nil {
		return err
	}
	fmt.Println("logs:", d.dir)
	d.alone, err = engine.Open(context.Background(), engine.Options{
		Model: "m", KV: kvmem.Geometry{Layers: 1, Heads: 1, HeadBytes: 8, BlockTokens: 16, Blocks: 2000, TPSize: 1}, MaxModel: 8192,
	})
	if err != nil {
		return err
	}
	if err := d.deploy(); err != nil {
		return err
	}
	if err := d.ask("PUT", d.admin("/tenants/team"), `{"quota_bytes":8388608,"ttl_seconds":3600}`, nil); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	d.load(ctx, &wg, seed)
	time.Sleep(between)
	for i := range 2 * swaps { // the node began as the previous release
		to, name, sig := d.binary, "upgrade", syscall.SIGTERM
		if i%2 == 1 {
			to, name = d.previous, "downgrade"
		}
		if i/2%2 == 1 {
			sig = syscall.SIGKILL
		}
		if err := d.swap(fmt.Sprintf("%s %d", name, i/2+1), to, sig, i); err != nil {
			return err
		}
		if err := d.swapOthers(to, sig); err != nil {
			return err
		}
		if err := d.fromTiers(fmt.Sprintf("%s %d", name, i/2+1), between); err != nil {
			return err
		}
	}
	return nil
}

func (d *driver) admin(path string) string {
	return strings.TrimSuffix(d.node.health, "/readyz") + path
}

// objects are the keys of the pool.
func (d *driver) objects() (map[string]bool, error) {
	out := map[string]bool{}
	for token := ""; ; {
		var page struct {
			Entries []struct{ Key json.RawMessage }
			Next    string `json:"next_page_token"`
		}
		if err := d.ask("GET", d.admin("/cache/objects?page_size=5000&page_token="+token), "", &page); err != nil {
			return nil, err
		}
		for _, e := range page.Entries {
			var fields map[string]any
			if err := json.Unmarshal(e.Key, &fields); err != nil {
				return nil, err
			}
			out[fmt.Sprint(fields["chunk_hash_hex"], fields["cache_salt"], fields["kv_rank"])] = true
		}
		if token = page.Next; token == "" {
			return out, nil
		}
	}
}

func (d *driver) metrics() (string, error) {
	q, err := http.NewRequestWithContext(context.Background(), http.MethodGet, d.admin("/metrics"), nil)
	if err != nil {
		return "", err
	}
	a, err := d.client.Do(q)
	if err != nil {
		return "", err
	}
	defer a.Body.Close()
	b, err := io.ReadAll(a.Body)
	return string(b), err
}

// sumOf adds the samples of a metric.
func sumOf(text, name string) (sum float64) {
	for line := range strings.Lines(text) {
		rest, ok := strings.CutPrefix(line, name)
		fields := strings.Fields(rest)
		if !ok || len(fields) == 0 || rest[0] != ' ' && rest[0] != '{' {
			continue
		}
		n, _ := strconv.ParseFloat(fields[len(fields)-1], 64) // of our own servers
		sum += n
	}
	return sum
}

// swap ends node and registry and starts the other release over their files.
func (d *driver) swap(name, to string, sig syscall.Signal, i int) error {
	team := fmt.Sprintf(`{"quota_bytes":%d,"ttl_seconds":3600}`, 8<<20+i)
	if err := d.ask("PUT", d.admin("/tenants/team"), team, nil); err != nil {
		return err
	}
	before, err := d.objects()
	if err != nil {
		return err
	}
	time.Sleep(settled)
	messages := d.events.Load()
	text, err := d.metrics()
	if err != nil {
		return err
	}
	for _, bad := range []string{"kvasir_corrupt_chunks_total", "kvasir_tier_corrupt_total", "kvasir_disk_corrupt_objects_total"} {
		if n := sumOf(text, bad); n > 0 {
			d.violation("before %s: %s is %v", name, bad, n)
		}
	}
	retrieved := sumOf(text, "kvasir_retrieved_bytes_total")
	d.swapped.Store(time.Now().Add(time.Hour).UnixMilli())
	began := time.Now()
	for _, s := range []*service{d.node, d.registry} {
		s.end(sig)
	}
	ended := time.Since(began)
	if err := errors.Join(d.registry.start(to), d.node.start(to)); err != nil {
		return err
	}
	if err := d.well(d.registry); err != nil {
		return err
	}
	var directory map[string]struct {
		Engine string `json:"engine_id"`
	}
	if err := d.ask("GET", strings.TrimSuffix(d.registry.health, "/healthz")+"/query", "", &directory); err != nil || directory["0"].Engine != "p" {
		d.violation("%s: the registry knows %v, %v", name, directory, err)
	}
	if err := d.well(d.node); err != nil {
		return err
	}
	ready := time.Since(began)
	after, err := d.objects()
	if err != nil {
		return err
	}
	lost := 0
	for k := range before {
		if !after[k] {
			lost++
		}
	}
	switch {
	case lost > 0 && lost == len(before) && i == 0: // docs/reliability-parts.md names it
		fmt.Printf("LOST AS NAMED %s: all %d objects of the pool: the tiers had no note of generations yet\n", name, lost)
	case lost > 0:
		d.violation("%s: %d of %d objects of the pool are lost", name, lost, len(before))
	}
	var kept json.RawMessage
	if err := d.ask("GET", d.admin("/tenants"), "", &kept); err != nil || !bytes.Contains(kept, []byte(strconv.Itoa(8<<20+i))) {
		d.violation("%s: the settings of the tenant are %s, %v", name, kept, err)
	}
	d.swapped.Store(time.Now().UnixMilli())
	if err := await("events", 30*time.Second, func() error {
		if d.events.Load() == messages {
			return errors.New("none came")
		}
		return nil
	}); err != nil {
		d.violation("%s: %v", name, err)
	}
	d.counts.Lock()
	defer d.counts.Unlock()
	fmt.Printf("%-12s %v: ended after %v, ready after %v; pool %d of %d objects, event messages %d; %.0f MiB were read from the node before; so far %d answered, %d ended with an error, %.0f %% of prompt tokens cached\n",
		name, sig, ended.Round(time.Millisecond), ready.Round(time.Millisecond), len(before)-lost, len(before), d.events.Load(), retrieved/(1<<20), d.counts.ok, d.counts.failed, 100*float64(d.counts.cached)/float64(max(1, d.counts.prompt)))
	return nil
}

// swapOthers swaps engines, relay and proxies, one after the other.
func (d *driver) swapOthers(to string, sig syscall.Signal) error {
	began := time.Now()
	for _, s := range d.others {
		d.swapped.Store(time.Now().Add(time.Hour).UnixMilli())
		s.end(sig)
		if err := errors.Join(s.start(to), d.well(s)); err != nil {
			return err
		}
		d.swapped.Store(time.Now().UnixMilli())
	}
	fmt.Printf("             engines, relay and proxies: swapped after %v\n", time.Since(began).Round(time.Millisecond))
	return nil
}

// fromTiers clears the pool under the load, which asks for what the tiers have had from the other release.
func (d *driver) fromTiers(name string, between time.Duration) error {
	time.Sleep(grace) // engines have registered with the node
	before, err := d.metrics()
	if err != nil {
		return err
	}
	if err := d.ask("POST", d.admin("/cache/clear"), `{"tier":"l1"}`, nil); err != nil {
		return err
	}
	time.Sleep(between)
	after, err := d.metrics()
	if err != nil {
		return err
	}
	delta := func(name string) float64 { return sumOf(after, name) - sumOf(before, name) }
	read, stored := delta("kvasir_tier_read_bytes_total")+delta("kvasir_disk_read_bytes_total"), delta("kvasir_stored_bytes_total")
	switch {
	case read == 0:
		d.violation("%s: with the pool cleared, nothing was read from the tiers", name)
	case stored > read/10:
		d.violation("%s: with the pool cleared, %.1f MiB were stored again: the tiers had lost them", name, stored/(1<<20))
	}
	fmt.Printf("             the pool cleared: %.1f MiB read from the tiers, %.1f MiB computed and stored\n", read/(1<<20), stored/(1<<20))
	return nil
}
