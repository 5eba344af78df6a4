// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// allOf is kvasir all in a process of its own.
type allOf struct {
	server, registry, relay, proxy string // URLs
	log                            string // so far
	stop                           func() string
}

// startAll runs the four parts. A port that another process took in between is no failure
// of this test: others are tried.
func startAll(t *testing.T) *allOf {
	t.Helper()
	for try := range 20 {
		if all := tryAll(t); all != nil {
			return all
		}
		t.Logf("try %d: a port was taken", try)
	}
	t.Fatal("no ports were found")
	return nil
}

func tryAll(t *testing.T) *allOf {
	t.Helper()
	port, registry := testkit.FreePort(t), testkit.FreePort(t)
	file := write(t, fmt.Sprintf("log-level: info\nserver: {port: %d, http-port: 0, l1-size-gb: 8MiB, checksum-mib-per-second: 0}\nbootstrap: {port: %d}\nrelay: {port: 0, memory-gb: 8MiB}\nproxy: {port: 0, prefill: ['http://127.0.0.1:1'], decode: ['http://127.0.0.1:1']}\n", port, registry))
	t.Cleanup(func() {
		left, _ := filepath.Glob(fmt.Sprintf("/dev/shm/lmcache_l1_pool_kvasir_%d*", port))
		for _, f := range left {
			_ = os.Remove(f)
		}
	})
	log, stop, ok := launch(t, 150*time.Second, "the proxy serves", "all", "--config", file)
	if !ok && strings.Contains(log, "address already in use") {
		return nil
	}
	if !ok {
		t.Fatalf("it ended:\n%s", log)
	}
	a := &allOf{registry: fmt.Sprintf("http://127.0.0.1:%d", registry), log: log, stop: stop}
	address := func(of string) string {
		m := regexp.MustCompile(of + `.* address=(?:http://)?(\S+).* part=|part=\S+.*` + of + `.* address=(?:http://)?(\S+)`).FindStringSubmatch(a.log)
		if m == nil {
			m = regexp.MustCompile(of + `.* address=(?:http://)?(\S+)`).FindStringSubmatch(a.log)
		}
		if m == nil {
			t.Fatalf("no address of %q in\n%s", of, a.log)
		}
		return "http://" + m[len(m)-1]
	}
	a.server, a.relay, a.proxy = address("serving HTTP"), address("the relay serves"), address("the proxy serves")
	return a
}

func fetch(t *testing.T, url string) (int, string) {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(body)
}

// Server, registry, relay and proxy run in one process, know each other, write one log,
// and end in the reverse of the order in which they started.
func TestAll(t *testing.T) {
	a := startAll(t)
	body := `{"engine_id":"e","dp_rank":0,"tp_rank":0,"pp_rank":0,"addr":"tcp://127.0.0.1:41233"}`
	r, err := http.Post(a.registry+"/register", "application/json", strings.NewReader(body))
	if err != nil || r.StatusCode != http.StatusOK {
		t.Fatal(r, err)
	}
	r.Body.Close()
	text := ""
	for end := time.Now().Add(90 * time.Second); !strings.Contains(text, "relay-e"); { // the relay asks the registry of the same file
		if time.Now().After(end) {
			t.Fatalf("the relay does not know the engine: %s", text)
		}
		time.Sleep(10 * time.Millisecond)
		_, text = fetch(t, a.relay+"/query")
	}
	if code, text := fetch(t, a.proxy+"/metrics"); code != http.StatusOK || !strings.Contains(text, "kvasir_proxy_") {
		t.Errorf("the proxy: %d, %s", code, text)
	}
	if code, text := fetch(t, a.server+"/healthcheck"); code != http.StatusOK {
		t.Errorf("the server: %d, %s", code, text)
	}
	_, text = fetch(t, a.server+"/status")
	var status struct {
		Flags map[string]string             `json:"flags"`
		Parts map[string]map[string]float64 `json:"parts"`
	}
	if err := json.Unmarshal([]byte(text), &status); err != nil {
		t.Fatal(err)
	}
	_, proxied := status.Parts["proxy"]["kvasir_proxy_requests_in_flight"]
	if status.Parts["bootstrap"]["kvasir_bootstrap_workers"] != 1 || status.Parts["relay"]["kvasir_relay_engines"] != 1 || !proxied || status.Flags["l1-size-gb"] != "8MiB" {
		t.Errorf("status: %s", text)
	}
	// The page of the server lists and drains the engines of the proxy beside it.
	engines := func() (list []admin.ProxyEngine) {
		code, text := fetch(t, a.server+"/engines")
		var got struct{ Engines []admin.ProxyEngine }
		if err := json.Unmarshal([]byte(text), &got); err != nil || code != http.StatusOK || len(got.Engines) == 0 {
			t.Fatalf("engines: %d %s", code, text)
		}
		return got.Engines
	}
	one := engines()[0]
	for _, deed := range []string{"drain", "undrain"} {
		r, err := http.Post(a.server+"/engines/"+deed+"?url="+url.QueryEscape(one.URL), "", nil)
		if err != nil || r.StatusCode != http.StatusOK {
			t.Fatal(r, err)
		}
		r.Body.Close()
		if got := engines()[0].Draining; got != (deed == "drain") {
			t.Errorf("after a %s the engine is drained: %v", deed, got)
		}
	}
	log := a.stop()
	at := -1
	for _, want := range []string{
		"Mooncake Bootstrap Server started at", "serving HTTP", "the relay serves", "the proxy serves",
		"the proxy stopped", "the relay stopped", "stopped; the pool stays", "Mooncake Bootstrap Server stopped.", "all parts have ended",
	} {
		i := strings.Index(log, want)
		if i < at || i < 0 {
			t.Errorf("%q does not follow what should be before it in\n%s", want, log)
		}
		at = i
	}
	for _, part := range []string{"bootstrap", "server", "relay", "proxy"} {
		if !strings.Contains(log, " part="+part) {
			t.Errorf("no line says that it is of %s:\n%s", part, log)
		}
	}
}

// A part that cannot start ends those before it: one line says which and why.
func TestAllEndsWhenAPartFails(t *testing.T) {
	taken := webTaken(t)
	file := write(t, fmt.Sprintf("log-level: error\nbootstrap: {port: 0}\nproxy:\n  engine: ['http://127.0.0.1:1']\n  port: %d\n", taken))
	code, stdout, stderr := run(t, "all", "--config", file)
	want := fmt.Sprintf("kvasir: proxy: listen tcp 127.0.0.1:%d: bind: address already in use: choose another --port, or stop the process that has it (--port is from %s line 5)\n", taken, file)
	if code != 1 || stdout != "" || stderr != want {
		t.Errorf("exit %d\n got %s\nwant %s", code, stderr, want)
	}
}

// Mistakes in any section are all reported in one line, with the line of the file and the
// nearest known key. Nothing is started.
func TestBadFilesForAll(t *testing.T) {
	testkit.LongAlone(t)
	f := func(text, want string) {
		t.Helper()
		file := write(t, text)
		want = "kvasir: " + strings.ReplaceAll(want, "FILE", file) + " (see kvasir all --help)\n"
		for _, args := range [][]string{{"all", "--config", file}, {"config", "check", file}} {
			code, stdout, stderr := run(t, args...)
			if code != 2 || stdout != "" || stderr != want {
				t.Errorf("%q: exit %d\n got %swant %s", text, code, stderr, want)
			}
		}
	}
	f("", "FILE has no section: server, bootstrap, relay or proxy")
	f("sever:\n", `FILE line 1: unknown key "sever", did you mean "server"?`)
	f("registry:\n", `FILE line 1: unknown key "registry": sections are bootstrap, server, relay, proxy`)
	f("port: 1\n", `FILE line 1: unknown key "port": sections are bootstrap, server, relay, proxy`)
	f("server:\n  prot: 1\n", `FILE line 2: unknown key "prot" in server, did you mean "port"?`)
	f("server: 5555\n", "FILE line 1: server is no section: want lines below it like port: 5555")
	f("server: {}\nbootstrap: {}\nserver: {}\n", "FILE line 3: server was given in line 1 already")
	f("server:\n---\nproxy:\n", "FILE line 2: a second document begins, want one")
	f("server:\n---\n  - }\n", "FILE: line 2: did not find expected node content")
	f("- server\n", "FILE line 1: want lines like bootstrap:")
	f("server: {drop: true}\n", "FILE line 1: drop can only be given on the command line")
	f("server:\n  port: x\n", `server: --port: "x" is no whole number (--port is from FILE line 2)`)
	f("relay:\n", "relay: missing flags: --upstream=URL")
	f("server:\n  http-port: 8998\nbootstrap:\n  host: 0.0.0.0\n  allow-from: 127.0.0.1\n", "bootstrap --port and server --http-port are both 8998")
	f("server:\n  kv-events: tcp://*:8998\n  allow-from: 127.0.0.1\nbootstrap:\n", "bootstrap --port and server --kv-events are both 8998")
	f("server:\n  kv-events: tcp://*:5557\n  allow-from: 127.0.0.1\n  kv-events-replay: tcp://127.0.0.1:5557\n", "server --kv-events and server --kv-events-replay are both 5557")
	f("server:\n  http-host: ''\n  allow-from: 127.0.0.1\n  http-port: 8998\nbootstrap:\n", "bootstrap --port and server --http-port are both 8998")
	f("server:\n  kv-events: '5557'\nbootstrap:\n", `server: --kv-events: zmtp: endpoint "5557" is neither tcp://host:port nor ipc://path (--kv-events is from FILE line 2)`)
	f("server:\n  kv-events: tcp://*:65536\n", `server: --kv-events: zmtp: endpoint "tcp://*:65536" has no port from 0 to 65535 (--kv-events is from FILE line 2)`)
	f("log-level: loud\nserver:\n", `--log-level: "loud" is no level: want debug, info, warn or error (--log-level is from FILE line 1)`)
	f("server:\n  l1-size-gb: 0\nproxy:\n  policy: best\nbootstrap:\n  port: 70000\n",
		"bootstrap: --port 70000 is outside 0 to 65535 (--port is from FILE line 6); server: --l1-size-gb: a pool has 4 KiB to 1024 TiB, not 0 B (--l1-size-gb is from FILE line 2); "+
			`proxy: --policy must be one of "round_robin","least_loaded","prefix_aware","random","power_of_two","cache_aware","consistent_hash","manual","bucket","least_load","prefix_hash","consistent_hashing" but got "best" (--policy is from FILE line 4); proxy: --prefill and --decode, or --engine, are missing`)

	f("rely: {}\nserver:\n  prot: 1\n  http-port: x\n  chunk-size: 0x10\n  session-ttl-seconds: -1\nproxy:\n  engin: y\n  port: 70000\n  engine: ['http://127.0.0.1:1']\n",
		`FILE line 1: unknown key "rely", did you mean "relay"?; server: --http-port: "x" is no whole number (--http-port is from FILE line 4); `+
			`server: --chunk-size: "0x10" is no whole number (--chunk-size is from FILE line 5); FILE line 3: unknown key "prot" in server, did you mean "port"?; `+
			`server: --session-ttl-seconds -1 is not above 0 (--session-ttl-seconds is from FILE line 6); FILE line 8: unknown key "engin" in proxy, did you mean "engine"?; `+
			`proxy: --port 70000 is outside 0 to 65535 (--port is from FILE line 9)`)

	missing := filepath.Join(t.TempDir(), "none.yaml")
	if code, _, stderr := run(t, "config", "check", missing); code != 2 || !strings.Contains(stderr, "kvasir config init "+missing+" writes one") {
		t.Errorf("a file that is not there: exit %d, %s", code, stderr)
	}
}

// The file that config init writes is valid. config check prints a file of the same values. config init
// replaces an existing file only with --force.
func TestConfigInitAndCheck(t *testing.T) {
	file := filepath.Join(t.TempDir(), "k.yaml")
	if code, stdout, stderr := run(t, "config", "init", file); code != 0 || stderr != "" || !strings.Contains(stdout, "kvasir all --config "+file) {
		t.Fatalf("exit %d, %s%s", code, stdout, stderr)
	}
	code, stdout, stderr := run(t, "config", "check", file)
	if code != 0 || stderr != "" {
		t.Fatalf("exit %d, %s", code, stderr)
	}
	for _, want := range []string{"log-level: INFO ", "\nserver:\n", "\n  http-port: 8080 ", "\n  upstream: http://127.0.0.1:8998  # the section bootstrap\n", "\n  chunk-size: 256 ", "# " + file + " line "} {
		if !strings.Contains(stdout, want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}
	again := write(t, stdout)
	code, twice, stderr := run(t, "config", "check", again)
	values := func(text string) string {
		return regexp.MustCompile(`(?m) +# .*$`).ReplaceAllString(text, "")
	}
	if code != 0 || values(twice) != values(stdout) {
		t.Errorf("read again: exit %d, %s\n%s", code, stderr, twice)
	}
	if code, _, stderr := run(t, "config", "init", file); code != 1 || stderr != "kvasir: "+file+" is there already: --force replaces it\n" {
		t.Errorf("exit %d, %s", code, stderr)
	}
	if code, _, stderr := run(t, "config", "init", "--force", file); code != 0 {
		t.Errorf("exit %d, %s", code, stderr)
	}
	if code, stdout, _ := run(t, "config", "init", "-"); code != 0 || !strings.HasPrefix(stdout, "# Kvasir") {
		t.Errorf("exit %d, %s", code, stdout)
	}
	env := []string{"KVASIR_SERVER_PORT=6001", "KVASIR_BOOTSTRAP_TOKEN=hidden-value"}
	code, stdout, stderr = checkConfig(t, env, "all", "--config", file)
	if code != 0 || !strings.Contains(stdout, "\n  port: 6001 ") || !strings.Contains(stdout, "# $KVASIR_SERVER_PORT") || strings.Contains(stdout, "hidden-value") {
		t.Errorf("with variables: exit %d, %s\n%s", code, stderr, stdout)
	}
}

// webTaken returns a port on which this process listens until the test ends.
func webTaken(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.Addr().(*net.TCPAddr).Port
}
