// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// outside is an address of this machine that no list of a test allows.
const outside = "127.0.0.2"

// tcpPorts returns the TCP ports on which a process listens, as the kernel knows them.
func tcpPorts(t *testing.T, pid int) (ports []int) {
	t.Helper()
	own := map[string]bool{}
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		to, _ := os.Readlink(l) // a descriptor may have closed
		own[strings.TrimSuffix(strings.TrimPrefix(to, "socket:["), "]")] = true
	}
	for _, table := range []string{"tcp", "tcp6"} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		if err != nil {
			continue // a machine without IPv6
		}
		for l := range strings.Lines(string(text)) {
			w := strings.Fields(l)
			if len(w) < 10 || w[3] != "0A" || !own[w[9]] { // 0A: it listens
				continue
			}
			port, err := strconv.ParseUint(w[1][strings.LastIndex(w[1], ":")+1:], 16, 16)
			if err != nil {
				t.Fatal(err)
			}
			ports = append(ports, int(port))
		}
	}
	slices.Sort(ports)
	return slices.Compact(ports)
}

// from sends a text to a port from an address and returns all that comes back until the connection ends.
func from(t *testing.T, address string, port int, text string) string {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}, Timeout: time.Minute}
	c, err := d.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(15 * time.Second))
	_, _ = io.WriteString(c, text) // it may be closed already
	answer, err := io.ReadAll(c)
	if err != nil && os.IsTimeout(err) {
		t.Errorf("port %d stays open to %s after %q and %q", port, address, text, answer)
	}
	return string(answer)
}

// status returns the status of an HTTP answer; 0: there is none.
func status(answer string) int {
	r, err := http.ReadResponse(bufio.NewReader(strings.NewReader(answer)), nil)
	if err != nil {
		return 0
	}
	_ = r.Body.Close()
	return r.StatusCode
}

// The routes of all parts, and others.
var knownRoutes = []string{
	"GET /", "GET /status", "GET /metrics", "GET /config", "GET /explain", "GET /live", "GET /now", "GET /transfers", "GET /version", "GET /debug/pprof/", "GET /debug/pprof/profile?seconds=1",
	"POST /cache/clear", "POST /tiers/drop", "POST /tiers/rekey", "GET /cache/objects", "DELETE /cache/objects", "POST /cache/pins", "GET /quota", "PUT /quota/a", "GET /tenants", "PUT /tenants/a",
	"GET /query", "GET /query/", "POST /register", "DELETE /register?engine_id=e", "GET /kept?engine=e&transfer=t", "GET /engines", "POST /engines", "GET /v1/models", "POST /v1/completions", "POST /v1/chat/completions",
	"GET /none", "OPTIONS *", "GET //healthz", "GET /healthz/../status",
}

var healthRoutes = []string{"GET /health", "GET /healthz", "GET /healthcheck", "GET /readyz", "GET /ping"}

// isPage reports whether an answer is the one of the node at /, which shows nothing by itself: its page, or LMCache's health text.
func isPage(route, body string) bool {
	return route == "GET /" && (strings.Contains(body, "<!doctype html>") || strings.HasSuffix(body, `{"service":"Kvasir HTTP API","status":"ok"}`+"\n"))
}

// outsideGetsHealthAlone asks a port all routes from an address outside, without credentials, and reports whether it speaks HTTP.
func outsideGetsHealthAlone(t *testing.T, port int) bool {
	t.Helper()
	if status(from(t, outside, port, "GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n")) == 0 {
		if got := from(t, outside, port, ""); got != "" {
			t.Errorf("port %d says %q to an address outside", port, got)
		}
		return false
	}
	for _, route := range append(slices.Clone(knownRoutes), healthRoutes...) {
		answer := from(t, outside, port, route+" HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
		switch code := status(answer); {
		case strings.Contains(answer, "SECRET"), code == 0:
			t.Errorf("port %d answers %s with %q", port, route, answer)
		case code == http.StatusUnauthorized, isPage(route, answer):
		case slices.Contains(healthRoutes, route) && (code == 200 || code == 503 || code == 404):
		case strings.HasPrefix(route, "OPTIONS *") && (code == 200 || code == 400 || code == 404): // net/http answers it itself
		default:
			t.Errorf("port %d answers %s with %d: %.300q", port, route, code, answer)
		}
	}
	return true
}

// With --allow-from alone each port of each command closes connections from other addresses, or answers them health alone. LISTENER=CIDR is
// for one listener. No process leaves a core file with secrets.
func TestEachCommandTakesNetworks(t *testing.T) {
	events := fmt.Sprintf(`{"enable_kv_cache_events":true,"endpoint":"tcp://127.0.0.1:%d","replay_endpoint":"tcp://127.0.0.1:%d"}`, testkit.FreePort(t), testkit.FreePort(t))
	p := `{"kv_connector":"MooncakeConnector","kv_role":"kv_both"}`
	for _, c := range []struct {
		ready      string
		ports, web int
		counted    []string // listeners in the metrics
		args       []string
	}{
		{"the engine serves", 7, 1, []string{"http", "events", "transfer"}, []string{"engine", "--port", "0", "--num-gpu-blocks-override", "64", "--kv-events-config", events, "--kv-transfer-config", p}},
		{"giving memory", 3, 1, []string{"http", "transfer"}, []string{"store-node", "--master", "127.0.0.1:1", "--memory-gb", "16MiB", "--http-port", "0"}},
		{"", 2, 0, nil, []string{"transfer", "serve", "--size", "1MiB"}},
		{"the relay serves", 3, 1, []string{"http", "transfer"}, []string{"relay", "--port", "0", "--upstream", "http://127.0.0.1:1", "--memory-gb", "8MiB"}},
	} {
		t.Run(c.args[0], func(t *testing.T) {
			t.Setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", fmt.Sprint(testkit.FreePort(t)))
			pid, _ := startAndLog(t, c.ready, append(c.args, "--allow-from", "127.0.0.1")...)
			web, ports := 0, []int(nil)
			testkit.Eventually(t, "all ports are open", func() bool { ports = tcpPorts(t, pid); return len(ports) >= c.ports })
			for _, port := range ports {
				if outsideGetsHealthAlone(t, port) {
					web++
				}
			}
			for _, port := range ports {
				figures := from(t, "127.0.0.1", port, "GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
				for _, l := range c.counted {
					if status(figures) == 200 && !strings.Contains(figures, "kvasir_bootstrap_") && !regexp.MustCompile(`kvasir_auth_refused_total\{listener="`+l+`",reason="(network|address)"\} [1-9]`).MatchString(figures) {
						t.Errorf("connections that %s refused are not counted:\n%s", l, figures)
					}
				}
			}
			if web != c.web {
				t.Errorf("%d of %d ports speak HTTP, want %d", web, len(ports), c.web)
			}
			limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
			if err != nil || !regexp.MustCompile(`Max core file size +0 `).Match(limits) {
				t.Errorf("a crash may write a core file: %v\n%s", err, limits)
			}
		})
	}
	port := testkit.FreePort(t)
	t.Cleanup(func() { must(t, "server", "--port", fmt.Sprint(port), "--drop") })
	pid, _ := startAndLog(t, "serving HTTP", "server", "--port", fmt.Sprint(port), "--http-port", "0", "--l1-size-gb", "8MiB", "--allow-from", "zmq=127.0.0.1,http="+outside)
	for _, at := range tcpPorts(t, pid) {
		want := map[string]int{outside: 200, "127.0.0.1": 401}
		for address, code := range want {
			got := status(from(t, address, at, "GET /status HTTP/1.0\r\nHost: localhost\r\n\r\n"))
			if at == port && got != 0 || at != port && got != code {
				t.Errorf("port %d answers %s with %d", at, address, got)
			}
		}
	}
	for _, at := range tcpPorts(t, pid) {
		if at == port {
			continue
		}
		figures := from(t, outside, at, "GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
		if !strings.Contains(figures, `kvasir_auth_refused_total{listener="zmq",reason="network"} 1`) || !strings.Contains(figures, `kvasir_auth_refused_total{listener="events",reason="network"} 0`) {
			t.Errorf("what the ZMQ port refused is not counted once:\n%s", figures)
		}
	}
	if got := from(t, outside, port, ""); got != "" {
		t.Errorf("the ZMQ port says %q to an address of another listener", got)
	}
}

// In the documented production configuration of kvasir all, each TCP port of the process answers an address outside the lists, without
// a token and a certificate, health alone, or 401, or it closes the connection before a byte. The same routes answer inside with a token.
func TestAddressesOutsideGetHealthAlone(t *testing.T) {
	dir := t.TempDir()
	tokens, keys := filepath.Join(dir, "tokens"), filepath.Join(dir, "keys")
	token := strings.TrimSpace(must(t, "token", "ops", "--scope", "admin", "--file", tokens))
	reader := strings.TrimSpace(must(t, "token", "prometheus", "--file", tokens))
	if err := os.WriteFile(keys, fmt.Appendf(nil, "ada %x\n", sha256.Sum256([]byte("SECRET-key"))), 0o600); err != nil {
		t.Fatal(err)
	}
	p := make([]int, 8)
	for i := range p {
		p[i] = testkit.FreePort(t)
	}
	file := write(t, fmt.Sprintf(`server: {host: 127.0.0.1, port: %d, listen: ['%d:144'], http-port: %d, pprof: true, l1-size-gb: 8MiB, kv-events: 'tcp://127.0.0.1:%d', kv-events-replay: 'tcp://127.0.0.1:%d', token-file: %s, audit-log: %[12]s, allow-from: [127.0.0.1]}
bootstrap: {port: %[7]d, token-file: %[6]s, allow-from: [127.0.0.1]}
relay: {port: 0, memory-gb: 8MiB, token-file: %[6]s, allow-from: [127.0.0.1]}
proxy: {port: %[8]d, admin-port: %[9]d, admin-token: SECRET-admin, audit-log: %[12]s, token-file: %[6]s, api-keys: %[10]s, store: 'http://127.0.0.1:%[3]d', store-token: %[11]s, prefill: ['http://127.0.0.1:1'], decode: ['http://127.0.0.1:1'], allow-from: [127.0.0.1]}
`, p[0], p[1], p[2], p[3], p[4], tokens, p[5], p[6], p[7], keys, reader, filepath.Join(dir, "audit")))
	t.Cleanup(func() { must(t, "server", "--port", fmt.Sprint(p[0]), "--drop") })
	pid, log := startAndLog(t, "the proxy serves", "all", "--config", file)
	ports := tcpPorts(t, pid)
	if len(ports) < 10 { // 8 of the file, the relay's directory, its two transfer ports and more
		t.Fatalf("only the ports %v are found", ports)
	}
	for _, port := range p {
		if !slices.Contains(ports, port) {
			t.Errorf("port %d of the file is not among %v", port, ports)
		}
	}
	web := 0
	for _, port := range ports {
		if outsideGetsHealthAlone(t, port) {
			web++
		}
	}
	if web != 5 {
		t.Errorf("%d ports speak HTTP, want 5: the node's, the registry's, the relay's, the proxy's and its admin's", web)
	}
	inside := func(port int, route, secret string, want int) {
		t.Helper()
		head := ""
		if secret != "" {
			head = "Authorization: Bearer " + secret + "\r\n"
		}
		if got := status(from(t, "127.0.0.1", port, route+" HTTP/1.0\r\nHost: localhost\r\n"+head+"\r\n")); got != want {
			t.Errorf("inside, port %d answers %s with %d, want %d", port, route, got, want)
		}
	}
	inside(p[2], "GET /status", "", 401)
	inside(p[2], "GET /status", reader, 200)
	inside(p[2], "GET /debug/pprof/", reader, 403)
	inside(p[2], "GET /debug/pprof/", token, 200)
	inside(p[2], "POST /cache/clear", reader, 403)
	inside(p[2], "POST /cache/clear", token, 200)
	inside(p[5], "GET /query", "", 200)
	inside(p[5], "GET /metrics", "", 401)
	inside(p[5], "GET /metrics", reader, 200)
	inside(p[7], "GET /metrics", "", 401)
	inside(p[7], "GET /metrics", reader, 200)
	testkit.Eventually(t, "the node answers the proxy's --store-token", func() bool {
		return strings.Contains(from(t, "127.0.0.1", p[7], "GET /metrics HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer "+reader+"\r\n\r\n"), "\nkvasir_proxy_store_well 1")
	})
	url := fmt.Sprintf("http://127.0.0.1:%d", p[2])
	for _, c := range []struct{ token, command, want string }{
		{reader, "status", ""}, {reader, "clear", "the token has the scope read, this needs admin"}, {"", "status", "set KVASIR_TOKEN"},
	} {
		t.Setenv("KVASIR_TOKEN", c.token)
		if code, _, errs := run(t, c.command, "--url", url); (code == 0) != (c.want == "") || !strings.Contains(errs, c.want) {
			t.Errorf("kvasir %s: %d, %s", c.command, code, errs)
		}
	}
	inside(p[7], "GET /engines", "SECRET-admin", 200)
	inside(p[7], "DELETE /engines?url=http://127.0.0.1:1", reader, 403)
	inside(p[7], "DELETE /engines?url=http://127.0.0.1:1&role=decode", "SECRET-admin", 200)
	deeds, err := os.ReadFile(filepath.Join(dir, "audit"))
	if err != nil || strings.Count(string(deeds), "\n") != 3 || !strings.Contains(string(deeds), `"listener":"http","who":"ops","from":"127.0.0.1:`) || !strings.Contains(string(deeds), `"listener":"admin","who":"key"`) {
		t.Errorf("profiles, a clear and an engine that was removed are not the three lines of the log of deeds: %v\n%s", err, deeds)
	}
	inside(p[6], "GET /v1/models", "SECRET-key", 200)
	inside(p[6], "GET /v1/models", token, 401) // a token is no API key
	secrets := []string{"SECRET", token, reader}
	for _, secret := range secrets {
		if strings.Contains(string(deeds), secret) {
			t.Error("the log of deeds has a secret")
		}
	}
	for _, route := range []string{"GET /status", "GET /config?sources=true", "GET /metrics", "GET /debug/pprof/goroutine?debug=2", "GET /debug/pprof/heap?debug=1", "GET /debug/pprof/cmdline"} {
		answer := from(t, "127.0.0.1", p[2], route+" HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer "+token+"\r\n\r\n")
		for _, secret := range secrets {
			if strings.Contains(answer, secret) {
				t.Errorf("%s shows a secret", route)
			}
		}
	}
	_, checked, _ := run(t, "config", "check", file)
	for _, secret := range secrets {
		if strings.Contains(checked, secret) {
			t.Errorf("config check shows a secret:\n%s", checked)
		}
		if strings.Contains(log(), secret) {
			t.Error("the log has a secret")
		}
	}
}

// startAndLog starts a command and waits until a line of its log has the text ready; "" does not wait. log returns the log so far.
func startAndLog(t *testing.T, ready string, args ...string) (pid int, log func() string) {
	t.Helper()
	c := command(args...)
	stderr, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var text strings.Builder
	started, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for lines, found := bufio.NewScanner(stderr), false; lines.Scan(); {
			mu.Lock()
			text.WriteString(lines.Text() + "\n")
			mu.Unlock()
			if !found && strings.Contains(lines.Text(), ready) {
				found = true
				close(started)
			}
		}
	}()
	log = func() string {
		mu.Lock()
		defer mu.Unlock()
		return text.String()
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		<-ended
		_ = c.Wait() // it was killed
	})
	if ready == "" {
		return c.Process.Pid, log
	}
	select {
	case <-started:
	case <-ended:
		t.Fatalf("it ended:\n%s", log())
	case <-time.After(120 * time.Second):
		t.Fatalf("it never said %q:\n%s", ready, log())
	}
	return c.Process.Pid, log
}

// must runs a command line that succeeds.
func must(t *testing.T, args ...string) string {
	t.Helper()
	code, out, errs := run(t, args...)
	if code != 0 {
		t.Fatalf("%v: %d, %s", args, code, errs)
	}
	return out
}

// A token is printed once; its file has no secret, keeps its mode, and takes a name once.
func TestTokenFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tokens")
	secret := strings.TrimSpace(must(t, "token", "a", "--scope", "write", "--until", "2126-01-31", "--file", file))
	text, err := os.ReadFile(file)
	want := fmt.Sprintf("a %x write until=2126-01-31T00:00:00Z\n", sha256.Sum256([]byte(secret)))
	if err != nil || string(text) != want {
		t.Errorf("%q, %v, want %q", text, err, want)
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if err := os.Chmod(file, 0o640); err != nil {
		t.Fatal(err)
	}
	must(t, "token", "b", "--file", file)
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	if text, _ := os.ReadFile(file); !regexp.MustCompile(`^a .*\nb [0-9a-f]{64} read\n$`).Match(text) {
		t.Errorf("%q", text)
	}
	f := func(want string, args ...string) {
		t.Helper()
		if code, out, errs := run(t, append([]string{"token"}, args...)...); code == 0 || out != "" || !strings.Contains(errs, want) {
			t.Errorf("%v: %d %q %q, want %q", args, code, out, errs, want)
		}
	}
	f("has a token", "b", "--file", file)
	f("not one word", "b c", "--file", file)
	f("no date", "c", "--until", "soon", "--file", file)
	if err := os.WriteFile(file+".new", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	f("another kvasir token writes it", "c", "--file", file)
	if err := os.Chmod(file, 0o644); err != nil {
		t.Fatal(err)
	}
	f("every user of this machine may read", "c", "--file", file)
}

// Flags and files that cannot be used are refused by name, at the start and by --check-config.
func TestWrongAccess(t *testing.T) {
	testkit.LongAlone(t)
	dir := t.TempDir()
	public := filepath.Join(dir, "public")
	if err := os.WriteFile(public, fmt.Appendf(nil, "a %x read\n", sha256.Sum256(nil)), 0o644); err != nil {
		t.Fatal(err)
	}
	commands := map[string][]string{
		"server": {"server", "--l1-size-gb", "8MiB"}, "bootstrap": {"bootstrap"}, "relay": {"relay", "--upstream", "http://127.0.0.1:1"},
		"proxy": {"proxy", "--engine", "http://127.0.0.1:1", "--admin-port", "8001"}, "engine": {"engine"},
		"store-node": {"store-node", "--master", "127.0.0.1:1"}, "keeper": {"keeper", dir, "--max-gb", "1"},
	}
	for name, line := range commands {
		for _, c := range []struct {
			want string
			args []string
		}{
			{"--token-file: tokens: " + public, []string{"--token-file", public}},
			{"no such file", []string{"--token-file", public + "x"}},
			{"--tls-cert and --tls-key go together", []string{"--token-file", public, "--tls-cert", public}},
			{"--tls-client-ca needs --tls-cert", []string{"--tls-client-ca", public}},
			{public + "x", []string{"--admin-token=t", "--tls-cert", public + "x", "--tls-key", public + "x"}},
			{"--allow-from \"10.0.0.0/33\" is no network", []string{"--admin-token=t", "--allow-from", "10.0.0.0/33"}},
			{"--allow-from nothing=10.0.0.0/8: the listeners are ", []string{"--admin-token=t", "--allow-from", "nothing=10.0.0.0/8"}},
		} {
			args := c.args
			if args[0] == "--admin-token=t" && name != "proxy" {
				args = args[1:]
			}
			code, _, errs := run(t, slices.Concat(line, args, []string{"--check-config"})...)
			if code == 0 || !strings.Contains(errs, c.want) {
				t.Errorf("%s %v: %d %s, want %q", name, args, code, errs, c.want)
			}
		}
	}
}

// A listener beyond loopback without networks and credentials is refused, at the start and by --check-config, unless --allow-anyone names
// the risk. The networks that the refusal prints are enough for a start, and so are credentials where the listener asks for some.
func TestOpenListenersAreRefused(t *testing.T) {
	testkit.LongAlone(t)
	tokens := filepath.Join(t.TempDir(), "tokens")
	must(t, "token", "a", "--file", tokens)
	keys := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(keys, fmt.Appendf(nil, "ada %x\n", sha256.Sum256([]byte("k"))), 0o600); err != nil {
		t.Fatal(err)
	}
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("k"), 0o600); err != nil {
		t.Fatal(err)
	}
	const p = `{"kv_connector":"MooncakeConnector","kv_role":"kv_producer"}`
	t.Setenv("VLLM_HOST_IP", "127.0.0.1")
	for _, c := range []struct {
		listeners []string // the listeners that are refused
		defended  []string // flags with which they are not refused; none: --allow-from alone
		args      []string
	}{
		{[]string{"zmq (--host 0.0.0.0)"}, nil, []string{"server", "--host", "0.0.0.0"}},
		{[]string{"zmq (--host )"}, nil, []string{"server", "--host", ""}},
		{[]string{"zmq (--host ::)"}, nil, []string{"server", "--host", "[::]", "--token-file", tokens}},
		{[]string{"http (--http-host 0.0.0.0)"}, []string{"--token-file", tokens}, []string{"server", "--http-host", "0.0.0.0"}},
		{[]string{"http (--http-host 0.0.0.0)"}, []string{"--api-key-file", key}, []string{"server", "--http-host", "0.0.0.0"}},
		{[]string{"zmq (", "http ("}, nil, []string{"server", "--host", "0.0.0.0", "--http-host", "0.0.0.0"}},
		{[]string{"events (--kv-events tcp://*:5557)"}, nil, []string{"server", "--kv-events", "tcp://*:5557"}},
		{[]string{"events (--kv-events-replay tcp://10.0.0.5:5558)"}, nil, []string{"server", "--kv-events", "tcp://127.0.0.1:*", "--kv-events-replay", "tcp://10.0.0.5:5558"}},
		{[]string{"zmq ("}, nil, []string{"server", "--host", "0.0.0.0", "--allow-from", "http=127.0.0.1"}},
		{[]string{"http (--host 0.0.0.0)"}, []string{"--token-guards", "writes", "--token", "t"}, []string{"bootstrap", "--host", "0.0.0.0"}},
		{[]string{"http ("}, nil, []string{"bootstrap", "--host", "0.0.0.0", "--token-file", tokens, "--token", "t"}},
		{[]string{"http (", "transfer (--host 10.0.0.5)"}, nil, []string{"relay", "--upstream", "http://127.0.0.1:1", "--host", "10.0.0.5", "--token-file", tokens}},
		{[]string{"api (--host 0.0.0.0)"}, []string{"--api-keys", keys}, []string{"proxy", "--host", "0.0.0.0", "--engine", "http://127.0.0.1:1"}},
		{[]string{"api ("}, nil, []string{"proxy", "--host", "0.0.0.0", "--engine", "http://127.0.0.1:1", "--admin-port", "8001", "--token-file", tokens, "--admin-host", "0.0.0.0"}},
		{[]string{"http (--host 0.0.0.0)"}, []string{"--token-file", tokens}, []string{"engine", "--host", "0.0.0.0"}},
		{[]string{"events (--kv-events-config tcp://*:5557)"}, nil, []string{"engine", "--token-file", tokens, "--kv-events-config", `{"enable_kv_cache_events":true}`}},
		{[]string{"transfer (--host 0.0.0.0)"}, nil, []string{"engine", "--host", "0.0.0.0", "--token-file", tokens, "--like", "sglang", "--disaggregation-mode", "prefill"}},
		{[]string{"http (--bind 0.0.0.0)", "transfer (--bind 0.0.0.0)"}, nil, []string{"store-node", "--master", "127.0.0.1:1", "--bind", "0.0.0.0"}},
		{[]string{"transfer (--host 10.0.0.5)"}, nil, []string{"store-node", "--master", "127.0.0.1:1", "--host", "10.0.0.5", "--token-file", tokens}},
		{[]string{"http (--host 0.0.0.0)"}, []string{"--token-file", tokens}, []string{"keeper", t.TempDir(), "--max-gb", "1", "--host", "0.0.0.0", "--http-port", "9095"}},
		{[]string{"events (--kv-events tcp://*:5557)"}, nil, []string{"keeper", t.TempDir(), "--max-gb", "1", "--token-file", tokens, "--kv-events", "tcp://*:5557"}},
		{[]string{"transfer (--bind 0.0.0.0)"}, nil, []string{"transfer", "serve", "--bind", "0.0.0.0"}},
	} {
		check := func(more ...string) (int, string) {
			code, _, errs := run(t, slices.Concat(c.args, more, []string{"--check-config"})...)
			return code, errs
		}
		code, errs := check()
		for _, l := range c.listeners {
			if code != 2 || !strings.Contains(errs, "the listener "+l) || !strings.Contains(errs, "--allow-anyone=read-prompts") {
				t.Errorf("%v: %d, %s, want a refusal of %s", c.args, code, errs, l)
			}
		}
		if got := strings.Count(errs, "the listener "); got != len(c.listeners) {
			t.Errorf("%v: %d listeners are refused: %s", c.args, got, errs)
		}
		if c.args[len(c.args)-1] != "http=127.0.0.1" { // it would be a second --allow-from
			found := regexp.MustCompile(`--allow-from (\S+) \(this machine's networks\)`).FindStringSubmatch(errs)
			if found == nil {
				t.Fatalf("%v: no networks are printed: %s", c.args, errs)
			}
			if code, errs := check("--allow-from", found[1]); code != 0 {
				t.Errorf("%v: refused with the networks that were printed: %s", c.args, errs)
			}
		}
		if len(c.defended) > 0 {
			if code, errs := check(c.defended...); code != 0 {
				t.Errorf("%v %v: %s", c.args, c.defended, errs)
			}
		}
		if code, errs := check("--allow-anyone", "read-prompts"); code != 0 {
			t.Errorf("%v: --allow-anyone: %s", c.args, errs)
		}
		if code, errs := check("--allow-anyone", "yes"); code != 2 || !strings.Contains(errs, "--allow-anyone yes: its one value is read-prompts") {
			t.Errorf("%v: --allow-anyone yes: %d, %s", c.args, code, errs)
		}
	}
	t.Setenv("VLLM_HOST_IP", "10.0.0.7")
	if code, _, errs := run(t, "engine", "--check-config", "--kv-transfer-config", p); code != 2 || !strings.Contains(errs, "the listener transfer (VLLM_HOST_IP, 10.0.0.7)") {
		t.Errorf("an engine on VLLM_HOST_IP: %d, %s", code, errs)
	}
	// The start refuses like --check-config, before anything listens.
	for _, args := range [][]string{
		{"server", "--host", "0.0.0.0", "--l1-size-gb", "8MiB"},
		{"bootstrap", "--host", "0.0.0.0", "--port", "0"},
		{"proxy", "--host", "0.0.0.0", "--port", "0", "--engine", "http://127.0.0.1:1"},
		{"relay", "--upstream", "http://127.0.0.1:1", "--host", "10.0.0.5"},
		{"engine", "--host", "0.0.0.0", "--port", "0"},
		{"store-node", "--master", "127.0.0.1:1", "--bind", "0.0.0.0", "--memory-gb", "16MiB"},
		{"keeper", t.TempDir(), "--max-gb", "1", "--host", "0.0.0.0", "--http-port", "9095"},
		{"transfer", "serve", "--bind", "0.0.0.0", "--size", "1MiB"},
	} {
		if code, _, errs := run(t, args...); code != 2 || !strings.Contains(errs, "--allow-anyone=read-prompts starts without") || strings.Contains(errs, "level=") {
			t.Errorf("%v: %d, %s", args, code, errs)
		}
	}
	file := write(t, "bootstrap:\n  host: 0.0.0.0\n")
	if code, _, errs := run(t, "config", "check", file); code != 2 || !strings.Contains(errs, "bootstrap: the listener http (--host 0.0.0.0)") {
		t.Errorf("config check: %d, %s", code, errs)
	}
	file = write(t, "bootstrap:\n  host: 0.0.0.0\n  allow-anyone: read-prompts\n")
	if code, out, errs := run(t, "config", "check", file); code != 0 || !strings.Contains(out, "allow-anyone: read-prompts") {
		t.Errorf("config check with allow-anyone: %d, %s%s", code, out, errs)
	}
	t.Setenv("KVASIR_BOOTSTRAP_ALLOW_ANYONE", "read-prompts")
	pid, _ := startAndLog(t, "Bootstrap Server started", "bootstrap", "--host", "0.0.0.0", "--port", "0")
	for _, port := range tcpPorts(t, pid) {
		if got := status(from(t, outside, port, "GET /query HTTP/1.0\r\nHost: localhost\r\n\r\n")); got != 200 {
			t.Errorf("with --allow-anyone the registry answers %d", got)
		}
	}
}

// Recipes beyond loopback, in the documents and in --help, name networks.
func TestRecipesNameNetworks(t *testing.T) {
	testkit.LongAlone(t)
	open := regexp.MustCompile(`kvasir (server|bootstrap|relay|proxy|engine|store-node|keeper|transfer serve) .*--(host|http-host|admin-host|bind|kv-events|kv-events-replay)[ =](tcp://)?(0\.0\.0\.0|10\.|\*)`)
	texts := map[string]string{}
	for _, pattern := range []string{"README.md", "docs/*.md", "docs/*/*.md"} {
		files, err := filepath.Glob(filepath.Join("../../../..", pattern))
		if err != nil || len(files) == 0 {
			t.Fatal(pattern, err)
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			texts[f] = string(text)
		}
	}
	for _, c := range []string{"server", "bootstrap", "relay", "proxy", "engine", "store-node", "keeper", "transfer"} {
		_, texts[c], _ = run(t, c, "--help")
	}
	recipes := 0
	for name, text := range texts {
		for l := range strings.Lines(text) {
			if open.MatchString(l) && !strings.HasPrefix(l, "<!-- before:") { // that is the test's own, at addresses of this host
				if recipes++; !strings.Contains(l, "--allow-from") {
					t.Errorf("%s: the command of %q does not start: it names no networks", name, strings.TrimSpace(l))
				}
			}
		}
	}
	if recipes < 8 {
		t.Errorf("only %d recipes were found", recipes)
	}
}
