// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"os"
	"path/filepath"
	"testing"
)

// What is available is what the kernel says, or less if a cgroup leaves less.
func TestAvailable(t *testing.T) {
	f := func(files map[string]string, want int64, ok bool) {
		t.Helper()
		root := t.TempDir()
		for name, text := range files {
			path := filepath.Join(root, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if n, known := available(root); n != want || known != ok {
			t.Errorf("%v: %d, %v, want %d, %v", files, n, known, want, ok)
		}
	}
	const info, limit, used, stat = "proc/meminfo", "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat"
	host := "MemTotal:  2048 kB\nMemAvailable:    1000 kB\n"
	f(nil, 0, false)
	f(map[string]string{info: "MemTotal: 2048 kB\n"}, 0, false)
	f(map[string]string{info: "MemAvailable: many kB\n"}, 0, false)
	f(map[string]string{info: host}, 1000<<10, true)
	f(map[string]string{info: host, limit: "max\n", used: "5\n"}, 1000<<10, true)
	f(map[string]string{info: host, limit: "4096\n", used: "1024\n"}, 3072, true)
	f(map[string]string{info: host, limit: "4096\n", used: "4000\n", stat: "anon 1\ninactive_file 1000\n"}, 1096, true)
	f(map[string]string{info: host, limit: "4096\n", used: "5000\n"}, 0, true)
	f(map[string]string{info: host, limit: "1099511627776\n", used: "0\n"}, 1000<<10, true)
}
