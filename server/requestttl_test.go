// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// withTTL is {"lmcache.tag.team": "blue", "lmcache.ttl": value}.
func withTTL(value []byte) []byte {
	b := msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(nil, 2), "lmcache.tag.team"), "blue")
	return append(msgp.AppendString(b, "lmcache.ttl"), value...)
}

// A request's TTL ends what it stores, in either mode and as a number or a text: a miss with a reason of its own.
func TestRequestTTLEndsWhatIsStored(t *testing.T) {
	short := [][]byte{msgp.AppendFloat64(nil, 0.05), msgp.AppendFloat32(nil, 0.05), msgp.AppendString(nil, "0.05"), msgp.AppendString(nil, " 5e-2 ")}
	t.Run("engine_driven", func(t *testing.T) {
		for _, ttl := range append(short, msgp.AppendInt(nil, 1)) {
			d := newDesk(t, server.Options{})
			d.register(1, 1, 2)
			k := configured(t, deskKey(1, 0, 2, "r"), withTTL(ttl))
			for _, answer := range [][]byte{
				d.ask(lmcache.OpPrepareStore, k, lmcache.AppendInt(nil, 1)),
				d.ask(lmcache.OpCommitStore, k, lmcache.AppendInt(nil, 1), lmcache.AppendBytes(nil, nil)),
			} {
				if answer == nil {
					t.Fatal("no answer")
				}
			}
			testkit.Eventually(t, "the chunks end", func() bool {
				defer d.ask(lmcache.OpEndSession, lmcache.AppendString(nil, "l"))
				return d.hit(1, 2, "l") == 0
			})
			if got := d.Explain("l", 1).Lookups; len(got) != 1 || got[0].Reason != "request_ttl" {
				t.Errorf("%x: %+v", ttl, got)
			}
			testkit.Eventually(t, "both are counted", func() bool { d.store.Expire(); return d.Stats().EndedChunks == 2 })
			if d.Stats().BadTTLs != 0 {
				t.Errorf("%x is counted as ignored", ttl)
			}
		}
	})
	t.Run("lmcache_driven", func(t *testing.T) {
		n := startDriven(t, t.TempDir(), "pool", server.Options{})
		defer n.stop()
		e := n.newEngine()
		e.register()
		tokens := make([]uint32, drivenChunk)
		put := func(ttl []byte) {
			t.Helper()
			got, err := lmcache.DecodeCopied(e.call(lmcache.OpStore, configured(t, e.key(tokens, 0, drivenChunk, "s"), withTTL(ttl)),
				lmcache.AppendInt(nil, e.reg.InstanceID), lmcache.AppendBlockIDs(nil, [][]int{{1, 2}}), lmcache.AppendBytes(nil, nil)))
			if err != nil || !got.OK {
				t.Fatalf("%+v, %v", got, err)
			}
		}
		put(short[0])
		testkit.Eventually(t, "the chunk ends", func() bool { return e.lookup(tokens, "l") == 0 })
		put(msgp.AppendInt(nil, 3600))
		if e.lookup(tokens, "l") != 1 {
			t.Error("a chunk with an hour left is not found")
		}
	})
}

// A value that is no TTL is counted and logged once, and what such a request stores has no end; nil is no TTL. The TTL of a lookup is
// ignored.
func TestRequestTTLOfAnyValue(t *testing.T) {
	d := newDesk(t, server.Options{})
	d.register(1, 1, 2)
	n := 0
	f := func(value []byte, bad bool) {
		t.Helper()
		n++
		k, before := deskKey(1, 0, 1, "r"), d.Stats().BadTTLs
		k.Tokens = tokens(16, 100+n)
		b := configured(t, k, withTTL(value))
		d.ask(lmcache.OpLookup, b, lmcache.AppendInt(nil, 1))
		if p, err := lmcache.DecodePrepareStore(d.ask(lmcache.OpPrepareStore, b, lmcache.AppendInt(nil, 1))); err != nil || len(p.Slots) != 1 {
			t.Errorf("%x: %d slots, %v", value, len(p.Slots), err)
		}
		if got := d.Stats().BadTTLs - before; got == 1 != bad {
			t.Errorf("%x: counted %d times", value, got)
		}
	}
	text := func(s string) []byte { return msgp.AppendString(nil, s) }
	for _, v := range []float64{0, -1, 1e-9, math.NaN(), math.Inf(1), math.Inf(-1), lmcache.MaxTTL.Seconds() + 1, math.MaxFloat64} {
		f(msgp.AppendFloat64(nil, v), true)
	}
	for _, s := range []string{"", "0", "-5", "NaN", "inf", "soon", "10m", "1e999", strings.Repeat("1", 33), strings.Repeat("x", 1<<16)} {
		f(text(s), true)
	}
	for _, b := range [][]byte{msgp.AppendInt(nil, 0), msgp.AppendInt64(nil, math.MinInt64), msgp.AppendUint64(nil, math.MaxUint64), msgp.AppendBool(nil, true), {0x90}, {0x80}, msgp.AppendBytes(nil, []byte("5"))} {
		f(b, true)
	}
	for _, b := range [][]byte{{0xc0}, msgp.AppendInt(nil, 1), msgp.AppendUint64(nil, uint64(lmcache.MaxTTL/time.Second)), msgp.AppendFloat64(nil, 0.001), text("86400"), text("1.5")} {
		f(b, false)
	}
	if got := strings.Count(d.log.String(), "lmcache.ttl is ignored"); got != 1 {
		t.Errorf("the log says it %d times:\n%s", got, d.log.String())
	}
}
