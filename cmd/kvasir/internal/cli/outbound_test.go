// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// outbound is a call with the address of another process: of IPv4, or of IPv6.
var outbound = regexp.MustCompile(`^\d+ +(connect|sendto|sendmsg|sendmmsg)\(.*sa_family=AF_INET6?,.*(?:inet_addr\("([^"]*)"\)|inet_pton\(AF_INET6, "([^"]*)"|sin6_addr=[^"]*"([^"]*)")`)

// strangers returns the calls of a trace that go beyond this host.
func strangers(trace string) (found []string) {
	for line := range strings.Lines(trace) {
		m := outbound.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		if a := m[2] + m[3] + m[4]; !strings.HasPrefix(a, "127.") && a != "::1" && !strings.HasPrefix(a, "::ffff:127.") {
			found = append(found, strings.TrimSpace(line))
		}
	}
	return found
}

// Server, registry, proxy and engine connect only to the peers that their flags name: to no name service, no time server, and
// they send no usage report. The test traces a start, a prompt and an orderly stop of each.
func TestNoOutboundConnections(t *testing.T) {
	if out, err := exec.Command("strace", "-f", "-e", "trace=connect", "true").CombinedOutput(); err != nil {
		t.Skipf("strace: %v: %s", err, out)
	}
	const canary = `7 connect(3, {sa_family=AF_INET, sin_port=htons(53), sin_addr=inet_addr("10.0.0.2")}, 16) = 0
8 sendto(3, "x", 1, 0, {sa_family=AF_INET6, sin6_port=htons(53), sin6_flowinfo=htonl(0), inet_pton(AF_INET6, "fe80::1", &sin6_addr), sin6_scope_id=0}, 28) = 1
9 connect(3, {sa_family=AF_INET, sin_port=htons(53), sin_addr=inet_addr("127.0.0.1")}, 16) = 0`
	if n := len(strangers(canary)); n != 2 {
		t.Fatalf("%d of 2 calls are found", n)
	}
	dir := t.TempDir()
	var traced []*exec.Cmd
	traces := map[string]string{}
	start := func(ready string, args ...string) {
		t.Helper()
		trace := filepath.Join(dir, fmt.Sprint("trace", len(traced)))
		c := exec.Command("strace", append([]string{"-f", "-qq", "-e", "trace=connect,sendto,sendmsg,sendmmsg", "-e", "signal=none", "-o", trace, os.Args[0]}, args...)...)
		c.Env = append(os.Environ(), "KVASIR_TEST_COMMAND=1")
		c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		errs, err := c.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		traced, traces[trace] = append(traced, c), args[0]
		t.Cleanup(func() { _ = syscall.Kill(-c.Process.Pid, syscall.SIGKILL) })
		lines := make(chan string, 1000)
		go func() {
			defer close(lines)
			for r := bufio.NewScanner(errs); r.Scan(); {
				lines <- r.Text()
			}
		}()
		(&serving{lines: lines}).wait(t, ready)
	}
	port := func() string { return fmt.Sprint(testkit.FreePort(t)) }
	zmq, web, engine, registry, front := port(), port(), port(), port(), port()
	t.Cleanup(func() {
		left, _ := filepath.Glob("/dev/shm/lmcache_l1_pool_kvasir_" + zmq + "_*")
		for _, f := range left {
			_ = os.Remove(f)
		}
	})
	start("serving HTTP", "server", "--l1-size-gb", "0.01", "--port", zmq, "--http-port", web)
	start("", "bootstrap", "--port", registry)
	start("the engine serves", "engine", "--port", engine, "--kv-transfer-config",
		fmt.Sprintf(`{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_connector_extra_config":{"lmcache.mp.port":%s}}`, zmq))
	start("", "proxy", "--port", front, "--engine", "http://127.0.0.1:"+engine)
	testkit.Eventually(t, "a prompt through the proxy is answered", func() bool {
		r, err := http.Post("http://127.0.0.1:"+front+"/v1/completions", "application/json", strings.NewReader(`{"max_tokens":2,"prompt":"`+strings.Repeat("word ", 300)+`"}`))
		if err != nil {
			return false
		}
		defer r.Body.Close()
		text, _ := io.ReadAll(r.Body)
		return r.StatusCode == http.StatusOK && strings.Contains(string(text), "usage")
	})
	for i := len(traced) - 1; i >= 0; i-- {
		_ = syscall.Kill(-traced[i].Process.Pid, syscall.SIGTERM)
		_ = traced[i].Wait()
	}
	for trace, command := range traces {
		text, err := os.ReadFile(trace)
		if calls := strings.Contains(string(text), `inet_addr("127.0.0.1")`); err != nil || calls != (command == "engine" || command == "proxy") {
			t.Errorf("%s: %v; calls to this host: %v", command, err, calls)
		}
		for _, call := range strangers(string(text)) {
			t.Errorf("kvasir %s: %s", command, call)
		}
	}
}
