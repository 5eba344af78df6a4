// SPDX-License-Identifier: Apache-2.0

package takeover

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"syscall"
	"time"
)

const (
	listenStep   = 20 * time.Millisecond
	listenEnding = 3 * time.Second // longest wait for the ports of a process that is ending
)

// ListenAgain calls listen again and again, for up to 3 s, while the address is in use: a killed process keeps its ports until the
// kernel has torn it down, which takes some 20 ms for each GB that it had mapped. ListenAgain stops when ctx ends. The context that
// listen gets does not end with ctx, so that a command that is stopped during a name lookup does not report a wrong address.
func ListenAgain(ctx context.Context, listen func(context.Context) error) error {
	for wait := time.Duration(0); ; wait += listenStep {
		err := listen(context.WithoutCancel(ctx))
		if !errors.Is(err, syscall.EADDRINUSE) || wait >= listenEnding || ctx.Err() != nil {
			return err
		}
		time.Sleep(listenStep)
	}
}

// ListenTCP listens on a port with the patience of ListenAgain. An IPv6 address may have its brackets. 0.0.0.0 means all IPv4
// addresses; :: means all IPv4 and IPv6 addresses, even if the kernel has no IPv6.
func ListenTCP(ctx context.Context, host string, port int) (l net.Listener, err error) {
	host, network := WithoutBrackets(host), "tcp"
	var config net.ListenConfig
	switch host {
	case "0.0.0.0":
		network = "tcp4"
	case "::": // package net would listen on IPv4 only if 127.0.0.1 is no address of this machine
		network, config.Control = "tcp6", bothFamilies
	}
	err = ListenAgain(ctx, func(ctx context.Context) error {
		l, err = config.Listen(ctx, network, net.JoinHostPort(host, strconv.Itoa(port)))
		if other := fallbackHost(host, err); other != "" {
			l, err = new(net.ListenConfig).Listen(ctx, "tcp4", net.JoinHostPort(other, strconv.Itoa(port)))
		}
		return err
	})
	return l, err
}

// fallbackHost returns the IPv4 address to use instead of a host on which listening failed with err; "": there is none.
func fallbackHost(host string, err error) string {
	switch {
	case host == "::" && errors.Is(err, syscall.EAFNOSUPPORT):
		return "0.0.0.0"
	case NoLocalhost(host, err):
		return "127.0.0.1"
	}
	return ""
}

// bothFamilies makes an IPv6 socket accept IPv4 connections, too.
func bothFamilies(_, _ string, c syscall.RawConn) error {
	var err error
	refused := c.Control(func(fd uintptr) { err = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_IPV6, syscall.IPV6_V6ONLY, 0) })
	return errors.Join(refused, err)
}

// NoLocalhost reports whether err means that the name localhost was not found, as in an image or a chroot without /etc/hosts. The
// caller should then use 127.0.0.1.
func NoLocalhost(host string, err error) bool {
	_, ok := errors.AsType[*net.DNSError](err)
	return ok && host == "localhost"
}

// WithoutBrackets returns host without the brackets that an IPv6 address has in a URL.
func WithoutBrackets(host string) string {
	if inner, ok := strings.CutPrefix(host, "["); ok {
		if inner, ok := strings.CutSuffix(inner, "]"); ok && strings.Contains(inner, ":") {
			return inner
		}
	}
	return host
}

// ExplainListen returns an error that says on which address listening failed, and why, and gives advice if there is any. host and port
// are the flags that set the address.
func ExplainListen(err error, host, port string) error {
	advice := ""
	switch {
	case errors.Is(err, syscall.EADDRINUSE) && port == "":
		advice = "another process listens there: stop it, or choose another " + host
	case errors.Is(err, syscall.EADDRINUSE):
		advice = "choose another " + port + ", or stop the process that has it"
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		advice = host + " is no address of this machine"
	case errors.Is(err, syscall.EACCES) && port != "":
		advice = "ports below 1024 need a privilege: choose another " + port
	case errors.Is(err, syscall.EACCES):
		advice = "this user may not create " + host
	case errors.Is(err, syscall.ENOENT):
		advice = "the directory of " + host + " is not there"
	default:
		if _, ok := errors.AsType[*net.DNSError](err); ok {
			advice = host + " is no address, and no name that is known here"
		}
	}
	if advice == "" {
		return err
	}
	return fmt.Errorf("%w: %s", err, advice)
}
