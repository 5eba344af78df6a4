// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// authority issues client certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  string
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{}
	der := a.sign(t, &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	a.cert, a.pem = cert, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	return a
}

// sign signs a certificate with a new key, which is the authority's where that has none.
func (a *authority) sign(t *testing.T, c *x509.Certificate) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent := a.cert
	if a.key == nil {
		a.key, parent = key, c
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func (a *authority) client(t *testing.T, name string) []*x509.Certificate {
	t.Helper()
	der := a.sign(t, &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return []*x509.Certificate{cert}
}

// tenants is a server with two chunks of the same prompt under each salt, and a lookup of each that found less.
func tenants(t *testing.T, salts ...string) *server.Server {
	t.Helper()
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: 64 * 4096, Dir: t.TempDir(), ChunkTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	st := store.New(p, store.Options{})
	s := server.New(st, server.Options{ChunkTokens: 16, Lifetimes: evict.NewLifetimes(), Log: slog.New(slog.DiscardHandler)})
	t.Cleanup(func() { _, _ = s.Close(), st.Close() })
	call := func(op lmcache.Op, p ...[]byte) { s.Answer(append([][]byte{{0}, lmcache.AppendOp(nil, op)}, p...)) }
	reg := lmcache.EngineDriven{InstanceID: 7, Model: "m", WorldSize: 1, BlockSize: 16, Layers: 1, Hidden: 128, DType: "bfloat16", SinglePlane: true, PhysicalSlots: 16}
	call(lmcache.OpRegisterEngineDriven, reg.Append(nil))
	for _, salt := range salts {
		if err := st.SetQuota(salt, 8*4096); err != nil {
			t.Fatal(err)
		}
		key := lmcache.Key{Model: "m", Salt: salt, WorldSize: 1, Tokens: make([]uint32, 32), End: 32, RequestID: "s-" + salt, Readers: 1}
		call(lmcache.OpPrepareStore, key.Append(nil), lmcache.AppendInt(nil, 7))
		call(lmcache.OpCommitStore, key.Append(nil), lmcache.AppendInt(nil, 7), lmcache.AppendBytes(nil, nil))
	}
	more := make([]uint32, 48)
	more[47] = 9
	first := lmcache.Key{Model: "m", Salt: salts[0], WorldSize: 1, Tokens: more, End: 48, RequestID: "s3", Readers: 1}
	call(lmcache.OpPrepareStore, first.Append(nil), lmcache.AppendInt(nil, 7))
	call(lmcache.OpCommitStore, first.Append(nil), lmcache.AppendInt(nil, 7), lmcache.AppendBytes(nil, nil))
	for _, salt := range salts { // its third chunk is there under the first salt alone
		key := lmcache.Key{Model: "m", Salt: salt, WorldSize: 1, Worker: lmcache.AllWorkers, Tokens: append(more, make([]uint32, 16)...), End: 64, RequestID: "r-" + salt, Readers: 1}
		call(lmcache.OpLookup, key.Append(nil), lmcache.AppendInt(nil, 1))
		call(lmcache.OpQueryPrefetchStatus, lmcache.AppendString(nil, key.RequestID))
		call(lmcache.OpEndSession, lmcache.AppendString(nil, key.RequestID))
	}
	return s
}

// A client of one tenant, by its certificate, its token or the listener, sees and changes that tenant alone on every route. What is about
// all tenants is refused, and counted.
func TestRoutesOfOneTenant(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	secret, line, err := auth.NewToken("ops", auth.Admin, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	free, freeLine, err := auth.NewToken("all", auth.Admin, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	tokens, err := auth.OpenTokens(write("tokens", line+"\n"+freeLine+"\n"))
	if err != nil {
		t.Fatal(err)
	}
	ca := newAuthority(t)
	authorities, err := auth.OpenAuthorities(write("ca", ca.pem))
	if err != nil {
		t.Fatal(err)
	}
	limits, err := auth.OpenTenantLimits(write("tenants", "token ops team-b\ncert CN=b team-b\n"), admin.SaltOf)
	if err != nil {
		t.Fatal(err)
	}
	byListener, err := auth.OpenTenantLimits(write("listener", "listener http team-b\n"), admin.SaltOf)
	if err != nil {
		t.Fatal(err)
	}
	for who, access := range map[string]auth.Options{
		"token":                              {Listener: "http", Tokens: tokens, Tenants: limits},
		"certificate":                        {Listener: "http", Tokens: tokens, Authorities: authorities, Tenants: limits},
		"certificate beside a token for all": {Listener: "http", Tokens: tokens, Authorities: authorities, Tenants: limits},
		"listener":                           {Listener: "http", Tenants: byListener},
	} {
		s := tenants(t, "team-a", "team-b", "")
		h := admin.Handler(s, admin.Options{Access: access})
		send := func(method, path, body string) (int, string) {
			t.Helper()
			r := httptest.NewRequest(method, "http://localhost"+path, strings.NewReader(body))
			r.Header.Set("Content-Type", "application/json")
			r.Header.Set("Accept-Encoding", "gzip")
			switch who {
			case "token":
				r.Header.Set("Authorization", "Bearer "+secret)
			case "certificate":
				r.TLS = &tls.ConnectionState{PeerCertificates: ca.client(t, "b")}
			case "certificate beside a token for all":
				r.TLS = &tls.ConnectionState{PeerCertificates: ca.client(t, "b")}
				r.Header.Set("Authorization", "Bearer "+free)
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			return w.Code, w.Body.String()
		}
		hash := kv.ChunkHashes(make([]uint32, 32), 16)[0]
		zeroes := strings.TrimSuffix(strings.Repeat("0,", 32), ",")
		pin := func(salt string) string {
			return fmt.Sprintf(`{"model_name":"m","world_size":1,"token_ids":[%s],"cache_salt":%q}`, zeroes, salt)
		}
		object := func(salt string) string {
			return fmt.Sprintf(`{"keys":[{"chunk_hash_hex":%q,"model_name":"m","kv_rank":%d,"object_group_id":0,"cache_salt":%q}]}`, hash, 0x01000100, salt)
		}
		foreign := regexp.MustCompile(`team-a|"r-"|"s3"|_default|model_name":"m"[^}]*"cache_salt":""`)
		for _, c := range []struct {
			method, path, body string
			code               int
			has                string
		}{
			{"PUT", "/tenants/team-b", `{"pin_limit_bytes":16384}`, 200, "team-b"},
			{"PUT", "/tenants/team-a", `{"pin_limit_bytes":16384}`, 403, ""},
			{"PUT", "/tenants/_default", `{"pin_limit_bytes":16384}`, 403, ""},
			{"DELETE", "/tenants/team-a", "", 403, ""},
			{"GET", "/tenants", "", 200, "team-b"},
			{"GET", "/quota", "", 200, "team-b"},
			{"GET", "/quota/team-b", "", 200, "team-b"},
			{"GET", "/quota/team-a", "", 403, ""},
			{"PUT", "/quota/team-a", `{"limit_gb":0}`, 403, ""},
			{"DELETE", "/quota/team-a", "", 403, ""},
			{"GET", "/explain", "", 200, "r-team-b"},
			{"GET", "/explain?request_id=r-team-b", "", 200, "r-team-b"},
			{"GET", "/explain?request_id=r-team-a", "", 200, `"lookups":[]`},
			{"GET", "/metrics", "", 200, `cache_salt="team-b"`},
			{"GET", "/cache/objects", "", 200, "team-b"},
			{"POST", "/cache/pins", pin("team-b"), 200, `"affected":2`},
			{"POST", "/cache/pins", pin("team-a"), 403, ""},
			{"GET", "/cache/pins", "", 200, `"total":2`},
			{"GET", "/cache/pins?cache_salt=team-a", "", 200, `"total":0`},
			{"DELETE", "/cache/pins", pin("team-a"), 403, ""},
			{"DELETE", "/cache/pins", pin("team-b"), 200, `"affected":2`},
			{"POST", "/cache/prefetches", pin("team-b"), 202, ""},
			{"POST", "/cache/prefetches", pin("team-a"), 403, ""},
			{"DELETE", "/cache/objects", object("team-a"), 403, ""},
			{"DELETE", "/cache/objects", object("team-b"), 200, `"deleted":1`},
			{"GET", "/status", "", 403, ""},
			{"GET", "/live", "", 403, ""},
			{"GET", "/now", "", 403, ""},
			{"GET", "/config?sources=true", "", 403, ""},
			{"GET", "/transfers", "", 403, ""},
			{"POST", "/cache/clear", "", 403, ""},
			{"POST", "/tiers/drop", `{"tier":"disk"}`, 403, ""},
			{"POST", "/tiers/rekey", `{"tier":"disk"}`, 403, ""},
			{"POST", "/cache/checksums", `{}`, 403, ""},
			{"GET", "/healthz", "", 200, ""},
			{"GET", "/version", "", 200, ""},
		} {
			code, body := send(c.method, c.path, c.body)
			if code != c.code || !strings.Contains(body, c.has) {
				t.Errorf("%s: %s %s: %d %s", who, c.method, c.path, code, body)
			}
			if found := foreign.FindString(body); code < 300 && found != "" && !strings.Contains(c.path, "r-team-a") {
				t.Errorf("%s: %s %s shows %q of another tenant: %s", who, c.method, c.path, found, body)
			}
		}
		if n := s.Store().Stats().Resident; n != 7-1 {
			t.Errorf("%s: %d chunks are left", who, n)
		}
		var why struct {
			Lookups []struct{ Reason, Text string }
		}
		if _, body := send("GET", "/explain", ""); json.Unmarshal([]byte(body), &why) != nil || len(why.Lookups) != 1 || why.Lookups[0].Reason != "never_stored" {
			t.Errorf("%s: what another tenant has is not told from what was never stored: %s", who, body)
		}
		r := httptest.NewRequest(http.MethodGet, "http://localhost/metrics", nil)
		r.Header.Set("Authorization", "Bearer "+free)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if text := w.Body.String(); who != "listener" && (!strings.Contains(text, `cache_salt="team-a"`) || !regexp.MustCompile(`kvasir_auth_refused_total\{listener="http",reason="tenant"\} 1[0-9]`).MatchString(text)) {
			t.Errorf("%s: a token for all does not see all, or refusals are not counted", who)
		}
	}
}
