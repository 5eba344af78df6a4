// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// A file of clients' tenants that limits no client, or that cannot be used, is refused by name.
func TestTenantFilesAreChecked(t *testing.T) {
	f := func(want, text string, more ...string) {
		t.Helper()
		path := filepath.Join(t.TempDir(), "tenants")
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil { // it has no secret
			t.Fatal(err)
		}
		code, _, errs := run(t, append([]string{"server", "--check-config", "--tenant-file", path}, more...)...)
		if (code == 0) != (want == "") || !strings.Contains(errs, want) {
			t.Errorf("%q %v: exit %d, %s", text, more, code, errs)
		}
	}
	f("", "listener zmq team-a\nuser * -\n")
	f("no entry", "# nothing\n")
	f("it is empty", "")
	f("line 2: want KIND NAME TENANT", "user * -\nuser\n")
	f("which needs --zmq-auth LISTENER=curve", "key router team-a\n")
	f("which needs --token-file", "token ops team-a\n")
	f("which needs --tls-client-ca", "cert CN=ops team-a\n")
	f("cannot stand beside --vllm-tier", "listener zmq team-a\n", "--vllm-tier", "/tmp/kvasir-vllm-tier.sock")
	if code, _, errs := run(t, "server", "--check-config", "--tenant-file", ""); code != 2 || !strings.Contains(errs, "--tenant-file is empty") {
		t.Errorf("an empty flag: exit %d, %s", code, errs)
	}
}

// A token that a line limits to a tenant shows that tenant, and not the server; one without a line shows all.
func TestTokensOfOneTenant(t *testing.T) {
	dir := t.TempDir()
	tokens, tenants := filepath.Join(dir, "tokens"), filepath.Join(dir, "tenants")
	limited := strings.TrimSpace(must(t, "token", "ops-a", "--scope", "admin", "--file", tokens))
	all := strings.TrimSpace(must(t, "token", "ops", "--scope", "admin", "--file", tokens))
	if err := os.WriteFile(tenants, []byte("token ops-a team-a\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	port, web := testkit.FreePort(t), testkit.FreePort(t)
	t.Cleanup(func() { must(t, "server", "--port", fmt.Sprint(port), "--drop") })
	startAndLog(t, "serving HTTP", "server", "--port", fmt.Sprint(port), "--http-port", fmt.Sprint(web), "--l1-size-gb", "8MiB", "--token-file", tokens, "--tenant-file", tenants,
		"--quota", "team-a=1MiB", "--quota", "team-b=1MiB")
	get := func(token, path string) (int, string) {
		t.Helper()
		r, err := http.NewRequest(http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d%s", web, path), nil)
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer "+token)
		res, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		text, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		return res.StatusCode, string(text)
	}
	for path, want := range map[string][2]int{"/status": {403, 200}, "/tenants": {200, 200}, "/tenants/": {404, 404}, "/metrics": {200, 200}} {
		for i, token := range []string{limited, all} {
			code, text := get(token, path)
			if code != want[i] {
				t.Errorf("%s: %d, want %d: %s", path, code, want[i], text)
			}
			if code == 200 && strings.Contains(text, "team-b") == (i == 0) {
				t.Errorf("%s shows the other tenant: %t", path, i == 1)
			}
		}
	}
}
