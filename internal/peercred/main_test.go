// SPDX-License-Identifier: Apache-2.0

package peercred

import (
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// dialer, when set, makes this test binary a client of another process: it connects
// to the address, and ends when its input does.
const dialer = "KVASIR_TEST_DIAL"

func TestMain(m *testing.M) {
	if addr := os.Getenv(dialer); addr != "" {
		if addr == "hold" { // what was handed down
			fmt.Println("held")
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(0)
		}
		network := "tcp"
		if addr[0] == '/' {
			network = "unix"
		}
		c, err := net.Dial(network, addr)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println("connected")
		_, _ = io.Copy(io.Discard, os.Stdin)
		c.Close()
		os.Exit(0)
	}
	testkit.Main(m)
}

// otherUser starts a client in a process of its own, as user uid when this is root,
// and returns the process and the accepted connection.
func otherUser(t *testing.T, l net.Listener, uid int) (*exec.Cmd, net.Conn) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), dialer+"="+l.Addr().String())
	cmd.Stderr = os.Stderr
	cmd.Dir = "/"
	if uid != os.Geteuid() {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid), NoSetGroups: true}}
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Wait() // a test that has killed it has seen it end
	})
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return cmd, c
}
