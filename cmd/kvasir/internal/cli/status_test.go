// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// status asks a live server and says in words why nothing hits. --json prints the server's answer.
func TestStatusOfALiveServer(t *testing.T) {
	s := serve(t)
	url := fmt.Sprintf("http://127.0.0.1:%d", s.http)
	code, stdout, stderr := run(t, "status", "--url", url)
	for _, want := range []string{
		fmt.Sprintf("process %d,", s.cmd.Process.Pid), "healthy", "10.2 MiB, 0.0 % full", "0 of 256 tokens kept", "worker   none",
		"- no worker that can be served is registered\n  start vLLM on this host",
	} {
		if code != 0 || stderr != "" || !strings.Contains(stdout, want) {
			t.Errorf("exit %d, %s, want %q in:\n%s", code, stderr, want, stdout)
		}
	}
	var st admin.Status
	if code, stdout, _ = run(t, "status", "--url", url, "--json"); code != 0 || json.Unmarshal([]byte(stdout), &st) != nil || st.PID != s.cmd.Process.Pid ||
		st.Flags["l1-size-gb"] == "" || st.Flags["http-port"] != fmt.Sprint(s.http) || len(st.Findings) != 1 {
		t.Errorf("--json: exit %d, %s", code, stdout)
	}
}

// status says in one line that a server is not kvasir.
func TestStatusOfSomethingElse(t *testing.T) {
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasPrefix(r.URL.Path, "/forbidden"):
			w.WriteHeader(http.StatusForbidden)
		case strings.HasPrefix(r.URL.Path, "/absent"):
			w.WriteHeader(http.StatusNotFound)
		case strings.HasPrefix(r.URL.Path, "/evil"):
			_, _ = w.Write([]byte(`{"pid": 1, "chunk_size": 16, "version": "\u001b[2J", "workers": [{"model_name": "a\nb\u001b[31m"}], "findings": [{"what": "c\nd", "do": "\u0007"}]}`))
		case strings.HasPrefix(r.URL.Path, "/slow"):
			<-r.Context().Done()
		default:
			_, _ = w.Write([]byte(`{"status": "ok"}`))
		}
	}))
	defer other.Close()
	f := func(code int, want, url string) {
		t.Helper()
		limit := "60"
		if strings.HasSuffix(url, "/slow") {
			limit = "0.5"
		}
		got, stdout, stderr := run(t, "status", "--url", url, "--timeout", limit)
		if got != code || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%s: exit %d, want %d and one line with %q:\n%s%s", url, got, code, want, stdout, stderr)
		}
	}
	code, stdout, stderr := run(t, "status", "--url", other.URL+"/evil")
	if code != 0 || stderr != "" || strings.ContainsAny(stdout, "\x1b\a") || !strings.Contains(stdout, `a\nb\x1b[31m`) || !strings.Contains(stdout, `- c\nd`) {
		t.Errorf("names of others reach the terminal: exit %d, %q %s", code, stdout, stderr)
	}
	f(1, "is not answered by a kvasir server", other.URL)
	f(1, "--allow-host", other.URL+"/forbidden")
	f(1, "404 Not Found: is that a kvasir server?", other.URL+"/absent")
	f(1, "does not answer in time", other.URL+"/slow")
	f(1, "nothing listens at", fmt.Sprintf("http://127.0.0.1:%d", testkit.FreePort(t)))
	f(1, "nothing listens at", fmt.Sprintf("127.0.0.1:%d", testkit.FreePort(t))) // without http://
	f(2, "is not http://HOST:PORT", "ftp://localhost:8080")
}

// pool ls names the process that has a pool. pool rm removes only pools that no process has.
func TestPools(t *testing.T) {
	live, old := fmt.Sprintf("lmcache_l1_pool_kvasir_test_live_%d", os.Getpid()), fmt.Sprintf("lmcache_l1_pool_kvasir_test_old_%d", os.Getpid())
	a, b := serve(t, "--shm-name", live), serve(t, "--shm-name", old)
	if err := b.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	b.wait(t, `remove_with="kvasir pool rm `+old+`"`)
	if err := b.cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	line := func(name string) string {
		t.Helper()
		_, stdout, _ := run(t, "pool", "ls")
		for l := range strings.Lines(stdout) {
			if strings.HasPrefix(l, name+" ") {
				return l
			}
		}
		return ""
	}
	if l := line(live); !strings.Contains(l, fmt.Sprintf("server %d ", a.cmd.Process.Pid)) || !strings.Contains(l, "10.2 MiB") {
		t.Errorf("the pool in use: %q", l)
	}
	if l := line(old); !strings.Contains(l, " no process ") {
		t.Errorf("the pool that is left: %q", l)
	}
	f := func(code int, want string, args ...string) {
		t.Helper()
		got, stdout, stderr := run(t, append([]string{"pool", "rm"}, args...)...)
		if got != code || !strings.Contains(stdout+stderr, want) || strings.Count(stderr, "\n") > 1 {
			t.Errorf("rm %v: exit %d, want %d and %q:\n%s%s", args, got, code, want, stdout, stderr)
		}
	}
	f(2, "name the pools to remove")
	f(2, "name the pools to remove", "--all", old)
	f(1, fmt.Sprintf("is used by server %d", a.cmd.Process.Pid), live)
	f(1, "there is no pool kvasir_test_absent in /dev/shm", "kvasir_test_absent")
	f(0, "removed "+old, "/dev/shm/"+old)
	f(1, "there is no pool", old)
	if line(old) != "" || line(live) == "" {
		t.Error("rm removed the wrong pool, or none")
	}
	if err := a.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = a.cmd.Wait()
	if err := os.WriteFile("/dev/shm/"+live+".kvasir", []byte("damaged"), 0o600); err != nil {
		t.Fatal(err)
	}
	if l := line(live); !strings.Contains(l, "its index is damaged") {
		t.Errorf("a damaged index: %q", l)
	}
	f(0, "removed "+live, live)
}
