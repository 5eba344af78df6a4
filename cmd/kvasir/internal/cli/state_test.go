// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// A quota that kvasir quota set survives a kill and an orderly end. A damaged state file is put aside. Another kind of file, or the file of
// another server, is an error.
func TestStateOfTenants(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tenants.state")
	flags := []string{"--quota", "a=1MiB", "--state", path}
	quota := func(s *serving, want string, args ...string) {
		t.Helper()
		code, stdout, stderr := run(t, append(append([]string{"quota"}, args...), "--url", fmt.Sprintf("http://127.0.0.1:%d", s.http))...)
		if text := strings.Join(strings.Fields(stdout), " "); code != 0 || stderr != "" || text != "TENANT QUOTA HAS EVICTED TTL EXPIRED PINNED MAY PIN "+want {
			t.Errorf("quota %v: exit %d, %s%s, want %s", args, code, stdout, stderr, want)
		}
	}
	s := serve(t, flags...)
	quota(s, "a 2 MiB 0 B 0 B - - - -", "set", "a", "--size", "2MiB")
	quota(s, "b - - - 1h30m0s 0 chunks - -", "set", "b", "--ttl", "90m")
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
	const held = "a 2 MiB 0 B 0 B - - - - b - - - 1h30m0s 0 chunks - -"
	s = serve(t, flags...)
	quota(s, held, "list")
	answer, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/config?sources=true", s.http))
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	body, _ := io.ReadAll(answer.Body)
	var c admin.Config
	if err := json.Unmarshal(body, &c); err != nil || c.State == nil || *c.State != path || len(c.Tenants) != 2 || c.Tenants[0].From != "set while running" ||
		c.Flags["quota"].From != "command line" || c.Flags["drain-timeout-seconds"].From != "default" {
		t.Errorf("%v %s", err, body)
	}
	other := command("server", "--port", fmt.Sprint(testkit.FreePort(t)), "--http-port", fmt.Sprint(testkit.FreePort(t)), "--l1-size-gb", "0.01", "--state", path)
	if out, err := other.CombinedOutput(); err == nil || strings.Count(string(out), "\n") != 1 || !strings.Contains(string(out), "kvasir: --state: state file "+path+" is in use by another process") {
		t.Errorf("another server: %v, %s", err, out)
	}
	stop(t, s)
	s = serve(t, flags...)
	quota(s, held, "list")
	stop(t, s)
	if err := os.WriteFile(path, []byte("kvasir-tenants 1 00000000\n{}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s = serve(t, flags...) // it serves, with what the flags say
	quota(s, "a 1 MiB 0 B 0 B - - - -", "list")
	stop(t, s)
	if _, err := os.Stat(path + ".bad"); err != nil {
		t.Error(err)
	}
	yaml := filepath.Join(t.TempDir(), "kvasir.yaml")
	if err := os.WriteFile(yaml, []byte("port: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, stdout, stderr := run(t, "server", "--port", fmt.Sprint(testkit.FreePort(t)), "--http-port", fmt.Sprint(testkit.FreePort(t)), "--l1-size-gb", "0.01", "--state", yaml); code != 1 || stdout != "" || strings.Count(stderr, "\n") != 1 ||
		!strings.Contains(stderr, "--state: state file "+yaml+": not a kvasir-tenants 1 file; name another one") {
		t.Errorf("exit %d, %s%s", code, stdout, stderr)
	}
}

// stop ends a server as an operator does.
func stop(t *testing.T, s *serving) {
	t.Helper()
	if err := s.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	s.wait(t, "stopped; the pool stays")
	if err := s.cmd.Wait(); err != nil {
		t.Error(err)
	}
}
