// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/mooncake/store/storetest"
)

// kvasir coordinator --master asks a store for prompts, given as hashes and as tokens, and names the blocks that the store lacks.
func TestCoordinatorOfAStore(t *testing.T) {
	master := storetest.New(t)
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	hashes, tokens := file("hashes", "00aa\n00bb\n00cc\n"), file("tokens", "[1, 2, 3, 4, 5, 6, 7, 8, 9]")
	master.Set(func() {
		for _, hash := range []string{"00aa", "00bb"} {
			master.Objects["m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"+hash] = &storetest.Object{Complete: true, Pieces: []storetest.Piece{{Addr: 1, Bytes: 10, Endpoint: "127.0.0.1:1"}}}
		}
	})
	f := func(wantCode int, want string, args ...string) {
		t.Helper()
		code, stdout, stderr := run(t, append([]string{"coordinator", "full,bs=4", "--master", master.Addr}, args...)...)
		if code != wantCode || !strings.Contains(stdout+stderr, want) {
			t.Errorf("%q: exit %d, want %q\n%s%s", args, code, want, stdout, stderr)
		}
	}
	f(0, "finds 8 tokens", "--model", "org/m", "--hashes", hashes)
	f(0, "Mooncake 0.3.13 at", "--model", "org/m", "--tokens", tokens)
	f(0, "finds 0 tokens", "--model", "org/m", "--tokens", tokens)
	f(0, "finds 0 tokens", "--model", "org/m", "--hashes", hashes, "--tensor-parallel-size", "2")
	f(2, "--master needs --model", "--hashes", hashes)
	f(2, "--hashes or --tokens", "--model", "m")
	f(2, "no token id", "--model", "m", "--tokens", hashes)
	f(2, "is not HOST:PORT", "--model", "m", "--hashes", hashes, "--master", "host")
}
