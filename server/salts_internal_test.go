// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// requests are one of each type of request. requestTypes finds the types that are missing here.
func requests() []lmcache.Request {
	key := func() *lmcache.KeyView { return &lmcache.KeyView{Salt: []byte("team-a")} }
	in := func() lmcache.KeyRange { return lmcache.KeyRange{Key: key()} }
	return []lmcache.Request{
		&lmcache.EngineDriven{}, &lmcache.KVCache{},
		&lmcache.PrepareStoreRequest{KeyRange: in()}, &lmcache.CommitStoreRequest{KeyRange: in()},
		&lmcache.PrepareRetrieveRequest{KeyRange: in()}, &lmcache.CommitRetrieveRequest{KeyRange: in()},
		&lmcache.StoreRequest{KeyRange: in()}, &lmcache.RetrieveRequest{KeyRange: in()},
		&lmcache.LookupRequest{Key: key()}, &lmcache.FreeLookupLocksRequest{Key: key()},
		&lmcache.PrefetchStatusRequest{}, &lmcache.EndSessionRequest{}, &lmcache.UnregisterRequest{}, &lmcache.PingRequest{}, &lmcache.ClearRequest{},
		&lmcache.GetChunkSizeRequest{}, &lmcache.NegotiateRequest{}, &lmcache.GetExperimentalRequest{}, &lmcache.NoopRequest{},
		&lmcache.ReportBlockAllocationRequest{}, &lmcache.P2PLookupRequest{}, &lmcache.P2PUnlockRequest{}, &lmcache.P2PResultRequest{},
		&lmcache.SubscribeRequest{}, &lmcache.OtherRequest{},
	}
}

// requestTypes returns the types of package lmcache that have a method Op() Op, from its source.
func requestTypes(t *testing.T) (names []string) {
	t.Helper()
	files, err := filepath.Glob("../lmcache/*.go")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range f.Decls {
			m, ok := d.(*ast.FuncDecl)
			if !ok || m.Recv == nil || m.Name.Name != "Op" {
				continue
			}
			of := m.Recv.List[0].Type
			if p, ok := of.(*ast.StarExpr); ok {
				of = p.X
			}
			names = append(names, of.(*ast.Ident).Name)
		}
	}
	slices.Sort(names)
	return names
}

// hasSalt reports whether a value of a type holds a key of chunks, or a salt.
func hasSalt(t reflect.Type, seen map[reflect.Type]bool) bool {
	if seen[t] {
		return false
	}
	seen[t] = true
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array:
		return hasSalt(t.Elem(), seen)
	case reflect.Struct:
		for f := range t.Fields() {
			if f.Name == "Salt" || hasSalt(f.Type, seen) {
				return true
			}
		}
	}
	return false
}

func testSalts(t *testing.T) *auth.SaltSecrets {
	t.Helper()
	path := filepath.Join(t.TempDir(), "salts")
	if err := os.WriteFile(path, []byte(strings.Repeat("s", 32)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	salts, err := auth.OpenSaltSecrets(path)
	if err != nil {
		t.Fatal(err)
	}
	return salts
}

// Every type of request that carries a salt is refused to a client of other tenants, and a clear to a client of some. The client may use its own.
func TestEveryRequestIsOfATenantOfItsClient(t *testing.T) {
	s := newBareServer(t, io.Discard)
	s.opts.Tenants = testLimits(t, "listener ipc team-b")
	who := connected(s)
	for _, r := range requests() {
		if lmcache.KeyOf(r) == nil {
			continue
		}
		sc := &scratch{inProcess: who}
		if err := s.takeTenant(sc, r); !errors.Is(err, errTenant) && sc.denied != errTenant {
			t.Errorf("%T of another tenant: %v, %v", r, err, sc.denied)
		}
		if k := lmcache.KeyOf(r); k.Salt != nil {
			t.Errorf("%T keeps the salt", r)
		}
		lmcache.KeyOf(r).Salt = []byte("team-b")
		if err := s.takeTenant(sc, r); err != nil || sc.denied != nil || string(lmcache.KeyOf(r).Salt) != "team-b" {
			t.Errorf("%T of the client's own tenant: %v, %v", r, err, sc.denied)
		}
	}
	sc := &scratch{inProcess: who}
	if err := s.handleRare(sc, &lmcache.ClearRequest{}); !errors.Is(err, errTenant) {
		t.Errorf("a clear of all tenants: %v", err)
	}
	if err := s.takeTenant(&scratch{}, &lmcache.LookupRequest{Key: &lmcache.KeyView{Salt: []byte("team-a")}}); err != nil {
		t.Errorf("this process is limited: %v", err)
	}
}

func testLimits(t *testing.T, lines ...string) *auth.TenantLimits {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tenants")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := auth.OpenTenantLimits(path, func(name string) string { return name })
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// Another node finds objects of its own tenants alone. What it may not use is counted once for a request.
func TestPeersAreOfTheirTenants(t *testing.T) {
	s := newBareServer(t, io.Discard)
	(&engine{t, s}).register(7)
	s.opts.Tenants = testLimits(t, "listener ipc team-a")
	rank, _ := kv.NewRank(1, 0)
	find := s.keysFor(&scratch{inProcess: connected(s)}, lmcache.OpP2PLookupAndLock)
	for salt, want := range map[string]bool{"team-a": true, "team-b": false, "": false} {
		if _, ok := find(&lmcache.ObjectKey{Model: []byte("m"), Rank: rank, Salt: []byte(salt)}); ok != want {
			t.Errorf("a peer of team-a finds objects of %q: %t", salt, ok)
		}
	}
	if n := s.Stats().Declined["foreign_tenant"]; n != 1 {
		t.Errorf("%d requests are counted", n)
	}
}

// Every type of request that carries a salt is checked: a new one fails here until takeTenant, or keysFor of peers, knows it.
func TestEveryRequestWithASaltIsChecked(t *testing.T) {
	s := newBareServer(t, io.Discard)
	s.opts.Salts = testSalts(t)
	var have []string
	checked := 0
	for _, r := range requests() {
		of := reflect.TypeOf(r).Elem()
		have = append(have, of.Name())
		switch r.(type) {
		case *lmcache.P2PLookupRequest, *lmcache.P2PUnlockRequest: // keysFor checks each of their names
			continue
		}
		if !hasSalt(of, map[reflect.Type]bool{}) {
			continue
		}
		checked++
		sc := &scratch{}
		if err := s.takeTenant(sc, r); !errors.Is(err, errUnsigned) && sc.denied != errUnsigned {
			t.Errorf("%s with an unsigned salt: %v, %v", of.Name(), err, sc.denied)
		}
		if k := lmcache.KeyOf(r); k == nil || k.Salt != nil {
			t.Errorf("%s keeps the unsigned salt", of.Name())
		}
	}
	slices.Sort(have)
	if want := requestTypes(t); !slices.Equal(have, want) {
		t.Errorf("the test has the requests\n%v, package lmcache has\n%v", have, want)
	}
	if checked != 8 {
		t.Errorf("%d types of requests carry a salt", checked)
	}
}

// Names of peers count with a signature alone, and lead to the tenant's objects.
func TestPeersNeedSignedSalts(t *testing.T) {
	s := newBareServer(t, io.Discard)
	(&engine{t, s}).register(7)
	rank, _ := kv.NewRank(1, 0)
	peerName := func(salt string) *lmcache.ObjectKey {
		return &lmcache.ObjectKey{Model: []byte("m"), Rank: rank, Salt: []byte(salt)}
	}
	find := s.keysFor(&scratch{}, lmcache.OpP2PLookupAndLock)
	want, ok := find(peerName("team-a"))
	if !ok {
		t.Fatal("without signatures no name is found")
	}
	s.opts.Salts = testSalts(t)
	salt, err := s.opts.Salts.Sign("team-a")
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"", "team-a", salt[:len(salt)-1], "team-b" + salt[len("team-a"):]} {
		if _, ok := find(peerName(bad)); ok {
			t.Errorf("a peer finds objects under the salt %q", bad)
		}
	}
	got, ok := find(peerName(salt))
	if !ok || got != want {
		t.Errorf("a signed name is %+v, %v; the tenant's is %+v", got, ok, want)
	}
}
