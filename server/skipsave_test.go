// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// configured is a key with request_configs in place of nil.
func configured(t *testing.T, k *lmcache.Key, configs []byte) []byte {
	t.Helper()
	const name = "request_configs"
	b := k.Append(nil)
	out := bytes.Replace(b, append([]byte(name), 0xc0), append([]byte(name), configs...), 1)
	if bytes.Equal(b, out) {
		t.Fatal("the key has no request_configs")
	}
	return out
}

// skipSave is {"priority": 3, "lmcache.skip_save": value}.
func skipSave(value []byte) []byte {
	b := msgp.AppendInt(msgp.AppendString(msgp.AppendMapHeader(nil, 2), "priority"), 3)
	return append(msgp.AppendString(b, "lmcache.skip_save"), value...)
}

// A request that asks for it stores nothing in either mode, its worker is told that nothing is
// left to store, and the next request stores as ever.
func TestSkipSave(t *testing.T) {
	yes, no := msgp.AppendBool(nil, true), msgp.AppendBool(nil, false)
	t.Run("engine_driven", func(t *testing.T) {
		d := newDesk(t, server.Options{})
		d.register(1, 1, 2)
		f := func(configs []byte, slots int) {
			t.Helper()
			p, err := lmcache.DecodePrepareStore(d.ask(lmcache.OpPrepareStore, configured(t, deskKey(1, 0, 2, "r"), configs), lmcache.AppendInt(nil, 1)))
			if err != nil || len(p.Slots) != slots {
				t.Errorf("%x: %d slots, %v, want %d", configs, len(p.Slots), err, slots)
			}
		}
		f(skipSave(yes), 0)
		f(skipSave(msgp.AppendInt(nil, 1)), 0)
		if got := d.store.Stats(); got.StagedBytes != 0 || got.Transfers != 0 {
			t.Errorf("left: %+v", got)
		}
		f(skipSave(no), 2)
		k := configured(t, deskKey(1, 0, 2, "r"), skipSave(no))
		if ok, err := lmcache.DecodeBool(d.ask(lmcache.OpCommitStore, k, lmcache.AppendInt(nil, 1), lmcache.AppendBytes(nil, nil))); err != nil || !ok {
			t.Errorf("the commit of what was stored: %v, %v", ok, err)
		}
		f(skipSave(yes), 0)
		if hit := d.hit(1, 2, "l"); hit != 2 {
			t.Errorf("%d chunks hit, want 2", hit)
		}
	})
	t.Run("lmcache_driven", func(t *testing.T) {
		n := startDriven(t, t.TempDir(), "pool", server.Options{})
		defer n.stop()
		e := n.newEngine()
		e.register()
		tokens := make([]uint32, drivenChunk)
		f := func(configs []byte, hit int) {
			t.Helper()
			got, err := lmcache.DecodeCopied(e.call(lmcache.OpStore, configured(t, e.key(tokens, 0, drivenChunk, "s"), configs),
				lmcache.AppendInt(nil, e.reg.InstanceID), lmcache.AppendBlockIDs(nil, [][]int{{1, 2}}), lmcache.AppendBytes(nil, nil)))
			if err != nil || !got.OK || e.lookup(tokens, "l") != hit {
				t.Errorf("%x: %+v, %v, or another hit than %d", configs, got, err, hit)
			}
		}
		f(skipSave(yes), 0)
		f(skipSave(no), 1)
	})
}

// Settings that are no map, or have keys that are no text, are passed over.
func TestRequestConfigsOfAnyKind(t *testing.T) {
	d := newDesk(t, server.Options{})
	d.register(1, 1, 2)
	for i, configs := range [][]byte{
		msgp.AppendString(nil, "lmcache.skip_save"), {0x90}, {0x80}, {0x81, 0x01, 0xc3}, skipSave([]byte{0xc0}), skipSave(msgp.AppendString(nil, "yes")), {0xde, 0, 0},
	} {
		k := deskKey(1, 0, 2, "r")
		k.Tokens = tokens(32, 100+i)
		p, err := lmcache.DecodePrepareStore(d.ask(lmcache.OpPrepareStore, configured(t, k, configs), lmcache.AppendInt(nil, 1)))
		if err != nil || len(p.Slots) != 2 {
			t.Errorf("%x: %d slots, %v", configs, len(p.Slots), err)
		}
	}
}

// Tags of a request count its lookups, at once and after a wait, and stand in the explanation of what it did not find. What is
// no text, too long or too many is passed over.
func TestTags(t *testing.T) {
	text := func(b []byte, pairs ...string) []byte {
		for _, s := range pairs {
			b = msgp.AppendString(b, s)
		}
		return b
	}
	d := newDesk(t, server.Options{})
	d.register(1, 1, 2)
	ask := func(request string, configs []byte) {
		t.Helper()
		k := deskKey(1, 0, 2, request)
		k.Worker = lmcache.AllWorkers
		d.ask(lmcache.OpLookup, configured(t, k, configs), lmcache.AppendInt(nil, 1))
	}
	ask("r1", text(msgp.AppendMapHeader(nil, 2), "lmcache.tag.team", "blue", "lmcache.tag.stage", "prod"))
	ask("r2", text(msgp.AppendMapHeader(nil, 3), "lmcache.tag.team", "blue", "other", "x", "lmcache.ttl", "5"))
	ask("r3", append(text(msgp.AppendMapHeader(nil, 3), "lmcache.tag.long", strings.Repeat("x", lmcache.MaxTagBytes+1), "lmcache.tag.n"), 5, 0xa1, 'y', 0xc0))
	many := msgp.AppendMapHeader(nil, 20)
	for i := range 20 {
		many = text(many, fmt.Sprint("lmcache.tag.many", i), "v")
	}
	ask("r4", many)
	got := d.ByModel()
	f := func(name, value string, lookups uint64) {
		t.Helper()
		at := [2]string{name, value}
		if got.TagLookups[at] != lookups || got.TagAsked[at] != 32*lookups || got.TagHit[at] != 0 {
			t.Errorf("%s=%s: %d lookups of %d tokens", name, value, got.TagLookups[at], got.TagAsked[at])
		}
	}
	f("team", "blue", 2)
	f("stage", "prod", 1)
	f("many0", "v", 1)
	f("many7", "v", 1)
	f("many8", "v", 0)
	if len(got.TagLookups) != 2+lmcache.MaxTags+1 {
		t.Errorf("the tags are %v", got.TagLookups)
	}
	for request, want := range map[string]string{"r1": "team=blue, stage=prod", "r2": "team=blue", "r3": ""} {
		if x := d.Explain(request, 1).Lookups; len(x) != 1 || x[0].Tags != want {
			t.Errorf("%s: %+v, want tags %q", request, x, want)
		}
	}
}
