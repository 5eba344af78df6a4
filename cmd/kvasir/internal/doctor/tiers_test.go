// SPDX-License-Identifier: Apache-2.0

package doctor_test

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/doctor"
	tiertool "github.com/kvasir-kv/kvasir/cmd/kvasir/internal/tier"
	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// fakeRedis answers the doctor's questions about a server's memory with info, and refuses all else. With an empty info it refuses those
// questions, too.
func fakeRedis(t *testing.T, info string) (at string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(func() { l.Close(); wg.Wait() })
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { answerRedis(c, info) })
		}
	})
	return l.Addr().String()
}

func answerRedis(c net.Conn, info string) {
	defer c.Close()
	r := bufio.NewReader(c)
	for {
		var n, size int
		if _, err := fmt.Fscanf(r, "*%d\r\n", &n); err != nil {
			return
		}
		words := make([]string, n)
		for i := range words {
			if _, err := fmt.Fscanf(r, "$%d\r\n", &size); err != nil {
				return
			}
			b := make([]byte, size+2)
			for at := 0; at < len(b); {
				m, err := r.Read(b[at:])
				if at += m; err != nil {
					return
				}
			}
			words[i] = string(b[:size])
		}
		switch {
		case words[0] == "INFO" && info != "":
			fmt.Fprintf(c, "$%d\r\n%s\r\n", len(info), info)
		case words[0] == "INFO":
			fmt.Fprint(c, "-NOPERM this user has no permissions to run the 'info' command\r\n")
		case words[0] == "DBSIZE":
			fmt.Fprint(c, ":0\r\n")
		default:
			fmt.Fprintf(c, "-ERR unknown command %s\r\n", words[0])
		}
	}
}

// The doctor finds what a Redis server does when its memory is full, for both layouts.
func TestFaultsOfRedis(t *testing.T) {
	m := newMachine(t)
	for _, c := range []struct {
		kind, info, text, mend string
		level                  doctor.Level
	}{
		{"redis", "used_memory:1\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n", "has no limit of memory", "maxmemory SIZE", doctor.Warning},
		{"redis", "used_memory:1\r\nmaxmemory:99\r\nmaxmemory_policy:noeviction\r\n", "evicts nothing", "allkeys-lru", doctor.Warning},
		{"redis", "used_memory:1\r\nmaxmemory:99\r\nmaxmemory_policy:volatile-lru\r\n", "have a time to live", "allkeys-lru", doctor.Warning},
		{"resp", "used_memory:1\r\nmaxmemory:99\r\nmaxmemory_policy:allkeys-lru\r\n", "may then hang", "noeviction", doctor.Warning},
		{"redis", "", "does not report its memory", "+info", doctor.Warning},
	} {
		m.o.Tiers = []string{c.kind + ":" + fakeRedis(t, c.info)}
		m.want(c.level, "tiers", c.text, c.mend)
	}
	m.o.Tiers = []string{fmt.Sprintf("redis:127.0.0.1:%d", testkit.FreePort(t))}
	m.want(doctor.Error, "tiers", "does not answer")
}

// Directories that a tier cannot use are found, and files of the check are removed.
func TestFaultsOfDirectories(t *testing.T) {
	m := newMachine(t)
	m.want(doctor.Info, "tiers", "not looked at")
	dir := t.TempDir()
	for _, kind := range []string{"disk:", "fs:", "fs_native:"} {
		m.o.Tiers = []string{kind + filepath.Join(dir, "none")}
		m.want(doctor.Error, "tiers", "cannot be used", "mkdir -p")
		m.file("plain", "")
		m.o.Tiers = []string{kind + filepath.Join(m.at, "plain")}
		m.want(doctor.Error, "tiers", "is no directory")
	}
	shm, err := os.MkdirTemp("/dev/shm", "kvasir_doctor_test")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(shm)
	m.o.Tiers = []string{"disk:" + shm}
	m.want(doctor.Warning, "tiers", "in memory")
	m.o.Tiers = []string{"disk:/proc/self"} // may be written to by its mode, and makes no files
	m.want(doctor.Error, "tiers", "disk:/proc/self: ")
	m.o.Tiers = []string{"nothing:x"}
	m.want(doctor.Error, "tiers", "The tier cannot be used")
	m.o.Tiers = []string{"fs:" + dir, "disk:" + dir}
	doctor.Run(t.Context(), m.o)
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	if hidden, _ := filepath.Glob(filepath.Join(dir, ".kvasir*")); err != nil || len(hidden) > 0 {
		t.Errorf("left behind: %v, %v, %v", left, hidden, err)
	}
	for _, f := range left {
		if strings.HasSuffix(f, ".data") {
			t.Errorf("left behind: %s", f)
		}
	}
}

// File systems without direct I/O or extended attributes are found.
func TestFaultsOfFileSystems(t *testing.T) {
	m := newMachine(t)
	dir := t.TempDir()
	m.o.Open = func(path string, flags int, mode uint32) (int, error) {
		if flags&unix.O_DIRECT != 0 {
			return -1, unix.EINVAL
		}
		return unix.Open(path, flags, mode)
	}
	m.o.SetAttribute = func(int, string, []byte, int) error { return unix.ENOTSUP }
	m.o.Tiers = []string{"disk:" + dir}
	m.want(doctor.Warning, "tiers", "has no direct I/O", "mount a volume")
	m.o.Tiers = []string{"fs:" + dir}
	m.want(doctor.Warning, "tiers", "have no checksums", "extended attributes", "--disk")
	m.o.Open = func(string, int, uint32) (int, error) { return -1, unix.EROFS }
	m.o.Tiers = []string{"disk:" + dir}
	m.want(doctor.Error, "tiers", "no file can be made", "read-only")
}

// The doctor finds a bucket that answers only in path style, and names the key that mends it. It does not report a bucket that answers in no
// style so.
func TestFaultOfStyle(t *testing.T) {
	m := newMachine(t)
	var tried []string
	m.o.TryTier = func(_ context.Context, text string) (tiertool.Verdict, []string) {
		tried = append(tried, text)
		if strings.Contains(text, `"s3_addressing_style":"path"`) && strings.Contains(text, `"s3_bucket":"bucket"`) {
			return tiertool.Good, nil
		}
		return tiertool.Useless, []string{"The tier does not answer: no such host."}
	}
	for _, text := range []string{"s3_native:bucket/prefix", `{"type":"s3","s3_bucket":"bucket","s3_endpoint":"https://store.corp"}`} {
		m.o.Tiers = []string{text}
		m.want(doctor.Error, "tiers", "answers in path style alone", `"s3_addressing_style":"path"`)
	}
	if last := tried[len(tried)-1]; !strings.Contains(last, "https://store.corp") {
		t.Errorf("the other keys are lost: %s", last)
	}
	m.o.Tiers = []string{"s3_native:other/prefix"}
	for _, f := range doctor.Run(t.Context(), m.o).Findings {
		if strings.Contains(f.Text, "path style") {
			t.Errorf("%+v", f)
		}
	}
}
