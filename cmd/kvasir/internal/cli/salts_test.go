// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// A server that requires signed salts refuses stores without one. A proxy takes the same file. Flags and files that exclude each other are
// refused by name.
func TestSaltSecretFile(t *testing.T) {
	dir := t.TempDir()
	file, public := filepath.Join(dir, "salts"), filepath.Join(dir, "public")
	secret := strings.Repeat("SECRET-", 6) + "\n"
	if err := os.WriteFile(file, []byte(secret), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(public, []byte(secret), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		want string
		args []string
	}{
		{"--require-signed-salts, or --count-unsigned-salts, and --salt-secret-file go together", []string{"server", "--require-signed-salts"}},
		{"--require-signed-salts, or --count-unsigned-salts, and --salt-secret-file go together", []string{"server", "--salt-secret-file", file}},
		{"give one of them", []string{"server", "--require-signed-salts", "--count-unsigned-salts", "--salt-secret-file", file}},
		{"cannot stand beside --vllm-tier", []string{"server", "--require-signed-salts", "--salt-secret-file", file, "--vllm-tier", filepath.Join(dir, "s")}},
		{"--salt-secret-file: secrets of salts: " + public, []string{"server", "--require-signed-salts", "--salt-secret-file", public}},
		{"--salt-secret-file: secrets of salts: " + public, []string{"proxy", "--engine", "http://127.0.0.1:1", "--salt-secret-file", public}},
	} {
		if code, _, errs := run(t, append(c.args, "--check-config")...); code == 0 || !strings.Contains(errs, c.want) || strings.Contains(errs, "SECRET") {
			t.Errorf("%v: %d, %s", c.args, code, errs)
		}
	}
	must(t, "proxy", "--engine", "http://127.0.0.1:1", "--salt-secret-file", file, "--check-config")
	port := testkit.FreePort(t)
	t.Cleanup(func() { must(t, "server", "--port", fmt.Sprint(port), "--drop") })
	startAndLog(t, "serving HTTP", "server", "--port", fmt.Sprint(port), "--http-port", "0", "--l1-size-gb", "8MiB", "--chunk-size", "16", "--require-signed-salts", "--salt-secret-file", file)
	c, err := lmcache.NewClient(fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.RegisterEngineDriven(t.Context(), &lmcache.EngineDriven{InstanceID: 7, Model: "m", WorldSize: 1, BlockSize: 16, Layers: 1, Hidden: 8, DType: "float16"}); err != nil {
		t.Fatal(err)
	}
	salts, err := auth.OpenSaltSecrets(file)
	if err != nil {
		t.Fatal(err)
	}
	signed, err := salts.Sign("team-a")
	if err != nil {
		t.Fatal(err)
	}
	for salt, want := range map[string]int{"": 0, "team-a": 0, signed: 2} {
		k := &lmcache.Key{Model: "m", Salt: salt, WorldSize: 1, Tokens: make([]uint32, 32), End: 32, RequestID: "r" + salt, Readers: 1}
		if p, err := c.PrepareStore(t.Context(), k, 7, nil); err != nil || len(p.Slots) != want {
			t.Errorf("salt %q: %d places for 2 chunks, %v", salt, len(p.Slots), err)
		}
	}
}
