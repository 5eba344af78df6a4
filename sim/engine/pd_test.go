// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
)

func testLog(t testing.TB) *slog.Logger {
	if !testing.Verbose() {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelInfo}))
}

func geometry(tp int) kvmem.Geometry {
	return kvmem.Geometry{Layers: 3, Heads: 4, HeadBytes: 16, BlockTokens: 16, Blocks: 200, TPSize: tp}
}

// open starts an engine with the connectors of a --kv-transfer-config; "" for none.
func open(t testing.TB, o engine.Options, config string, env map[string]string) *engine.Engine {
	t.Helper()
	e := openUnclosed(t, o, config, env)
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// openUnclosed is open for an engine that the test closes.
func openUnclosed(t testing.TB, o engine.Options, config string, env map[string]string) *engine.Engine {
	t.Helper()
	if config != "" {
		o.Connectors = parsed(t, config)
	}
	o.Getenv = func(name string) (string, bool) {
		if name == "VLLM_HOST_IP" {
			return "127.0.0.1", true
		}
		v, ok := env[name]
		return v, ok
	}
	o.Log = testLog(t)
	e, err := engine.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func parsed(t testing.TB, config string) []*kvconfig.Config {
	t.Helper()
	c, err := kvconfig.Parse([]byte(config))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func prompt(n int, seed uint32) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = seed*7919 + uint32(i)
	}
	return out
}

// ask runs one request to its end.
func ask(t testing.TB, e *engine.Engine, r engine.Request) ([]uint32, *engine.End) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	s, err := e.Submit(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	tokens, end, err := s.Wait(ctx)
	if err != nil {
		t.Fatalf("request %s: %v; %+v", r.ID, err, e.Stats())
	}
	return tokens, end
}

// idle waits until no request has blocks.
func idle(t testing.TB, e *engine.Engine) {
	t.Helper()
	testkit.Eventually(t, "all blocks are free", func() bool { s := e.Stats(); return s.Free == s.Blocks && s.Kept == 0 })
	if s := e.Stats(); s.WrongBytes > 0 {
		t.Fatalf("%+v", s)
	}
}

// Equal prompts give equal tokens, from the prefix cache too, whatever else runs.
func TestAlone(t *testing.T) {
	e := open(t, engine.Options{KV: geometry(2), MaxTokens: 64, MaxModel: 1024}, "", nil)
	want, end := ask(t, e, engine.Request{ID: "first", Tokens: prompt(300, 1), MaxTokens: 20})
	if len(want) != 20 || end.Reason != "length" || end.Err != nil {
		t.Fatalf("%v, %+v", want, end)
	}
	other, _ := ask(t, e, engine.Request{ID: "other", Tokens: prompt(300, 2), MaxTokens: 20})
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			s, err := e.Submit(t.Context(), engine.Request{ID: fmt.Sprint("r", i), Tokens: prompt(300, 1+uint32(i%2)), MaxTokens: 20})
			if err != nil {
				t.Error(err)
				return
			}
			got, end, err := s.Wait(t.Context())
			if err != nil || end.Err != nil || !slices.Equal(got, [][]uint32{want, other}[i%2]) {
				t.Errorf("request %d: %v, %+v, %v", i, got, end, err)
			}
		})
	}
	wg.Wait()
	idle(t, e)
	if s := e.Stats(); s.CachedTokens < 9*288 || s.Finished < 21 {
		t.Fatalf("%+v", s)
	}
	if !e.ResetPrefixCache(false) {
		t.Fatal("the prefix cache is not emptied")
	}
}

// P computes the prompt and D continues: the tokens are those of one engine alone, all KV comes from P, and all blocks are
// free afterwards.
func TestPrefillAndDecode(t *testing.T) {
	f := func(pTP, dTP int) {
		t.Helper()
		port := testkit.FreePort(t)
		p := open(t, engine.Options{KV: geometry(pTP), MaxModel: 1024},
			`{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","engine_id":"p"}`, map[string]string{"VLLM_MOONCAKE_BOOTSTRAP_PORT": strconv.Itoa(port)})
		d := open(t, engine.Options{KV: geometry(dTP), MaxModel: 1024}, `{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}`, nil)
		alone := open(t, engine.Options{KV: geometry(1), MaxModel: 1024}, "", nil)
		registry := fmt.Sprintf("http://127.0.0.1:%d", port)
		for i := range 4 {
			tokens, id := prompt(100+37*i, uint32(i%3)), fmt.Sprint("x", i)
			want, _ := ask(t, alone, engine.Request{ID: id, Tokens: tokens, MaxTokens: 12})
			first, end := ask(t, p, engine.Request{ID: "p" + id, Tokens: tokens, MaxTokens: 1, Params: wire.RemoteDecode(id)})
			if end.Err != nil || !slices.Equal(first, want[:1]) {
				t.Fatalf("TP %d to %d: P: %v, %+v", pTP, dTP, first, end)
			}
			got, end := ask(t, d, engine.Request{ID: "d" + id, Tokens: tokens, MaxTokens: 12, Params: wire.RemotePrefill(registry, "p", id)})
			if end.Err != nil || !slices.Equal(got, want) {
				t.Fatalf("TP %d to %d: D: %v, %+v, want %v", pTP, dTP, got, end, want)
			}
		}
		idle(t, p)
		idle(t, d)
		if s := d.Stats(); s.LoadedTokens < 100+137+174 || s.Finished != 4 {
			t.Fatalf("TP %d to %d: %+v", pTP, dTP, s)
		}
		s, other := d.Stats(), p.Stats()
		for what, n := range map[string]uint64{"queue": s.Queue.Total(), "prefill": s.Prefill.Total(), "decode": s.Decode.Total(), "load": s.Load.Total(), "P's queue": other.Queue.Total()} {
			if n != 4 {
				t.Errorf("TP %d to %d: %d times of %s", pTP, dTP, n, what)
			}
		}
		if s.Load.Sum <= 0 || s.Load.Sum > s.Queue.Sum || s.Queue.Sum < 0 || s.Prefill.Sum < 0 || s.Decode.Sum <= 0 || other.Load.Total() != 0 {
			t.Errorf("TP %d to %d: loads of %d ns in queues of %d ns, then %d and %d", pTP, dTP, s.Load.Sum, s.Queue.Sum, s.Prefill.Sum, s.Decode.Sum)
		}
	}
	f(1, 1)
	f(2, 1)
	f(1, 2)
	f(4, 2)
}

// P and D with one secret transfer KV. With different secrets, or where one of them has none, D computes the prompt and the answer is the same.
func TestPairProvesItsSecret(t *testing.T) {
	secrets := func(text, stock string) *auth.PeerSecrets {
		path := filepath.Join(t.TempDir(), "secret")
		if err := os.WriteFile(path, []byte(strings.Repeat(text, 32)+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		var networks []netip.Prefix
		if stock != "" {
			networks = append(networks, netip.MustParsePrefix(stock))
		}
		s, err := auth.OpenPeerSecrets(path, networks, nil)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	f := func(what string, ofP, ofD *auth.PeerSecrets, loads bool) {
		t.Helper()
		port := testkit.FreePort(t)
		o := engine.Options{KV: geometry(1), MaxModel: 1024}
		p, d := o, o
		p.Secrets, d.Secrets = ofP, ofD
		from := open(t, p, `{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","engine_id":"p"}`, map[string]string{"VLLM_MOONCAKE_BOOTSTRAP_PORT": strconv.Itoa(port)})
		to := open(t, d, `{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer","kv_load_failure_policy":"recompute"}`, nil)
		alone := open(t, o, "", nil)
		want, _ := ask(t, alone, engine.Request{ID: "a", Tokens: prompt(137, 1), MaxTokens: 12})
		if _, end := ask(t, from, engine.Request{ID: "p1", Tokens: prompt(137, 1), MaxTokens: 1, Params: wire.RemoteDecode("t1")}); end.Err != nil {
			t.Fatal(end.Err)
		}
		got, end := ask(t, to, engine.Request{ID: "d1", Tokens: prompt(137, 1), MaxTokens: 12, Params: wire.RemotePrefill(fmt.Sprintf("http://127.0.0.1:%d", port), "p", "t1")})
		if end.Err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %v, %+v, want %v", what, got, end, want)
		}
		if s := to.Stats(); s.WrongBytes != 0 || (s.LoadedTokens > 0) != loads || (ofD.Refused()+ofP.Refused() > 0) != (!loads && ofD != nil) {
			t.Errorf("%s: %+v, %d refused", what, s, ofD.Refused())
		}
	}
	f("one secret", secrets("a", ""), secrets("a", ""), true)
	f("P has none", nil, secrets("a", ""), false)
	f("D has none", secrets("a", ""), nil, false)
	f("D takes stock peers", nil, secrets("a", "127.0.0.0/8"), true)
	f("two secrets", secrets("a", ""), secrets("b", ""), false)
}

// Sixteen requests in flight through P and D, some of whose clients leave, while P is
// started again: every answer is right, computed by D where P's KV was lost, and all blocks
// are free in the end.
func TestPairUnderLoad(t *testing.T) {
	f := func(pTP, dTP int, first bool) {
		t.Helper()
		registry, err := bootstrap.Open(bootstrap.Options{})
		if err != nil {
			t.Fatal(err)
		}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		var serving sync.WaitGroup
		serving.Go(func() { registry.Serve(ctx, l) })
		defer func() { stop(); serving.Wait(); registry.Close() }()
		url := "http://" + l.Addr().String()
		g := geometry(pTP)
		g.Blocks = 600
		env := map[string]string{"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "6", "VLLM_MOONCAKE_BOOTSTRAP_PORT": strconv.Itoa(testkit.FreePort(t))}
		po := engine.Options{KV: g, MaxModel: 1024, StepTime: time.Millisecond, First: first}
		pConfig := fmt.Sprintf(`{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","engine_id":"p","kv_connector_extra_config":{"bootstrap_server_address":%q}}`, l.Addr())
		var p atomic.Pointer[engine.Engine]
		p.Store(open(t, po, pConfig, env))
		g.TPSize = dTP
		d := open(t, engine.Options{KV: g, MaxModel: 1024, StepTime: time.Millisecond, First: first},
			`{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer","kv_load_failure_policy":"recompute"}`, env)
		alone := open(t, engine.Options{KV: g, MaxModel: 1024}, "", nil)
		var next atomic.Int64
		var wg sync.WaitGroup
		requests := max(40, testkit.Volume(160))
		for range 16 {
			wg.Go(func() {
				for i := int(next.Add(1)) - 1; i < requests; i = int(next.Add(1)) - 1 {
					tokens, id := prompt(60+i%200, uint32(i%7)), fmt.Sprint("x", i)
					ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
					if i%9 == 0 {
						time.AfterFunc(time.Duration(i%13)*time.Millisecond, cancel)
					}
					decode := wire.RemoteDecode(id)
					pulls := wire.RemotePrefill(url, "p", id)
					own, other := "p"+id, "d"+id
					if first { // both engines know the request by one id, and P's answer tells D where
						decode, own, other = wire.RemoteDecode(""), id, id
					}
					if s, err := p.Load().Submit(ctx, engine.Request{ID: own, Tokens: tokens, MaxTokens: 1, Params: decode}); err == nil {
						_, end, _ := s.Wait(t.Context())
						if first {
							pulls = end.Params
						}
					}
					s, err := d.Submit(ctx, engine.Request{ID: other, Tokens: tokens, MaxTokens: 6, Params: pulls})
					if err != nil {
						if ctx.Err() == nil {
							t.Error(err)
						}
						cancel()
						continue
					}
					got, end, _ := s.Wait(t.Context())
					cancel()
					if i%9 == 0 {
						continue
					}
					want, _ := ask(t, alone, engine.Request{ID: id, Tokens: tokens, MaxTokens: 6})
					if end.Err != nil || !slices.Equal(got, want) {
						t.Errorf("TP %d to %d, request %d: %v, %+v, want %v", pTP, dTP, i, got, end, want)
					}
				}
			})
		}
		for int(next.Load()) < requests/2 && !t.Failed() {
			time.Sleep(time.Millisecond)
		}
		if err := p.Load().Close(); err != nil {
			t.Error(err)
		}
		p.Store(open(t, po, pConfig, env))
		wg.Wait()
		idle(t, d)
		idle(t, p.Load())
		if s := d.Stats(); s.LoadedTokens == 0 || s.Failed > 0 {
			t.Fatalf("TP %d to %d: %+v", pTP, dTP, s)
		}
	}
	f(1, 1, false)
	f(2, 1, false)
	f(1, 4, false)
	f(1, 1, true)
	f(2, 2, true)
}
