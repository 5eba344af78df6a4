// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
)

// Source says where the proxy finds engines.
type Source struct {
	Role string // of the engines found: engine, prefill or decode
	// URL is dns+http://NAME:PORT for an engine at each address of a DNS name, or registry+http://HOST:PORT?port=PORT for an engine at
	// each host whose side channel a registry lists. For a registry, ?port= is the port of the engines' API, and &scheme=http its
	// scheme if that is not the registry's.
	URL string
	// Registry is the port of the registry at each prefill engine that DNS finds.
	Registry int
	Guessed  bool // Registry is only a default: the port that P itself reports replaces it
}

// finder looks up the engines of a Source.
type finder struct {
	role     role
	api      url.URL // address of an engine's API, whose host is replaced
	name     string  // DNS name
	registry *bootstrap.Client
	port     int  // port of a registry at each engine
	guessed  bool // port is only a default

	outside, beyond int // how many engines the last lookup left out: outside FoundNetworks, and beyond maxFound
}

// maxFound is the largest number of engines that the proxy accepts from one registry, where any host that reaches it may register. The
// others are left out, with a warning in the log.
const maxFound = 64

// privateNetworks is the default of Options.FoundNetworks.
var privateNetworks = []netip.Prefix{
	netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128"),
	netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12"), netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("fc00::/7"),
}

// foundAllowed reports whether all addresses of a host that a registry names lie in Options.FoundNetworks.
func (p *Proxy) foundAllowed(ctx context.Context, host string) bool {
	addresses := []string{host}
	if _, err := netip.ParseAddr(host); err != nil {
		if addresses, err = p.o.resolve(ctx, host); err != nil {
			return false
		}
	}
	return len(addresses) > 0 && !slices.ContainsFunc(addresses, func(a string) bool {
		addr, err := netip.ParseAddr(a)
		addr = addr.Unmap().WithZone("")
		return err != nil || !slices.ContainsFunc(p.o.FoundNetworks, func(n netip.Prefix) bool { return n.Contains(addr) })
	})
}

// selectFound returns those of the found engines that the proxy may use. Of engines that a registry names, these are at most maxFound,
// all in Options.FoundNetworks; engines that the proxy already has (known, by URL) come first. It logs when the number of engines left
// out changes.
func (p *Proxy) selectFound(ctx context.Context, f *finder, known map[string]*backend, found []Prefill) []Prefill {
	if f.registry == nil {
		return found // DNS names come from the operator
	}
	var first, others []Prefill // known engines keep their places
	for _, e := range found {
		if known[e.URL] != nil {
			first = append(first, e)
		} else {
			others = append(others, e)
		}
	}
	var selected []Prefill
	outside, example, beyond := 0, "", 0
	for _, e := range append(first, others...) {
		switch u, err := url.Parse(e.URL); {
		case len(selected) == maxFound:
			beyond++
		case err != nil || !p.foundAllowed(ctx, u.Hostname()):
			outside++
			example = e.URL
		default:
			selected = append(selected, e)
		}
	}
	if outside != f.outside || beyond != f.beyond {
		f.outside, f.beyond = outside, beyond
		p.o.Log.Warn("engines of a registry are left out", "registry", f.registry.Base(), "outside_networks", outside, "example", example, "beyond_limit", beyond, "limit", maxFound)
	}
	return selected
}

// discoverEvery is the number of health checks of engines between two lookups of a Source.
const discoverEvery = 5

func newFinder(s Source, dialect Dialect, of bootstrap.ClientOptions) (*finder, error) {
	r, ok := roleNames[s.Role]
	kind, rest, _ := strings.Cut(s.URL, "+")
	u, err := url.Parse(rest)
	if !ok || err != nil || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("%.200q is not dns+http://NAME:PORT or registry+http://HOST:PORT?port=PORT", s.URL)
	}
	f := &finder{role: r, port: s.Registry, guessed: s.Guessed, api: url.URL{Scheme: u.Scheme}}
	switch {
	case kind == "dns" && u.Port() != "":
		f.name, f.api.Host = u.Hostname(), ":"+u.Port()
		return f, nil
	case kind == "registry" && u.Query().Get("port") != "" && r == prefill && dialect == Mooncake:
		f.api.Host = ":" + u.Query().Get("port")
		if scheme := u.Query().Get("scheme"); scheme == "http" || scheme == "https" {
			f.api.Scheme = scheme
		}
		u.RawQuery = ""
		f.registry, err = bootstrap.NewClient(u.String(), bootstrap.ClientOptions{Attempts: 1, Token: of.Token, TLS: of.TLS})
		return f, err
	}
	return nil, fmt.Errorf("%.200q is not dns+http://NAME:PORT, or for mooncake's P registry+http://HOST:PORT?port=PORT", s.URL)
}

// find returns the engines that the source names now.
func (f *finder) find(ctx context.Context, resolve func(context.Context, string) ([]string, error)) (out []Prefill, err error) {
	var hosts []string
	if f.registry == nil {
		hosts, err = resolve(ctx, f.name)
	} else {
		var d bootstrap.Directory
		d, err = f.registry.Query(ctx)
		for _, e := range d {
			for host := range hostsOf(e) {
				hosts = append(hosts, host)
			}
		}
	}
	if err != nil {
		return nil, err
	}
	slices.Sort(hosts)
	for _, host := range slices.Compact(hosts) {
		e := Prefill{URL: f.api.Scheme + "://" + net.JoinHostPort(host, f.api.Host[1:])}
		switch {
		case f.registry != nil:
			e.Registry = f.registry.Base()
		case f.role == prefill && f.port > 0:
			e.Registry, e.Guessed = "http://"+net.JoinHostPort(host, fmt.Sprint(f.port)), f.guessed
		}
		out = append(out, e)
	}
	return out, nil
}

// hostsOf returns the hosts of an engine's side channels.
func hostsOf(e bootstrap.Engine) map[string]bool {
	hosts := make(map[string]bool)
	for _, of := range e.Workers {
		for _, addr := range of {
			if u, err := url.Parse(addr); err == nil && u.Hostname() != "" {
				hosts[u.Hostname()] = true
			}
		}
	}
	return hosts
}

// discover looks up a source again and again until ctx ends. It adds the engines that the source names and removes those that it names
// no more. While a source does not answer, nothing changes.
func (p *Proxy) discover(ctx context.Context, f *finder) {
	known := make(map[string]*backend)
	for {
		look, cancel := context.WithTimeout(ctx, max(p.o.HealthInterval, 5*time.Second)+p.o.patience)
		found, err := f.find(look, p.o.resolve)
		if err == nil {
			found = p.selectFound(look, f, known, found)
		}
		cancel()
		if err != nil && ctx.Err() == nil {
			p.o.Log.Warn("engines cannot be looked up", "name", f.name, "err", err)
		}
		if err == nil {
			p.follow(f, known, found)
		}
		select {
		case <-time.After(discoverEvery * p.o.HealthInterval):
		case <-ctx.Done():
			if f.registry != nil {
				_ = f.registry.Close() // the error is always nil
			}
			return
		}
	}
}

func (p *Proxy) addFound(f *finder, e Prefill) error {
	return p.addBackend(&backend{role: f.role, url: trimURL(e.URL), guessed: e.Guessed, found: f.registry != nil, turns: make(map[string]uint64)}, e.Registry)
}

func (p *Proxy) follow(f *finder, known map[string]*backend, found []Prefill) {
	there := make(map[string]bool)
	for _, e := range found {
		if there[e.URL] = true; known[e.URL] != nil {
			continue
		}
		err := errors.Join(p.checkEngine(f.role, e.URL, e.Registry))
		if err == nil {
			err = p.addFound(f, e)
		}
		if err != nil {
			p.o.Log.Warn("an engine that was found cannot be added", "engine", e.URL, "err", err)
			continue
		}
		for _, b := range p.fleet.engines() {
			if b.url == e.URL && b.role == f.role {
				known[e.URL] = b
			}
		}
		p.o.Log.Info("an engine was found", "engine", e.URL, "role", f.role.String())
	}
	for url, b := range known {
		if !there[url] {
			delete(known, url)
			p.remove(b)
		}
	}
}
