// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/store/storetest"
)

// transferSecret writes a file of one secret.
func transferSecret(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "transfer")
	if err := os.WriteFile(path, []byte(strings.Repeat(text, 32)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func stdin(t *testing.T, text string, args ...string) (code int, stderr string) {
	t.Helper()
	c := command(args...)
	var errs strings.Builder
	c.Stdin, c.Stderr = strings.NewReader(text), &errs
	_ = c.Run() // the exit code says it
	return c.ProcessState.ExitCode(), errs.String()
}

// With --transfer-secret-file on a node or a region, only clients with the secret can store and read there. The metrics count the refused
// clients, and the log names them once, without the secret.
func TestTransfersNeedTheSecret(t *testing.T) {
	right, wrong := transferSecret(t, "r"), transferSecret(t, "w")
	master, port := storetest.New(t), testkit.FreePort(t)
	_, log := startAndLog(t, "memory is mounted", "store-node", "--master", master.Addr, "--memory-gb", "16MiB", "--http-port", fmt.Sprint(port), "--transfer-secret-file", right)
	peer := filepath.Join(t.TempDir(), "peer.json")
	startAndLog(t, "", "transfer", "serve", "--size", "1MiB", "--peer-file", peer, "--transfer-secret-file", right)
	for i, f := range []struct {
		flags []string
		want  int
	}{{nil, 1}, {[]string{"--transfer-secret-file", wrong}, 1}, {[]string{"--transfer-secret-file", right}, 0}} {
		if code, errs := stdin(t, "hello", append([]string{"store", "put", fmt.Sprint("k", i), "--master", master.Addr, "--timeout", "1m"}, f.flags...)...); code != f.want {
			t.Errorf("put with %v: exit %d, %s", f.flags, code, errs)
		}
		if code, errs := stdin(t, "hello", append([]string{"transfer", "write", "--peer-file", peer, "--timeout", "1m"}, f.flags...)...); code != f.want {
			t.Errorf("write with %v: exit %d, %s", f.flags, code, errs)
		}
		code, got, errs := run(t, append([]string{"transfer", "read", "--peer-file", peer, "--bytes", "5", "--timeout", "1m"}, f.flags...)...)
		if code != f.want || got != strings.Repeat("hello", 1-f.want) {
			t.Errorf("read with %v: exit %d, %q, %s", f.flags, code, got, errs)
		}
		code, got, errs = run(t, append([]string{"store", "get", "k2", "--master", master.Addr, "--timeout", "1m"}, f.flags...)...)
		if code != f.want || got != strings.Repeat("hello", 1-f.want) {
			t.Errorf("get with %v: exit %d, %q, %s", f.flags, code, got, errs)
		}
	}
	res, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", port))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	figures := new(strings.Builder)
	if err := res.Write(figures); err != nil || strings.Contains(figures.String(), `kvasir_auth_refused_total{listener="transfer",reason="credential"} 0`) ||
		!strings.Contains(figures.String(), `kvasir_auth_refused_total{listener="transfer",reason="credential"}`) {
		t.Errorf("refused peers are not counted: %v\n%s", err, figures)
	}
	if text := log(); strings.Count(text, "a peer was refused") != 1 || strings.Contains(text+figures.String(), strings.Repeat("r", 32)) {
		t.Errorf("not one warning without the secret:\n%s", text)
	}
}

// Every command that transfers refuses an unusable file of secrets and an empty flag by name. Flags for stock peers need the file.
func TestTransferSecretFilesAreChecked(t *testing.T) {
	open := transferSecret(t, "o")
	if err := os.Chmod(open, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range [][]string{
		{"engine"}, {"relay", "--upstream", "http://127.0.0.1:1"}, {"store-node", "--master", "127.0.0.1:1"}, {"transfer", "serve"},
	} {
		f := func(want string, more ...string) {
			t.Helper()
			if code, _, errs := run(t, append(append(c, "--check-config"), more...)...); code == 0 || !strings.Contains(errs, want) {
				t.Errorf("%v %v: exit %d, %s", c, more, code, errs)
			}
		}
		f("chmod o-rwx", "--transfer-secret-file", open)
		f("--transfer-secret-file is empty", "--transfer-secret-file", "")
		f("which is missing", "--transfer-stock", "10.0.0.0/8")
		f("no network", "--transfer-secret-file", transferSecret(t, "s"), "--transfer-stock", "ten")
	}
	for _, c := range [][]string{
		{"store", "get", "k", "--master", "127.0.0.1:1"},
		{"transfer", "read", "--peer", "127.0.0.1:1", "--addr", "1", "--bytes", "1"},
		{"transfer", "bench", "--peer-file", "none"},
		{"tier", "ls", `{"type":"mooncake_store","transfer_secret_file":"` + open + `"}`},
		{"server", "--check-config", "--l2-adapter", `{"type":"mooncake_store","transfer_secret_file":"` + open + `"}`},
	} {
		if c[0] == "store" || c[0] == "transfer" {
			c = append(c, "--transfer-secret-file", open)
		}
		if code, _, errs := run(t, c...); code == 0 || !strings.Contains(errs, "chmod o-rwx") {
			t.Errorf("%v: exit %d, %s", c, code, errs)
		}
	}
	// A secret defends a node's port beyond loopback, unless everyone is a stock peer. The relay's side channels have none.
	secret := transferSecret(t, "s")
	for _, c := range []struct {
		want string
		args []string
	}{
		{"", []string{"transfer", "serve", "--bind", "0.0.0.0"}},
		{"--allow-from", []string{"transfer", "serve", "--bind", "0.0.0.0", "--transfer-stock", "0.0.0.0/0"}},
		{"--allow-from", []string{"relay", "--upstream", "http://127.0.0.1:1", "--host", "10.0.0.5"}},
	} {
		code, _, errs := run(t, append(c.args, "--check-config", "--transfer-secret-file", secret)...)
		if (code == 0) != (c.want == "") || !strings.Contains(errs, c.want) {
			t.Errorf("%v: exit %d, %s", c.args, code, errs)
		}
	}
}
