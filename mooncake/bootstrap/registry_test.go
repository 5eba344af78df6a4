// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
)

// local is a process on this host.
var local = peercred.Origin{User: "uid 1", Addr: "127.0.0.1", Here: true}

// call makes one request and returns status and body.
func call(r *Registry, method, path, body string, header ...string) (int, string) {
	req := httptest.NewRequest(method, path, strings.NewReader(body))
	req.RemoteAddr, req.Host = "127.0.0.1:5", "127.0.0.1:8998"
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
		switch header[i] {
		case "From":
			req.RemoteAddr = header[i+1]
		case "Host":
			req.Host = header[i+1]
		}
	}
	rec := httptest.NewRecorder()
	r.ServeHTTP(rec, req)
	return rec.Code, rec.Body.String()
}

func mustRegister(t *testing.T, r *Registry, in Registration) {
	t.Helper()
	body, err := in.body()
	if err != nil {
		t.Fatal(err)
	}
	if code, text := call(r, "POST", "/register", string(body)); code != 200 || text != `{"status":"ok"}` {
		t.Fatalf("register %+v: %d %s", in, code, text)
	}
}

// refused registers and returns the refusal's text.
func refused(t *testing.T, r *Registry, status int, in Registration) string {
	t.Helper()
	body, err := in.body()
	if err != nil {
		t.Fatal(err)
	}
	code, text := call(r, "POST", "/register", string(body))
	if code != status {
		t.Fatalf("register %+v: %d %s, want %d", in, code, text, status)
	}
	return text
}

func wantQuery(t *testing.T, r *Registry, want string) {
	t.Helper()
	if code, got := call(r, "GET", "/query", ""); code != 200 || got != want {
		t.Fatalf("query: %d %s, want %s", code, got, want)
	}
}

// sideChannel listens as a worker does.
func sideChannel(t *testing.T) (addr string, closeIt func()) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return "tcp://" + l.Addr().String(), func() { l.Close() }
}

// A restarted P with two ranks: while it comes back, nothing is shown, and never
// a mixture; a live one is not replaced.
func TestReplaceTwoRanks(t *testing.T) {
	r := open(t, Options{})
	a0, close0 := sideChannel(t)
	a1, close1 := sideChannel(t)
	b0, _ := sideChannel(t)
	b1, _ := sideChannel(t)
	mustRegister(t, r, Registration{EngineID: "old", TPRank: 0, Addr: a0})
	mustRegister(t, r, Registration{EngineID: "old", TPRank: 1, Addr: a1})
	old := `{"0":{"engine_id":"old","worker_addr":{"0":{"0":"` + a0 + `"},"1":{"0":"` + a1 + `"}}}}`
	wantQuery(t, r, old)

	next := Registration{EngineID: "new", TPRank: 0, Addr: b0}
	if got := refused(t, r, 400, next); got != `{"detail":"Engine ID mismatch for dp_rank=0: expected old, got new"}` {
		t.Fatal(got)
	}
	wantQuery(t, r, old)
	close0()
	close1()
	mustRegister(t, r, next)
	wantQuery(t, r, `{}`)
	mustRegister(t, r, Registration{EngineID: "new", TPRank: 1, Addr: b1})
	wantQuery(t, r, `{"0":{"engine_id":"new","worker_addr":{"0":{"0":"`+b0+`"},"1":{"0":"`+b1+`"}}}}`)
}

// One closed side channel is enough: another process may have got the port of
// the rank that comes first.
func TestReplaceOneRankGone(t *testing.T) {
	r := open(t, Options{})
	a0, _ := sideChannel(t)
	a1, close1 := sideChannel(t)
	b0, _ := sideChannel(t)
	mustRegister(t, r, Registration{EngineID: "old", TPRank: 0, Addr: a0})
	mustRegister(t, r, Registration{EngineID: "old", TPRank: 1, Addr: a1})
	close1()
	mustRegister(t, r, Registration{EngineID: "new", TPRank: 0, Addr: b0})
}

// The same engine id from other addresses is another incarnation: no old address
// stays beside a new one.
func TestReplaceSameEngineID(t *testing.T) {
	r := open(t, Options{})
	a0, close0 := sideChannel(t)
	a1, close1 := sideChannel(t)
	b0, _ := sideChannel(t)
	b1, _ := sideChannel(t)
	for i, a := range []string{a0, a1} {
		mustRegister(t, r, Registration{EngineID: "e", TPRank: i, Addr: a})
	}
	want := fmt.Sprintf(`{"detail":"Worker with dp_rank=0, tp_rank=1, pp_rank=0 is already registered at %s, but still want to register at %s"}`, a1, b1)
	if got := refused(t, r, 400, Registration{EngineID: "e", TPRank: 1, Addr: b1}); got != want {
		t.Fatal(got)
	}
	close0()
	close1()
	mustRegister(t, r, Registration{EngineID: "e", TPRank: 1, Addr: b1})
	wantQuery(t, r, `{}`)
	mustRegister(t, r, Registration{EngineID: "e", TPRank: 0, Addr: b0})
	wantQuery(t, r, `{"0":{"engine_id":"e","worker_addr":{"1":{"0":"`+b1+`"},"0":{"0":"`+b0+`"}}}}`)
}

// An address that is not tcp, or that is the loopback of another host, proves nothing when it refuses connections.
func TestUnprovable(t *testing.T) {
	f := func(addr, from string) {
		t.Helper()
		r := open(t, Options{})
		body, _ := Registration{EngineID: "old", Addr: addr}.body()
		if code, text := call(r, "POST", "/register", string(body), "From", from); code != 200 {
			t.Fatal(code, text)
		}
		refused(t, r, 400, Registration{EngineID: "new", Addr: "tcp://127.0.0.1:1"})
	}
	gone, closeIt := sideChannel(t)
	closeIt()
	f(gone, "10.1.1.1:7")
	f("ipc:///tmp/x", "127.0.0.1:7")
	f("tcp://127.0.0.1", "127.0.0.1:7")
	f("", "127.0.0.1:7")
}

func TestStrict(t *testing.T) {
	r := open(t, Options{Strict: true})
	a, closeIt := sideChannel(t)
	mustRegister(t, r, Registration{EngineID: "old", Addr: a})
	closeIt()
	refused(t, r, 400, Registration{EngineID: "new", Addr: "tcp://127.0.0.1:1"})
	// The first releases refuse a repeat, too; the default does not.
	want := `{"detail":"Worker with dp_rank=0, tp_rank=0, pp_rank=0 is already registered at ` + a + `, but still want to register at ` + a + `"}`
	if got := refused(t, r, 400, Registration{EngineID: "old", Addr: a}); got != want {
		t.Fatal(got)
	}
	r = open(t, Options{})
	for range 2 {
		mustRegister(t, r, Registration{EngineID: "old", Addr: a})
	}
}

// A side channel that hangs holds up its own registration only.
func TestHangingProbeDelaysOnlyItsRegistration(t *testing.T) {
	r := open(t, Options{MaxProbes: 1})
	r.prober.timeout = time.Minute
	hang, asked := make(chan struct{}), make(chan struct{}, 10)
	r.prober.dial = func(ctx context.Context, host string) error {
		asked <- struct{}{}
		select {
		case <-hang:
			return syscall.ECONNREFUSED
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	mustRegister(t, r, Registration{EngineID: "old", Addr: "tcp://10.0.0.1:1"})
	mustRegister(t, r, Registration{EngineID: "other", DPRank: 1, Addr: "tcp://10.0.0.1:2"})
	var wg sync.WaitGroup
	for range 3 { // one after the other
		wg.Go(func() {
			if err := r.register(t.Context(), Registration{EngineID: "new", Addr: "tcp://10.0.0.2:1"}, local); err != nil {
				t.Error(err)
			}
		})
	}
	<-asked
	mustRegister(t, r, Registration{EngineID: "third", DPRank: 2, Addr: "tcp://10.0.0.1:3"})
	call(r, "GET", "/query", "")
	// A probe of another address waits for the slot as long as its request does.
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := r.register(ctx, Registration{EngineID: "x", DPRank: 1, Addr: "tcp://10.0.0.2:9"}, local); err == nil {
		t.Fatal("replaced without a probe")
	}
	close(hang)
	wg.Wait()
	if _, got := call(r, "GET", "/query", ""); !strings.Contains(got, `"new"`) || strings.Contains(got, `"old"`) {
		t.Fatal(got)
	}
}

// An engine that comes back with fewer ranks is shown after the settle time.
func TestSettle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := open(t, Options{Settle: 10 * time.Second})
		mustRegister(t, r, Registration{EngineID: "old", TPRank: 0, Addr: "tcp://h:1"})
		mustRegister(t, r, Registration{EngineID: "old", TPRank: 1, Addr: "tcp://h:2"})
		mustRegister(t, r, Registration{EngineID: "new", TPRank: 0, Addr: "tcp://h:1"}) // has the old one's address
		wantQuery(t, r, `{}`)
		time.Sleep(10*time.Second - 1)
		synctest.Wait()
		wantQuery(t, r, `{}`)
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		wantQuery(t, r, `{"0":{"engine_id":"new","worker_addr":{"0":{"0":"tcp://h:1"}}}}`)
	})
}

// Where the workers or the operator state an engine's size, the registry shows the engine only when it is complete.
func TestSizes(t *testing.T) {
	r := open(t, Options{})
	w := func(tp, pp int) Registration {
		return Registration{EngineID: "e", TPRank: tp, PPRank: pp, TPSize: 2, PPSize: 2, Addr: fmt.Sprintf("tcp://h:%d%d", tp, pp)}
	}
	for _, at := range [][2]int{{0, 0}, {1, 0}, {1, 1}} {
		mustRegister(t, r, w(at[0], at[1]))
		wantQuery(t, r, `{}`)
	}
	bad := w(0, 1)
	bad.TPSize = 4
	if got := refused(t, r, 400, bad); got != `{"detail":"tp_size mismatch for engine e of dp_rank=0: expected 2, got 4"}` {
		t.Fatal(got)
	}
	bad.TPSize, bad.TPRank = 2, 2
	refused(t, r, 422, bad)
	mustRegister(t, r, w(0, 1))
	wantQuery(t, r, `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"tcp://h:00","1":"tcp://h:01"},"1":{"0":"tcp://h:10","1":"tcp://h:11"}}}}`)

	r = open(t, Options{TP: 2})
	mustRegister(t, r, Registration{EngineID: "e", TPRank: 0, Addr: "a"})
	wantQuery(t, r, `{}`)
	mustRegister(t, r, Registration{EngineID: "e", TPRank: 1, Addr: "b"})
	wantQuery(t, r, `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"a"},"1":{"0":"b"}}}}`)
}

// A repeated registration renews the lease. The lease ends to the nanosecond. The registry does not
// show an engine of which one lease ended. A registration without a lease stays.
func TestLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := open(t, Options{})
		a := Registration{EngineID: "e", TPRank: 0, Addr: "a", Lease: 10 * time.Second}
		b := Registration{EngineID: "e", TPRank: 1, Addr: "b", Lease: 20 * time.Second}
		mustRegister(t, r, a)
		mustRegister(t, r, b)
		mustRegister(t, r, Registration{EngineID: "stock", DPRank: 1, Addr: "c"})
		whole := `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"a"},"1":{"0":"b"}}},"1":{"engine_id":"stock","worker_addr":{"0":{"0":"c"}}}}`
		time.Sleep(9 * time.Second)
		mustRegister(t, r, a)
		time.Sleep(10*time.Second - 1)
		wantQuery(t, r, whole)
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		stock := `{"1":{"engine_id":"stock","worker_addr":{"0":{"0":"c"}}}}`
		wantQuery(t, r, stock)
		mustRegister(t, r, b)
		wantQuery(t, r, stock)
		mustRegister(t, r, a)
		wantQuery(t, r, `{"0":{"engine_id":"e","worker_addr":{"1":{"0":"b"},"0":{"0":"a"}}},"1":{"engine_id":"stock","worker_addr":{"0":{"0":"c"}}}}`)
		time.Sleep(time.Hour)
		synctest.Wait()
		wantQuery(t, r, stock)
		mustRegister(t, r, Registration{EngineID: "later", Addr: "d"}) // the place is free
	})
}

func TestWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := open(t, Options{MaxWaiters: 3, MaxWait: time.Minute})
		type result struct {
			code int
			body string
			took time.Duration
		}
		ask := func(q string) <-chan result {
			c := make(chan result, 1)
			begin := time.Now()
			go func() {
				code, body := call(r, "GET", "/query?"+q, "")
				c <- result{code, body, time.Since(begin)}
			}()
			synctest.Wait()
			return c
		}
		two, engine, never := ask("wait=30&tp=2"), ask("wait=30&engine_id=e&pp=1"), ask("wait=5&tp=3")
		if got := <-ask("wait=1&tp=1"); got.code != 503 || !strings.Contains(got.body, "3 requests are waiting") || got.took != 0 {
			t.Fatal(got)
		}
		time.Sleep(time.Second)
		mustRegister(t, r, Registration{EngineID: "e", TPRank: 0, Addr: "a"})
		time.Sleep(time.Second)
		if got := <-engine; got.code != 200 || got.took > 1100*time.Millisecond || !strings.Contains(got.body, `"e"`) {
			t.Fatal(got)
		}
		mustRegister(t, r, Registration{EngineID: "e", TPRank: 1, Addr: "b"})
		if got := <-two; got.code != 200 || got.body != `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"a"},"1":{"0":"b"}}}}` || got.took > 2100*time.Millisecond {
			t.Fatal(got)
		}
		if got := <-never; got.code != 503 || got.took != 5*time.Second ||
			got.body != `{"detail":"not ready after 5s: engine \"e\" of dp_rank 0 has 2 TP ranks, expected tp=3"}` {
			t.Fatal(got)
		}
		f := func(q string, code int, want string) {
			t.Helper()
			if got := <-ask(q); got.code != code || !strings.Contains(got.body, want) {
				t.Fatalf("%s: %+v, want %d %s", q, got, code, want)
			}
		}
		f("tp=2&pp=1&dp=1", 200, `"a"`)
		f("dp=2", 503, "1 engines are shown, expected dp=2")
		f("engine_id=no", 503, `engine \"no\" is not shown`)
		f("pp=2", 503, "expected pp=2")
		f("tp=x", 422, "tp:")
		f("wait=-1", 422, "wait:")
		f("wait=NaN", 422, "wait:")
		f("tp=1.5", 422, "integer")
		f("after=x", 422, "after:")
		f("other=1", 200, `"a"`)

		gen := r.current().gen
		later := ask(fmt.Sprintf("wait=60&after=%d", gen))
		time.Sleep(time.Second)
		if n := r.unregisterMatching("e", nil, nil, nil); n != 2 {
			t.Fatal(n)
		}
		// The directory changed, but nothing is shown: the request wants an engine.
		time.Sleep(time.Second)
		mustRegister(t, r, Registration{EngineID: "f", Addr: "c"})
		if got := <-later; got.code != 200 || got.took > 2100*time.Millisecond || r.current().gen <= gen {
			t.Fatal(got, r.current().gen, gen)
		}
		same := <-ask(fmt.Sprintf("wait=2&after=%d", r.current().gen))
		if same.code != 200 || same.took != 2*time.Second {
			t.Fatal(same)
		}
	})
}

func TestUnregister(t *testing.T) {
	r := open(t, Options{})
	for tp := range 2 {
		mustRegister(t, r, Registration{EngineID: "e", TPRank: tp, Addr: "a" + strconv.Itoa(tp)})
	}
	f := func(query string, code int, want string) {
		t.Helper()
		if got, text := call(r, "DELETE", "/register?"+query, ""); got != code {
			t.Fatalf("%s: %d %s", query, got, text)
		}
		wantQuery(t, r, want)
	}
	whole := `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"a0"},"1":{"0":"a1"}}}}`
	f("", 422, whole)
	f("engine_id=e&tp_rank=x", 422, whole)
	f("engine_id=other", 404, whole)
	f("engine_id=e&dp_rank=1", 404, whole)
	f("engine_id=e&tp_rank=1", 200, `{}`) // half an engine is not shown
	mustRegister(t, r, Registration{EngineID: "e", TPRank: 1, Addr: "b1"})
	f("engine_id=e&tp_rank=7", 404, `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"a0"},"1":{"0":"b1"}}}}`)
	f("engine_id=e", 200, `{}`)
	f("engine_id=e", 404, `{}`)
}

func TestToken(t *testing.T) {
	f := func(o Options, header []string, want map[string]int) {
		t.Helper()
		for req, code := range want {
			r := open(t, o)
			mustRegister(t, open(t, Options{}), Registration{EngineID: "e"})
			_ = r.register(t.Context(), Registration{EngineID: "e", Addr: "a"}, local)
			method, path, _ := strings.Cut(req, " ")
			if got, text := call(r, method, path, `{"engine_id":"e","dp_rank":0,"tp_rank":0,"pp_rank":0,"addr":"a"}`, header...); got != code {
				t.Errorf("guard %d, %v, %s: %d %s, want %d", o.Guard, header, req, got, text, code)
			}
		}
	}
	del := "DELETE /register?engine_id=e"
	f(Options{}, nil, map[string]int{del: 200, "POST /register": 200, "GET /query": 200, "GET /metrics": 200})
	f(Options{}, []string{"From", "10.0.0.1:5"}, map[string]int{del: 403, "POST /register": 200, "GET /query": 200})
	f(Options{Token: "s"}, nil, map[string]int{del: 401, "POST /register": 200, "GET /query": 200})
	f(Options{Token: "s"}, []string{"Authorization", "Bearer t"}, map[string]int{del: 401})
	f(Options{Token: "s"}, []string{"Authorization", "Bearer s", "From", "10.0.0.1:5"}, map[string]int{del: 200})
	f(Options{Token: "s", Guard: GuardWrites}, nil, map[string]int{del: 401, "POST /register": 401, "GET /query": 200, "GET /metrics": 200})
	f(Options{Token: "s", Guard: GuardAll}, nil, map[string]int{del: 401, "POST /register": 401, "GET /query": 401, "GET /metrics": 401, "GET /healthz": 200})
	f(Options{Token: "s", Guard: GuardAll}, []string{"Authorization", "Bearer s"}, map[string]int{"POST /register": 200, "GET /query": 200})
}

func TestLimits(t *testing.T) {
	r := open(t, Options{MaxWorkers: 2})
	if code, text := call(r, "POST", "/register", strings.Repeat(" ", maxBodyBytes+1)); code != 413 {
		t.Fatal(code, text)
	}
	refused(t, r, 422, Registration{EngineID: strings.Repeat("x", maxEngineIDBytes+1)})
	refused(t, r, 422, Registration{Addr: strings.Repeat("x", maxAddrBytes+1)})
	refused(t, r, 422, Registration{Lease: time.Millisecond})
	refused(t, r, 422, Registration{Lease: maxLease + time.Second})
	for tp := range 2 {
		mustRegister(t, r, Registration{EngineID: "e", TPRank: tp, Addr: "a"})
	}
	if got := refused(t, r, 503, Registration{EngineID: "e", TPRank: 2, Addr: "a"}); !strings.Contains(got, "full: 2 workers") {
		t.Fatal(got)
	}
	mustRegister(t, r, Registration{EngineID: "e", TPRank: 1, Addr: "a"}) // a repeat needs no room
	if code, text := call(r, "POST", "/register", strings.Repeat("[", 60000)); code != 400 {
		t.Fatal(code, text)
	}
}

func TestMetricsAndHealth(t *testing.T) {
	r := open(t, Options{})
	mustRegister(t, r, Registration{EngineID: "e", Addr: "a"})
	wantQuery(t, r, `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"a"}}}}`)
	_, text := call(r, "GET", "/metrics", "")
	for _, want := range []string{"kvasir_bootstrap_workers 1", "kvasir_bootstrap_queries_total 1", "kvasir_bootstrap_registered_total 1"} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
	var health struct {
		Status  string
		Workers int
	}
	_, text = call(r, "GET", "/healthz", "")
	if err := json.Unmarshal([]byte(text), &health); err != nil || health.Status != "ok" || health.Workers != 1 {
		t.Fatal(text, err)
	}
}

// Log lines name both sides.
func TestLog(t *testing.T) {
	var out bytes.Buffer
	r := open(t, Options{Log: slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	a, closeIt := sideChannel(t)
	mustRegister(t, r, Registration{EngineID: "old", Addr: a})
	refused(t, r, 400, Registration{EngineID: "new", Addr: "tcp://x:1"})
	closeIt()
	mustRegister(t, r, Registration{EngineID: "new", Addr: "tcp://x:1"})
	for _, want := range []string{
		"engine registered", "expected old, got new", "accepts connections", "engine replaced", "refuses connections",
		"level=DEBUG msg=\"Registered worker: engine_id=old, dp_rank=0, tp_rank=0, pp_rank=0 at " + a,
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
}

// The last lease of an engine ends at the moment when the registry gives up ranks of its predecessor: its ranks are subtracted once.
func TestLastLeaseEndsWhenAnEngineSettles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, err := Open(Options{Settle: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		r.prober.dial = func(context.Context, string) error { return syscall.ECONNREFUSED }
		for tp := range 2 {
			mustRegisterDirect(t, r, Registration{EngineID: "old", TPRank: tp, Addr: fmt.Sprint("tcp://127.0.0.1:", 10+tp)}, local)
		}
		mustRegisterDirect(t, r, Registration{EngineID: "other", DPRank: 1, Addr: "tcp://127.0.0.1:12"}, local)
		mustRegisterDirect(t, r, Registration{EngineID: "new", Addr: "tcp://127.0.0.1:13", Lease: 10 * time.Second}, local)
		checkCounters(t, r)
		time.Sleep(11 * time.Second)
		synctest.Wait()
		checkCounters(t, r)
		wantQuery(t, r, `{"1":{"engine_id":"other","worker_addr":{"0":{"0":"tcp://127.0.0.1:12"}}}}`)
	})
}
