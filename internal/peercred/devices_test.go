// SPDX-License-Identifier: Apache-2.0

//go:build linux

package peercred

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestUsesDevice(t *testing.T) {
	const line = "7f35e6000000-7f35f6000000 rw-s 00000000 00:05 1033 "
	for path, want := range map[string]bool{
		"/dev/nvidiactl": true, "/dev/nvidia-uvm": true, "/dev/nvidia0": true, "/dev/kfd": true, "/dev/dri/renderD128": true, "/dev/davinci0": true,
		"/dev/shm/lmcache_l1_pool_kvasir": false, "/dev/zero (deleted)": false, "/usr/lib/libcuda.so.1": false, "/home/a/dev/nvidia0": false, "": false,
	} {
		if got, whole := namesDevice(strings.NewReader("7f00-7f01 r--p 00000000 00:00 0\n" + line + path + "\n")); got != want || !whole {
			t.Errorf("%q: %v, %v", path, got, whole)
		}
	}
	if uses, seen := UsesDevice(os.Getpid()); uses || !seen {
		t.Errorf("this process: %v, %v", uses, seen)
	}
	if uses, seen := UsesDevice(0); uses || seen {
		t.Errorf("no process: %v, %v", uses, seen)
	}
}

func TestTimesOfProcessesAndFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	born, ok := FileBorn(path)
	if !ok {
		t.Skip("this file system does not say when a file was made")
	}
	if age := time.Since(born); age < -time.Second || age > time.Minute {
		t.Errorf("a new file is %v old", age)
	}
	p, ok := Running(os.Getpid())
	if !ok {
		t.Fatal("this process is not seen")
	}
	began, ok := p.Began()
	if age := time.Since(began); !ok || age < -time.Second || age > time.Hour {
		t.Errorf("this process is %v old, %v", age, ok)
	}
	if began.After(born.Add(time.Second)) {
		t.Errorf("this process began at %v, after the file that it made at %v", began, born)
	}
	if _, ok := (Process{}).Began(); ok {
		t.Error("no process has a beginning")
	}
	if _, ok := FileBorn(path + ".not"); ok {
		t.Error("no file has a birth")
	}
}
