// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/mooncake/store"
	"github.com/kvasir-kv/kvasir/mooncake/store/storetest"
)

// kvasir store ls --like hicache explains a key of SGLang, and lists which pages of a prompt are stored.
func TestStoreLsLikeHiCache(t *testing.T) {
	master := storetest.New(t)
	tokens := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(tokens, []byte("[1, 2, 3, 4, 5, 6, 7, 8, 9]"), 0o600); err != nil {
		t.Fatal(err)
	}
	hash := store.HiCacheHashes([]uint32{1, 2, 3, 4}, 4, nil, nil)[0]
	f := func(code int, want string, args ...string) {
		t.Helper()
		got, stdout, stderr := run(t, append([]string{"store", "ls", "--master", master.Addr}, args...)...)
		if got != code || !strings.Contains(stdout+stderr, want) {
			t.Errorf("%v: exit %d, want %d and %q\n%s%s", args, got, code, want, stdout, stderr)
		}
	}
	f(1, "V of a page of model org-m, rank 1; the hash "+hash[:8], "--like", "hicache", "org-m_"+hash+"_1_v")
	f(1, "rank 0 of stage 2", "--like", "hicache", "m_"+hash+"_0_2_k")
	f(1, "MLA of a page of model m, all ranks", "--like", "hicache", "m_"+hash+"__k")
	f(1, "swa, V of a page of model m, rank 3;", "--like", "hicache", "m_"+hash+"_3_swa_v")
	f(1, "indexer, what belongs to a page of model m, all ranks;", "--like", "hicache", "m_"+hash+"__indexer")
	f(1, "state (conv_1) after a page of model m, rank 0;", "--like", "hicache", "m_"+hash+"_0_conv_1")
	f(1, "MLA of a page of model m, shard dcp1_cp0 of stage 2;", "--like", "hicache", "m_"+hash+"_dcp1_cp0_2_k")
	f(1, "not a name of HiCache", "--like", "hicache", "greeting")
	f(0, "tokens 0 to 3, "+hash[:8]+"…: 0 of 2 objects", "--like", "hicache", "--model", "org/m", "--page", "4", "--tokens", tokens)
	f(0, "SGLang finds 0 of 9 tokens: 0 of 2 pages of 4", "--like", "hicache", "--model", "org/m", "--page", "4", "--tokens", tokens)
	master.Set(func() { // a page is stored when one of its replicas is complete
		for _, part := range []string{"k", "v"} {
			master.Objects["org-m_"+hash+"_0_"+part] = &storetest.Object{Complete: true, Pieces: []storetest.Piece{{Bytes: 64, Writing: true}, {Bytes: 64}}}
		}
	})
	f(0, "tokens 0 to 3, "+hash[:8]+"…: 2 of 2 objects, 128 bytes", "--like", "hicache", "--model", "org/m", "--page", "4", "--tokens", tokens)
	f(2, "name keys", "--like", "hicache")
	f(2, "--tokens goes with", "--tokens", tokens)
	f(2, "--page 0", "--like", "hicache", "--model", "m", "--page", "0", "--tokens", tokens)
	f(2, "is no token id", "--like", "hicache", "--model", "m", "--tokens", fileWith(t, "one two"))
}

func fileWith(t *testing.T, text string) string {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}
