// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/internal/metrics"
)

// networkFlags say from which networks the listeners of a command may be reached.
type networkFlags struct {
	AllowFrom   []string `name:"allow-from" help:"Networks (CIDR) and addresses, comma-separated, from which the listeners of this command may be used: HTTP answers other addresses health alone, other ports close their connections. LISTENER=CIDR is for one listener. Default: every address." placeholder:"CIDR" group:"Access"`
	AllowAnyone string   `name:"allow-anyone" help:"read-prompts: start although a listener beyond loopback has neither networks nor credentials, so that everyone who reaches it may read what engines stored. Without it such a start is refused." placeholder:"read-prompts" group:"Access"`
}

// networks returns, for each listener, the networks from which it may be reached; nil for a listener that every address may use.
func (f *networkFlags) networks(log *slog.Logger, listeners ...string) (map[string]*auth.Networks, error) {
	every, one := []netip.Prefix{}, map[string][]netip.Prefix{}
	var bad faults
	for _, text := range f.AllowFrom {
		name, network, named := strings.Cut(text, "=")
		if !named {
			network = text
		}
		p, err := auth.ParseNetwork(network)
		switch {
		case err != nil:
			bad.unless(false, "--allow-from %v", err)
		case !named:
			every = append(every, p)
		case !slices.Contains(listeners, name):
			bad.unless(false, "--allow-from %s: the listeners are %s", text, strings.Join(listeners, ", "))
		default:
			one[name] = append(one[name], p)
		}
	}
	out := map[string]*auth.Networks{}
	for _, name := range listeners {
		if list := slices.Concat(one[name], every); len(one[name]) > 0 {
			out[name] = auth.NewNetworks(one[name], log)
		} else if len(list) > 0 {
			out[name] = auth.NewNetworks(list, log)
		}
	}
	return out, bad.err()
}

// accessFlags say who may use the HTTP listeners of a command, and from where.
type accessFlags struct {
	networkFlags

	TokenFile string `name:"token-file" help:"File of the tokens of which HTTP requests need one (Authorization: Bearer): NAME SHA256 read|write|admin on each line, which kvasir token makes. Read again when it changes. Health needs none." placeholder:"FILE" group:"Access"`
	TLSCert   string `name:"tls-cert" help:"Certificate (PEM) for https, read again when it changes." placeholder:"FILE" group:"Access"`
	TLSKey    string `name:"tls-key" help:"Its key (PEM)." placeholder:"FILE" group:"Access"`
	ClientCA  string `name:"tls-client-ca" help:"Authorities (PEM, with X509 CRL blocks for revoked certificates) of clients: HTTP requests need a client certificate, which allows everything, or a token. Read again when it changes." placeholder:"FILE" group:"Access"`
	CertScope string `name:"tls-client-scope" help:"What a client certificate allows whose subject has no line NAME cert:SUBJECT SCOPE in --token-file: none, read, write or admin. Without this flag every certificate allows everything, and such lines are refused." placeholder:"SCOPE" group:"Access"`
	AuditLog  string `name:"audit-log" help:"File to which each deed of an administrator adds a line of JSON: who, from where, what, and the status of the answer. It has at most 16 MiB; four earlier files stay beside it." placeholder:"FILE" group:"Access"`
}

// access holds what accessFlags name, after open has read it.
type access struct {
	tokens      *auth.Tokens
	authorities *auth.Authorities
	tls         *tls.Config // nil: http
	audit       *auth.Audit
	networks    map[string]*auth.Networks
	listed      *auth.Tokens // entries for certificates; nil: every certificate allows everything
	unlisted    auth.Scope
	salts       *auth.SaltSecrets // from saltFlags; nil: none
	peers       *auth.PeerSecrets // from peerFlags, for the listener "transfer"; nil: none
	log         *slog.Logger
}

// open reads the files that the flags name, and refuses listeners that nothing protects. The error names the flags, or the file, that
// cannot be used.
func (f *accessFlags) open(log *slog.Logger, exposed []exposure, listeners ...string) (a *access, err error) {
	a = &access{log: log}
	if a.networks, err = f.networkFlags.networks(log, listeners...); err != nil {
		return nil, err
	}
	if err := f.refuseOpen(a.networks, f.TokenFile != "" || f.ClientCA != "", exposed); err != nil {
		return nil, err
	}
	switch {
	case (f.TLSCert == "") != (f.TLSKey == ""):
		return nil, usagef("--tls-cert and --tls-key go together")
	case f.ClientCA != "" && f.TLSCert == "":
		return nil, usagef("--tls-client-ca needs --tls-cert and --tls-key: clients show certificates over https alone")
	}
	if f.TokenFile != "" {
		if a.tokens, err = auth.OpenTokens(f.TokenFile); err != nil {
			return nil, fmt.Errorf("--token-file: %w", err)
		}
	}
	if err := f.openScopes(a); err != nil {
		return nil, err
	}
	if f.ClientCA != "" {
		if a.authorities, err = auth.OpenAuthorities(f.ClientCA); err != nil {
			return nil, fmt.Errorf("--tls-client-ca: %w", err)
		}
	}
	if f.TLSCert != "" {
		pair, err := httpserver.OpenCertificate(f.TLSCert, f.TLSKey)
		if err != nil {
			return nil, fmt.Errorf("--tls-cert, --tls-key: %w", err)
		}
		a.tls = auth.TLSConfig(pair.Get, a.authorities)
	}
	if f.AuditLog != "" {
		if a.audit, err = auth.OpenAudit(f.AuditLog); err != nil {
			return nil, fmt.Errorf("--audit-log: %w", err)
		}
	}
	return a, nil
}

// openScopes reads which scopes client certificates have. It refuses lines for certificates without --tls-client-scope: an operator who
// writes such lines wants to limit certificates, but without that flag, removing the last line would allow every certificate
// everything.
func (f *accessFlags) openScopes(a *access) (err error) {
	switch {
	case f.CertScope == "" && a.tokens != nil && a.tokens.HasSubjects():
		return usagef("--token-file has lines for certificates: say with --tls-client-scope what the other certificates allow, as none")
	case f.CertScope == "":
		return nil
	case f.ClientCA == "" || a.tokens == nil:
		return usagef("--tls-client-scope needs --tls-client-ca and --token-file")
	case f.CertScope != "none":
		if a.unlisted, err = auth.ParseScope(f.CertScope); err != nil {
			return usagef("--tls-client-scope: %v, or none", err)
		}
	}
	a.listed = a.tokens
	return nil
}

// check returns an error for flags and files that cannot be used.
func (f *accessFlags) check(exposed []exposure, listeners ...string) error {
	files := *f
	files.AuditLog = "" // a check must not create a file
	_, err := files.open(slog.New(slog.DiscardHandler), exposed, listeners...)
	return err
}

// gateOptions returns the options of the gate of an HTTP listener.
func (a *access) gateOptions(listener string) auth.Options {
	return auth.Options{Listener: listener, Tokens: a.tokens, Authorities: a.authorities, Networks: a.networks[listener], Audit: a.audit, Certificates: a.listed, Unlisted: a.unlisted, Log: a.log}
}

// addMetrics adds the figures of the given listeners, which do not speak HTTP.
func (a *access) addMetrics(r *metrics.Registry, listeners ...string) {
	for _, l := range listeners {
		metrics.AddWith(r, map[string]string{"listener": l}, func() auth.NetworkStats {
			s := a.networks[l].Stats()
			if l == "transfer" && a.peers != nil {
				s.Refused["credential"] = a.peers.Refused()
			}
			return s
		})
	}
}

// watch reads the files again whenever they change, until the caller calls stop.
func (a *access) watch() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	if a.tokens != nil {
		wg.Go(func() { a.tokens.Watch(ctx, a.log) })
	}
	if a.salts != nil {
		wg.Go(func() { a.salts.Watch(ctx, a.log) })
	}
	if a.peers != nil {
		wg.Go(func() { a.peers.Watch(ctx, a.log) })
	}
	if a.authorities != nil {
		wg.Go(func() { a.authorities.Watch(ctx, a.log) })
	}
	return func() { cancel(); wg.Wait() }
}

// serve serves https if there is a certificate, else http.
func (a *access) serve(web *http.Server, l net.Listener) error {
	if a.tls == nil {
		return web.Serve(l)
	}
	web.TLSConfig = a.tls
	return web.ServeTLS(l, "", "")
}

// url returns the address of an HTTP listener.
func (a *access) url(at net.Addr) string {
	if a.tls != nil {
		return "https://" + at.String()
	}
	return "http://" + at.String()
}
