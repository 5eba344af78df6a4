// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/resp"
	"github.com/kvasir-kv/kvasir/kv"
)

// A header that is accepted can be written with the same bytes, except one of formerMagic. Its stripes add up to its length.
func FuzzHeader(f *testing.F) {
	f.Add(header{length: 1, sum: 2, stripe: 3}.bytes(kv.Key{}))
	f.Add(header{length: 100, sum: 2, stripe: 64, seal: 5, write: 6}.bytes(kv.Key{}))
	f.Add(header{length: 1 << 30, sum: 2, stripe: 4 << 20}.bytes(kv.Key{}))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, ok := parseHeader(b, kv.Key{})
		if !ok {
			return
		}
		if string(b[:8]) != formerMagic && string(h.bytes(kv.Key{})) != string(b[:h.size()]) {
			t.Fatalf("%+v of %x", h, b)
		}
		sum := int64(0)
		for i := range h.stripes() {
			sum += h.stripeBytes(i)
		}
		if sum != int64(h.length) {
			t.Fatalf("%+v: stripes of %d bytes", h, sum)
		}
	})
}

func TestHeaderRefuses(t *testing.T) {
	f := func(h header) {
		t.Helper()
		if _, ok := parseHeader(h.bytes(kv.Key{}), kv.Key{}); ok {
			t.Errorf("%+v", h)
		}
	}
	f(header{length: 0, stripe: 1})
	f(header{length: 1, stripe: 0})
	f(header{length: 1 << 60, stripe: 1 << 60})
	f(header{length: 1 << 40, stripe: 1})
	for _, h := range []header{{length: 5, sum: 6, stripe: 7}, {length: 5, sum: 6, stripe: 7, seal: 8, write: 9}} {
		b := h.bytes(kv.Key{})
		for i := range b {
			b[i] ^= 1
			if _, ok := parseHeader(b, kv.Key{}); ok {
				t.Errorf("byte %d may be another one", i)
			}
			b[i] ^= 1
			if _, ok := parseHeader(b[:i], kv.Key{}); ok {
				t.Errorf("%d bytes are a header", i)
			}
		}
	}
}

// The answer to CLUSTER SLOTS is checked before it is used. A server without a
// name in it is the server that was asked.
func TestParseSlots(t *testing.T) {
	text := func(s string) resp.Reply { return resp.Reply{Kind: '$', Text: s} }
	number := func(n int64) resp.Reply { return resp.Reply{Kind: ':', Int: n} }
	list := func(l ...resp.Reply) resp.Reply { return resp.Reply{Kind: '*', List: l} }
	r, err := parseSlots(list(list(number(0), number(5), list(text(""), number(7001))), list(number(6), number(16383), list(text("::1"), number(7002), text("id")))), "10.0.0.1:7000")
	if err != nil || len(r) != 2 || r[0] != (slotRange{0, 5, "10.0.0.1:7001"}) || r[1] != (slotRange{6, 16383, "[::1]:7002"}) {
		t.Errorf("%v, %v", r, err)
	}
	for _, bad := range []resp.Reply{
		{},
		list(), list(list()), list(list(number(0), number(1))), list(list(number(0), number(1), list(text("a")))), list(list(number(-1), number(1), list(text("a"), number(1)))),
		list(list(number(0), number(16383), list(text("a"), number(1))), list(number(5), number(5), list(text("b"), number(1)))),
		list(list(number(3), number(1), list(text("a"), number(1)))), list(list(number(0), number(16384), list(text("a"), number(1)))), list(list(number(0), number(1), list(text("a"), number(70000)))),
	} {
		if r, err := parseSlots(bad, "a:1"); err == nil {
			t.Errorf("%+v: %v", bad, r)
		}
	}
}

func TestRedirected(t *testing.T) {
	top := topology{o: &Options{Cluster: true}}
	f := func(text string, want redirection, ok bool) {
		t.Helper()
		if got, is := top.redirected("10.0.0.1:7000", &resp.Error{Text: text}); got != want || is != ok {
			t.Errorf("%s: %+v, %v", text, got, is)
		}
	}
	f("MOVED 7 10.0.0.2:7001", redirection{"10.0.0.2:7001", 7, false}, true)
	f("ASK 7 ::1:7001", redirection{"[::1]:7001", 7, true}, true)
	f("MOVED 7 :7001", redirection{"10.0.0.1:7001", 7, false}, true)
	f("MOVED 16384 a:1", redirection{}, false)
	f("MOVED -1 a:1", redirection{}, false)
	f("MOVED x a:1", redirection{}, false)
	f("MOVED 7", redirection{}, false)
	f("MOVED 7 a", redirection{}, false)
	f("ERR "+strings.Repeat("x", 100), redirection{}, false)
	top.o.Cluster = false
	f("MOVED 7 10.0.0.2:7001", redirection{}, false)
}
