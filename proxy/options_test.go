// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/proxy"
)

// An engine's address with a login is refused, and the error names the address without the login.
func TestRefusedAddressHidesItsLogin(t *testing.T) {
	err := proxy.Options{Engines: []string{"http://u:SECRET@10.0.0.1:8000"}}.Validate()
	if err == nil || strings.Contains(err.Error(), "SECRET") || !strings.Contains(err.Error(), "10.0.0.1:8000") {
		t.Errorf("%v", err)
	}
}

// An address whose port cannot be dialed is refused at the start, and not looked at for ever.
func TestPortsOfAddresses(t *testing.T) {
	const ok = "http://10.0.0.1:8000"
	f := func(good bool, o proxy.Options) {
		t.Helper()
		if err := o.Validate(); (err == nil) != good {
			t.Errorf("%+v: %v", o, err)
		}
	}
	for port, good := range map[string]bool{"8998": true, "65535": true, "0": false, "65536": false, "99999999999999999999": false} {
		bad := "http://10.0.0.1:" + port
		f(good, proxy.Options{Engines: []string{bad}})
		f(good, proxy.Options{Prefill: []proxy.Prefill{{URL: ok, Registry: bad}}, Decode: []string{ok}})
		f(good, proxy.Options{Dialect: proxy.SGLang, Prefill: []proxy.Prefill{{URL: ok, Registry: bad}}, Decode: []string{ok}})
		f(good, proxy.Options{Prefill: []proxy.Prefill{{URL: ok, Registry: ok}}, Decode: []string{bad}})
		f(good, proxy.Options{Engines: []string{ok}, Store: bad})
		f(good, proxy.Options{Engines: []string{ok}, Store: ok, StoreEvents: "tcp://10.0.0.1:" + port})
	}
	f(true, proxy.Options{Engines: []string{"http://10.0.0.1"}})
}
