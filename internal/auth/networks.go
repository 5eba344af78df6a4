// SPDX-License-Identifier: Apache-2.0

package auth

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// Networks holds the networks from which a listener accepts connections. A nil *Networks accepts every address. Its methods are safe
// for concurrent use.
type Networks struct {
	prefixes []netip.Prefix
	log      *slog.Logger
	refused  atomic.Uint64
	logged   atomic.Int64 // when a refusal was last logged, Unix nanoseconds
}

// NewNetworks returns Networks of prefixes. log gets at most one line a minute about refused connections; a nil log discards it.
func NewNetworks(prefixes []netip.Prefix, log *slog.Logger) *Networks {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Networks{prefixes: slices.Clone(prefixes), log: log}
}

// ParseNetwork parses a network (10.0.0.0/8), or a single address, which becomes a network of one address.
func ParseNetwork(text string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return p, fmt.Errorf("%.60q is no network like 10.0.0.0/8 and no address", text)
	}
	return p.Masked(), nil
}

// Contains reports whether an address is in one of the networks.
func (n *Networks) Contains(a netip.Addr) bool {
	if n == nil {
		return true
	}
	a = a.Unmap().WithZone("")
	for _, p := range n.prefixes {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// allows reports whether a connection may come from an address. UNIX sockets are always allowed: they have no network, and the kernel
// knows their users.
func (n *Networks) allows(from net.Addr) bool {
	a, ok := from.(*net.TCPAddr)
	return !ok || n.Contains(a.AddrPort().Addr())
}

// Refused returns how many connections were refused.
func (n *Networks) Refused() uint64 {
	if n == nil {
		return 0
	}
	return n.refused.Load()
}

// NetworkStats are the figures of the Networks of a listener that does not speak HTTP, for metrics.
type NetworkStats struct {
	Refused map[string]uint64 `counter:"kvasir_auth_refused_total" label:"reason" help:"Requests and connections refused: address (HTTP from outside --allow-from), network (connections of other protocols from outside), credential (missing, unknown or ended), scope (the token does not allow it), tenant (--tenant-file does not allow it)."`
}

// Stats returns the figures.
func (n *Networks) Stats() NetworkStats {
	return NetworkStats{Refused: map[string]uint64{"network": n.Refused()}}
}

// refuse counts a refused connection, which came to the listener `at` from the address `from`. It logs at most one a minute.
func (n *Networks) refuse(at, from string) {
	total := n.refused.Add(1)
	now, last := time.Now().UnixNano(), n.logged.Load()
	if now-last >= int64(time.Minute) && n.logged.CompareAndSwap(last, now) {
		n.log.Warn("a connection was refused: its address is in no network of --allow-from", "listener", at, "from", from, "refused_in_all", total)
	}
}

// String returns the networks as a text.
func (n *Networks) String() string {
	if n == nil {
		return ""
	}
	var out []string
	for _, p := range n.prefixes {
		out = append(out, p.String())
	}
	return strings.Join(out, ",")
}

// Listener returns a listener that closes connections from other networks at once, before it reads a byte from them.
func (n *Networks) Listener(l net.Listener) net.Listener {
	if n == nil {
		return l
	}
	return &netListener{l, n}
}

type netListener struct {
	net.Listener
	networks *Networks
}

// Accept implements net.Listener.
func (l *netListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil || l.networks.allows(c.RemoteAddr()) {
			return c, err
		}
		l.networks.refuse(l.Addr().String(), c.RemoteAddr().String())
		_ = c.Close() // nothing was sent
	}
}
