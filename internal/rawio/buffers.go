// SPDX-License-Identifier: Apache-2.0

//go:build unix

package rawio

import "net"

// WriteBuffers writes bufs to c, as bufs.WriteTo does. It also tells the race detector, where that runs, that all operations so far happen
// before those that follow the read of these bytes in the same process. The net package does so for Write, but not for Buffers, and a test
// whose client and server share a variable would then be reported as a race.
func WriteBuffers(c net.Conn, bufs *net.Buffers) (int64, error) {
	announceConn(c)
	return bufs.WriteTo(c)
}
