// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// part is one process of the deployment, started again after each end.
type part struct {
	name   string
	kind   string // node, p, d, registry, relay, proxy, store, keeper; of others' programs: redis, s3, master; alone: the real engine that computes what answers must be
	host   string // its network namespace; "" is the driver's
	health string // URL that answers 200 when it is well; of others' programs but real engines: HOST:PORT
	// foreign is a program that is not Kvasir's: it is killed and started again, but its own faults are no violations.
	foreign bool
	args    []string
	env     []string
	log     string
	clock   string // file with the seconds that its wall clock is ahead, in a build with -clocks

	scanning sync.Mutex
	scanned  int64 // bytes of the log, under scanning

	mu struct {
		sync.Mutex
		cmd     *exec.Cmd
		ended   chan struct{} // closed when cmd has ended
		wanted  bool          // an end of cmd is a violation
		stopped bool          // SIGSTOP
		began   time.Time     // of cmd
		lives   int
		old     bool // its lives are of the previous release, whose bugs are known
	}
}

// start starts a life. alone is called when it ends by itself, with how long it was.
func (p *part) start(alone func(p *part, err error, lived time.Duration)) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.cmd != nil {
		return nil
	}
	log := p.log
	if p.mu.old {
		log += ".previous"
	}
	f, err := os.OpenFile(log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	args := p.args
	if p.host != "" {
		args = append([]string{"nsenter", "--net=/run/netns/" + p.host}, args...)
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(withoutFlags(os.Environ()), p.env...)
	cmd.Stdout, cmd.Stderr = f, f
	if p.isRealEngine() { // it has processes of its own, which outlive kill -9 of the first one
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	}
	p.mu.lives++
	fmt.Fprintf(f, "--- life %d at %s\n", p.mu.lives, time.Now().UTC().Format(time.TimeOnly))
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	ended := make(chan struct{})
	p.mu.cmd, p.mu.ended, p.mu.wanted, p.mu.stopped = cmd, ended, true, false
	began := time.Now()
	p.mu.began = began
	go func() {
		err := cmd.Wait()
		if p.isRealEngine() {
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // nothing may be left of it
		}
		p.mu.Lock()
		wanted := p.mu.wanted && p.mu.cmd == cmd
		if p.mu.cmd == cmd {
			p.mu.cmd = nil
		}
		p.mu.Unlock()
		close(ended)
		if wanted {
			alone(p, err, time.Since(began))
		}
	}()
	return nil
}

// setBinary sets the program of the next lives; old is that of the previous release.
func (p *part) setBinary(path string, old bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.args, p.mu.old = append([]string{path}, p.args[1:]...), old
}

func (p *part) isOld() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.old
}

// end sends a signal that ends the process, and waits. It reports whether the process ended within limit.
func (p *part) end(sig syscall.Signal, limit time.Duration) bool {
	p.mu.Lock()
	cmd, ended := p.mu.cmd, p.mu.ended
	if cmd == nil {
		p.mu.Unlock()
		return true
	}
	p.mu.wanted = false
	if p.mu.stopped {
		_ = cmd.Process.Signal(syscall.SIGCONT)
		if p.isRealEngine() {
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGCONT) // it may have ended
		}
	}
	_ = cmd.Process.Signal(sig) // it may have ended
	p.mu.Unlock()
	select {
	case <-ended:
		return true
	case <-time.After(limit):
		_ = cmd.Process.Signal(syscall.SIGQUIT) // stacks into the log
		select {
		case <-ended:
		case <-time.After(2 * time.Second):
			_ = cmd.Process.Kill()
			<-ended
		}
		return false
	}
}

// stacks has the process write the stacks of its goroutines into the log, which ends it.
func (p *part) stacks() {
	p.mu.Lock()
	cmd, ended := p.mu.cmd, p.mu.ended
	p.mu.wanted = false
	if cmd != nil {
		_ = cmd.Process.Signal(syscall.SIGQUIT)
	}
	p.mu.Unlock()
	if cmd == nil {
		return
	}
	select {
	case <-ended:
	case <-time.After(5 * time.Second):
	}
}

// pause stops the process or lets it go on.
func (p *part) pause(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.cmd == nil {
		return
	}
	sig := syscall.SIGCONT
	if on {
		sig = syscall.SIGSTOP
	}
	p.mu.stopped = on
	if p.isRealEngine() {
		_ = syscall.Kill(-p.mu.cmd.Process.Pid, sig) // it may have ended
		return
	}
	_ = p.mu.cmd.Process.Signal(sig)
}

func (p *part) pid() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.cmd == nil {
		return 0
	}
	return p.mu.cmd.Process.Pid
}

var httpClient = &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// well reports why the part cannot be used.
func (p *part) well(ctx context.Context) error {
	if !strings.HasPrefix(p.health, "http") {
		c, err := net.DialTimeout("tcp", p.health, time.Second)
		if err != nil {
			return err
		}
		return c.Close()
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, p.health, nil)
	if err != nil {
		return err
	}
	a, err := httpClient.Do(r)
	if err != nil {
		return err
	}
	defer a.Body.Close()
	if a.StatusCode != http.StatusOK {
		b := make([]byte, 200)
		n, _ := a.Body.Read(b)
		return fmt.Errorf("%s: %s", a.Status, bytes.TrimSpace(b[:n]))
	}
	return nil
}

// await waits until the part is well.
func (p *part) await(ctx context.Context, limit time.Duration) error {
	var err error
	for end := time.Now().Add(limit); time.Now().Before(end); {
		if err = p.well(ctx); err == nil {
			return nil
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return fmt.Errorf("%s is not well after %v: %w", p.name, limit, err)
}

// reason returns the last line of the log if it is an error of the command line's.
func (p *part) reason() string {
	b, err := os.ReadFile(p.log)
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	if last := lines[len(lines)-1]; strings.HasPrefix(last, "kvasir: ") {
		return last
	}
	return ""
}

// words in a log that are violations whenever they come.
var words = []string{"panic:", "fatal error:", "DATA RACE", "BUG:", "level=ERROR msg=\"panic", wrongBytes}

// wrongBytes is what an engine logs that was given KV which is not its tokens'. A request that fails by it may be tried again
// elsewhere, or fail near a fault, and kill -9 ends the engine's counters: only the log has all of them.
const wrongBytes = "wrong KV bytes"

// scan looks for such words in what the log has gained since it was called last.
func (p *part) scan() error {
	if p.isRealEngine() { // its words are its own
		return nil
	}
	p.scanning.Lock()
	defer p.scanning.Unlock()
	f, err := os.Open(p.log)
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := io.ReadAll(io.NewSectionReader(f, p.scanned, 1<<62))
	if err != nil {
		return err
	}
	whole := bytes.LastIndexByte(b, '\n') + 1 // a line that is being written is read again
	p.scanned += int64(whole)
	for _, w := range words {
		if i := bytes.Index(b, []byte(w)); i >= 0 {
			line, _, _ := strings.Cut(string(b[i:min(len(b), i+300)]), "\n")
			return fmt.Errorf("%s: %s", p.log, line)
		}
	}
	return nil
}

const (
	nodePort = 5555
	nodeHTTP = 8080
	pPort    = 8101
	dPort    = 8102
)

// variant is the model and how engines hold it, drawn by the seed.
type variant struct {
	name     string
	pTP, dTP int
	window   bool // a hybrid model: a group of full attention and one of sliding windows
}

func variantOf(seed uint64) variant {
	return []variant{{"TP 1 to 1", 1, 1, false}, {"TP 2 to 1", 2, 1, false}, {"windows, TP 1 to 1", 1, 1, true}, {"TP 1 to 2", 1, 2, false}}[seed%4]
}

// makeParts describes the deployment, in the order of starting.
func makeParts(o *options, v variant) (parts []*part) {
	add := func(p *part) *part {
		p.log = filepath.Join(o.dir, p.name+".log")
		if !p.foreign { // by the environment: the previous release has no such flag
			p.clock = filepath.Join(o.dir, p.name+".clock")
			p.env = append(p.env, clockEnv+"="+p.clock, heapEnv+"="+filepath.Join(o.dir, p.name+".heap"), "KVASIR_"+strings.ToUpper(strings.ReplaceAll(p.args[1], "-", "_"))+"_ALLOW_FROM="+network)
		}
		parts = append(parts, p)
		return p
	}
	k := func(args ...string) []string { return append([]string{o.binary}, args...) }
	for _, p := range tierParts(o) {
		add(p)
	}
	registries := []string{fmt.Sprintf("http://%s:8998", bridgeAddr), fmt.Sprintf("http://%s:8999", bridgeAddr)} // one for each P: a registry has one engine
	relay := fmt.Sprintf("http://%s:9000", bridgeAddr)
	for i, url := range registries {
		name := fmt.Sprintf("registry%d", i+1)
		add(&part{
			name: name, kind: "registry", health: url + "/healthz",
			args: k("bootstrap", "--host", bridgeAddr, "--port", fmt.Sprint(8998+i), "--state", filepath.Join(o.dir, name+".state")),
		})
	}
	for i, h := range []string{"h1", "h2"} {
		add(nodePart(o, v, h, i))
	}
	add(&part{ // node2's directory has no limit of its own
		name: "keeper", kind: "keeper", health: "http://127.0.0.1:9095/healthz",
		args: k("keeper", filepath.Join(o.dir, "fs2"), "--max-gb", "96MiB", "--http-port", "9095"),
	})
	for i, h := range []string{"h1", "h2"} {
		add(enginePart(o, v, "p", h, i, pPort))
		add(enginePart(o, v, "d", h, i, dPort))
	}
	add(&part{
		name: "relay", kind: "relay", health: relay + "/healthz",
		args: k("relay", "--upstream", registries[0], "--host", bridgeAddr, "--port", "9000", "--memory-gb", "48MiB", "--timeout", "15"),
	})
	if o.real != "" {
		add(realPart(o, "alone", "alone", "", alonePort, ""))
	}
	for i, first := range []string{relay, registries[0]} {
		port := 8000 + i
		args := k("proxy", "--host", bridgeAddr, "--port", fmt.Sprint(port), "--policy", []string{"prefix_aware", "least_loaded"}[i],
			"--prefill-timeout", o.patience(15*time.Second).String(), "--first-byte-timeout", o.patience(20*time.Second).String(), "--stall-timeout", o.patience(10*time.Second).String(),
			"--queue-timeout", o.patience(10*time.Second).String(), "--drain-timeout", "5s")
		for j, h := range []string{"h1", "h2"} {
			args = append(args, "--prefill", fmt.Sprintf("http://%s:%d,%s", addrOf(h), pPort, []string{first, registries[1]}[j]), "--decode", fmt.Sprintf("http://%s:%d", addrOf(h), dPort))
		}
		add(&part{name: fmt.Sprintf("proxy%d", i+1), kind: "proxy", health: fmt.Sprintf("http://%s:%d/health", bridgeAddr, port), args: args})
	}
	return parts
}

func nodePart(o *options, v variant, host string, i int) *part {
	addr := addrOf(host)
	n := i + 1
	args := []string{
		o.binary, "server", "--host", "127.0.0.1", "--port", fmt.Sprint(nodePort), "--http-host", addr, "--http-port", fmt.Sprint(nodeHTTP),
		"--l1-size-gb", "32MiB", "--chunk-size", "64", "--shm-name", fmt.Sprintf("kvasir_n%d", n), "--state", filepath.Join(o.dir, fmt.Sprintf("node%d.state", n)),
		"--disk", filepath.Join(o.dir, fmt.Sprintf("disk%d", n), "kv"), "--disk-gb", "0.125", "--l1-write-ttl-seconds", "15", "--session-ttl-seconds", "20",
		"--kv-events", fmt.Sprintf("tcp://%s:5557", addr), "--kv-events-replay", fmt.Sprintf("tcp://%s:5558", addr), "--drain-timeout-seconds", "5",
	}
	if v.window {
		args = append(args, "--separate-object-groups")
	}
	for _, a := range adapters(o, n) {
		args = append(args, "--l2-adapter", a)
	}
	return &part{name: fmt.Sprintf("node%d", n), kind: "node", host: host, health: fmt.Sprintf("http://%s:%d/readyz", addr, nodeHTTP), args: args}
}

func enginePart(o *options, v variant, kind, host string, i, port int) *part {
	n, tp, mode := i+1, v.dTP, "engine_driven"
	blocks := 400 // D's: two of the longest prompts and their answers; blocks that were freed are used again soon
	if kind == "p" {
		tp, blocks = v.pTP, 700
	}
	if (i == 1 || v.window) && o.real == "" { // engine_driven has one group of full attention
		mode = "lmcache_driven"
	}
	cache := fmt.Sprintf(`{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute","kv_connector_extra_config":{
		"lmcache.mp.server_urls":"tcp://127.0.0.1:%d","lmcache.mp.mp_transfer_mode":%q,"lmcache.mp.mq_timeout":%d,"lmcache.mp.heartbeat_interval":0.5}}`, nodePort, mode, o.nodePatience())
	moon := `{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}`
	if kind == "p" {
		moon = fmt.Sprintf(`{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_connector_extra_config":{"bootstrap_server_address":"%s:%d"}}`, bridgeAddr, 8998+i)
	}
	config := fmt.Sprintf(`{"kv_connector":"MultiConnector","kv_role":"kv_both","engine_id":"%s%d","kv_load_failure_policy":"recompute","kv_connector_extra_config":{"connectors":[%s,%s]}}`,
		kind, n, moon, cache)
	args := []string{
		o.binary, "engine", "--host", addrOf(host), "--port", fmt.Sprint(port), "--model", "m", "--layers", "2", "--kv-heads", "4", "--head-bytes", "64",
		"--num-gpu-blocks-override", fmt.Sprint(blocks), "--max-model-len", "4096", "--max-num-batched-tokens", "1024", "--step-time", "2ms", "--kv-transfer-config", config,
		"--tensor-parallel-size", fmt.Sprint(tp),
	}
	if v.window {
		args = append(args, "--window", "200")
	}
	name := fmt.Sprintf("%s%d", kind, n)
	if o.real != "" {
		return realPart(o, name, kind, host, port, config)
	}
	return &part{
		name: name, kind: kind, host: host, health: fmt.Sprintf("http://%s:%d/health", addrOf(host), port),
		args: args,
		env:  []string{"VLLM_HOST_IP=" + addrOf(host), "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=8"},
	}
}

var errDown = errors.New("the process is down")

// url returns the URL of a path on the part's HTTP port.
func (p *part) url(path string) string {
	at := strings.Index(p.health, "//") + 2
	host, _, _ := strings.Cut(p.health[at:], "/")
	return "http://" + host + path
}
