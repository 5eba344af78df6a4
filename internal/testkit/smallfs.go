// SPDX-License-Identifier: Apache-2.0

//go:build linux

package testkit

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

const insideSmallFS = "KVASIR_TEST_SMALLFS"

// SmallFS calls f with an empty tmpfs of that many bytes, which f may fill. It does so in another process: the test binary runs t again
// in a new user and mount namespace, in which this user may mount. On a system that forbids such namespaces it skips the test. The test
// must consist of this call only.
func SmallFS(t *testing.T, bytes int64, f func(t *testing.T, dir string)) {
	t.Helper()
	mounted(t, "tmpfs", fmt.Sprintf("size=%d,mode=0700", bytes), f)
}

// PlainFS is like SmallFS, with a ramfs, which keeps no extended attributes and has no direct I/O.
func PlainFS(t *testing.T, f func(t *testing.T, dir string)) {
	t.Helper()
	mounted(t, "ramfs", "mode=0700", f)
}

func mounted(t *testing.T, kind, options string, f func(t *testing.T, dir string)) {
	t.Helper()
	if os.Getenv(insideSmallFS) == t.Name() {
		dir := t.TempDir()
		if err := syscall.Mount(kind, dir, kind, syscall.MS_NOSUID|syscall.MS_NODEV, options); err != nil {
			t.Fatalf("mount: %v", err)
		}
		t.Cleanup(func() {
			if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
				t.Errorf("unmount: %v", err)
			}
		})
		f(t, dir)
		return
	}
	// The name of a subtest is a path; each part of it is a pattern for -test.run.
	pattern := "^" + strings.ReplaceAll(t.Name(), "/", "$/^") + "$"
	cmd := exec.Command("/proc/self/exe", "-test.run="+pattern, "-test.v")
	cmd.Env = append(os.Environ(), insideSmallFS+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	out, err := cmd.CombinedOutput()
	if _, ran := err.(*exec.ExitError); err != nil && !ran {
		t.Skipf("no user and mount namespace of its own here: %v", err)
	}
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()+" ") {
		t.Errorf("in its own file system: %v\n%s", err, out)
	}
}

// FillFS fills the file system of dir with the file path, except for `keep` bytes that stay free.
func FillFS(t *testing.T, dir, path string, keep int64) {
	t.Helper()
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := syscall.Fallocate(int(file.Fd()), 0, 0, int64(st.Bavail)*st.Bsize-keep); err != nil {
		t.Fatalf("fill: %v", err)
	}
}
