// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// Options configures a Registry. A zero field means its default.
type Options struct {
	Strict        bool           // as vLLM's first releases: no registration is replaced, and a repeated one is refused
	TP, PP        int            // sizes of engines that do not state their own; default unknown
	Settle        time.Duration  // how long after a replacement an engine with fewer ranks stays hidden; default 10 s, at most an hour
	ProbeTimeout  time.Duration  // for all probes of one decision; default 250 ms, at most 5 s
	ProbeNetworks []netip.Prefix // side channels there are probed even if another host registered them; default none
	MaxProbes     int            // most probes at a time; default 64
	MaxWorkers    int            // most registered workers; default 16,384
	MaxWait       time.Duration  // longest ?wait= of a query; default 60 s, at most an hour
	MaxWaiters    int            // most requests that wait at a time; default 1,024
	MaxConns      int            // most connections of Serve; default 4,096
	StateFile     string         // file that keeps the registry over restarts; default none
	Version       string         // set in a process that is only a registry: /metrics then also shows this version, the Go runtime and the process
	Token         string         // bearer token; default none
	Access        auth.Options   // further ways to be allowed to send requests; the registry sets Need, Refuse and Listener itself
	TLS           *tls.Config    // for Serve; nil: http
	Guard         Guard          // which requests need Token; default GuardDelete
	AllowHosts    []string       // host names under which DELETE is accepted, besides IP addresses and this machine's names
	Log           *slog.Logger   // nil: nothing is logged
}

// Validate reports every field that cannot be used, all in one error.
func (o Options) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(o.TP >= 0 && o.TP <= maxSize, "TP size %d is outside 0 to %d", o.TP, maxSize)
	check(o.PP >= 0 && o.PP <= maxSize, "PP size %d is outside 0 to %d", o.PP, maxSize)
	span := func(name string, d, most time.Duration) {
		check(d >= 0 && d <= most, "%s of %v is outside 0 to %v", name, d, most)
	}
	span("settle time", o.Settle, time.Hour)
	span("longest wait", o.MaxWait, time.Hour)
	span("probe timeout", o.ProbeTimeout, 5*time.Second) // a whole answer has 30 s
	limit := func(name string, n int) {
		check(n >= 0 && n <= maxLimit, "%s: %d is outside 0 to %d", name, n, maxLimit)
	}
	limit("workers", o.MaxWorkers)
	limit("probes", o.MaxProbes)
	limit("waiting requests", o.MaxWaiters)
	limit("connections", o.MaxConns)
	check(!strings.ContainsFunc(o.Token, func(r rune) bool { return r <= ' ' || r > '~' }), "the token must be printable ASCII without blanks")
	check(o.Guard <= GuardDelete || o.Token != "" || o.Access.Tokens != nil || o.Access.Authorities != nil, "--token-guards needs a token or authorities of client certificates, and there is no token")
	return errors.Join(errs...)
}

// maxLimit bounds the numbers in Options; Validate reports a larger one.
const maxLimit = 1 << 20
