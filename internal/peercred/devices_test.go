// SPDX-License-Identifier: Apache-2.0

//go:build linux

package peercred

import (
	"os"
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

func TestTicksAreOnTheClockOfProcesses(t *testing.T) {
	p, ok := Running(os.Getpid())
	if !ok {
		t.Fatal("this process is not seen")
	}
	if now, hour := Ticks(), uint64(100*time.Hour/time.Second); now < p.Started || now > p.Started+hour {
		t.Errorf("now is %d, this process began at %d", now, p.Started)
	}
}
