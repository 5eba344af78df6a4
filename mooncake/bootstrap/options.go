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
	Strict        bool           // the first releases' rule: no registration is replaced, and a repeat is refused
	TP, PP        int            // sizes of engines that do not state theirs; default unknown
	Settle        time.Duration  // after a replacement, until a narrower engine is shown; default 10 s, at most an hour
	ProbeTimeout  time.Duration  // default 250 ms, at most 5 s
	ProbeNetworks []netip.Prefix // probe side channels there even if another host registered them; default none
	MaxProbes     int            // at a time; default 64
	MaxWorkers    int            // registered at a time; default 16,384
	MaxWait       time.Duration  // longest ?wait=; default 60 s, at most an hour
	MaxWaiters    int            // requests that wait at a time; default 1,024
	MaxConns      int            // connections of Serve; default 4,096
	StateFile     string         // keeps the registry over restarts; default none
	Version       string         // set in a process that is only a registry: /metrics then also shows this version, the Go runtime and the process
	Token         string         // bearer token; default none
	Access        auth.Options   // who else may send requests; its Need, Refuse and Listener are the registry's own
	TLS           *tls.Config    // of Serve; nil: http
	Guard         Guard          // what the token guards; default GuardDelete
	AllowHosts    []string       // host names under which DELETE is accepted, besides addresses and this machine's names
	Log           *slog.Logger   // nil discards
}

// Validate reports every field that cannot be used.
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
	span("probe timeout", o.ProbeTimeout, 5*time.Second) // an answer has 30 s
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

// maxLimit bounds Options' numbers.
const maxLimit = 1 << 20
