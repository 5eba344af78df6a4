// SPDX-License-Identifier: Apache-2.0

//go:build !unix

package http1

import "net"

// open cannot find out on this system: a closed connection fails when it is used.
func open(net.Conn) bool { return true }
