package loopback

import (
	"net"

	"golang.org/x/sys/unix"
)

// unpaced selects Reno. Where that is refused, the system's choice stays.
func unpaced(c *net.TCPConn) {
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno")
	})
}
