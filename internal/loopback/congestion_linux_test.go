package loopback

import (
	"testing"

	"golang.org/x/sys/unix"
)

func TestUnpaced(t *testing.T) {
	a, _ := pair(t, "127.0.0.1")
	if !Prepare(a) {
		t.Fatal("not taken for this host")
	}
	raw, err := a.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var name string
	var nameErr error
	if err := raw.Control(func(fd uintptr) {
		name, nameErr = unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION)
	}); err != nil || nameErr != nil {
		t.Fatal(err, nameErr)
	}
	if name != "reno" {
		t.Errorf("congestion control is %q", name)
	}
}
