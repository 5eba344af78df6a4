// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/cli"
	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// The test binary is also the command, so that signals and exit codes are real.
func TestMain(m *testing.M) {
	if os.Getenv("KVASIR_TEST_COMMAND") != "" {
		os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr))
	}
	testkit.Main(m)
}

func command(args ...string) *exec.Cmd {
	c := exec.Command(os.Args[0], args...)
	c.Env = append(os.Environ(), "KVASIR_TEST_COMMAND=1")
	return c
}

// run runs a command line to its end.
func run(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	c := command(args...)
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	timer := time.AfterFunc(200*time.Second, func() { _ = c.Process.Kill() })
	defer timer.Stop()
	err := c.Run()
	if _, ok := err.(*exec.ExitError); err != nil && !ok {
		t.Fatal(err)
	}
	return c.ProcessState.ExitCode(), out.String(), errs.String()
}

// serving is a server in a process of its own.
type serving struct {
	cmd        *exec.Cmd
	port, http int
	lines      chan string
	waited     []string // lines that wait has read
}

func serve(t testing.TB, args ...string) *serving {
	t.Helper()
	return serveUntil(t, "/status", args...)
}

// serveUntil starts a server and waits for a line of its log.
func serveUntil(t testing.TB, line string, args ...string) *serving {
	t.Helper()
	s := &serving{port: testkit.FreePort(t), http: testkit.FreePort(t), lines: make(chan string, 1000)}
	s.cmd = command(append([]string{"server", "--port", fmt.Sprint(s.port), "--http-port", fmt.Sprint(s.http), "--l1-size-gb", "0.01"}, args...)...)
	stderr, err := s.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if s.cmd.ProcessState == nil {
			_ = s.cmd.Process.Kill()
			_ = s.cmd.Wait()
		}
		left, _ := filepath.Glob(fmt.Sprintf("/dev/shm/lmcache_l1_pool_kvasir_%d*", s.port))
		for _, f := range left {
			_ = os.Remove(f)
		}
	})
	go func() {
		defer close(s.lines)
		for r := bufio.NewScanner(stderr); r.Scan(); {
			s.lines <- r.Text()
		}
	}()
	s.wait(t, line)
	return s
}

// wait reads log lines until one contains text.
func (s *serving) wait(t testing.TB, text string) {
	t.Helper()
	deadline, last := time.After(120*time.Second), ""
	for {
		select {
		case line, ok := <-s.lines:
			if !ok {
				t.Fatalf("the server ended before it said %q: %s", text, last)
			}
			last, s.waited = line, append(s.waited, line)
			if strings.Contains(line, text) {
				return
			}
		case <-deadline:
			t.Fatalf("the server never said %q", text)
		}
	}
}

func TestServerLife(t *testing.T) {
	s := serve(t, "--max-workers", "4", "--no-l1-use-lazy", "--l2-adapter", `{"type":"resp","host":"h","port":1}`, `{"type":"raw_block"}`, "--eviction-policy", "LRU")
	r, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/healthcheck", s.http))
	if err != nil || r.StatusCode != http.StatusOK {
		t.Fatalf("%v, %v", r, err)
	}
	r.Body.Close()
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	pool := filepath.Join("/dev/shm", fmt.Sprintf("lmcache_l1_pool_kvasir_%d_%s", s.port, boot[:8]))
	if _, err := os.Stat(pool); err != nil {
		t.Fatal(err)
	}
	f := func(want string, args ...string) {
		t.Helper()
		code, _, stderr := run(t, append([]string{"server", "--l1-size-gb", "0.01"}, args...)...)
		if code == 0 || strings.Count(strings.TrimSpace(stderr), "\n") != 0 || !strings.Contains(stderr, want) {
			t.Errorf("%v: exit %d, want one line with %q, got:\n%s", args, code, want, stderr)
		}
	}
	port, web := fmt.Sprint(testkit.FreePort(t)), fmt.Sprint(testkit.FreePort(t))
	f("choose another --port", "--port", fmt.Sprint(s.port), "--shm-name", "other", "--http-port", web)
	f("choose another --http-port", "--port", port, "--http-port", fmt.Sprint(s.http))
	f("choose another --shm-name", "--port", port, "--http-port", web, "--shm-name", filepath.Base(pool))

	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	s.wait(t, "stopping")
	if err := s.cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	again := []string{"--port", fmt.Sprint(s.port), "--http-port", fmt.Sprint(s.http)}
	f("--cold to discard it", append(again, "--l1-align-bytes", "8192")...)
	f("--cold to discard it", append(again, "--chunk-size", "128")...)
	drop := func(want string) {
		t.Helper()
		code, _, stderr := run(t, append([]string{"server", "--l1-size-gb", "0.02", "--drop"}, again...)...)
		if code != 0 || !strings.Contains(stderr, want) {
			t.Errorf("--drop: exit %d, want %q\n%s", code, want, stderr)
		}
		if left, _ := filepath.Glob(pool + "*"); len(left) != 0 {
			t.Errorf("left behind: %v", left)
		}
	}
	if err := os.WriteFile(pool+".kvasir", []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	f("--cold to discard it", again...)
	drop("no engine maps it any more\" path=" + pool)
	drop("nothing to remove: there is no such pool\" path=" + pool)
}

// A start that fails because its socket for events is taken leaves no pool behind.
func TestNoPoolIsLeftWithoutASocketForEvents(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	name := fmt.Sprintf("kvasir_test_events_%d", os.Getpid())
	code, _, stderr := run(t, "server", "--l1-size-gb", "0.01", "--shm-name", name, "--port", fmt.Sprint(testkit.FreePort(t)), "--http-port", "0", "--kv-events", "tcp://"+l.Addr().String())
	if code != 1 || !strings.Contains(stderr, "--kv-events") || !strings.Contains(stderr, "address already in use") {
		t.Errorf("exit %d, %s", code, stderr)
	}
	left, _ := filepath.Glob("/dev/shm/lmcache_l1_pool_" + name + "*")
	for _, f := range left {
		t.Errorf("left behind: %s", f)
		_ = os.Remove(f)
	}
}

func TestIgnoredFlagsAreNamed(t *testing.T) {
	code, _, stderr := run(t, "server", "--l1-size-gb", "0.01", "--port", "1", "--http-port", fmt.Sprint(testkit.FreePort(t)),
		"--eviction-ratio=0.2", "--l1-use-lazy", "--l1-init-size-gb", "5", "--http-host", "127.0.0.1", "--host", "256.0.0.1")
	if code == 0 || !strings.Contains(stderr, `flags="--eviction-ratio --l1-init-size-gb --l1-use-lazy"`) {
		t.Errorf("exit %d:\n%s", code, stderr)
	}
}

func TestBadCommandLines(t *testing.T) {
	testkit.LongAlone(t)
	dir := t.TempDir()
	trace := filepath.Join(dir, "trace.jsonl")
	if err := os.WriteFile(trace, []byte("{\"input_length\": 600, \"hash_ids\": [1]}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	foreign := fmt.Sprintf("kvasir_test_foreign_%d", os.Getpid())
	path := filepath.Join("/dev/shm", "lmcache_l1_pool_"+foreign)
	if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(path)
	trouble := regexp.MustCompile(`(?i)goroutine|panic|\.go:`)
	f := func(code int, want string, args ...string) {
		t.Helper()
		got, stdout, stderr := run(t, args...)
		if got != code || !strings.Contains(stderr, want) || trouble.MatchString(stderr+stdout) {
			t.Errorf("kvasir %v: exit %d, want %d and %q, got:\n%s", args, got, code, want, stderr)
		}
	}
	f(2, "unknown flag --bogus", "server", "--bogus")
	f(2, "unexpected argument", "nonsense")
	f(2, "--hash-algorithm", "server", "--hash-algorithm", "builtin")
	f(2, "--transport", "server", "--transport", "grpc")
	f(2, "--eviction-policy mru is unknown; known are lru, leaf-lru, s3fifo, arc, leaf-hazard, and LMCache's LRU", "server", "--eviction-policy", "mru")
	f(2, "--chunk-size", "server", "--chunk-size", "0")
	f(2, "--chunk-size", "server", "--separate-object-groups", "--supported-transfer-mode", "lmcache_driven", "--chunk-size", "0")
	f(2, "--checksum-mib-per-second", "server", "--checksum-mib-per-second=-1")
	f(2, "--session-ttl-seconds 0 is not above 0", "server", "--session-ttl-seconds", "0")
	f(2, "--chunk-size: -4 is outside", "server", "--chunk-size=-4")
	f(2, "--transport grpc is not served; use zmq and a tcp:// URL in the engine; --l1-align-bytes: 1000 is not a power of two from 64 to 2^30; --memo-mib: ",
		"server", "--transport", "grpc", "--l1-align-bytes", "1000", "--memo-mib", "1024TiB") // all at once
	f(2, "--l1-size-gb", "server", "--l1-size-gb", "0")
	f(2, "--l1-size-gb", "server", "--l1-size-gb", "NaN")
	f(2, "--l1-size-gb", "server", "--l1-size-gb", "-1")
	f(2, "--l1-align-bytes", "server", "--l1-align-bytes", "1000")
	f(1, "enlarge /dev/shm", "server", "--l1-size-gb", "1000000", "--shm-name", foreign+"_large")
	f(1, "remove the file if nothing uses it", "server", "--l1-size-gb", "0.01", "--shm-name", foreign)
	f(1, "no such file", "demo", "--trace", filepath.Join(dir, "absent"))
	f(1, "line 1: 1 hash_ids for input_length 600", "demo", "--trace", trace)
	f(2, "--workers 0 is outside 1 to 64", "demo", "--workers", "0")
	f(2, "name the model's groups", "coordinator")
	f(2, `unknown kind "foo"`, "coordinator", "foo")
	if b, err := os.ReadFile(path); err != nil || string(b) != "x" {
		t.Error("somebody else's file was changed")
	}
}

func TestHelp(t *testing.T) {
	testkit.LongAlone(t)
	for _, args := range [][]string{{}, {"--help"}, {"server", "--help"}, {"demo", "--help"}, {"coordinator", "--help"}, {"bootstrap", "--help"}, {"version"}} {
		code, stdout, stderr := run(t, args...)
		if code != 0 || stdout == "" || stderr != "" {
			t.Errorf("kvasir %v: exit %d, %q, %q", args, code, stdout, stderr)
		}
		if len(args) == 2 && !strings.Contains(stdout, "Examples") {
			t.Errorf("kvasir %v shows no examples", args)
		}
	}
}

// The demo evicts, serves no wrong byte, loses its server in the middle, and ends with the original's table beside modelled
// figures. It writes a page where that is asked for, and leaves no file of its own.
func TestDemo(t *testing.T) {
	temp, page := t.TempDir(), filepath.Join(t.TempDir(), "table.html")
	t.Setenv("TMPDIR", temp)
	requests, pool := 40, "0.005"
	if testkit.Race {
		requests, pool = 12, "0.002"
	}
	code, stdout, stderr := run(t, "demo", "--requests", fmt.Sprint(requests), "--l1-size-gb", pool, "--chunk-kib", "64", "--plot", page)
	if code != 0 || !strings.Contains(stdout, "wrong bytes") || !strings.Contains(stderr, fmt.Sprintf("%d of %[1]d requests", requests)) {
		t.Errorf("exit %d:\n%s\n%s", code, stdout, stderr)
	}
	if !regexp.MustCompile(`wrong bytes +0\n`).MatchString(stdout) || regexp.MustCompile(`evictions +0 `).MatchString(stdout) {
		t.Errorf("want evictions and no wrong bytes:\n%s", stdout)
	}
	for _, want := range []string{
		fmt.Sprintf(`requests through P and D +%d in .* s, 0 failed`, requests), fmt.Sprintf(`server killed \(kill -9\) +after %d requests`, requests/2),
		`wrong KV / other answers +0 / 0\n`, `Next, with vLLM`, `2692\.51`, `2934\.43`, `p99_itl_ms`,
	} {
		if !regexp.MustCompile(want).MatchString(stdout) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}
	if text, err := os.ReadFile(page); err != nil || !strings.Contains(string(text), "mooncake") {
		t.Errorf("%v, %d bytes", err, len(text))
	}
	if left, err := os.ReadDir(temp); err != nil || len(left) > 0 {
		t.Errorf("the demo left %v, %v", left, err)
	}
}

func TestTransfer(t *testing.T) {
	file := filepath.Join(t.TempDir(), "peer.json")
	s := command("transfer", "serve", "--size", "1MiB", "--peer-file", file)
	out, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Process.Kill(); _ = s.Wait() }()
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil { // the line that says it is ready
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte("blocks of bytes "), 1000)
	w := command("transfer", "write", "--peer-file", file, "--offset", "4k")
	w.Stdin = bytes.NewReader(want)
	if b, err := w.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, b)
	}
	code, got, stderr := run(t, "transfer", "read", "--peer-file", file, "--offset", "4k", "--bytes", "16000")
	if code != 0 || got != string(want) {
		t.Fatalf("exit %d, %d bytes\n%s", code, len(got), stderr)
	}
	code, bench, stderr := run(t, "transfer", "bench", "--peer-file", file, "--sizes", "4k", "--batches", "8", "--seconds", "0.02", "--verify")
	if code != 0 || !strings.Contains(bench, "BenchmarkTransfer/op=write/size=4096/batch=8") {
		t.Errorf("exit %d\n%s%s", code, bench, stderr)
	}
	code, _, stderr = run(t, "transfer", "write", "--peer-file", file, "--offset", "2MiB", "--timeout", "10s")
	if code != 0 { // nothing on standard input is nothing to write
		t.Errorf("exit %d\n%s", code, stderr)
	}
	code, bench, stderr = run(t, "transfer", "bench", "--peer-file", file, "--sizes", "2m,4m")
	if code != 2 || bench != "" || !strings.Contains(stderr, "--sizes: every block is larger than the region: serve one of more than 1 MiB") {
		t.Errorf("blocks larger than the region: exit %d\n%s%s", code, bench, stderr)
	}
	w = command("transfer", "write", "--peer-file", file)
	w.Stdin = bytes.NewReader(make([]byte, 2<<20))
	if b, err := w.CombinedOutput(); err == nil || strings.Contains(string(b), "wrote") || !strings.Contains(string(b), "more may have arrived") {
		t.Errorf("a write past the region: %v\n%s", err, b)
	}
	if err := s.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := s.Wait(); err != nil {
		t.Errorf("serve: %v", err)
	}
	if _, err := os.Stat(file); err == nil {
		t.Error("the peer file was left")
	}
	for _, args := range [][]string{{"write"}, {"read", "--peer", "127.0.0.1:1"}, {"serve", "--size", "x"}, {"bench"}} {
		if code, _, stderr := run(t, append([]string{"transfer"}, args...)...); code != 2 || strings.Count(strings.TrimSpace(stderr), "\n") != 0 {
			t.Errorf("%v: exit %d\n%s", args, code, stderr)
		}
	}
}

func TestCoordinator(t *testing.T) {
	code, stdout, _ := run(t, "coordinator", "full,bs=16", "swa,bs=16,win=1024", "--prompt", "8192", "--ascii")
	if code != 0 || !strings.Contains(stdout, "hit: 8176 of 8192 tokens") {
		t.Errorf("exit %d:\n%s", code, stdout)
	}
}

// Lines are slog's own, with the date, as text or as JSON, and what is below the
// level is not written.
func TestLogFormats(t *testing.T) {
	drop := func(flags ...string) string {
		t.Helper()
		code, _, stderr := run(t, append([]string{"server", "--drop", "--shm-name", fmt.Sprintf("kvasir_test_nothing_%d", os.Getpid())}, flags...)...)
		if code != 0 {
			t.Fatalf("exit %d: %s", code, stderr)
		}
		return stderr
	}
	today := time.Now().Format("time=2006-01-")
	if got := drop(); !strings.HasPrefix(got, today) || !strings.Contains(got, ` level=INFO msg="nothing to remove`) {
		t.Errorf("text: %s", got)
	}
	var line struct {
		Time  time.Time
		Level string
		Msg   string
		Path  string
	}
	if got := drop("--log-format", "json"); json.Unmarshal([]byte(got), &line) != nil || line.Level != "INFO" || line.Msg == "" ||
		!strings.HasPrefix(line.Path, "/dev/shm/") || time.Since(line.Time) > time.Hour {
		t.Errorf("json: %s", got)
	}
	if got := drop("--log-level", "warn"); got != "" {
		t.Errorf("below the level: %s", got)
	}
	if code, _, _ := run(t, "server", "--drop", "--log-format", "xml"); code != 2 {
		t.Errorf("an unknown format: exit %d", code)
	}
}
