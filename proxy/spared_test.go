// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/relay"
	"github.com/kvasir-kv/kvasir/proxy"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/server/events"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// asked sends a request and returns how often P was asked for it; its answer must be that of one engine alone.
func (x *deployment) asked(request string, alone *served) (prefills int64) {
	x.t.Helper()
	_, want, _ := post(x.t, alone.web.URL, request)
	before := x.p[0].Stats().Finished
	status, got, _ := post(x.t, x.url, request)
	if status != 200 || answerText(x.t, got) != answerText(x.t, want) {
		x.t.Fatalf("%d %s\nwant %s", status, got, want)
	}
	x.idle() // also what it stores is stored
	return x.p[0].Stats().Finished - before
}

func (x *deployment) wantAsked(what string, want int64, request string, alone *served) {
	x.t.Helper()
	if n := x.asked(request, alone); n != want {
		x.t.Errorf("%s: P was asked %d times, want %d", what, n, want)
	}
}

// startRelayed starts a P, a relay behind it, three D's that pull from the relay, the proxy, and an engine alone.
func startRelayed(t *testing.T) (x *deployment, r *relay.Relay, alone *served) {
	t.Helper()
	x = &deployment{t: t, registry: startRegistry(t)}
	x.stopAll()
	x.p = append(x.p, serve(t, "", producer(x.registry, "p0"), 0))
	alone = serve(t, "", "", 0)
	t.Cleanup(func() { alone.stop(t) })
	r, err := relay.Open(relay.Options{Upstream: x.registry, MemoryPath: filepath.Join(t.TempDir(), "memory"), MemoryBytes: 16 << 20, RefreshEvery: time.Millisecond, Log: testLog()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	web := httptest.NewServer(r)
	t.Cleanup(web.Close)
	o := proxy.Options{Prefill: []proxy.Prefill{{URL: x.p[0].web.URL, Registry: web.URL}}, HealthInterval: 50 * time.Millisecond}
	for range 3 {
		d := serve(t, "", consumer, 0)
		x.d, o.Decode = append(x.d, d), append(o.Decode, d.web.URL)
	}
	x.start(o)
	return x, r, alone
}

// D gets a prompt's KV from the relay where the relay has it. P computes each of two prompts once, however
// often they come, whole or streamed. Another salt or another field makes another prompt. After a restart
// P computes the prompt again.
func TestRelayServesAgain(t *testing.T) {
	x, r, alone := startRelayed(t)
	for _, e := range append(x.p, x.d...) {
		testkit.Eventually(t, "all are well", func() bool { return x.proxy.Stats().Well[e.web.URL] == 1 })
	}
	for i := range 2 {
		x.only(0)
		x.wantAsked("first", 1, body(i, 5, ""), alone)
		x.only(1)
		x.wantAsked("again, at another D", 0, body(i, 9, ""), alone)
		x.only(2)
		x.wantAsked("again, at a third D, streamed", 0, body(i, 7, `,"stream":true,"temperature":0.5`), alone)
		x.wantAsked("another salt", 1, body(i, 5, `,"cache_salt":"s"`), alone)
		x.wantAsked("another field", 1, body(i, 5, `,"add_special_tokens":true`), alone)
	}
	if s := x.proxy.Stats(); s.Spared["relay"] != 4 || s.Retries != 0 || r.Stats().FromMemory < 4 {
		t.Errorf("%+v, %+v", s, r.Stats())
	}
	addr := x.p[0].web.Listener.Addr().String()
	x.p[0].stop(t)
	x.p[0] = serve(t, addr, producer(x.registry, "another"), 0)
	testkit.Eventually(t, "the next request succeeds", func() bool {
		status, _, _ := post(t, x.url, body(7, 3, ""))
		return status == 200
	})
	x.idle()
	x.wantAsked("another life of P", 1, body(0, 5, ""), alone)
	x.wantAsked("again in that life", 0, body(0, 5, ""), alone)
}

// When the relay has lost a prompt by the time D asks, the attempt fails and the next one succeeds, whole or
// streamed.
func TestRelayHasLostIt(t *testing.T) {
	var kept, refused atomic.Int64
	mux := http.NewServeMux()
	mux.HandleFunc("GET /query", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"0":{"engine_id":"relay-p","worker_addr":{"0":{"0":"tcp://h:1"}}}}`)
	})
	mux.HandleFunc("GET /kept", func(w http.ResponseWriter, r *http.Request) {
		kept.Add(1)
		fmt.Fprint(w, `{"kept":true}`)
	})
	var ps, ds legs
	p := mock(t, func(w http.ResponseWriter, r *http.Request) { ps.note(r); fmt.Fprint(w, `{}`) })
	d := mock(t, func(w http.ResponseWriter, r *http.Request) {
		m := ds.note(r)
		if id := m["kv_transfer_params"].(map[string]any)["transfer_id"].(string); strings.HasSuffix(id, "!") {
			refused.Add(1)
			if m["stream"] == true { // as vLLM does: the head is sent by then
				w.Header().Set("Content-Type", "text/event-stream")
				fmt.Fprint(w, "data: {\"error\":{\"message\":\"KV load failed\",\"code\":500}}\n\ndata: [DONE]\n\n")
				return
			}
			http.Error(w, "KV load failed", 500)
			return
		}
		testkit.Eventually(t, "P has its part", func() bool { return ps.count()+int(refused.Load()) == ds.count() })
		if m["stream"] == true {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: {}\n\ndata: [DONE]\n\n")
			return
		}
		fmt.Fprint(w, `{}`)
	})
	url, s := startProxy(t, proxy.Options{Prefill: []proxy.Prefill{{URL: p, Registry: serveMux(t, mux)}}, Decode: []string{d}, HealthInterval: 20 * time.Millisecond})
	reach(t, url)
	for i, more := range []string{"", "", `,"stream":true`} {
		// P's answer is noted before D's is over: a mock P answers first.
		if status, text, _ := post(t, url, `{"prompt":"a"`+more+`}`); status != 200 || strings.Contains(text, "error") {
			t.Fatal(i, status, text)
		}
	}
	if ps.count() != 3 || refused.Load() != 2 || kept.Load() != 2 || s.Stats().Retries != 2 || s.Stats().Spared["relay"] != 0 {
		t.Errorf("P %d, refused %d, kept %d: %+v", ps.count(), refused.Load(), kept.Load(), s.Stats())
	}
}

// node is a cache server in this process, with its HTTP interface.
type node struct {
	url, dir       string
	web            *httptest.Server
	events, replay string // where it publishes its KV events
}

const nodeChunk = 32 // tokens

func startNode(t testing.TB, bytes int64, salts *auth.SaltSecrets) *node {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "kvasir_proxy_test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: bytes, Dir: dir, ChunkTokens: nodeChunk})
	if err != nil {
		t.Fatal(err)
	}
	st := store.New(p, store.Options{})
	book := events.New(st, events.Options{})
	srv := server.New(st, server.Options{ChunkTokens: nodeChunk, ShmDir: dir, Log: testLog(), Events: book, Salts: salts})
	pub := events.NewPublisher(book, events.PublisherOptions{Topic: "kv@host:5555@" + events.ModelInTopic, ChunkTokens: nodeChunk, Log: testLog()})
	at, replay, err := pub.Listen(t.Context(), "tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	addr, err := srv.Listen(t.Context(), "tcp://127.0.0.1:*")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { srv.Run(ctx) })
	wg.Go(func() { pub.Run(ctx) })
	n := &node{url: "tcp://" + addr, dir: dir, web: httptest.NewServer(admin.Handler(srv, admin.Options{})), events: at, replay: replay}
	t.Cleanup(func() {
		n.web.Close()
		stop()
		wg.Wait()
		_ = pub.Close()
		if err := srv.Close(); err != nil {
			t.Error(err)
		}
		if err := st.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// serveMulti starts an engine of a Mooncake role that stores in a cache server and loads from it.
func (n *node) serveMulti(t testing.TB, mooncake string) *served {
	t.Helper()
	return serveWith(t, "", fmt.Sprintf(`{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute","kv_connector_extra_config":{"connectors":[%s,
		{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute","kv_connector_extra_config":{"lmcache.mp.server_urls":%q,"lmcache.mp.mp_transfer_mode":"engine_driven"}}]}}`,
		mooncake, n.url), engine.Options{ShmDir: n.dir})
}

// startShared starts a P and some D's that share a cache server, and an engine alone. It does not start the proxy, whose options it
// returns. salts are the secrets that proxy and server share; nil: salts need no signature.
func startShared(t *testing.T, ds int, salts *auth.SaltSecrets) (n *node, x *deployment, o proxy.Options, alone *served) {
	t.Helper()
	n, x = startNode(t, 64<<20, salts), &deployment{t: t, registry: startRegistry(t)}
	x.stopAll()
	x.p = append(x.p, n.serveMulti(t, producer(x.registry, "p0")))
	alone = serve(t, "", "", 0)
	t.Cleanup(func() { alone.stop(t) })
	o = proxy.Options{
		Prefill: []proxy.Prefill{{URL: x.p[0].web.URL, Registry: x.registry}}, HealthInterval: 50 * time.Millisecond,
		Store: n.web.URL, SkipPrefill: 400, Salts: salts,
	}
	for range ds {
		d := n.serveMulti(t, consumer)
		x.d, o.Decode = append(x.d, d), append(o.Decode, d.web.URL)
	}
	return n, x, o, alone
}

// D loads a prompt's KV from kvasir server where the server has it. P computes each of two prompts once, and a longer
// prompt that begins like one of them. When the server is cleared or silent, P computes the prompt.
func TestStoreServesAgain(t *testing.T) {
	n, x, o, alone := startShared(t, 3, nil)
	x.start(o)
	for _, e := range append(x.p, x.d...) {
		testkit.Eventually(t, "all are well", func() bool { s := x.proxy.Stats(); return s.Well[e.web.URL] == 1 && s.Store == 1 })
	}
	loaded := func() (sum int64) {
		for _, d := range x.d {
			sum += d.Stats().LoadedTokens
		}
		return sum
	}
	for who := range 2 {
		x.only(0)
		x.wantAsked("first", 1, talk(who, 3), alone)
		x.only(1)
		before := loaded()
		x.wantAsked("again, at another D", 0, talk(who, 3), alone)
		if got := loaded() - before; got < 250 {
			t.Errorf("D loaded %d tokens from the server", got)
		}
		x.wantAsked("the next turn", 1, talk(who, 4), alone)
	}
	if s := x.proxy.Stats(); s.Spared["store"] != 2 {
		t.Errorf("%+v", s)
	}
	was := x.proxy.StoreID()
	r, err := http.Post(n.web.URL+"/cache/clear", "application/json", strings.NewReader(`{"force":true}`))
	if err != nil || r.StatusCode != 200 {
		t.Fatal(err, r)
	}
	r.Body.Close()
	testkit.Eventually(t, "the proxy has seen it", func() bool { return x.proxy.StoreID() != was })
	x.only(2)
	x.wantAsked("the server was cleared", 1, talk(0, 3), alone)
	n.web.CloseClientConnections()
	n.web.Close()
	testkit.Eventually(t, "the proxy has seen it", func() bool { return x.proxy.Stats().Store == 0 })
	x.wantAsked("the server is silent", 1, talk(1, 3), alone)
}

// chunks returns the number of chunks in the server.
func (n *node) chunks(t testing.TB) int64 {
	t.Helper()
	r, err := http.Get(n.web.URL + "/status")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	var status struct {
		L1 struct {
			Chunks int64 `json:"resident_chunks"`
		} `json:"l1"`
	}
	if err := json.NewDecoder(r.Body).Decode(&status); err != nil {
		t.Fatal(err)
	}
	return status.L1.Chunks
}

// drop deletes all chunks of the server, as soon as no engine reads or writes them.
func (n *node) drop(t testing.TB) {
	t.Helper()
	call := func(method, body string, got any) {
		r, _ := http.NewRequest(method, n.web.URL+"/cache/objects", strings.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if err := json.NewDecoder(resp.Body).Decode(got); err != nil || resp.StatusCode != 200 {
			t.Fatal(resp.Status, err)
		}
	}
	testkit.Eventually(t, "all is deleted", func() bool {
		var list struct {
			Entries []struct {
				Key json.RawMessage `json:"key"`
			} `json:"entries"`
		}
		call(http.MethodGet, "", &list)
		if len(list.Entries) == 0 {
			return true
		}
		var keys []json.RawMessage
		for _, e := range list.Entries {
			keys = append(keys, e.Key)
		}
		body, _ := json.Marshal(map[string]any{"tier": "l1", "keys": keys})
		call(http.MethodDelete, string(body), &struct{}{})
		return false
	})
}

// From the server's KV events the proxy knows the server's chunks: a prompt that the server dropped goes to P again, and one that
// another proxy had stored does not, also without replays. A salt makes another prompt. The same holds where salts are signed:
// the server's events name tenants, requests name signed salts.
func TestStoreEvents(t *testing.T) {
	path := filepath.Join(t.TempDir(), "salts")
	if err := os.WriteFile(path, []byte(strings.Repeat("s", 32)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	salts, err := auth.OpenSaltSecrets(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, replay := range []bool{true, false} {
		t.Run(fmt.Sprintf("replay %v", replay), func(t *testing.T) { testStoreEvents(t, replay, nil) })
	}
	t.Run("signed salts", func(t *testing.T) { testStoreEvents(t, true, salts) })
}

func testStoreEvents(t *testing.T, replay bool, salts *auth.SaltSecrets) {
	n, x, o, alone := startShared(t, 4, salts)
	o.StoreEvents = "tcp://" + n.events
	if replay {
		o.StoreReplay = "tcp://" + n.replay
	}
	x.start(o)
	x.only(0)
	other, _ := startProxy(t, o)
	reach(t, other)
	chunks := func() int64 { return x.proxy.Stats().Chunks }
	told := func() bool { return chunks() == n.chunks(t) }
	// The proxy learns the chunk size from this prompt, before the first one below.
	x.wantAsked("a first prompt", 1, talk(9, 3), alone)
	testkit.Eventually(t, "the server tells of it", told)
	for who := range 2 {
		salted := strings.Replace(talk(who, 3), "{", `{"cache_salt":"s",`, 1)
		for _, request := range []string{talk(who, 3), salted} {
			x.only(0)
			learned := x.proxy.Stats().Tokenized
			x.wantAsked("first", 1, request, alone)
			testkit.Eventually(t, "the proxy knows", func() bool { return told() && x.proxy.Stats().Tokenized > learned })
			x.only(1)
			x.wantAsked("again, at another D", 0, request, alone)
			x.idle()
			n.drop(t)
			testkit.Eventually(t, "the proxy knows that it is gone", func() bool { return chunks() == 0 })
			if status, text, _ := post(t, other, request); status != 200 {
				t.Fatal(status, text)
			}
			x.idle()
			testkit.Eventually(t, "another proxy had it stored", func() bool { return chunks() > 0 && told() })
			x.only(2)
			x.wantAsked("stored for another proxy", 0, request, alone)
			n.drop(t)
			testkit.Eventually(t, "the proxy knows that it is gone", func() bool { return chunks() == 0 })
			x.only(3)
			if replay { // without replays the proxy may not know that it got all events
				x.wantAsked("dropped", 1, request, alone)
			}
		}
	}
}

// only lets requests go to one D alone.
func (x *deployment) only(i int) {
	x.t.Helper()
	admin := x.proxy.Admin("token")
	for k, d := range x.d {
		path := "/engines/drain?url="
		if k == i {
			path = "/engines/undrain?url="
		}
		r := httptest.NewRequest(http.MethodPost, path+d.web.URL, nil)
		r.Header.Set("Authorization", "Bearer token")
		w := httptest.NewRecorder()
		if admin.ServeHTTP(w, r); w.Code != 200 {
			x.t.Fatal(w.Code, w.Body)
		}
	}
}
