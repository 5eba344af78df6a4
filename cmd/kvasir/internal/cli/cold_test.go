// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
)

// stop ends a server in an orderly way.
func (s *serving) stop(t *testing.T) {
	t.Helper()
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Wait(); err != nil {
		t.Fatal(err)
	}
}

// A server with another --l1-size-gb takes the pool over and says so. With --cold it says which tiers keep their
// chunks. With --cold=all a new generation begins in the tiers.
func TestStartsWithAnotherSizeAndCold(t *testing.T) {
	name, below := fmt.Sprintf("kvasir_test_cold_%d", os.Getpid()), t.TempDir()
	args := func(more ...string) []string {
		return append([]string{"--shm-name", name, "--l2-adapter", fmt.Sprintf(`{"type":"fs","base_path":%q}`, below)}, more...)
	}
	defer run(t, "server", "--shm-name", name, "--drop")
	serve(t, args("--l1-size-gb", "8MiB")...).stop(t)
	generation := func() uint64 {
		var g struct{ All struct{ Number uint64 } }
		b, err := os.ReadFile(filepath.Join(below, ".kvasir-generations"))
		if err == nil {
			err = json.Unmarshal(b, &g)
		}
		if err != nil {
			t.Error(err)
		}
		return g.All.Number
	}
	f := func(want string, more ...string) {
		t.Helper()
		s := serveUntil(t, want, args(more...)...)
		s.stop(t)
	}
	f("the pool has another size now\" bytes=4194304 before_bytes=8388608", "--l1-size-gb", "4MiB")
	f("the pool has another size now\" bytes=12582912 before_bytes=4194304", "--l1-size-gb", "12MiB")
	f("these tiers still serve what they have, --cold=all forgets that too\" tiers=[fs]", "--l1-size-gb", "12MiB", "--cold")
	if n := generation(); n != 0 {
		t.Errorf("--cold began generation %d in a tier", n)
	}
	f("the tiers serve nothing older than this start", "--l1-size-gb", "12MiB", "--cold=all")
	if n := generation(); n != 1 {
		t.Errorf("after --cold=all the generation of the tier is %d", n)
	}
	if code, _, stderr := run(t, append([]string{"server"}, args("--cold=some")...)...); code != 2 || !strings.Contains(stderr, `"some" is none of true, false and all`) {
		t.Errorf("--cold=some: exit %d\n%s", code, stderr)
	}
}

// pool ls lists a pool that was removed and is still mapped, with the process that maps it.
func TestPoolLsShowsRemovedPools(t *testing.T) {
	name := fmt.Sprintf("lmcache_l1_pool_kvasir_test_removed_%d", os.Getpid())
	path := filepath.Join(shm.Dir, name)
	s, err := shm.Create(path, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	code, stdout, _ := run(t, "pool", "ls")
	for l := range strings.Lines(stdout) {
		if strings.HasPrefix(l, name+" (removed)") && strings.Contains(l, fmt.Sprint(os.Getpid(), " ")) && strings.Contains(l, "1 MiB") {
			return
		}
	}
	t.Errorf("exit %d, not listed:\n%s", code, stdout)
}
