// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/disk"
	"github.com/kvasir-kv/kvasir/tier/seal"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// A tier is encrypted anew at a bounded rate, with lines that say how far it is; who leaves ends it, another call meanwhile is refused, and the next
// one goes on.
func TestRekeyOfATier(t *testing.T) {
	place, err := disk.Open(disk.Options{Dirs: []disk.Dir{{Path: t.TempDir(), Bytes: 256 << 20}}, MinFree: 1, FirstTouch: true, Sealed: true})
	if err != nil {
		t.Fatal(err)
	}
	<-place.Opened()
	defer place.Close()
	old, both := seal.New(place, tiertest.Keys(t, 1), seal.Options{}), seal.New(place, tiertest.Keys(t, 2, 1), seal.Options{Name: "sealed"}).Sealed()
	const objects = 20
	for i := range objects {
		b, m := tiertest.Object(i, 100_000)
		if err := old.Write(t.Context(), tiertest.Key(i), m, b); err != nil {
			t.Fatal(err)
		}
	}
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: 64 * 4096, Dir: t.TempDir(), ChunkTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	st := store.New(p, store.Options{})
	plain := seal.New(tier.NewMemory(1<<20), nil, seal.Options{}).Sealed()
	s := server.New(st, server.Options{ChunkTokens: 16, Seals: map[string]*seal.Tier{"sealed": both, "plain": plain}, Contents: map[string]tier.Tier{"sealed": both, "plain": plain, "fs": place}})
	t.Cleanup(func() { _, _ = s.Close(), st.Close() })
	h := admin.Handler(s, admin.Options{})
	rekey := func(body string) (int, string) {
		return ask(h, "POST", "http://127.0.0.1/tiers/rekey", body, "Content-Type", "application/json")
	}
	refused := func(status int, text, body string) {
		t.Helper()
		if code, answer := rekey(body); code != status || !strings.Contains(answer, text) {
			t.Errorf("%s: %d %s, want %d with %q", body, code, answer, status, text)
		}
	}
	for _, bad := range []string{"{}", `{"tier":"sealed","bytes_per_second":-1}`, `{"tier":"sealed","bytes_per_second":1e300}`, `{"tier":7}`} {
		refused(http.StatusBadRequest, "body is not", bad)
	}
	refused(http.StatusNotFound, "this server has fs, plain, sealed", `{"tier":"redis"}`)
	refused(http.StatusConflict, "never encrypted", `{"tier":"fs"}`)
	refused(http.StatusConflict, "not encrypted", `{"tier":"plain"}`)

	web := httptest.NewServer(h)
	defer web.Close()
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	r, err := http.NewRequestWithContext(ctx, "POST", web.URL+"/tiers/rekey", strings.NewReader(`{"tier":"sealed","bytes_per_second":400000}`)) // two objects a second
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if a, err := http.DefaultClient.Do(r); err == nil {
			_, _ = io.Copy(io.Discard, a.Body)
			a.Body.Close()
		}
	}()
	testkit.Eventually(t, "the first object", func() bool { return both.Stats().Rekeyed > 0 })
	refused(http.StatusConflict, "another rekey", `{"tier":"sealed"}`)
	leave()
	<-ended
	var slow *http.Response
	testkit.Eventually(t, "another rekey begins", func() bool {
		slow, err = http.Post(web.URL+"/tiers/rekey", "application/json", strings.NewReader(`{"tier":"sealed","bytes_per_second":100}`)) // the second object is an hour away
		if err != nil {
			t.Fatal(err)
		}
		if slow.StatusCode != http.StatusOK {
			slow.Body.Close()
		}
		return slow.StatusCode == http.StatusOK
	})
	heard := bufio.NewScanner(slow.Body)
	for range 2 { // it says each second that it goes on
		if !heard.Scan() || !strings.Contains(heard.Text(), `"status":"running"`) {
			t.Errorf("a rekey that waits says %q, %v", heard.Text(), heard.Err())
		}
	}
	slow.Body.Close()
	began := time.Now()
	var code int
	var answer string
	testkit.Eventually(t, "the one that was left has ended", func() bool {
		code, answer = rekey(`{"tier":"sealed"}`)
		return code != http.StatusConflict
	})
	if done := both.Stats().Rekeyed; done != objects {
		t.Errorf("%d objects were encrypted anew in all", done)
	}
	lines := strings.Split(strings.TrimSpace(answer), "\n")
	var end struct {
		seal.RekeyStats
		Status string
	}
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &end); err != nil || code != http.StatusOK || end.Status != "ok" || end.Seen != objects || end.Rewritten+end.Current != objects || end.Current == 0 || end.Failed > 0 {
		t.Errorf("%d after %v: %s", code, time.Since(began), answer)
	}
	for i := range objects {
		b, m := tiertest.Object(i, 100_000)
		dst := make([]byte, len(b))
		if got, err := seal.New(place, tiertest.Keys(t, 2), seal.Options{}).Read(t.Context(), tiertest.Key(i), dst); err != nil || got != m || string(dst) != string(b) {
			t.Errorf("object %d: %+v, %v", i, got, err)
		}
	}
}
