// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// asNobody runs the rest of a test as a user without rights; if this process is root, in another process. It returns a directory of that
// user, and false in the process that only waited.
func asNobody(t *testing.T, prepare func(dir string, uid int)) (dir string, here bool) {
	t.Helper()
	const env, nobody = "KVASIR_TEST_NOBODY", 65534
	if dir = os.Getenv(env); dir != "" {
		return dir, true
	}
	dir = t.TempDir()
	if os.Geteuid() != 0 {
		prepare(dir, os.Geteuid())
		return dir, true
	}
	program, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	own := filepath.Join(dir, "keeper.test")
	kv := filepath.Join(dir, "kv")
	if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.WriteFile(own, program, 0o755), os.Mkdir(kv, 0o755), os.Chown(kv, nobody, nobody)); err != nil {
		t.Fatal(err)
	}
	prepare(kv, nobody)
	cmd := exec.Command(own, "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Dir, cmd.Env = "/", append(os.Environ(), env+"="+kv)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.CombinedOutput()
	if err != nil && strings.Contains(err.Error(), "permission denied") {
		t.Skipf("no other user may run here: %v", err)
	}
	if err != nil || !strings.Contains(string(out), "--- PASS") {
		t.Errorf("%v\n%s", err, out)
	}
	return "", false
}

// own gives all that is below a directory to a user.
func own(t *testing.T, dir string, uid int) {
	t.Helper()
	if err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Lchown(path, uid, uid))
	}); err != nil {
		t.Fatal(err)
	}
}

// rows makes the files of rows, the first ones the oldest.
func rows(t *testing.T, dir string, n int) *tier {
	t.Helper()
	x := &tier{t: t, root: dir, row: make([]byte, 1000)}
	x.configure(base)
	for i := range n {
		x.store(i)
		at := time.Now().Add(time.Duration(i-n) * time.Hour)
		if err := os.Chtimes(x.path(i), at, at); err != nil {
			t.Fatal(err)
		}
	}
	return x
}

// Files that the keeper may not unlink do not prevent the eviction of others. The keeper logs them, and unlinks them once it may.
func TestFilesWithoutRightsKeepNoOtherFromGoing(t *testing.T) {
	const all = 60
	held := func(x *tier) (dirs []string) {
		for i := range 20 { // the coldest: more than a batch
			dirs = append(dirs, filepath.Dir(x.path(i)))
		}
		return dirs
	}
	dir, here := asNobody(t, func(dir string, uid int) {
		x := rows(t, dir, all)
		own(t, dir, uid)
		for _, d := range held(x) {
			if err := errors.Join(os.Chown(d, os.Geteuid(), -1), os.Chmod(d, 0o555)); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.Chmod(d, 0o755) })
		}
	})
	if !here {
		return
	}
	x := &tier{t: t, root: dir}
	var log lines
	k := open(t, Options{Roots: []string{dir}, Limit: 40_000, Log: slog.New(slog.NewTextHandler(&log, nil))})
	defer closed(t, k)
	testkit.Eventually(t, "the limit holds", func() bool { _, n := x.there(); return n <= 30_000 })
	s := k.Stats()
	if !s.CannotUnlink || !strings.Contains(s.Refusal, "permission denied") || strings.Count(log.String(), "cannot be unlinked") != 1 {
		t.Errorf("%+v\n%s", s, log.String())
	}
	if files, n := x.there(); files != 30 || s.Total != n {
		t.Errorf("%d files, %d bytes, the books say %d", files, n, s.Total)
	}
}

// The keeper logs a directory that it may not read, and still reads all others, of the same rank and of other ranks.
func TestDirectoryWithoutRightsKeepsNoOtherFromCounting(t *testing.T) {
	const ranks, each = 4, 10
	dir, here := asNobody(t, func(dir string, uid int) {
		x := rows(t, dir, each)
		for rank := 1; rank < ranks; rank++ {
			for i := range each {
				path := strings.Replace(x.path(i), base+"_r0", fmt.Sprintf("%s_r%d", base, rank), 1)
				if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, x.row, 0o644)); err != nil {
					t.Fatal(err)
				}
			}
		}
		own(t, dir, uid)
		for rank := range ranks {
			d := filepath.Dir(strings.Replace(x.path(3), base+"_r0", fmt.Sprintf("%s_r%d", base, rank), 1))
			if err := errors.Join(os.Chown(d, os.Geteuid(), -1), os.Chmod(d, 0)); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.Chmod(d, 0o755) })
		}
	})
	if !here {
		return
	}
	var log lines
	k := open(t, Options{Roots: []string{dir}, TTL: 1000 * time.Hour, Log: slog.New(slog.NewTextHandler(&log, nil))})
	defer closed(t, k)
	if s := k.Stats(); s.Total != ranks*(each-1)*1000 || !strings.Contains(log.String(), "permission denied") {
		t.Errorf("%+v\n%s", s, log.String())
	}
	report, err := Verify(t.Context(), VerifyOptions{Roots: []string{dir}, StateDir: t.TempDir()})
	if err != nil || report.Files != ranks*(each-1) || len(report.Faults) != 1 || !strings.Contains(report.Faults[0].Reason, "cannot be read whole") {
		t.Errorf("%+v, %v", report, err)
	}
}
