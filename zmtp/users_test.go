// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"net"
	"sync/atomic"
	"testing"
)

// Connections of one host count for the user who owns them: a user with as many marked connections
// as there may be (MaxPeers) keeps no other user of the host out.
func TestConnectionsOfOneUserLeaveRoomForOthers(t *testing.T) {
	var user atomic.Value
	_, addr, _ := startRouter(t, func(p *Peer, m Message) {
		p.Mark()
		echo(p, m)
	}, RouterOptions{
		MaxPeers: 8, GiveWay: true,
		Identify: func(net.Conn) any { return user.Load() },
		Share:    func(who any) string { return who.(string) },
	})
	join := func(name string) *client {
		t.Helper()
		user.Store(name)
		c := dialFrom(t, "127.0.0.1", addr)
		c.send(frames("mark"))
		c.want("mark")
		return c
	}
	for range 8 {
		join("loud")
	}
	quiet := []*client{join("quiet"), join("quiet")}
	for range 20 {
		join("loud")
	}
	for _, c := range quiet {
		c.send(frames("still here"))
		c.want("still here")
	}
}
