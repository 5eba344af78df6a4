// SPDX-License-Identifier: Apache-2.0

//go:build linux

package peercred

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const nobody = 65534

func listen(t *testing.T, network, addr string) net.Listener {
	t.Helper()
	l, err := net.Listen(network, addr)
	if err != nil {
		t.Skipf("listen on %s: %v", addr, err) // no IPv6 here
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// dial returns both ends of a connection to l.
func dial(t *testing.T, l net.Listener, network, addr string) (client, accepted net.Conn) {
	t.Helper()
	client, err := net.Dial(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	accepted, err = l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { accepted.Close() })
	return client, accepted
}

func inodeOf(t *testing.T, c net.Conn) uint64 {
	t.Helper()
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if cerr := raw.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &st) }); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	return st.Ino
}

// A client of this user is identified by its own socket, in every way in which a server listens.
func TestOwnUser(t *testing.T) {
	f := func(network, addr, dialNet, host string) {
		t.Helper()
		l := listen(t, network, addr)
		_, port, _ := net.SplitHostPort(l.Addr().String())
		for range 2 { // two clients at once have two sockets
			c, a := dial(t, l, dialNet, net.JoinHostPort(host, port))
			got := Of(a)
			if !got.Known() || got.UID != os.Geteuid() || got.Socket != inodeOf(t, c) || got.Addr != netip.MustParseAddr(host) {
				t.Errorf("%s from %s: %+v, want uid %d, inode %d", addr, host, got, os.Geteuid(), inodeOf(t, c))
			}
		}
	}
	f("tcp4", "127.0.0.1:0", "tcp4", "127.0.0.1")
	f("tcp", "[::]:0", "tcp4", "127.0.0.1") // stands among the IPv4 sockets
	f("tcp6", "[::1]:0", "tcp6", "::1")
}

// Without sock_diag, the kernel's tables give the same answers.
func TestTablesAgree(t *testing.T) {
	f := func(network, addr, host string) {
		t.Helper()
		l := listen(t, network, addr)
		_, port, _ := net.SplitHostPort(l.Addr().String())
		_, a := dial(t, l, "tcp", net.JoinHostPort(host, port))
		remote, local := addrPort(a.RemoteAddr()), addrPort(a.LocalAddr())
		want, err := diag(remote, local)
		if err != nil {
			t.Skip(err) // not allowed here: only the tables can be used
		}
		if got, err := list(remote, local); err != nil || got != want {
			t.Errorf("%s: tables %+v, %v; sock_diag %+v", addr, got, err, want)
		}
	}
	f("tcp4", "127.0.0.1:0", "127.0.0.1")
	f("tcp", "[::]:0", "127.0.0.1")
	f("tcp6", "[::1]:0", "::1")
}

// If sock_diag is forbidden, or finds nothing at all, the tables are read. If it
// works, its answer "none" is final.
func TestFindWithoutSockDiag(t *testing.T) {
	l := listen(t, "tcp4", "127.0.0.1:0")
	c, a := dial(t, l, "tcp4", l.Addr().String())
	remote, local := addrPort(a.RemoteAddr()), addrPort(a.LocalAddr())
	f := func(err error, works bool, want error) {
		t.Helper()
		ask := func(_, _ netip.AddrPort) (socket, error) { return socket{}, err }
		got, gotErr := findBy(ask, func(_, _ netip.AddrPort) bool { return works }, remote, local)
		if !errors.Is(gotErr, want) || want == nil && (got.inode != inodeOf(t, c) || got.uid != os.Geteuid()) {
			t.Errorf("%v, works %v: %+v, %v", err, works, got, gotErr)
		}
	}
	f(syscall.EPERM, false, nil)
	f(syscall.EPROTONOSUPPORT, false, nil)
	f(syscall.ENOENT, false, nil)
	f(syscall.ENOENT, true, ErrNotHere)
}

// A socket that its process has closed, or half closed, has no known user: its row shows
// uid 0.
func TestClosedSocketHasNoUser(t *testing.T) {
	f := func(name string, end func(net.Conn) error) {
		t.Helper()
		l := listen(t, "tcp4", "127.0.0.1:0")
		open, first := dial(t, l, "tcp4", l.Addr().String())
		c, second := dial(t, l, "tcp4", l.Addr().String())
		if err := end(c); err != nil {
			t.Fatal(err)
		}
		// The end of the stream is there once the state has changed.
		if _, err := second.Read(make([]byte, 1)); err == nil {
			t.Fatal("a byte from a silent client")
		}
		if got := Of(second); got.Known() || got.Socket != 0 || got.UID != 0 || !errors.Is(got.Err, ErrNotHere) {
			t.Errorf("%s: %+v", name, got)
		}
		remote, local := addrPort(second.RemoteAddr()), addrPort(second.LocalAddr())
		if s, err := list(remote, local); err == nil {
			if s, err = s.check(); err == nil {
				t.Errorf("%s: the tables give %+v", name, s)
			}
		}
		if got := Of(first); !got.Known() || got.Socket != inodeOf(t, open) {
			t.Errorf("%s: the other client is %+v", name, got)
		}
	}
	f("closed", net.Conn.Close)
	f("half closed", func(c net.Conn) error { return c.(*net.TCPConn).CloseWrite() })
}

// Addresses without a socket here (another host, another network namespace)
// have no known user, and a listener on the peer's port is not the peer.
func TestElsewhere(t *testing.T) {
	l := listen(t, "tcp4", "127.0.0.1:0")
	at := addrPort(l.Addr())
	for _, from := range []netip.AddrPort{netip.MustParseAddrPort("192.0.2.1:5555"), at} {
		if s, err := find(from, netip.MustParseAddrPort("127.0.0.1:9")); err == nil {
			t.Errorf("%v is %+v", from, s)
		}
	}
}

// Two users at once, over TCP and a UNIX socket, are distinguished.
func TestTwoUsers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to start a client as another user")
	}
	path := filepath.Join(t.TempDir(), "socket")
	for _, l := range []net.Listener{listen(t, "tcp", "127.0.0.1:0"), listen(t, "unix", path)} {
		if l.Addr().Network() == "unix" {
			for dir := path; dir != "/"; dir = filepath.Dir(dir) {
				if dir == os.TempDir() {
					break
				}
				if err := os.Chmod(dir, 0o777); err != nil {
					t.Fatal(err)
				}
			}
		}
		root, a := otherUser(t, l, 0)
		other, b := otherUser(t, l, nobody-1)
		if got := Of(a); !got.Known() || got.UID != 0 || got.PID != 0 && got.PID != root.Process.Pid {
			t.Errorf("%v: root's client is %+v", l.Addr(), got)
		}
		if got := Of(b); !got.Known() || got.UID != nobody-1 || got.PID != 0 && got.PID != other.Process.Pid {
			t.Errorf("%v: the other's client is %+v", l.Addr(), got)
		}
	}
}

// The owner of a socket is a process, and its end is noticed. The end of another client
// changes nothing.
func TestOwnersEnd(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	one, a := otherUser(t, l, os.Geteuid())
	two, b := otherUser(t, l, os.Geteuid())
	pa, pb := Of(a), Of(b)
	owners := Owners(os.Geteuid(), map[uint64]bool{pa.Socket: true, pb.Socket: true})
	if owners[pa.Socket].PID != one.Process.Pid || owners[pb.Socket].PID != two.Process.Pid {
		t.Fatalf("%v, want processes %d and %d", owners, one.Process.Pid, two.Process.Pid)
	}
	if has, seen := HasSocket(one.Process.Pid, pa.Socket); !has || !seen {
		t.Errorf("process one has its socket: %v, %v", has, seen)
	}
	if has, seen := HasSocket(two.Process.Pid, pa.Socket); has || !seen {
		t.Errorf("process two has socket one: %v, %v", has, seen)
	}
	if err := one.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(60 * time.Second); !owners[pa.Socket].Gone(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a killed process, not yet waited for, is not gone")
		}
	}
	if owners[pb.Socket].Gone() {
		t.Error("the other process is gone, too")
	}
}

// A socket that two processes have open has no owner: the end of one proves nothing.
func TestSharedSocketHasNoOwner(t *testing.T) {
	l := listen(t, "tcp", "127.0.0.1:0")
	c, a := dial(t, l, "tcp", l.Addr().String())
	f, err := c.(*net.TCPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	inode := Of(a).Socket
	if got := Owners(os.Geteuid(), map[uint64]bool{inode: true}); got[inode].PID != os.Getpid() {
		t.Fatalf("%v, want this process, %d", got, os.Getpid())
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env, cmd.ExtraFiles = append(os.Environ(), dialer+"=hold"), []*os.File{f}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { in.Close(); _ = cmd.Wait() }()
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if got := Owners(os.Geteuid(), map[uint64]bool{inode: true}); len(got) != 0 {
		t.Errorf("%v", got)
	}
}

// The number that stands for users without a number in this namespace is of no known user, except if every
// user has a number here.
func TestUnmapped(t *testing.T) {
	f := func(uidMap string, want bool) {
		t.Helper()
		if got := wholeMap(uidMap); got != want {
			t.Errorf("%q maps everybody: %v", uidMap, got)
		}
	}
	f("         0          0 4294967295\n", true)
	f("         0     100000      65536\n", false)
	f("         0       1000          1\n         1     100000      65536\n", false)
	f("", false)
	if m := mapping(); unmapped(m.overflow) == m.whole || unmapped(m.overflow+1) {
		t.Errorf("mapping %+v", m)
	}
}

// A process that has ended does not run. One whose first thread has ended still runs.
func TestParseStat(t *testing.T) {
	f := func(stat string, want uint64, ok bool) {
		t.Helper()
		if got, is := parseStat([]byte(stat)); got != want || is != ok {
			t.Errorf("%q: %d, %v", stat, got, is)
		}
	}
	const rest = " 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 "
	f("7 (a) S"+rest+"1 0 4711 99 100", 4711, true)
	f("7 (a) Z (b) 1) S"+rest+"1 0 4711 99 100", 4711, true)
	f("7 (a) Z"+rest+"1 0 4711 99 100", 0, false)
	f("7 (a) Z"+rest+"3 0 4711 99 100", 4711, true)
	f("7 (a) X"+rest+"0 0 4711 99 100", 0, false)
	f("7 (a", 0, false)
	f("", 0, false)
}

// Rows and answers that are cut, or about other sockets, are not used.
func TestForeignAnswers(t *testing.T) {
	from, to := netip.MustParseAddrPort("127.0.0.1:5555"), netip.MustParseAddrPort("127.0.0.2:40000")
	row := "   0: 0100007F:15B3 0200007F:9C40 01 00000000:00000000 00:00000000 00000000  1000        0 12345 1 x\n"
	if s, ok := scanTable(strings.NewReader("head\n"+row), from, to); !ok || s != (socket{1000, 12345, established}) {
		t.Fatalf("%+v, %v", s, ok)
	}
	for _, other := range []string{row[:60], strings.Replace(row, "15B3", "15B4", 1), strings.Replace(row, "0200007F", "0300007F", 1), "x"} {
		if s, ok := scanTable(strings.NewReader(other), from, to); ok {
			t.Errorf("%q gives %+v", other, s)
		}
	}
	closed := strings.Replace(strings.Replace(row, "  1000  ", "     0  ", 1), "12345", "0", 1)
	if s, ok := scanTable(strings.NewReader(closed), from, to); !ok || s != (socket{0, 0, established}) {
		t.Fatalf("%+v, %v", s, ok)
	} else if _, err := s.check(); err == nil {
		t.Error("a closed socket's uid counts")
	}
	answer := make([]byte, diagAnswer)
	for n := range answer {
		if s, err := parseDiag(answer[:n], from, to); err == nil {
			t.Fatalf("%d bytes give %+v", n, s)
		}
	}
}
