// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// checkConfig runs a command line with --check-config and these variables.
func checkConfig(t *testing.T, env []string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	c := command(append(args, "--check-config")...)
	c.Env = append(c.Env, env...)
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	_ = c.Run()
	return c.ProcessState.ExitCode(), out.String(), errs.String()
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kvasir.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// The command line overrides the environment, the environment the file, and the file
// the default, for commands of one word and of two.
func TestOrderOfConfiguration(t *testing.T) {
	file := write(t, "# a comment\nport: 6001\nhttp-port: 6002\nchunk-size: 64\nl1-size-gb: 64MiB\nallow-host: [a, 'b']\nseparate-object-groups: true\nlog-level: warn\n")
	env := []string{"KVASIR_SERVER_HTTP_PORT=7002", "KVASIR_SERVER_CHUNK_SIZE=32", "KVASIR_LOG_FORMAT=json"}
	want := map[string]string{
		"port: 6001": file + " line 2", "http-port: 7002": "$KVASIR_SERVER_HTTP_PORT", "chunk-size: 16": "command line", "l1-size-gb: 64MiB": file + " line 5",
		"allow-host: [a, b]": file + " line 6", "separate-object-groups: true": file + " line 7", "log-level: WARN": file + " line 8",
		"log-format: json": "$KVASIR_LOG_FORMAT", "pickle: auto": "default",
	}
	see := func(stdout string) {
		t.Helper()
		got := make(map[string]string)
		for line := range strings.Lines(stdout) {
			flag, from, _ := strings.Cut(line, " # ")
			got[strings.TrimSpace(flag)] = strings.TrimSpace(from)
		}
		for flag, from := range want {
			if got[flag] != from {
				t.Errorf("%s: from %q, want %q", flag, got[flag], from)
			}
		}
	}
	code, stdout, stderr := checkConfig(t, env, "server", "--config", file, "--chunk-size", "16")
	if code != 0 || stderr != "" {
		t.Fatalf("exit %d: %s", code, stderr)
	}
	see(stdout)
	_, byVariable, _ := checkConfig(t, append(env, "KVASIR_SERVER_CONFIG="+file), "server", "--chunk-size", "16")
	if byVariable != stdout {
		t.Errorf("the file named by a variable gives something else:\n%s", byVariable)
	}
	again := write(t, stdout) // what is printed is a file
	for flag := range want {
		want[flag] = again
	}
	_, repeated, _ := checkConfig(t, nil, "server", "--config", again)
	flags := func(s string) (out []string) {
		for line := range strings.Lines(s) {
			flag, _, _ := strings.Cut(line, " # ")
			out = append(out, strings.TrimSpace(flag))
		}
		return out
	}
	if strings.Join(flags(repeated), "\n") != strings.Join(flags(stdout), "\n") {
		t.Errorf("read again: %s", repeated)
	}
	if _, stdout, _ := checkConfig(t, []string{"KVASIR_TRANSFER_SERVE_SIZE=3MiB"}, "transfer", "serve"); !strings.Contains(stdout, "size: 3MiB ") {
		t.Errorf("transfer serve: %s", stdout)
	}
	if _, stdout, _ := checkConfig(t, []string{"KVASIR_BOOTSTRAP_TOKEN=secret"}, "bootstrap"); strings.Contains(stdout, "secret") || !strings.Contains(stdout, "token: (set)") {
		t.Errorf("the token is shown: %s", stdout)
	}
	if _, stdout, _ := checkConfig(t, nil, "server", "--disk", t.TempDir(), "--disk-gb", "1", "--tier-key-command", "echo "+strings.Repeat("3f", 32)); strings.Contains(stdout, "3f3f") || !strings.Contains(stdout, "\n# tier-key-command: (set)") {
		t.Errorf("a command that must not be shown is shown, or would be run as (set) where the file is read again: %s", stdout)
	}
	proxies := "prefill: [http://a:1, 'http://b:1,http://c:2']\ndecode: http://d:1\n"
	if code, stdout, stderr := checkConfig(t, []string{"KVASIR_PROXY_DECODE=http://e:1 http://f:1"}, "proxy", "--config", write(t, proxies)); code != 0 ||
		!strings.Contains(stdout, "prefill: ['http://a:1', 'http://b:1,http://c:2']") && !strings.Contains(stdout, `prefill: [http://a:1, "http://b:1,http://c:2"]`) ||
		!strings.Contains(stdout, "http://e:1") || !strings.Contains(stdout, "http://f:1") {
		t.Errorf("flags that are repeated: exit %d, %s\n%s", code, stderr, stdout)
	}
	if code, _, stderr := checkConfig(t, nil, "relay", "--config", write(t, "upstream: http://p:8998\n")); code != 0 {
		t.Errorf("a flag that is needed, in the file: %s", stderr)
	}
}

// Bad input is one line that names file and line, or variable, and nothing is started.
func TestBadConfiguration(t *testing.T) {
	testkit.LongAlone(t)
	f := func(text, want string) {
		t.Helper()
		file := write(t, text)
		want = "kvasir: " + strings.ReplaceAll(want, "FILE", file) + " (see kvasir server --help)\n"
		c := command("server", "--config", file) // without --check-config: it must not serve
		out, err := c.CombinedOutput()
		if err == nil || c.ProcessState.ExitCode() != 2 || string(out) != want {
			t.Errorf("%q:\n got %swant %s", text, out, want)
		}
	}
	f("port: 1\nprot: 1\n", `FILE line 2: unknown key "prot", did you mean "port"?`)
	f("prt: 1\nl1_size_gb: 1\n", `FILE line 1: unknown key "prt", did you mean "port"?; FILE line 2: unknown key "l1_size_gb", did you mean "l1-size-gb"?`)
	f("port: 1\nport: 2\n", `FILE line 2: port was given in line 1 already`)
	f("drop: true\n", `FILE line 1: drop can only be given on the command line`)
	f("host: {a: 1}\nport:\n", `FILE line 1: host is neither a value nor a list of values; FILE line 2: port is neither a value nor a list of values`)
	f("- port\n", `FILE line 1: want lines like port: 5555`)
	f("port: x\n", `--port: "x" is no whole number (--port is from FILE line 1)`)
	f("port: 1\nport: [\n", `FILE: line 2: did not find expected node content`)
	f("\nport: 0\n", `--port 0 is outside 1 to 65535 (--port is from FILE line 2)`)
	f("pickle: never\n", `--pickle must be one of "auto","on","only","off" but got "never" (--pickle is from FILE line 1)`)
	f("prt: 1\nhttp-port: x\nport: y\n", `FILE line 1: unknown key "prt", did you mean "port"?; --port: "y" is no whole number; --http-port: "x" is no whole number (--port is from FILE line 3) (--http-port is from FILE line 2)`)
	f("server: {prt: 1}\nproxy: {port: z}\nbootstrap: {}\n", `FILE line 1: unknown key "prt", did you mean "port"?`)
	f(strings.Repeat("# long\n", 1<<18), "FILE is longer than 1 MiB")

	if code, _, stderr := checkConfig(t, nil, "server", "--config", "/nonexistent"); code != 2 || !strings.Contains(stderr, "open /nonexistent: no such file") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	if code, _, stderr := checkConfig(t, []string{"KVASIR_SERVER_PORT=x"}, "server"); code != 2 || !strings.Contains(stderr, "(--port is from $KVASIR_SERVER_PORT)") {
		t.Errorf("exit %d: %s", code, stderr)
	}
	if code, _, stderr := checkConfig(t, []string{"KVASIR_SERVER_PROT=1"}, "server"); code != 0 || !strings.Contains(stderr, "did you mean KVASIR_SERVER_PORT?") {
		t.Errorf("a variable that is misspelt: exit %d: %s", code, stderr)
	}
	// Kubernetes sets this for a Service of the name kvasir-server.
	service := []string{"KVASIR_SERVER_SERVICE_HOST=10.0.0.1", "KVASIR_SERVER_PORT=tcp://10.0.0.1:5555"}
	if code, stdout, stderr := checkConfig(t, service, "server"); code != 0 || !strings.Contains(stdout, "port: 5555 ") {
		t.Errorf("a Service's variables: exit %d: %s", code, stderr)
	}
}

// SIGHUP, as from a terminal that closes, does not stop the server.
func TestHangUpDoesNotStopTheServer(t *testing.T) {
	s := serve(t)
	if err := s.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	s.wait(t, "SIGHUP does nothing")
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// A command reads its own section of a file for kvasir all. --l2-adapter takes a YAML mapping as its JSON, as the docs
// show it.
func TestSectionsAndMappingsOfFiles(t *testing.T) {
	file := write(t, "log-level: warn\nserver:\n  chunk-size: 128\n  l2-adapter: {\"type\":\"fs\",\"base_path\":\"/x\"}\nproxy:\n  port: 1\n")
	code, stdout, stderr := checkConfig(t, nil, "server", "--config", file)
	if code != 0 || !strings.Contains(stdout, "chunk-size: 128 ") || !strings.Contains(stdout, "log-level: WARN ") || !strings.Contains(stdout, `"base_path":"/x"`) {
		t.Errorf("exit %d: %s\n%s", code, stderr, stdout)
	}
	list := write(t, "l2-adapter:\n  - type: fs\n    base_path: /a\n  - '{\"type\":\"fs\",\"base_path\":\"/b\"}'\n")
	if code, stdout, stderr := checkConfig(t, nil, "server", "--config", list); code != 0 || !strings.Contains(stdout, `"base_path":"/a"`) || !strings.Contains(stdout, `"base_path":"/b"`) {
		t.Errorf("a list: exit %d: %s\n%s", code, stderr, stdout)
	}
}

// An empty value of a flag that guards a listener is refused, on the command line, in the environment and in a file. It never counts as absent.
func TestEmptyFilesThatGuardAreRefused(t *testing.T) {
	f := func(want string, env []string, args ...string) {
		t.Helper()
		if code, _, stderr := checkConfig(t, env, args...); code != 2 || !strings.Contains(stderr, want) {
			t.Errorf("%v %v: exit %d, %s", env, args, code, stderr)
		}
	}
	for _, flag := range []string{"token-file", "tls-client-ca", "salt-secret-file", "curve-clients"} {
		f("--"+flag+" is empty", nil, "server", "--"+flag, "")
	}
	f("--token-file is empty", []string{"KVASIR_SERVER_TOKEN_FILE="}, "server")
	f("--token-file is empty", nil, "server", "--config", write(t, "token-file: ''\n"))
	f("--token-file is empty", nil, "all", "--config", write(t, "server:\n  l1-size-gb: 64MiB\n  token-file: ''\n"))
	f("--token-file is empty", nil, "relay", "--upstream", "http://p:8998", "--token-file", "")
	const engine = "http://127.0.0.1:8100"
	f("--api-keys is empty", nil, "proxy", "--engine", engine, "--api-keys", "")
	f("--api-keys is empty", []string{"KVASIR_PROXY_API_KEYS="}, "proxy", "--engine", engine, "--allow-from", "127.0.0.1")
	f("--admin-token is empty", nil, "proxy", "--engine", engine, "--admin-port", "8001", "--token-file", "x", "--admin-token=")
	f("--admin-token is empty", []string{"KVASIR_PROXY_ADMIN_TOKEN="}, "proxy", "--engine", engine)
	f("--token is empty", []string{"KVASIR_BOOTSTRAP_TOKEN="}, "bootstrap")
	if code, _, stderr := checkConfig(t, nil, "server"); code != 0 {
		t.Errorf("without them: exit %d, %s", code, stderr)
	}
}
