// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/events"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/miss"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// tenantLimits returns limits, and what replaces their lines.
func tenantLimits(t *testing.T, lines ...string) (*auth.TenantLimits, func(lines ...string)) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tenants")
	put := func(lines ...string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put(lines...)
	l, err := auth.OpenTenantLimits(path, func(name string) string { return strings.TrimPrefix(name, "_default") })
	if err != nil {
		t.Fatal(err)
	}
	return l, func(lines ...string) {
		t.Helper()
		put(lines...)
		if err := l.Reload(); err != nil {
			t.Fatal(err)
		}
	}
}

// may has a client do all that a request may do under a salt, and reports how much of it was done. Nothing of a tenant that it may not use
// is found, stored, loaded or released, and a lookup says why.
func may(t *testing.T, what string, a *asker, n *node, salt, request string, want bool) {
	t.Helper()
	prompt, fresh := tokens(32, 1), tokens(32, 1000+len(request)*int(request[len(request)-1]))
	before := n.Stats().Declined["foreign_tenant"]
	resident := n.Store().Stats().Resident
	instance := a.register("m", 1, "bfloat16")
	hit, why := a.ask(keyOf("m", salt, request, 1, prompt))
	if (hit == 2) != want || !want && (hit != 0 || why.Reason != miss.ForeignTenant.Label() || why.Salt != "" || !strings.Contains(why.Text, "may not use")) {
		t.Errorf("%s: a lookup hits %d chunks, %+v", what, hit, why)
	}
	live := keyOf("m", salt, request+"l", 1, prompt)
	live.Worker = lmcache.AllWorkers
	if hit, err := a.c.Lookup(t.Context(), live); err != nil || (hit == 2) != want {
		t.Errorf("%s: %d, %v", what, hit, err)
	}
	live.Worker = 0
	got, err := a.c.PrepareRetrieve(t.Context(), live, instance)
	if (err == nil && len(got.Slots) == 2) != want || !want && err == nil && len(got.Slots) > 0 {
		t.Errorf("%s: a load gets %d places, %v", what, len(got.Slots), err)
	}
	if ok, err := a.c.CommitRetrieve(t.Context(), live, instance); (err == nil && ok) != want {
		t.Errorf("%s: the commit of a load: %t, %v", what, ok, err)
	}
	k := keyOf("m", salt, request+"s", 1, fresh)
	if got, err := a.c.PrepareStore(t.Context(), k, instance, nil); (err == nil && len(got.Slots) == 2) != want || !want && err == nil && len(got.Slots) > 0 {
		t.Errorf("%s: a store gets %d places, %v", what, len(got.Slots), err)
	}
	if ok, err := a.c.CommitStore(t.Context(), k, instance); (err == nil && ok) != want {
		t.Errorf("%s: the commit of a store: %t, %v", what, ok, err)
	}
	if err := a.c.EndSession(t.Context(), live.RequestID); err != nil {
		t.Error(err)
	}
	declined := n.Stats().Declined["foreign_tenant"] - before
	if stored := n.Store().Stats().Resident - resident; want && (declined > 0 || stored != 2) || !want && (declined < 6 || stored != 0) {
		t.Errorf("%s: %d requests are declined for the tenant, %d chunks are stored", what, declined, stored)
	}
}

// Two tenants, by the listener, the user, the key and the token of their engines, and by several of these at once. Each uses its own KV
// alone, also where the file changes while the connection lasts; a client without a line uses all.
func TestClientsOfSomeTenants(t *testing.T) {
	uid := fmt.Sprint(os.Getuid())
	limits, put := tenantLimits(t, "user 4294967294 nobody")
	n, stop := startNode(t, t.TempDir(), 256, server.Options{Tenants: limits})
	defer stop()
	other, err := n.Listen(t.Context(), fmt.Sprint("tcp://127.0.0.1:", testkit.FreePort(t)))
	if err != nil {
		t.Fatal(err)
	}
	ipc := "ipc://" + filepath.Join(t.TempDir(), "socket")
	if _, err := n.Listen(t.Context(), ipc); err != nil {
		t.Fatal(err)
	}
	a, b, c := &asker{t: t, c: newClient(t, n.url), s: n.Server}, &asker{t: t, c: newClient(t, "tcp://"+other), s: n.Server, n: 1000}, &asker{t: t, c: newClient(t, ipc), s: n.Server, n: 2000}
	instance := a.register("m", 1, "bfloat16")
	for i, salt := range []string{"team-a", "team-b", ""} {
		a.store(instance, keyOf("m", salt, fmt.Sprint("s", i), 1, tokens(32, 1)))
	}
	may(t, "nobody has a line", a, n, "team-a", "r1", true)
	port := other[strings.LastIndexByte(other, ':')+1:]
	put("listener zmq:"+port+" team-b", "listener ipc _default")
	may(t, "a listener without a line", a, n, "team-a", "r2", true)
	may(t, "another tenant's listener", b, n, "team-a", "r3", false)
	may(t, "its own listener", b, n, "team-b", "r4", true)
	may(t, "the empty salt elsewhere", b, n, "", "r5", false)
	may(t, "the empty salt", c, n, "", "r6", true)
	may(t, "a salt on the listener of the empty one", c, n, "team-b", "r7", false)
	put("listener zmq team-a team-b", "listener zmq:"+port+" team-b", "user "+uid+" team-a")
	may(t, "listener and user", a, n, "team-a", "r8", true)
	may(t, "the listener allows it, the user does not", a, n, "team-b", "r9", false)
	may(t, "the user allows it, the listener does not", b, n, "team-a", "r10", false)
	put("user * -")
	may(t, "no tenant", a, n, "team-a", "r11", false)
	put("user * *", "listener zmq team-a")
	may(t, "all for the user", a, n, "team-a", "r12", true)

	// What is about all tenants is not for a client of some.
	before := n.Store().Stats().Resident
	soon, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond) // a clear that is declined may have no answer
	defer cancel()
	if err := a.c.Clear(soon, true); err == nil || n.Store().Stats().Resident != before {
		t.Errorf("a client of one tenant cleared %d chunks: %v", before-n.Store().Stats().Resident, err)
	}
	put("user * *")
	if err := a.c.Clear(t.Context(), true); err != nil || n.Store().Stats().Resident != 0 {
		t.Errorf("%v, %d chunks are left", err, n.Store().Stats().Resident)
	}
}

// Keys of CURVE and tokens limit the clients that have proved them.
func TestKeysAndTokensOfSomeTenants(t *testing.T) {
	limits, _ := tenantLimits(t, "key a team-a", "key b team-b", "token a team-a", "token b team-b")
	server0 := zmtp.NewKey()
	keys := map[string]zmtp.Key{"a": zmtp.NewKey(), "b": zmtp.NewKey(), "free": zmtp.NewKey()}
	curve := &zmtp.CurveServer{Secret: server0, Client: func(public zmtp.Key) (string, bool) {
		for name, k := range keys {
			if k.Public() == public {
				return name, true
			}
		}
		return "", false
	}}
	for _, kind := range []string{"key", "token"} {
		o := server.Options{Tenants: limits, Clients: zmtp.Authentication{Curve: curve}}
		if kind == "token" {
			o.Clients = zmtp.Authentication{Plain: func(user, password string) bool { return password == "of "+user }}
		}
		n, stop := startNode(t, t.TempDir(), 256, o)
		as := func(name string) *asker {
			o := lmcache.ClientOptions{Curve: &zmtp.CurveClient{Secret: keys[name], Server: server0.Public()}}
			if kind == "token" {
				o = lmcache.ClientOptions{Plain: &zmtp.PlainClient{User: name, Password: "of " + name}}
			}
			c, err := lmcache.OpenClient(n.url, o)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = c.Close() })
			return &asker{t: t, c: c, s: n.Server, n: int64(100 * len(name))}
		}
		a, b, free := as("a"), as("b"), as("free")
		b.n = 5000
		instance := free.register("m", 1, "bfloat16")
		for i, salt := range []string{"team-a", "team-b"} {
			free.store(instance, keyOf("m", salt, fmt.Sprint("s", i), 1, tokens(32, 1)))
		}
		may(t, kind+" a, own", a, n, "team-a", "r1", true)
		may(t, kind+" a, of b", a, n, "team-b", "r2", false)
		may(t, kind+" b, own", b, n, "team-b", "r3", true)
		may(t, kind+" b, of a", b, n, "team-a", "r4", false)
		may(t, kind+" without a line", free, n, "team-b", "r5", true)
		stop()
	}
}

// The KV events of LMCache's clients are of their tenants: a chunk that two tenants have is announced to a client of one of them as its own,
// and nothing of the other one.
func TestStreamsOfSomeTenants(t *testing.T) {
	dir := t.TempDir()
	limits, _ := tenantLimits(t, "listener ipc team-a")
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: 64 * 4096, Dir: dir, ChunkTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	n := &node{store: store.New(p, store.Options{TrustUnsummed: true}), dir: dir, log: new(logBuffer), url: "ipc://" + filepath.Join(dir, "socket")}
	n.Server = server.New(n.store, server.Options{ChunkTokens: 16, Tenants: limits, Events: events.New(n.store, events.Options{})})
	if _, err := n.Listen(t.Context(), n.url); err != nil {
		t.Fatal(err)
	}
	other, err := n.Listen(t.Context(), "tcp://127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer run(t, n.Server, n.store)()
	a := &asker{t: t, c: newClient(t, "tcp://"+other), s: n.Server}
	instance := a.register("m", 1, "bfloat16")
	put := func(salt string, seed int) []kv.Hash {
		t.Helper()
		a.store(instance, keyOf("m", salt, fmt.Sprint(salt, seed), 1, tokens(32, seed)))
		return kv.ChunkHashes(tokens(32, seed), 16)
	}
	c := subscribe(t, n.url, 9, 100)
	c.batch() // from now on the tokens of what is stored are noted
	c.control(1, lmcache.StreamAck)
	want := map[kv.Hash]bool{}
	expect := func(hashes ...kv.Hash) {
		t.Helper()
		for _, h := range hashes {
			want[h] = true
		}
		for !maps.Equal(want, keysOf(c.has)) {
			c.batch()
			c.control(1, lmcache.StreamAck)
		}
	}
	put("team-b", 1)
	expect(put("team-a", 1)...) // what team-b has already
	put("", 2)
	put("team-b", 3)
	expect(put("team-a", 4)...)
	late := subscribe(t, n.url, 10, 100)
	for !maps.Equal(want, keysOf(late.has)) {
		late.batch()
		late.control(1, lmcache.StreamAck)
	}
}

func keysOf[K comparable, V any](m map[K]V) map[K]bool {
	out := map[K]bool{}
	for k := range m {
		out[k] = true
	}
	return out
}
