// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"cmp"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/kvasir-kv/kvasir/proxy"
)

// Engines reads the values of --prefill, --decode and --engine into o. The caller has set o.Dialect before.
func Engines(o *proxy.Options, prefill, decode, both []string) error {
	all, err := prefills(prefill, o.Dialect, o.Detect)
	if err != nil {
		return err
	}
	for _, p := range all {
		if !addSource(o, "prefill", p) {
			o.Prefill = append(o.Prefill, p)
		}
	}
	o.Decode = slices.DeleteFunc(slices.Clone(decode), func(u string) bool { return addSource(o, "decode", proxy.Prefill{URL: u}) })
	o.Engines = slices.DeleteFunc(slices.Clone(both), func(u string) bool { return addSource(o, "engine", proxy.Prefill{URL: u}) })
	return nil
}

// prefills reads the values of --prefill, each in one of the forms URL, URL,REGISTRY and URL PORT. URL and PORT may be two elements of
// the list.
func prefills(list []string, dialect proxy.Dialect, detect bool) (out []proxy.Prefill, err error) {
	for i := 0; i < len(list); i++ {
		engine, at, given := strings.Cut(list[i], ",")
		if !given {
			engine, at, given = strings.Cut(strings.TrimSpace(list[i]), " ")
		}
		if !given && i+1 < len(list) && isRegistryPort(list[i+1]) {
			i++
			at, given = list[i], true
		}
		at = strings.TrimSpace(at)
		none := !given || at == "none"
		switch {
		case dialect == proxy.SGLang && none, dialect != proxy.Mooncake && dialect != proxy.SGLang, at == "none" && !detect:
			out = append(out, proxy.Prefill{URL: engine})
			continue
		case none:
			at = ""
		}
		if none || isRegistryPort(at) {
			_, address, found := strings.Cut(engine, "+")
			if !found {
				address = engine
			}
			u, err := url.Parse(address)
			if err != nil || u.Hostname() == "" {
				return nil, fmt.Errorf("--prefill %q is not http://host:port", engine)
			}
			at = "http://" + net.JoinHostPort(u.Hostname(), cmp.Or(at, "8998"))
		}
		out = append(out, proxy.Prefill{URL: engine, Registry: at, Guessed: none && detect})
	}
	return out, nil
}

// addSource adds e to o.Sources if its URL names a source of engines (dns+ or registry+). It returns false if the URL is that of an
// engine.
func addSource(o *proxy.Options, role string, e proxy.Prefill) bool {
	if !strings.HasPrefix(e.URL, "dns+") && !strings.HasPrefix(e.URL, "registry+") {
		return false
	}
	s := proxy.Source{Role: role, URL: e.URL, Guessed: e.Guessed}
	if u, err := url.Parse(e.Registry); err == nil {
		s.Registry, _ = strconv.Atoi(u.Port())
	}
	o.Sources = append(o.Sources, s)
	return true
}
