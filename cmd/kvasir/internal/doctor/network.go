// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/safelog"
)

// defaultListen are the addresses at which kvasir server listens without flags.
var defaultListen = []string{"127.0.0.1:5555", "127.0.0.1:8080"}

func (d *doctor) ports() {
	mark := d.mark()
	list, taken := d.Listen, Error
	if len(list) == 0 {
		list, taken = defaultListen, Info
	}
	for _, at := range list {
		host, port, err := splitPort(at)
		if err != nil {
			d.add(Error, ports, at+" is no HOST:PORT", err.Error(), "")
			continue
		}
		d.port(at, host, port, taken)
	}
	d.okIfNone(mark, ports, "%s can be listened on", strings.Join(list, ", "))
}

// port checks whether a server can listen at the address `at`, which is host and port. taken is the level of the finding if a program other
// than Kvasir listens there.
func (d *doctor) port(at, host string, port int, taken Level) {
	l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	switch {
	case err == nil:
		l.Close()
	case errors.Is(err, unix.EADDRINUSE):
		owner, kvasir := d.owner(port)
		if kvasir {
			d.add(OK, ports, at+": "+owner+" listens there", "", "")
			return
		}
		d.add(taken, ports, at+" is taken", owner+" listens there", "end that process, or choose another --port or --http-port (ss -ltnp shows all)")
	case errors.Is(err, unix.EADDRNOTAVAIL):
		d.add(Error, ports, "no interface of this machine has the address of "+at, err.Error(), "ip -brief address shows the addresses")
	case errors.Is(err, unix.EACCES):
		d.add(Error, ports, "this user may not listen on "+at, err.Error(), "choose a port above 1023, or AmbientCapabilities=CAP_NET_BIND_SERVICE in the systemd unit")
	default:
		d.add(Error, ports, "nothing can listen on "+at, err.Error(), "")
	}
	words := strings.Fields(read(filepath.Join(d.Proc, "sys/net/ipv4/ip_local_port_range")))
	if len(words) != 2 || err != nil {
		return
	}
	from, _ := strconv.Atoi(words[0])
	to, _ := strconv.Atoi(words[1])
	reserved := strings.TrimSpace(read(filepath.Join(d.Proc, "sys/net/ipv4/ip_local_reserved_ports")))
	if port != 0 && from <= port && port <= to && !inRanges(reserved, port) {
		d.add(Warning, ports, fmt.Sprintf("%s is among the ports %d to %d of outgoing connections: one may have it when the server starts again", at, from, to),
			"net.ipv4.ip_local_port_range", fmt.Sprintf("sysctl -w net.ipv4.ip_local_reserved_ports=%s", strings.TrimPrefix(reserved+","+strconv.Itoa(port), ",")))
	}
}

func splitPort(at string) (host string, port int, err error) {
	host, text, err := net.SplitHostPort(at)
	if err != nil {
		return "", 0, err
	}
	n, err := strconv.ParseUint(text, 10, 16)
	return host, int(n), err
}

// inRanges reports whether a list of ports and ranges, such as 8080,9000-9010, contains a port.
func inRanges(list string, port int) bool {
	for r := range strings.SplitSeq(list, ",") {
		from, to, isRange := strings.Cut(r, "-")
		a, err := strconv.Atoi(from)
		b := a
		if isRange {
			b, _ = strconv.Atoi(to)
		}
		if err == nil && a <= port && port <= b {
			return true
		}
	}
	return false
}

// owner describes the process that listens on a port in words, and reports whether that process is Kvasir.
func (d *doctor) owner(port int) (words string, kvasir bool) {
	var inodes []string
	for _, file := range []string{"net/tcp", "net/tcp6"} {
		for line := range strings.Lines(read(filepath.Join(d.Proc, file))) {
			f := strings.Fields(line)
			if len(f) < 10 || f[3] != "0A" { // 0A is the state LISTEN
				continue
			}
			_, hex, _ := strings.Cut(f[1], ":")
			if n, err := strconv.ParseUint(hex, 16, 16); err == nil && int(n) == port {
				inodes = append(inodes, "socket:["+f[9]+"]")
			}
		}
	}
	for _, p := range d.processes() {
		if p.hasSocket(inodes) {
			return fmt.Sprintf("process %d (%s)", p.pid, p.name()), p.isKvasir()
		}
	}
	return "a process of another user or container", false
}

// dialTime is how long a connection to an advertised address may take.
const dialTime = 3 * time.Second

func (d *doctor) advertised(ctx context.Context, all []*process) {
	mark := d.mark()
	list := d.Advertised
	for _, p := range all {
		if at := p.environ["VLLM_HOST_IP"]; at != "" && p.isEngine() {
			list = append(list, at)
		}
	}
	seen := map[string]bool{}
	for _, at := range list {
		if !seen[at] {
			seen[at] = true
			d.selfDial(ctx, at)
		}
	}
	switch {
	case len(list) == 0:
		d.add(Info, advertised, "not looked at: --advertised HOST[:PORT] names the addresses that engines and nodes give to their peers", "", "")
	default:
		d.okIfNone(mark, advertised, "this machine reaches itself at %s", strings.Join(list, ", "))
	}
}

// selfDial checks that this machine reaches itself at an address that peers are given. If nothing listens there, dialOwn listens during
// the check.
func (d *doctor) selfDial(ctx context.Context, at string) {
	host, port, err := splitPort(at)
	if err != nil {
		host, port = strings.Trim(at, "[]"), 0
	}
	ctx, cancel := context.WithTimeout(ctx, 2*dialTime)
	defer cancel()
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil || len(found) == 0 {
		d.add(Error, advertised, at+" has no address", fmt.Sprint(err), "advertise an address of this machine (ip -brief address), or add the name to the DNS")
		return
	}
	ip := found[0].Unmap()
	switch {
	case ip.IsUnspecified():
		d.add(Error, advertised, at+" means every address: peers connect to themselves", "an address to listen on was advertised", "advertise an address of this machine (ip -brief address)")
		return
	case ip.IsLoopback():
		d.add(Warning, advertised, at+" is a loopback address: peers on other hosts connect to themselves", "often /etc/hosts has the host's name at 127.0.1.1", "advertise an address of the network (VLLM_HOST_IP, --host)")
	}
	if port == 0 {
		d.dialOwn(ctx, at, ip, 0)
		return
	}
	c, err := new(net.Dialer).DialContext(ctx, "tcp", netip.AddrPortFrom(ip, uint16(port)).String())
	if err == nil {
		c.Close()
		return
	}
	d.dialOwn(ctx, at, ip, port)
}

// dialOwn listens on a port of all addresses, and checks that a connection to the advertised address reaches this listener.
func (d *doctor) dialOwn(ctx context.Context, at string, ip netip.Addr, port int) {
	l, err := net.Listen("tcp", ":"+strconv.Itoa(port))
	if err != nil {
		d.add(Error, advertised, at+" does not answer, although a process of this machine has its port", err.Error(), "ss -ltnp shows on which address it listens")
		return
	}
	var word [16]byte
	_, _ = rand.Read(word[:]) // this never fails
	ended := make(chan struct{})
	go func() { // every connection gets the random word
		defer close(ended)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.SetDeadline(time.Now().Add(dialTime))
			_, _ = c.Write(word[:])
			c.Close()
		}
	}()
	defer func() { l.Close(); <-ended }()
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	to := netip.AddrPortFrom(ip, uint16(l.Addr().(*net.TCPAddr).Port)).String()
	var got [16]byte
	c, err := new(net.Dialer).DialContext(ctx, "tcp", to)
	if err == nil {
		_ = c.SetDeadline(time.Now().Add(dialTime))
		_, err = io.ReadFull(c, got[:])
		c.Close()
	}
	const mend = "advertise an address of this machine that its peers route to (ip -brief address; VLLM_HOST_IP, --host), and open the port in the firewall"
	switch {
	case err != nil:
		d.add(Error, advertised, "this machine does not reach itself at "+at, err.Error(), mend)
	case got != word:
		d.add(Error, advertised, at+" is another machine", "a process of it answers there", mend)
	}
}

// safeURL returns a URL with its password hidden.
func safeURL(text string) string {
	if u, err := url.Parse(text); err == nil {
		return u.Redacted()
	}
	return safelog.HideLogin(text)
}
