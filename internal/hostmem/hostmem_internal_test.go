// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"os"
	"path/filepath"
	"testing"
)

// The available memory is the number of the kernel, or less if a cgroup leaves less.
func TestAvailable(t *testing.T) {
	f := func(files map[string]string, want int64, ok bool) {
		t.Helper()
		root := rootOf(t, files)
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

	const cgroup = "proc/self/cgroup"
	f(map[string]string{info: host, cgroup: "0::/pod/one\n", "sys/fs/cgroup/pod/memory.max": "4096\n", "sys/fs/cgroup/pod/memory.current": "96\n"}, 4000, true)
	v1 := "sys/fs/cgroup/memory/docker/1/memory."
	f(map[string]string{
		info: host, cgroup: "9:cpu:/\n4:memory:/docker/1\n0::/\n", v1 + "limit_in_bytes": "4096\n", v1 + "usage_in_bytes": "4000\n", v1 + "stat": "inactive_file 1\ntotal_inactive_file 1000\n",
	}, 1096, true)
	f(map[string]string{info: host, cgroup: "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n"}, 1000<<10, true)
}

// rootOf writes files below a folder.
func rootOf(t *testing.T, files map[string]string) string {
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
	return root
}

// The limit is the smallest of the cgroups that the process is in, of either version.
func TestLimit(t *testing.T) {
	f := func(want int64, file string, files map[string]string) {
		t.Helper()
		root := rootOf(t, files)
		n, at, limited := Limit(filepath.Join(root, "proc"), filepath.Join(root, "sys"))
		if n != want || limited != (want > 0) || limited && at != filepath.Join(root, file) {
			t.Errorf("%v: %d, %s, %v, want %d of %s", files, n, at, limited, want, file)
		}
	}
	const cgroup = "proc/self/cgroup"
	f(0, "", nil)
	f(0, "", map[string]string{cgroup: "0::/\n"})
	f(0, "", map[string]string{cgroup: "0::/pod\n", "sys/fs/cgroup/pod/memory.max": "max\n"})
	f(0, "", map[string]string{cgroup: "nonsense\n4:memory\n"})
	f(4096, "sys/fs/cgroup/memory.max", map[string]string{"sys/fs/cgroup/memory.max": "4096\n"})
	f(4096, "sys/fs/cgroup/memory.max", map[string]string{cgroup: "0::/../../pod\n", "sys/fs/cgroup/memory.max": "4096\n"}) // a container sees its own at the root
	f(2048, "sys/fs/cgroup/pod/memory.max", map[string]string{
		cgroup: "0::/pod/one\n", "sys/fs/cgroup/pod/one/memory.max": "4096\n", "sys/fs/cgroup/pod/memory.max": "2048\n", "sys/fs/cgroup/other/memory.max": "1\n",
	})
	f(4096, "sys/fs/cgroup/unified/pod/memory.max", map[string]string{cgroup: "0::/pod\n", "sys/fs/cgroup/unified/pod/memory.max": "4096\n"})
	f(1024, "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", map[string]string{
		cgroup: "4:cpu,memory:/docker/1\n0::/\n", "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": "1024\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
	})
	f(1024, "sys/fs/cgroup/memory/memory.limit_in_bytes", map[string]string{cgroup: "4:memory:/docker/1\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "1024\n"})
}
