// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"

	"github.com/kvasir-kv/kvasir/internal/takeover"
)

// parseEndpoint translates a ZeroMQ endpoint to what package net takes:
//
//	tcp://host:port, tcp://[v6]:port
//	tcp://*:port, tcp://host:*   for listening: all addresses, any free port
//	ipc:///path, ipc://@name     a Unix socket: a file, for listening mode 0600, or Linux's abstract name
func parseEndpoint(endpoint string) (network, address string, err error) {
	scheme, rest, ok := strings.Cut(endpoint, "://")
	switch {
	case ok && scheme == "tcp":
		host, port, err := net.SplitHostPort(rest)
		if err != nil {
			return "", "", fmt.Errorf("zmtp: endpoint %q: %w", endpoint, err)
		}
		if host == "*" {
			host = ""
		}
		if port == "*" {
			port = "0"
		}
		return "tcp", net.JoinHostPort(host, port), nil
	case ok && scheme == "ipc" && rest != "" && rest != "@" && rest != "*":
		return "unix", rest, nil
	}
	return "", "", fmt.Errorf("zmtp: endpoint %q is neither tcp://host:port nor ipc://path", endpoint)
}

// HostPort returns the host and port at which a socket bound to endpoint listens. An empty host means all addresses, and port 0 a port
// that the kernel chooses. For a Unix socket it returns "" and 0.
func HostPort(endpoint string) (host string, port int, err error) {
	network, address, err := parseEndpoint(endpoint)
	if err != nil || network != "tcp" {
		return "", 0, err
	}
	host, service, _ := net.SplitHostPort(address) // no error: parseEndpoint joined host and port
	if port, err = net.LookupPort(network, service); err != nil {
		return "", 0, fmt.Errorf("zmtp: endpoint %q has no port from 0 to 65535", endpoint)
	}
	return host, port, nil
}

func listen(ctx context.Context, endpoint string) (net.Listener, error) {
	network, address, err := parseEndpoint(endpoint)
	if err != nil {
		return nil, err
	}
	if network == "unix" {
		removeStale(ctx, address)
	}
	if strings.HasPrefix(address, "0.0.0.0:") {
		network = "tcp4" // else it would also listen on all IPv6 addresses
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, network, address)
	if host, port, _ := net.SplitHostPort(address); takeover.NoLocalhost(host, err) {
		l, err = lc.Listen(ctx, network, net.JoinHostPort("127.0.0.1", port))
	}
	if err == nil && network == "unix" && address[0] != '@' {
		if err = os.Chmod(address, 0o600); err != nil { // whatever the umask is
			err = errors.Join(err, l.Close())
		}
	}
	if err != nil {
		return nil, err
	}
	return l, nil
}

// removeStale removes the file of a Unix socket at which nothing listens, as a killed server leaves it.
func removeStale(ctx context.Context, path string) {
	st, err := os.Lstat(path)
	if err != nil || st.Mode()&os.ModeSocket == 0 {
		return
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err == nil {
		_ = c.Close() // a server runs there: Listen returns the error
		return
	}
	if errors.Is(err, syscall.ECONNREFUSED) {
		_ = os.Remove(path) // if it fails, Listen returns the error
	}
}

func dial(ctx context.Context, endpoint string) (net.Conn, error) {
	network, address, err := parseEndpoint(endpoint)
	if err != nil {
		return nil, err
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, network, address)
	if host, port, _ := net.SplitHostPort(address); takeover.NoLocalhost(host, err) {
		c, err = d.DialContext(ctx, network, net.JoinHostPort("127.0.0.1", port))
	}
	return c, err
}
