// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// Each wrong command line gets one line that names the flag and gives the right advice for it,
// and no other advice.
func TestMessages(t *testing.T) {
	testkit.LongAlone(t)
	name := fmt.Sprintf("kvasir_test_messages_%d", os.Getpid())
	f := func(code int, want string, args ...string) {
		t.Helper()
		got, stdout, stderr := run(t, args...)
		line := strings.TrimSuffix(stderr, "\n")
		if got != code || line != "kvasir: "+want || stdout != "" {
			t.Errorf("kvasir %v: exit %d, want %d\n got %s\nwant kvasir: %s", args, got, code, stderr, want)
		}
	}
	server := " (see kvasir server --help)"
	f(2, `unexpected argument sever, did you mean "server"? (see kvasir --help)`, "sever")
	f(2, `unexpected argument nonsense (see kvasir --help)`, "help", "nonsense")
	f(2, `unknown flag --l1-size, did you mean "--l1-size-gb"?`+server, "server", "--l1-size", "4")
	f(2, `unknown flag --http-prot, did you mean "--http-port"?`+server, "server", "--http-prot", "4")
	f(2, `--l1-size-gb: "4XB" is no size: want for example 4, 4GiB or 256MiB`+server, "server", "--l1-size-gb", "4XB")
	f(2, `--l1-size-gb: "NaN" is outside 0 to 1 PiB`+server, "server", "--l1-size-gb", "NaN")
	f(2, `--l1-size-gb: a pool has 4 KiB to 1024 TiB, not 0 B`+server, "server", "--l1-size-gb", "0")
	f(2, `--l1-size-gb: a value is missing, or write --l1-size-gb="-1"`+server, "server", "--l1-size-gb", "-1")
	f(2, `unknown flag --queue-size: kvasir proxy has --max-queue (see kvasir proxy --help)`, "proxy", "--pd-disaggregation", "--prefill", "http://p:1", "8998", "--decode", "http://d:1", "--queue-size", "4")
	f(2, `unknown flag --api-key: kvasir proxy has --engine-api-key for the engines' key, --api-keys for those of clients (see kvasir proxy --help)`, "proxy", "--api-key", "x")
	f(2, `unknown flag --mcp-config-path (see kvasir proxy --help)`, "proxy", "--mcp-config-path", "x")
	f(2, `an argument is missing: shell (see kvasir completion --help)`, "completion")
	f(2, `--port 99999 is outside 0 to 65535 (see kvasir engine --help)`, "engine", "--port", "99999")
	f(2, `--port: a value is missing`+server, "server", "--port")
	f(2, `--port: a value is missing, or write --port="-5"`+server, "server", "--port", "-5")
	f(2, `--port: "x" is no whole number`+server, "server", "--port", "x")
	f(2, `--port 55555555 is outside 1 to 65535`+server, "server", "--port", "55555555")
	f(2, `--port 0 is outside 1 to 65535; --http-port -1 is outside 0 to 65535; --chunk-size 0 is outside 1 to 65536`+server,
		"server", "--port", "0", "--http-port=-1", "--chunk-size", "0")
	long := "/tmp/" + strings.Repeat("x", 120)
	f(2, fmt.Sprintf(`--ipc %s has 125 bytes: the path of a socket has at most 107`, long)+server, "server", "--ipc", long)
	f(2, `--session-ttl-seconds: "soon" is no number`+server, "server", "--session-ttl-seconds", "soon")
	f(2, `--session-ttl-seconds 0 is not above 0`+server, "server", "--session-ttl-seconds", "0")
	f(2, `--log-level: "loud" is no level: want debug, info, warn or error`+server, "server", "--log-level", "loud")
	f(2, `--port 70000 is outside 0 to 65535 (see kvasir bootstrap --help)`, "bootstrap", "--port", "70000")
	f(2, `--settle-seconds 0 is not above 0; --max-probes 0 is less than 1 (see kvasir bootstrap --help)`, "bootstrap", "--settle-seconds", "0", "--max-probes", "0")
	f(2, `--upstream "127.0.0.1:8998" is not http://HOST:PORT or https://HOST:PORT (see kvasir relay --help)`, "relay", "--upstream", "127.0.0.1:8998")
	f(2, `--upstream "ftp://127.0.0.1:8998" is not http://HOST:PORT or https://HOST:PORT (see kvasir relay --help)`, "relay", "--upstream", "ftp://127.0.0.1:8998")
	f(2, `layout: "swa,bs=16" lacks win=, the tokens of its window (see kvasir coordinator --help)`, "coordinator", "full,bs=16", "swa,bs=16")
	f(2, `--workers 65 is outside 1 to 64; --chunk-kib 0B is outside 1KiB to 1GiB (see kvasir demo --help)`, "demo", "--workers", "65", "--chunk-kib", "0")
	f(2, `--l1-size-gb 512MiB holds no chunk of 976.6 MiB (see kvasir demo --help)`, "demo", "--chunk-kib", "1000000", "--l1-size-gb", "512MiB")

	free := fmt.Sprint(testkit.FreePort(t))
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	busy := fmt.Sprint(taken.Addr().(*net.TCPAddr).Port)
	g := func(want, not string, args ...string) {
		t.Helper()
		code, _, stderr := run(t, append([]string{"server", "--l1-size-gb", "4MiB", "--shm-name", name, "--log-level", "error"}, args...)...)
		if code != 1 || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, want) || strings.Contains(stderr, not) {
			t.Errorf("%v: exit %d, want one line with %q and not %q, got:\n%s", args, code, want, not, stderr)
		}
		if left, _ := filepath.Glob("/dev/shm/lmcache_l1_pool_" + name + "*"); len(left) != 0 {
			t.Errorf("%v: left behind: %v", args, left)
		}
	}
	g("choose another --port, or stop the process that has it", "no address", "--port", busy, "--http-port", free)
	g("choose another --http-port, or stop", "no address", "--port", free, "--http-port", busy)
	g("--host is no address of this machine", "choose", "--host", "192.0.2.1", "--allow-from", "127.0.0.1", "--port", free, "--http-port", "0")
	g("the directory of --ipc is not there", "choose", "--ipc", "/nonexistent/socket", "--port", free, "--http-port", "0")
}

// When a kept pool was made with other flags, the error names only the flags that differ.
func TestPoolOfOtherFlagsNamesWhatDiffers(t *testing.T) {
	name := fmt.Sprintf("kvasir_test_differs_%d", os.Getpid())
	s := serve(t, "--shm-name", name, "--l1-size-gb", "4MiB")
	if err := s.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	defer run(t, "server", "--shm-name", name, "--drop")
	path := filepath.Join(shm.Dir, "lmcache_l1_pool_"+name)
	f := func(want string, args ...string) {
		t.Helper()
		code, _, stderr := run(t, append([]string{"server", "--shm-name", name, "--l1-size-gb", "4MiB"}, args...)...)
		if want = "kvasir: the pool that is kept in " + path + " has " + want + "\n"; code != 1 || stderr != want {
			t.Errorf("%v: exit %d\n got %swant %s", args, code, stderr, want)
		}
	}
	f("--l1-align-bytes 4096, asked for is 8192: start with what it has, or with --cold to discard it", "--l1-size-gb", "8MiB", "--l1-align-bytes", "8192")
	f("--l1-align-bytes 4096 and --chunk-size 256, asked for is 8192 and 128: start with what it has, or with --cold to discard it, "+
		"and restart the engines (they asked for the chunk size when they started)", "--chunk-size", "128", "--l1-align-bytes", "8192")
}
