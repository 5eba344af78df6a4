// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// bootstrapServer starts the command and waits until it serves.
func bootstrapServer(t *testing.T, args ...string) (base string, stop func() string) {
	t.Helper()
	return webServer(t, "Mooncake Bootstrap Server started at ", append([]string{"bootstrap"}, args...)...)
}

// webServer starts a command that takes --host and --port and waits until it says
// that it is ready. stop ends it with SIGTERM and returns what it logged.
func webServer(t *testing.T, ready string, args ...string) (base string, stop func() string) {
	t.Helper()
	port := testkit.FreePort(t)
	log, stop, ok := launch(t, 60*time.Second, ready, append(args, "--host", "127.0.0.1", "--port", fmt.Sprint(port))...)
	if !ok {
		t.Fatalf("it ended:\n%s", log)
	}
	return fmt.Sprintf("http://127.0.0.1:%d", port), stop
}

// launch starts a command and reads its log until it says that it is ready; ok is false where it ended before. stop ends it with
// SIGTERM and returns all that it logged. It is killed after a time, and when the test ends.
func launch(t *testing.T, atMost time.Duration, ready string, args ...string) (log string, stop func() string, ok bool) {
	t.Helper()
	c := command(args...)
	stderr, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	kill := time.AfterFunc(atMost, func() { _ = c.Process.Kill() })
	t.Cleanup(func() {
		kill.Stop()
		if c.ProcessState == nil {
			_ = c.Process.Kill()
			_ = c.Wait()
		}
	})
	out := bufio.NewReader(stderr)
	for !strings.Contains(log, ready) {
		line, err := out.ReadString('\n')
		if log += line; err != nil {
			_ = c.Wait()
			return log, nil, false
		}
	}
	return log, func() string {
		t.Helper()
		if err := c.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		rest, _ := io.ReadAll(out)
		if err := c.Wait(); err != nil {
			t.Fatalf("%v\n%s", err, rest)
		}
		return log + string(rest)
	}, true
}

func TestBootstrap(t *testing.T) {
	state := filepath.Join(t.TempDir(), "state")
	base, stop := bootstrapServer(t, "--state", state)
	body := `{"engine_id":"e","dp_rank":0,"tp_rank":0,"pp_rank":0,"addr":"tcp://127.0.0.1:41233"}`
	resp, err := http.Post(base+"/register", "application/json", strings.NewReader(body))
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatal(resp, err)
	}
	resp.Body.Close()
	code, _, stderr := run(t, "bootstrap", "--host", "127.0.0.1", "--port", base[strings.LastIndexByte(base, ':')+1:])
	if code != 1 || !strings.Contains(stderr, "choose another --port") {
		t.Errorf("a second one on the port: exit %d\n%s", code, stderr)
	}
	if log := stop(); !strings.Contains(log, "msg=\"engine registered\" engine=e dp_rank=0 workers=1 last_addr=tcp://127.0.0.1:41233") || !strings.Contains(log, "Mooncake Bootstrap Server stopped.") {
		t.Error(log)
	}
	base, stop = bootstrapServer(t, "--state", state)
	resp, err = http.Get(base + "/query")
	if err != nil {
		t.Fatal(err)
	}
	got, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if string(got) != `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"tcp://127.0.0.1:41233"}}}}` {
		t.Errorf("after a restart: %s", got)
	}
	resp, err = http.Get(base + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	for _, want := range []string{"kvasir_build_info{", "go_goroutines ", "process_open_fds ", "kvasir_bootstrap_"} {
		if !strings.Contains(string(text), "\n"+want) {
			t.Errorf("/metrics lacks %s:\n%s", want, text)
		}
	}
	stop()
	if err := os.WriteFile(state, []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	f := func(code int, want string, args ...string) {
		t.Helper()
		got, _, stderr := run(t, append([]string{"bootstrap", "--host", "127.0.0.1", "--port", "0"}, args...)...)
		if got != code || !strings.Contains(stderr, want) || strings.Count(strings.TrimSpace(stderr), "\n") != 0 {
			t.Errorf("%v: exit %d, want %d and one line with %q:\n%s", args, got, code, want, stderr)
		}
	}
	f(1, state, "--state", state)
	f(2, "--port", "--port", "70000")
	f(2, "TP size 70000", "--tp", "70000")
	f(2, "--settle-seconds NaN is not above 0", "--settle-seconds", "NaN")
	f(2, "settle time", "--settle-seconds", "3601")
	f(2, "--probe-net", "--probe-net", "10.0.0.1")
	f(2, "--max-workers 0 is less than 1", "--max-workers", "0")
	f(2, "no token", "--token-guards", "all")
	f(2, "token", "--token", "a b")
}
