// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store/miss"
)

func openSalts(t *testing.T, secrets ...string) *auth.SaltSecrets {
	t.Helper()
	path := filepath.Join(t.TempDir(), "salts")
	if err := os.WriteFile(path, []byte(strings.Join(secrets, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := auth.OpenSaltSecrets(path)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Where salts must be signed, a tenant finds its own KV under salts of both secrets of a rotation. Forged, cut, exchanged, missing and
// hashed salts (SGLang's client hashes salt and extra_key) find nothing, and the lookup says why; stores and loads with them are refused,
// also by a peer. Books and quotas know the tenant without its signature.
func TestUnsignedSaltsFindAndStoreNothing(t *testing.T) {
	older, newer, foreign := strings.Repeat("o", 32), strings.Repeat("n", 32), strings.Repeat("f", 32)
	n, stop := startNode(t, t.TempDir(), 16, server.Options{Salts: openSalts(t, newer, older)})
	defer stop()
	a := &asker{t: t, c: newClient(t, n.url), s: n.Server}
	sign := func(secret, tenant string) string {
		salt, err := openSalts(t, secret).Sign(tenant)
		if err != nil {
			t.Fatal(err)
		}
		return salt
	}
	instance := a.register("m", 1, "bfloat16")
	prompt := tokens(32, 1)
	if err := n.Store().SetQuota("team-a", 4096); err != nil {
		t.Fatal(err)
	}
	old, now, other := sign(older, "team-a"), sign(newer, "team-a"), sign(newer, "team-b")
	a.store(instance, keyOf("m", old, "s", 1, prompt))
	for i, salt := range []string{old, now} {
		request := fmt.Sprint("own", i)
		if hit, why := a.ask(keyOf("m", salt, request, 1, prompt)); hit != 2 {
			t.Errorf("the tenant's own lookup hits %d chunks: %+v", hit, why)
		}
	}
	if hit, why := a.ask(keyOf("m", other, "b", 1, prompt)); hit != 0 || why.Reason != miss.OtherSalt.Label() {
		t.Errorf("another tenant's lookup: %d, %+v", hit, why)
	}
	usage := n.Store().Tenants()
	if len(usage) != 1 || usage[0].Salt != "team-a" || usage[0].Bytes != 2*4096 {
		t.Errorf("the quota of team-a counts %+v", usage)
	}
	live := keyOf("m", now, "live", 1, prompt)
	live.Worker = lmcache.AllWorkers
	if hit, err := a.c.Lookup(t.Context(), live); hit != 2 || err != nil {
		t.Fatal(hit, err)
	}
	hashed := sha256.Sum256([]byte(now + "\x00extra"))
	for i, salt := range []string{"", "team-a", now[:len(now)-1], "team-b" + now[len("team-a"):], sign(foreign, "team-a"), hex.EncodeToString(hashed[:])} {
		request := fmt.Sprint("bad", i)
		hit, why := a.ask(keyOf("m", salt, request, 1, prompt))
		if hit != 0 || why.Reason != miss.Unsigned.Label() || !strings.Contains(why.Text, "no valid signature") || why.Salt != "" {
			t.Errorf("salt %q: a hit of %d, %+v", salt, hit, why)
		}
		k := keyOf("m", salt, request, 1, tokens(32, 7))
		if got, err := a.c.PrepareStore(t.Context(), k, instance, nil); err == nil && len(got.Slots) > 0 {
			t.Errorf("salt %q: a store got %d places", salt, len(got.Slots))
		}
		if ok, err := a.c.CommitStore(t.Context(), k, instance); err == nil && ok {
			t.Errorf("salt %q: a store is committed", salt)
		}
		k = keyOf("m", salt, "live", 1, prompt)
		if got, err := a.c.PrepareRetrieve(t.Context(), k, instance); err == nil && len(got.Slots) > 0 {
			t.Errorf("salt %q: a load got %d places", salt, len(got.Slots))
		}
		if ok, err := a.c.CommitRetrieve(t.Context(), k, instance); err == nil && ok {
			t.Errorf("salt %q: a load is committed", salt)
		}
	}
	if got, err := a.c.PrepareRetrieve(t.Context(), keyOf("m", old, "live", 1, prompt), instance); err != nil || len(got.Slots) != 2 {
		t.Errorf("the tenant's own load: %+v, %v", got, err)
	}
	s := n.Stats()
	if s.Declined["unsigned_salt"] < 6*5 || n.Store().Stats().Resident != 2 {
		t.Errorf("%d requests were declined for their salts, %d chunks are there", s.Declined["unsigned_salt"], n.Store().Stats().Resident)
	}
	a.store(instance, keyOf("m", other, "s2", 1, prompt)) // the same prompt, another tenant
	if hit, why := a.ask(keyOf("m", other, "b2", 1, prompt)); hit != 2 {
		t.Errorf("team-b's own lookup hits %d chunks: %+v", hit, why)
	}
}

// Without required signatures every salt counts as it is, signed ones too.
func TestSaltsThatNeedNoSignature(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 16, server.Options{})
	defer stop()
	a := &asker{t: t, c: newClient(t, n.url), s: n.Server}
	salt, err := openSalts(t, strings.Repeat("s", 32)).Sign("team-a")
	if err != nil {
		t.Fatal(err)
	}
	a.store(a.register("m", 1, "bfloat16"), keyOf("m", salt, "s", 1, tokens(32, 1)))
	for of, want := range map[string]int{salt: 2, "team-a": 0} {
		if hit, _ := a.ask(keyOf("m", of, "r"+of[:3], 1, tokens(32, 1))); hit != want {
			t.Errorf("%q hits %d chunks, want %d", of, hit, want)
		}
	}
}

// Workers whose KV the server copies store and load under signed salts alone, and free_lookup_locks without one frees no pins.
func TestDrivenWorkersNeedSignedSalts(t *testing.T) {
	salts := openSalts(t, strings.Repeat("s", 32))
	n := startDriven(t, t.TempDir(), "pool", server.Options{Salts: salts})
	defer n.stop()
	own, err := salts.Sign("team-a")
	if err != nil {
		t.Fatal(err)
	}
	other, err := salts.Sign("team-b")
	if err != nil {
		t.Fatal(err)
	}
	e := n.newEngine()
	e.register()
	e.tint(3)
	prompt := tokens(2*drivenChunk, 3)
	key := func(salt, request string, worker int) []byte {
		k := e.key(prompt, 0, len(prompt), request)
		k.Salt, k.Worker = salt, worker
		return k.Append(nil)
	}
	instance := lmcache.AppendInt(nil, e.reg.InstanceID)
	copied := func(op lmcache.Op, key []byte, blocks []int, more ...[]byte) lmcache.Copied {
		t.Helper()
		frames := append([][]byte{key, instance, lmcache.AppendBlockIDs(nil, [][]int{blocks}), lmcache.AppendBytes(nil, nil)}, more...)
		got, err := lmcache.DecodeCopied(e.call(op, frames...))
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	lookup := func(salt, request string) int64 {
		t.Helper()
		e.call(lmcache.OpLookup, key(salt, request, lmcache.AllWorkers), lmcache.AppendInt(nil, 1))
		hit, err := lmcache.DecodeInt(e.call(lmcache.OpWaitPrefetchStatus, lmcache.AppendString(nil, request), msgp.AppendFloat64(nil, 60)))
		if err != nil {
			t.Fatal(err)
		}
		return hit
	}
	bad := []string{"", "team-a", own[:len(own)-1], "team-b" + own[len("team-a"):]}
	for _, salt := range bad {
		if got := copied(lmcache.OpStore, key(salt, "s", 0), span(1, 4)); got.OK {
			t.Errorf("salt %q: a store is done", salt)
		}
	}
	if resident := n.store.Stats().Resident; resident != 0 {
		t.Fatalf("%d chunks are stored without a signed salt", resident)
	}
	if got := copied(lmcache.OpStore, key(own, "s", 0), span(1, 4)); got != done {
		t.Fatalf("the tenant's own store: %+v", got)
	}
	if hit := lookup(own, "r"); hit != 2 {
		t.Fatalf("the tenant's own lookup hits %d chunks", hit)
	}
	skip := lmcache.AppendInt(nil, 0)
	before := bytes.Clone(e.layers[0])
	for _, salt := range append(bad, other) {
		if got := copied(lmcache.OpRetrieve, key(salt, "r", 0), span(20, 4), skip); got.OK || !bytes.Equal(before, e.layers[0]) {
			t.Errorf("salt %q: a load is done: %+v", salt, got)
		}
	}
	pins := func() int { st := n.store.Stats(); return st.Resident - st.EvictableObjs }
	pinned := pins()
	for _, salt := range bad {
		e.call(lmcache.OpFreeLookupLocks, key(salt, "r", lmcache.AllWorkers), lmcache.AppendInt(nil, 1))
	}
	if now := pins(); pinned == 0 || now != pinned {
		t.Errorf("%d chunks are pinned, %d were: unsigned salts freed pins", now, pinned)
	}
	if got := copied(lmcache.OpRetrieve, key(own, "r", 0), span(20, 4), skip); got != done || !bytes.Equal(e.block(0, 0, 20), e.block(0, 0, 1)) {
		t.Errorf("the tenant's own load: %+v", got)
	}
	if hit := lookup(own, "f"); hit != 2 {
		t.Fatalf("the tenant's own lookup hits %d chunks", hit)
	}
	pinned = pins()
	e.call(lmcache.OpFreeLookupLocks, key(own, "f", lmcache.AllWorkers), lmcache.AppendInt(nil, 1))
	if now := pins(); now >= pinned {
		t.Errorf("the tenant's own free_lookup_locks left %d of %d pins", now, pinned)
	}
}

// A server that only counts refuses nothing. It keeps signed salts by their tenants, as it does once signatures are required.
func TestCountingUnsignedSaltsRefusesNothing(t *testing.T) {
	salts := openSalts(t, strings.Repeat("s", 32))
	n, stop := startNode(t, t.TempDir(), 16, server.Options{Salts: salts, CountUnsigned: true})
	defer stop()
	a := &asker{t: t, c: newClient(t, n.url), s: n.Server}
	signed, err := salts.Sign("team-a")
	if err != nil {
		t.Fatal(err)
	}
	instance := a.register("m", 1, "bfloat16")
	for i, salt := range []string{"", "team-b", signed} {
		prompt := tokens(32, i)
		a.store(instance, keyOf("m", salt, fmt.Sprint("s", i), 1, prompt))
		if hit, why := a.ask(keyOf("m", salt, fmt.Sprint("r", i), 1, prompt)); hit != 2 {
			t.Errorf("salt %q: a hit of %d, %+v", salt, hit, why)
		}
	}
	if hit, _ := a.ask(keyOf("m", "team-a", "plain", 1, tokens(32, 2))); hit != 2 {
		t.Errorf("KV of a signed salt is not kept by its tenant: a hit of %d", hit)
	}
	s := n.Stats()
	if s.Declined["unsigned_salt"] != 0 || s.Unsigned["lookup"] != 3 || s.Unsigned["prepare_store"] != 2 || s.Unsigned["commit_store"] != 2 {
		t.Errorf("declined %d, counted %v", s.Declined["unsigned_salt"], s.Unsigned)
	}
}
