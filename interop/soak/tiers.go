// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Tiers below both nodes: their own disks, a Redis Cluster, a bucket of S3, a Mooncake Store; node2 also has a directory.
const (
	redisNodes   = 6 // three primaries, each with a replica
	redisPort    = 7001
	s3Port       = 9100 // of the forwarder, on host r
	s3Behind     = 9101 // of the store, which the forwarder alone reaches
	s3Bucket     = "kvcache"
	masterPort   = 50051
	storeMemory  = "48MiB" // of each store-node
	redisTimeout = 1500 * time.Millisecond
	none         = "none"
	auto         = "auto"
)

// machine finds what this machine has of the tiers' servers, and builds the object store. What it lacks is set to none.
// It returns the reason of each.
func (o *options) machine(ctx context.Context) (lacks map[string]string) {
	lacks = map[string]string{}
	lack := func(what, reason string, setting *string) {
		lacks[what], *setting = reason, none
	}
	switch o.redis {
	case none:
		lack("redis", "-redis none", &o.redis)
	case "one", "cluster", auto:
		for _, program := range []string{"redis-server", "redis-cli"} {
			if _, err := exec.LookPath(program); err != nil {
				lack("redis", err.Error(), &o.redis)
			}
		}
		if o.redis == auto {
			o.redis = "cluster"
		}
	}
	switch o.store {
	case none:
		lack("s3", "-s3-store none", &o.store)
	case auto:
		if path, err := buildStore(ctx, o.dir); err != nil {
			lack("s3", err.Error(), &o.store)
		} else {
			o.store = path
		}
	}
	switch o.master {
	case none:
		lack("mooncake", "-mooncake-master none", &o.master)
	case auto:
		if path, err := findMaster(); err != nil {
			lack("mooncake", err.Error(), &o.master)
		} else {
			o.master = path
		}
	}
	return lacks
}

// buildStore builds the object store of interop/s3, a module of its own.
func buildStore(ctx context.Context, dir string) (string, error) {
	to := filepath.Join(dir, "s3store")
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", "build", "-o", to, ".")
	cmd.Dir = filepath.Join("interop", "s3")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build interop/s3: %w: %.300s", err, out)
	}
	return to, nil
}

// findMaster looks for mooncake_master in PATH, then in the environments that the interop scripts keep.
func findMaster() (string, error) {
	paths := []string{}
	if path, err := exec.LookPath("mooncake_master"); err == nil {
		paths = append(paths, path)
	}
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	found, _ := filepath.Glob(filepath.Join(cache, "*", "venv", "lib", "python*", "site-packages", "mooncake", "mooncake_master")) // the pattern is well formed
	paths = append(paths, found...)
	for _, path := range paths {
		out, err := exec.Command(path, "--version").CombinedOutput() // a library may be missing
		if text := string(out); err == nil || strings.Contains(text, "mooncake_master") && !strings.Contains(text, "shared libraries") {
			return path, nil
		}
	}
	return "", fmt.Errorf("no mooncake_master that runs, in PATH or below %s", cache)
}

// cacheDir is where the interop scripts keep their environments.
func cacheDir() (string, error) {
	if dir := os.Getenv("KVASIR_CACHE"); dir != "" {
		return dir, nil
	}
	base, err := os.UserCacheDir()
	return filepath.Join(base, "kvasir"), err
}

// tierParts describes the servers of the tiers, in the order of starting.
func tierParts(o *options) (parts []*part) {
	for i := range map[string]int{"one": 1, "cluster": redisNodes}[o.redis] {
		parts = append(parts, redisPart(o, i))
	}
	if o.store != none {
		parts = append(parts, &part{
			name: "s3", kind: "s3", foreign: true, health: fmt.Sprintf("127.0.0.1:%d", s3Behind),
			args: []string{o.store, "-bucket", s3Bucket, "-addr", fmt.Sprintf("127.0.0.1:%d", s3Behind)},
		})
	}
	if o.master == none {
		return parts
	}
	r := addrOf("r")
	parts = append(parts, &part{
		name: "master", kind: "master", foreign: true, host: "r", health: fmt.Sprintf("%s:%d", r, masterPort),
		args: []string{o.master, "--rpc_address=" + r, fmt.Sprintf("--rpc_port=%d", masterPort), "--metrics_host=" + r, "--metrics_port=9003", "--client_ttl=5"},
		env:  []string{"LD_LIBRARY_PATH=" + filepath.Dir(o.master)},
	})
	for i, h := range []string{"h1", "h2"} {
		addr := addrOf(h)
		parts = append(parts, &part{
			name: fmt.Sprintf("store%d", i+1), kind: "store", host: h, health: fmt.Sprintf("http://%s:9004/healthz", addr),
			args: []string{o.binary, "store-node", "--master", fmt.Sprintf("%s:%d", r, masterPort), "--host", addr, "--memory-gb", storeMemory, "--http-port", "9004"},
		})
	}
	return parts
}

func redisPart(o *options, i int) *part {
	name := fmt.Sprintf("redis%d", i+1)
	args := []string{
		"redis-server", "--port", fmt.Sprint(redisPort + i), "--bind", addrOf("r"), "--protected-mode", "no", "--save", "", "--appendonly", "no",
		"--dir", filepath.Join(o.dir, name), "--maxmemory", redisMemory, "--maxmemory-policy", "allkeys-lru",
	}
	if o.redis == "cluster" {
		args = append(args, "--cluster-enabled", "yes", "--cluster-node-timeout", fmt.Sprint(redisTimeout.Milliseconds()), "--cluster-require-full-coverage", "no",
			"--cluster-replica-validity-factor", "0", "--cluster-allow-replica-migration", "no", "--repl-diskless-sync-delay", "0")
	}
	return &part{name: name, kind: "redis", foreign: true, host: "r", health: fmt.Sprintf("%s:%d", addrOf("r"), redisPort+i), args: args}
}

// redisMemory is that of each Redis.
const redisMemory = "32mb"

// adapters are the values of a node's --l2-adapter.
func adapters(o *options, n int) (out []string) {
	r := addrOf("r")
	switch o.redis {
	case "one":
		out = append(out, fmt.Sprintf(`{"type":"redis","host":"%s","port":%d,"request_timeout":2,"connection_timeout":2}`, r, redisPort))
	case "cluster":
		out = append(out, fmt.Sprintf(`{"type":"redis","startup_nodes":"%s:%d,%s:%d","cluster_mode":true,"request_timeout":2,"connection_timeout":2}`, r, redisPort, r, redisPort+1))
	}
	if o.store != none {
		out = append(out, fmt.Sprintf(`{"type":"s3_native","s3_endpoint":"http://%s:%d","s3_bucket":%q,"s3_addressing_style":"path","aws_access_key_id":"id","aws_secret_access_key":"secret","request_timeout":2,"connection_timeout":2}`,
			r, s3Port, s3Bucket))
	}
	if o.master != none {
		out = append(out, fmt.Sprintf(`{"type":"mooncake_store","master_server_addr":"%s:%d"}`, r, masterPort))
	}
	if n == 2 {
		out = append(out, fmt.Sprintf(`{"type":"fs","base_path":%q}`, filepath.Join(o.dir, "fs2")))
	}
	return out
}

// redisParts are all nodes of the cluster, or the one Redis.
func (s *soak) redisParts() (out []*part) {
	for _, p := range s.parts {
		if p.kind == "redis" {
			out = append(out, p)
		}
	}
	return out
}

// makeCluster makes a cluster of the Redis servers, which have started.
func (s *soak) makeCluster(ctx context.Context) error {
	if s.o.redis != "cluster" {
		return nil
	}
	args := []string{"--cluster", "create"}
	for _, p := range s.redisParts() {
		args = append(args, p.health)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, "redis-cli", append(args, "--cluster-replicas", "1", "--cluster-yes")...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("make a cluster: %w: %s", err, out)
	}
	if err := eventually(ctx, 30*time.Second, func() error { return s.clusterWhole() }); err != nil {
		return err
	}
	s.primaries()
	return ctx.Err()
}

// clusterWhole reports why a node of the cluster does not serve, or has no peer.
func (s *soak) clusterWhole() error {
	if s.o.redis != "cluster" {
		return nil
	}
	primaries := 0
	for _, p := range s.redisParts() {
		info, err := redisCall(p, "CLUSTER", "INFO")
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		if !strings.Contains(info, "cluster_state:ok") || !strings.Contains(info, "cluster_slots_ok:16384") {
			return fmt.Errorf("%s: %.200q", p.name, info)
		}
		switch role, err := redisCall(p, "ROLE"); {
		case err != nil:
			return fmt.Errorf("%s: %w", p.name, err)
		case strings.Contains(role, "\r\nmaster\r\n"):
			primaries++
		}
	}
	if primaries != redisNodes/2 {
		return fmt.Errorf("%d of %d nodes of Redis are primaries", primaries, redisNodes)
	}
	return nil
}

// primaries returns the Redis servers that are primaries now, and counts those that have become one since the last call: failovers.
func (s *soak) primaries() (primaries, replicas []*part) {
	for _, p := range s.redisParts() {
		role, err := redisCall(p, "ROLE")
		switch {
		case err != nil: // down or stopped: it has no role
		case strings.Contains(role, "\r\nmaster\r\n"):
			primaries = append(primaries, p)
		default:
			replicas = append(replicas, p)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range primaries {
		if s.replica[p.name] {
			s.record.Failovers++
		}
		s.replica[p.name] = false
	}
	for _, p := range replicas {
		s.replica[p.name] = true
	}
	return primaries, replicas
}

// redisCall sends one command of plain words and returns the beginning of the answer.
func redisCall(p *part, words ...string) (string, error) {
	const patience = time.Second
	c, err := net.DialTimeout("tcp", p.health, patience)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return "", err
	}
	if _, err := fmt.Fprintf(c, "%s\r\n", strings.Join(words, " ")); err != nil {
		return "", err
	}
	b := make([]byte, 4096)
	n, err := c.Read(b)
	if err == nil && n > 0 && b[0] == '-' {
		err = fmt.Errorf("redis: %s", b[:n])
	}
	return string(b[:n]), err
}

var errNoTarget = errors.New("the deployment has none here")

// victim returns the part that a fault is for, and its kind: what is a primary of Redis changes with each failover.
func (s *soak) victim(f fault) (*part, string, error) {
	var from []*part
	kind := f.Target
	switch f.Target {
	case "redis", "replica":
		primaries, replicas := s.primaries()
		if from = primaries; f.Target == "replica" {
			from = replicas
		}
		if len(from) == 0 && len(s.redisParts()) > 0 {
			return nil, "", fmt.Errorf("no %s of Redis answers at the moment", f.Target)
		}
	default:
		if i := slices.IndexFunc(s.parts, func(p *part) bool { return p.name == f.Target }); i >= 0 {
			from, kind = s.parts[i:i+1], s.parts[i].kind
		}
	}
	if len(from) == 0 {
		return nil, "", fmt.Errorf("%s: %w: %s", f.Target, errNoTarget, s.lackOf(f.Target))
	}
	return from[int(f.At/time.Millisecond)%len(from)], kind, nil
}

// lackOf says why the deployment has no such part.
func (s *soak) lackOf(target string) string {
	what := map[string]string{"replica": "redis", "master": "mooncake", "store1": "mooncake", "store2": "mooncake"}[target]
	if what == "" {
		what = target
	}
	if reason := s.record.Lacks[what]; reason != "" {
		return reason
	}
	return "-" + what + " " + s.o.redis
}

// redisOOM leaves all Redis servers without memory for a while.
func (s *soak) redisOOM(ctx context.Context, d time.Duration) error {
	if len(s.redisParts()) == 0 {
		return fmt.Errorf("redis: %w: %s", errNoTarget, s.lackOf("redis"))
	}
	took := 0
	for _, w := range [][]string{{"CONFIG", "SET", "maxmemory-policy", "noeviction"}, {"CONFIG", "SET", "maxmemory", "1mb"}} {
		var err error
		if took, err = s.redisEach(w...); took == 0 { // one that is stopped or killed has its memory
			return err
		}
	}
	wait(ctx, d)
	for _, w := range [][]string{{"CONFIG", "SET", "maxmemory", redisMemory}, {"CONFIG", "SET", "maxmemory-policy", "allkeys-lru"}} {
		for range 20 { // one may be stopped or killed; a new life has its own settings
			if _, err := s.redisEach(w...); err == nil {
				break
			}
			wait(ctx, 500*time.Millisecond)
		}
	}
	return nil
}

// redisEach sends a command to each Redis server, and counts those that took it.
func (s *soak) redisEach(words ...string) (took int, err error) {
	for _, p := range s.redisParts() {
		if _, e := redisCall(p, words...); e != nil {
			err = fmt.Errorf("%s: %w", p.name, e)
		} else {
			took++
		}
	}
	return took, err
}

// redisFlush empties all primaries.
func (s *soak) redisFlush() error {
	primaries, _ := s.primaries()
	if len(primaries) == 0 {
		return fmt.Errorf("redis: no primary answers: %s", s.lackOf("redis"))
	}
	for _, p := range primaries {
		if _, err := redisCall(p, "FLUSHALL"); err != nil {
			return err
		}
	}
	return nil
}
