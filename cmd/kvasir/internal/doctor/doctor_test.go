// SPDX-License-Identifier: Apache-2.0

package doctor_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/doctor"
	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// machine is a simulated machine without faults: its /proc, its /sys, and a directory of its own in /dev/shm, where no other test leaves pools.
type machine struct {
	t  *testing.T
	at string
	o  doctor.Options
}

const goodLimits = `Limit                     Soft Limit           Hard Limit           Units
Max file size             unlimited            unlimited            bytes
Max open files            1024                 1048576              files
Max address space         unlimited            unlimited            bytes
`

func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{t: t, at: t.TempDir()}
	m.o.Proc, m.o.Sys = filepath.Join(m.at, "proc"), filepath.Join(m.at, "sys")
	m.o.Listen = []string{"127.0.0.1:0"}
	var err error
	if m.o.Shm, err = os.MkdirTemp("/dev/shm", "kvasir_doctor_test"); err != nil {
		t.Fatal(err)
	}
	own := m.o.Shm
	t.Cleanup(func() { os.RemoveAll(own) })
	m.file("proc/self/limits", goodLimits)
	m.file("proc/self/cgroup", "0::/a/b\n")
	m.file("sys/fs/cgroup/a/memory.max", "max\n")
	m.file("sys/fs/cgroup/a/b/memory.max", "68719476736\n")
	m.file("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
	m.file("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never] deny force\n")
	m.file("proc/meminfo", "MemTotal:       1000000 kB\nHugePages_Total:       0\nHugePages_Free:        0\nHugepagesize:       2048 kB\n")
	m.file("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
	m.file("proc/sys/net/ipv4/ip_local_reserved_ports", "\n")
	m.file("proc/sys/net/ipv4/tcp_congestion_control", "cubic\n")
	return m
}

func (m *machine) file(path, text string) {
	m.t.Helper()
	path = filepath.Join(m.at, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) link(to, path string) {
	m.t.Helper()
	path = filepath.Join(m.at, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		m.t.Fatal(err)
	}
	if err := os.Symlink(to, path); err != nil {
		m.t.Fatal(err)
	}
}

// process adds a process, of a user, whose root is a directory of the machine.
func (m *machine) process(pid, uid int, root, network string, environ []string, args ...string) {
	dir := fmt.Sprintf("proc/%d/", pid)
	m.file(dir+"cmdline", strings.Join(args, "\x00")+"\x00")
	m.file(dir+"environ", strings.Join(environ, "\x00"))
	m.file(dir+"comm", filepath.Base(args[0])+"\n")
	m.file(dir+"status", fmt.Sprintf("Name:\tx\nUid:\t%d\t%d\t%d\t%d\n", uid, uid, uid, uid))
	m.link("net:["+network+"]", dir+"ns/net")
	m.file(root+"/dev/shm/x", "")
	m.link(filepath.Join(m.at, root), dir+"root")
}

// packages adds an environment of Python with releases.
func (m *machine) packages(env string, releases ...string) string {
	for _, r := range releases {
		m.file(env+"/lib/python3.12/site-packages/"+r+".dist-info/METADATA", "")
	}
	m.link("lib", env+"/lib64")
	return filepath.Join(m.at, env)
}

// want runs the doctor, and checks that there is a finding of a level about a noun with all texts in its text, its cause or its mend.
func (m *machine) want(level doctor.Level, noun string, texts ...string) {
	m.t.Helper()
	r := doctor.Run(m.t.Context(), m.o)
	for _, f := range r.Findings {
		if all := f.Text + "|" + f.Cause + "|" + f.Mend; f.Noun == noun && f.Level == level {
			if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(all, text) }) {
				return
			}
		}
	}
	var out bytes.Buffer
	_ = r.Write(&out)
	m.t.Errorf("no finding %v of %s with %q in\n%s", level, noun, texts, out.String())
}

// On a machine without faults, with a server, an engine, an environment and a tier, nothing is above Info, and each noun is named.
func TestAHealthyMachineHasNoFaults(t *testing.T) {
	m := newMachine(t)
	env := m.packages("root/opt/vllm", "vllm-0.32.0+cpu", "lmcache-0.5.7rc2", "mooncake_transfer_engine_non_cuda-0.3.13.post1")
	m.process(100, 1000, "root", "1", nil, "/usr/bin/kvasir", "server", "--port", "5555")
	m.process(200, 1000, "root", "1", []string{"VIRTUAL_ENV=/opt/vllm"}, "/opt/vllm/bin/python", "/opt/vllm/bin/vllm", "serve", "m")
	m.process(300, 0, "root", "1", nil, "/bin/sh", "-c", "vllm serve")
	web := httptest.NewServer(http.NotFoundHandler())
	defer web.Close()
	m.o.PoolBytes, m.o.Pythons, m.o.Peers = 8<<20, []string{env}, []string{web.URL}
	m.o.Tiers = []string{"fs:" + t.TempDir()}
	m.o.Advertised = []string{ownAddress(t)}
	r := doctor.Run(t.Context(), m.o)
	seen := map[string]bool{}
	for _, f := range r.Findings {
		seen[f.Noun] = true
		if f.Level > doctor.Info {
			if f.Noun == "tiers" && strings.Contains(f.Text, "in memory") { // where temporary files are in a tmpfs
				continue
			}
			t.Errorf("%+v", f)
		}
	}
	for _, noun := range doctor.Nouns {
		if !seen[noun] {
			t.Errorf("nothing is said of %s", noun)
		}
	}
	m.want(doctor.OK, "releases", "lmcache 0.5.7rc2")
	m.want(doctor.OK, "users", "engines: 1;")
	m.want(doctor.OK, "clocks", "1 other clocks agree")
}

// ownAddress returns an address of this machine, a loopback one if there is no other.
func ownAddress(t *testing.T) string {
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLoopback() && n.IP.To4() != nil {
			return n.IP.String()
		}
	}
	t.Skip("this machine has loopback addresses alone")
	return ""
}

// Faults of the host are found, each with the command that mends it.
func TestFaultsOfTheHost(t *testing.T) {
	m := newMachine(t)
	own := m.o.Shm
	m.o.PoolBytes = 1 << 50
	m.want(doctor.Error, "shared memory", "less than a pool of", "--shm-size")
	m.want(doctor.Error, "limits", "the control group may use 64 GiB", "--memory")
	m.o.PoolBytes = 0
	m.o.Shm = filepath.Join(m.at, "none")
	m.want(doctor.Error, "shared memory", "there is no "+m.o.Shm, "mount -t tmpfs")
	m.o.Shm = "/proc"
	m.want(doctor.Error, "shared memory", "is not in memory", "no tmpfs")
	m.o.Shm = own
	m.file("proc/self/limits", strings.NewReplacer("1048576", "4096   ", "Max file size             unlimited            unlimited", "Max file size             1024                 1024     ").Replace(goodLimits))
	m.want(doctor.Warning, "limits", "4096 files open", "LimitNOFILE")
	m.want(doctor.Error, "limits", "1 KiB of file", "ulimit -f")
	m.file("proc/self/limits", goodLimits)
	m.file("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise never [deny] force\n")
	m.want(doctor.Warning, "huge pages", "gets no huge pages", "shmem_enabled is deny", "echo")
	m.file("proc/meminfo", "MemTotal:       1000000 kB\nHugePages_Total:     200\nHugePages_Free:      200\nHugepagesize:       2048 kB\n")
	m.want(doctor.Warning, "huge pages", "400 MiB of memory are reserved", "vm.nr_hugepages=0")
	m.file("proc/sys/net/ipv4/tcp_congestion_control", "lp\n")
	m.want(doctor.Warning, "congestion control", "lp gives way", "tcp_congestion_control=cubic")
	m.file("proc/sys/net/ipv4/tcp_congestion_control", "bbr\n")
	m.want(doctor.Info, "congestion control", "bbr paces loopback")
}

// The doctor finds a clock that is in the past or differs from another machine's. A machine that it cannot ask is named without its login.
func TestFaultsOfClocks(t *testing.T) {
	m := newMachine(t)
	ahead := time.Duration(0)
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Date", time.Now().Add(ahead).UTC().Format(http.TimeFormat))
		w.WriteHeader(http.StatusUnauthorized)
	}))
	defer web.Close()
	m.o.Peers = []string{web.URL}
	m.want(doctor.OK, "clocks", "agree")
	for by, level := range map[time.Duration]doctor.Level{
		20 * time.Second: doctor.Warning, -20 * time.Second: doctor.Warning, time.Hour: doctor.Error, -time.Hour: doctor.Error,
	} {
		ahead = by
		m.want(level, "clocks", "differ by", "timedatectl")
	}
	m.o.Peers = []string{fmt.Sprintf("http://u:SECRET@127.0.0.1:%d", testkit.FreePort(t))}
	m.want(doctor.Warning, "clocks", "cannot be asked", "refused")
	var out bytes.Buffer
	if r := doctor.Run(t.Context(), m.o); r.Write(&out) != nil || strings.Contains(out.String(), "SECRET") {
		t.Errorf("a login is shown:\n%s", out.String())
	}
	m.o.Peers, m.o.Now = nil, func() time.Time { return time.Date(2001, 1, 1, 0, 0, 0, 0, time.UTC) }
	m.want(doctor.Error, "clocks", "2001-01-01")
}

// Ports that are taken, outside this machine's addresses, or among those of outgoing connections are found.
func TestFaultsOfPorts(t *testing.T) {
	m := newMachine(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	at := l.Addr().(*net.TCPAddr)
	m.file("proc/net/tcp", fmt.Sprintf("  sl  local_address rem_address   st\n   0: 0100007F:%04X 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1\n", at.Port))
	m.process(77, 1000, "root", "1", nil, "/usr/sbin/squid")
	m.link("socket:[4242]", "proc/77/fd/5")
	m.o.Listen = []string{at.String()}
	m.want(doctor.Error, "ports", "is taken", "process 77 (squid)", "ss -ltnp")
	m.process(78, 1000, "root2", "1", nil, "/usr/bin/kvasir", "server")
	if err := os.Rename(filepath.Join(m.at, "proc/77/fd"), filepath.Join(m.at, "proc/78/fd")); err != nil {
		t.Fatal(err)
	}
	m.want(doctor.OK, "ports", "process 78 (kvasir) listens there")
	m.o.Listen = []string{"192.0.2.1:5555"}
	m.want(doctor.Error, "ports", "no interface of this machine")
	m.o.Listen = []string{"nonsense"}
	m.want(doctor.Error, "ports", "is no HOST:PORT")
	free := testkit.FreePort(t)
	m.o.Listen = []string{fmt.Sprintf("127.0.0.1:%d", free)}
	m.file("proc/sys/net/ipv4/ip_local_port_range", "1024\t65535\n")
	m.want(doctor.Warning, "ports", "outgoing connections", fmt.Sprintf("ip_local_reserved_ports=%d", free))
	m.file("proc/sys/net/ipv4/ip_local_reserved_ports", fmt.Sprintf("80,%d-%d\n", free-1, free+1))
	m.want(doctor.OK, "ports", "can be listened on")
}

// The doctor finds addresses under which this machine does not reach itself, also those in an engine's environment.
func TestFaultsOfAdvertisedAddresses(t *testing.T) {
	m := newMachine(t)
	m.want(doctor.Info, "advertised addresses", "not looked at")
	for at, want := range map[string]string{
		"192.0.2.1": "does not reach itself", "0.0.0.0:5555": "means every address", "no.such.host.invalid": "has no address",
	} {
		m.o.Advertised = []string{at}
		m.want(doctor.Error, "advertised addresses", want)
	}
	m.o.Advertised = []string{"127.0.0.1:8000"}
	m.want(doctor.Warning, "advertised addresses", "is a loopback address", "VLLM_HOST_IP")
	l, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	m.o.Advertised = []string{fmt.Sprintf("127.0.0.3:%d", l.Addr().(*net.TCPAddr).Port)}
	m.want(doctor.Error, "advertised addresses", "does not answer, although a process of this machine has its port")
	m.o.Advertised = nil
	m.process(200, 1000, "root", "1", []string{"VLLM_HOST_IP=0.0.0.0"}, "python3", "-m", "vllm.entrypoints.openai.api_server")
	m.want(doctor.Error, "advertised addresses", "0.0.0.0 means every address")
}

// An engine with another user, another /dev/shm or another network than its server is found.
func TestFaultsOfUsers(t *testing.T) {
	m := newMachine(t)
	m.process(100, 1000, "root", "1", nil, "/usr/bin/kvasir", "--log-level", "info", "all")
	m.process(201, 1001, "root", "1", nil, "/v/bin/python", "-m", "sglang.launch_server")
	m.want(doctor.Error, "users", "process 201 (python) has user 1001, process 100 (kvasir) has user 1000", "docker run --user")
	m.process(202, 1000, "container", "2", nil, "VLLM::EngineCore")
	m.want(doctor.Error, "users", "process 202 (VLLM::EngineCore) has another /dev/shm", "--ipc host")
	m.want(doctor.Info, "users", "has a network of its own", "--trust-address")
	if err := os.Remove(filepath.Join(m.at, "proc/202/root")); err != nil {
		t.Fatal(err)
	}
	m.want(doctor.Info, "users", "not looked at: which /dev/shm process 202")
}

// The doctor finds releases that were not run with Kvasir, in environments of running engines and in those that options name.
func TestFaultsOfReleases(t *testing.T) {
	m := newMachine(t)
	m.want(doctor.Info, "releases", "not looked at")
	m.o.Pythons = []string{m.packages("env", "vllm-0.15.1", "lmcache-0.4.5", "Mooncake.Transfer.Engine-0.4.0", "sglang-0.5.22.post1", "vllm_flash-9")}
	m.want(doctor.Warning, "releases", "vllm 0.15.1", "cannot pair P and D", "pip install")
	m.want(doctor.Error, "releases", "lmcache 0.4.5", "CUDA IPC only")
	m.want(doctor.Warning, "releases", "mooncake_transfer_engine 0.4.0", "newer than every release")
	m.want(doctor.Warning, "releases", "sglang 0.5.22.post1", "no check was run")
	m.o.Pythons = []string{m.packages("other", "numpy-2.0")}
	m.want(doctor.Warning, "releases", "has none of vllm")
	m.o.Pythons = []string{filepath.Join(m.at, "none")}
	m.want(doctor.Error, "releases", "cannot be looked at", "no such file")
	m.o.Pythons = nil
	m.packages("root/opt/e", "vllm-nonsense")
	if err := os.MkdirAll(filepath.Join(m.at, "root/opt/e/lib/python3.11"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(m.at, "root/opt/e/lib/python3.11/site-packages"), 0o600); err != nil { // a reader would wait
		t.Fatal(err)
	}
	m.process(200, 1000, "root", "1", nil, "/opt/e/bin/vllm", "serve", "m")
	m.want(doctor.Warning, "releases", "vllm nonsense in /opt/e", "cannot be read")
}

// The doctor asks a Python interpreter where its packages are.
func TestAnInterpreterIsAsked(t *testing.T) {
	m := newMachine(t)
	dirs := m.packages("env", "lmcache-0.5.6")
	python := filepath.Join(m.at, "python")
	m.file("python", "#!/bin/sh\necho "+filepath.Join(dirs, "lib/python3.12/site-packages")+"\n")
	if err := os.Chmod(python, 0o700); err != nil {
		t.Fatal(err)
	}
	m.o.Pythons = []string{python}
	m.want(doctor.OK, "releases", "lmcache 0.5.6 in "+python)
	m.file("python", "#!/bin/sh\nexit 3\n")
	m.want(doctor.Error, "releases", "cannot be looked at", "exit status 3")
}

// The releases of the doctor are those of the page on compatibility.
func TestReleasesAreThoseOfTheCompatibilityPage(t *testing.T) {
	page, err := os.ReadFile("../../../../docs/reference/compatibility.md")
	if err != nil {
		t.Fatal(err)
	}
	for name, r := range doctor.Releases() {
		for _, version := range r {
			if !regexp.MustCompile(`(?i)\b` + regexp.QuoteMeta(strings.TrimSuffix(version, ".0"))).Match(page) {
				t.Errorf("%s %s is not in docs/reference/compatibility.md", name, version)
			}
		}
	}
}

// The report is JSON of all findings, and the exit code is of the worst one.
func TestReport(t *testing.T) {
	m := newMachine(t)
	m.o.Listen = []string{"nonsense"}
	r := doctor.Run(t.Context(), m.o)
	var out bytes.Buffer
	if err := r.WriteJSON(&out); err != nil {
		t.Fatal(err)
	}
	var got struct {
		Worst    string
		Findings []map[string]string
	}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil || got.Worst != "error" || len(got.Findings) != len(r.Findings) {
		t.Errorf("%v: %s", err, out.String())
	}
	if r.ExitCode() != 2 {
		t.Errorf("exit code %d of an error", r.ExitCode())
	}
	for level, want := range map[doctor.Level]int{doctor.OK: 0, doctor.Info: 0, doctor.Warning: 1, doctor.Error: 2} {
		one := doctor.Report{Findings: []doctor.Finding{{Level: level}, {}}}
		if got := one.ExitCode(); got != want {
			t.Errorf("exit code %d of %v", got, level)
		}
	}
}
