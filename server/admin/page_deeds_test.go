// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/tier"
)

// doDeed opens a deed, fills in its fields, types the name where one is asked for, and returns what the page said that it would do, and had done.
func doDeed(b *browser, open string, fields map[string]string, name string) (what, did string) {
	b.t.Helper()
	b.until(fmt.Sprintf(`(() => { const x = document.querySelector(%q); if (!x || x.disabled) return false; x.click(); return document.querySelector("#deed").open; })()`, open))
	for id, value := range fields {
		b.eval(fmt.Sprintf(`(() => { const f = document.querySelector("#f-%s"); f.value = %q; f.dispatchEvent(new Event("input")); })()`, id, value))
	}
	what = b.text(`document.querySelector("#deed-what").textContent`)
	asked := b.eval(`!document.querySelector("#deed-confirm").hidden`)
	if asked != (name != "") {
		b.t.Errorf("%s: a name is asked for: %v", open, asked)
	}
	if name != "" {
		for _, typed := range []string{"", name + "x", name} {
			b.eval(fmt.Sprintf(`(() => { const f = document.querySelector("#deed-name"); f.value = %q; f.dispatchEvent(new Event("input")); })()`, typed))
			if off := b.eval(`document.querySelector("#deed-go").disabled`); off != (typed != name) {
				b.t.Errorf("%s with %q typed for %q: disabled %v", open, typed, name, off)
			}
		}
	}
	b.eval(`document.querySelector("#deed-go").click()`)
	b.until(`!["", "…"].includes(document.querySelector("#deed-result").textContent)`)
	return what, b.text(`document.querySelector("#deed-result").textContent`)
}

func undoDeed(b *browser) string {
	b.t.Helper()
	b.eval(`document.querySelector("#deed-undo").click()`)
	b.until(`document.querySelector("#deed-result").textContent.startsWith("Undone")`)
	return b.text(`document.querySelector("#deed-result").textContent`)
}

func closeDeed(b *browser) {
	b.t.Helper()
	b.eval(`document.querySelector("#deed-close").click()`)
	b.until(`!document.querySelector("#deed").open`)
}

// Each deed says what it will do, does it, and those that can be undone are. Clears and drops ask for a name.
func TestPageDeeds(t *testing.T) {
	b := startBrowser(t)
	n := newPageNode(t, true, nil)
	b.open(n.url, 1280, 900)
	b.until(ready)
	has := func(got, want string) {
		t.Helper()
		if !strings.Contains(got, want) {
			t.Errorf("%q has no %q", got, want)
		}
	}
	quota := func(salt string) (bytes int64) {
		for _, u := range n.Store().Tenants() {
			if u.Salt == salt {
				return u.QuotaBytes
			}
		}
		return -2
	}

	pinned := func() (objects int) {
		for _, u := range n.Store().Tenants() {
			objects += u.PinnedObjects
		}
		return objects
	}

	what, did := doDeed(b, "#change [data-deed=quota]", map[string]string{"tenant": "red", "quota": "64 KiB", "pins": "32 KiB"}, "")
	has(what, "Tenant red: 64 KiB of the pool's 512 KiB that no other tenant takes")
	has(did, "Set for red; it ends with this server")
	if got := quota("red"); got != 64<<10 {
		t.Errorf("the quota is %d", got)
	}
	has(undoDeed(b), "red has what it had")
	if got := quota("red"); got != -2 {
		t.Errorf("the quota is still %d", got)
	}
	closeDeed(b)
	b.eval(`deeds.quota("red"); $("f-quota").value = "nonsense"; $("f-quota").oninput()`)
	if off := b.eval(`$("deed-go").disabled && $("deed-what").textContent === "nonsense is no size, as 20 GiB."`); off != true {
		t.Errorf("a size that is none can be set: %q", b.text(`$("deed-what").textContent`))
	}
	closeDeed(b)
	doDeed(b, "#change [data-deed=quota]", map[string]string{"tenant": "_default", "pins": "32 KiB"}, "")
	closeDeed(b)
	prompt := map[string]string{"model": `["m",1]`, "tokens": strings.Repeat("0, ", 32), "life": "60"}
	what, did = doDeed(b, "[data-deed=pin]", prompt, "")
	has(what, "the prompt's first 2 chunks for 60 s")
	has(did, "2 objects pinned, of 2 chunks")
	if got := pinned(); got != 2 {
		t.Errorf("%d objects are pinned", got)
	}
	has(undoDeed(b), "2 objects unpinned")
	if got := pinned(); got != 0 {
		t.Errorf("%d objects are still pinned", got)
	}
	closeDeed(b)

	what, did = doDeed(b, "button[data-key='engine http://10.0.0.1:8100prefill']", nil, "")
	has(what, "sends no new request to http://10.0.0.1:8100 (prefill). The 2 requests in progress go on")
	has(did, "gets no new requests")
	if !n.isDrained() {
		t.Error("the engine is not drained")
	}
	undoDeed(b)
	if n.isDrained() {
		t.Error("the engine is still drained")
	}
	closeDeed(b)

	tiered := func() (objects int) {
		_ = n.memory.List(t.Context(), func(kv.Key, tier.Meta) bool { objects++; return true })
		return objects
	}
	testkit.Eventually(t, "the tier has chunks", func() bool { return tiered() >= n.Status().Pool.ResidentChunks })
	host := strings.TrimSuffix(strings.TrimPrefix(n.url, "http://"), "/")
	what, did = doDeed(b, "[data-deed=clear]", map[string]string{"where": "l1"}, host)
	has(what, "Forgets ")
	has(what, "It cannot be undone")
	has(did, "Cleared: ")
	if got := n.Status().Pool.ResidentChunks; got != 0 {
		t.Errorf("%d chunks are in the pool", got)
	}
	closeDeed(b)

	what, did = doDeed(b, "[data-deed=prefetch]", map[string]string{"model": prompt["model"], "tokens": prompt["tokens"]}, "")
	has(what, "Reads what the tiers have of the prompt's first 2 chunks")
	has(did, "2 of 2 objects are in the pool now")
	if got := n.Status().Pool.ResidentChunks; got != 2 {
		t.Errorf("%d chunks are in the pool", got)
	}
	closeDeed(b)

	what, did = doDeed(b, "#tiers [data-deed=drop]", nil, "memory")
	has(b.text(`document.querySelector("#tier-list").textContent`), "memoryok")
	has(what, "from memory, for every server that shares it")
	has(did, "Removed ")
	if got := tiered(); got != 0 {
		t.Errorf("%d objects are in the tier", got)
	}
	closeDeed(b)
	b.faultless(n.url)
}

// A quota that a change of something else leaves alone stays as it is to the byte, and Undo gives a tenant back what it had, also one that is
// not among those that the page shows.
func TestPageKeepsTheTermsOfATenant(t *testing.T) {
	b := startBrowser(t)
	n := newPageNode(t, false, nil)
	put := func(salt, body string) {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPut, strings.TrimSuffix(n.url, "/")+"/tenants/"+salt, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		got, err := http.DefaultClient.Do(r)
		if err != nil || got.StatusCode != http.StatusOK {
			t.Fatal(got, err)
		}
		_ = got.Body.Close()
	}
	for i := range 70 {
		put(fmt.Sprintf("m-%02d", i), `{"quota_bytes": 1001}`)
	}
	put("a", `{"quota_bytes": 100001, "pin_limit_bytes": 50001}`)
	put("z", `{"quota_bytes": 3333, "ttl_seconds": 100}`)
	of := func(salt string) (quota, pins int64, ttl time.Duration) {
		for _, u := range n.Store().Tenants() {
			if u.Salt == salt {
				return u.QuotaBytes, u.PinLimit, u.TTL
			}
		}
		return -2, 0, 0
	}
	b.open(n.url, 1280, 900)
	b.until(ready)
	doDeed(b, "button[data-key='tenant a']", map[string]string{"ttl": "500"}, "")
	if quota, pins, ttl := of("a"); quota != 100001 || pins != 50001 || ttl != 500*time.Second {
		t.Errorf("a change of the TTL alone makes a quota of %d bytes, of pins %d, TTL %v", quota, pins, ttl)
	}
	closeDeed(b)
	what, _ := doDeed(b, "#change [data-deed=quota]", map[string]string{"tenant": "z", "quota": "8 KiB"}, "")
	if quota, _, _ := of("z"); quota != 8<<10 || strings.Contains(what, "nothing of its own") {
		t.Errorf("%d bytes; %s", quota, what)
	}
	undoDeed(b)
	if quota, _, ttl := of("z"); quota != 3333 || ttl != 100*time.Second {
		t.Errorf("after Undo the quota is %d, the TTL %v", quota, ttl)
	}
	closeDeed(b)
	b.faultless(n.url)
}

// A deed is done with the keyboard alone, its window can be read in both themes at 360 pixels, too, and Escape leaves things as they are.
func TestPageDeedWithTheKeyboard(t *testing.T) {
	b := startBrowser(t)
	n := newPageNode(t, false, nil)
	b.open(n.url, 1280, 900)
	b.until(ready)
	b.eval(`document.querySelector("#normal details").open = true`)
	for _, deed := range []string{"quota", "pin", "prefetch", "clear"} {
		b.eval(fmt.Sprintf(`document.querySelector("#change [data-deed=%s]").focus()`, deed))
		b.key("Enter")
		b.until(`document.querySelector("#deed").open && document.querySelector("#deed").contains(document.activeElement)`)
		for _, theme := range []string{"light", "dark"} {
			b.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": theme}}}, nil)
			for _, width := range []int{360, 1280} {
				b.size(width, 900)
				b.until(fmt.Sprintf(`innerWidth === %d`, width))
				if why := b.text(looksRight); why != "" {
					t.Errorf("%s, %d pixels, %s:\n%s", deed, width, theme, why)
				}
				b.picture(fmt.Sprintf("deed-%s-%d-%s.png", deed, width, theme))
			}
		}
		b.key("Escape")
		b.until(`!document.querySelector("#deed").open`)
	}
	if got := n.Status().Pool.ResidentChunks; got == 0 {
		t.Error("a clear that was left is done")
	}
	b.eval(`document.querySelector("#change [data-deed=quota]").focus()`)
	b.key("Enter")
	b.until(`document.querySelector("#deed").open`)
	for range 20 {
		if b.eval(`document.activeElement.id`) == "f-tenant" {
			break
		}
		b.key("Tab")
	}
	b.write("blue")
	b.key("Tab")
	b.write("64 KiB")
	b.key("Enter")
	b.until(`document.querySelector("#deed-result").textContent.startsWith("Set for blue") && document.activeElement.id === "deed-undo"`)
	b.key("Enter")
	b.until(`document.querySelector("#deed-result").textContent.startsWith("Undone") && document.activeElement.id === "deed-close"`)
	b.key("Enter")
	b.until(`!document.querySelector("#deed").open`)
	b.faultless(n.url)
}

// With tokens the page asks for one, and shows and allows what its scope does.
func TestPageWithTokens(t *testing.T) {
	b := startBrowser(t)
	file := filepath.Join(t.TempDir(), "tokens")
	var lines, secrets []string
	for _, s := range []auth.Scope{auth.Read, auth.Write, auth.Admin} {
		secret, line, err := auth.NewToken("t-"+s.String(), s, time.Time{})
		if err != nil {
			t.Fatal(err)
		}
		secrets, lines = append(secrets, secret), append(lines, line)
	}
	if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	tokens, err := auth.OpenTokens(file)
	if err != nil {
		t.Fatal(err)
	}
	n := newPageNode(t, true, func(o *admin.Options) { o.Access = auth.Options{Listener: "http", Tokens: tokens} })
	b.open(n.url, 1280, 900)
	signIn := func(secret string) {
		t.Helper()
		b.until(`!document.querySelector("#login").hidden && document.activeElement.id === "token"`)
		b.write(secret)
		b.key("Enter")
	}
	b.until(`document.querySelector("#login") && !document.querySelector("#login").hidden`)
	if shown := b.eval(`document.querySelector("#t-pool").textContent`); shown != "–" {
		t.Errorf("without a token there is %v", shown)
	}
	signIn("kv-wrong")
	b.until(`document.querySelector("#login-error").textContent.includes("unknown")`)
	for i, want := range []string{"pin,prefetch,drop,quota,clear", "drop,quota,clear", ""} {
		signIn(secrets[i])
		b.until(ready)
		list := strings.Split(want, ",")
		slices.Sort(list)
		b.until(fmt.Sprintf(`[...new Set([...document.querySelectorAll("[data-deed]:disabled")].map(x => x.dataset.deed))].sort().join() === %q `, strings.Join(list, ",")))
		if says := b.text(`$("may").textContent`); !strings.Contains(says, []string{"may look", "may pin and prefetch", "Each says first"}[i]) {
			t.Errorf("token %d: %q", i, says)
		}
		b.eval(`document.querySelector("#leave").click()`)
		b.until(`document.querySelector("#t-pool")?.textContent === "–" && !document.querySelector("#login").hidden`)
	}
}

// What changes something is refused to pages of other sites, and without tokens to browsers of other hosts; programs are asked as before.
func TestDeedsOfPages(t *testing.T) {
	n := newPageNode(t, true, nil)
	send := func(route, from string, header ...string) int {
		method, path, _ := strings.Cut(route, " ")
		r, err := http.NewRequest(method, "http://10.0.0.5:8080"+path, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		r.RemoteAddr, r.RequestURI = from, path
		r.Header.Set("Content-Type", "application/json")
		for i := 0; i+1 < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		w := &answer{header: http.Header{}}
		n.web.Config.Handler.ServeHTTP(w, r)
		return w.code
	}
	deeds := []string{
		"POST /cache/clear", "POST /tiers/drop", "PUT /tenants/a", "DELETE /tenants/a", "PUT /quota/a", "DELETE /quota/a", "POST /cache/pins", "DELETE /cache/pins", "POST /cache/prefetches", "DELETE /cache/objects",
		"POST /engines/drain?url=x", "POST /engines/undrain?url=x",
	}
	for _, d := range deeds {
		for name, header := range map[string][]string{"an origin": {"Origin", "http://evil.example"}, "a foreign fetch": {"Sec-Fetch-Site", "cross-site"}, "a page of another port": {"Origin", "http://10.0.0.5:9090", "Sec-Fetch-Site", "same-site"}} {
			if code := send(d, "127.0.0.1:7", header...); code != http.StatusForbidden {
				t.Errorf("%s with %s: %d", d, name, code)
			}
		}
		own := []string{"Origin", "http://10.0.0.5:8080", "Sec-Fetch-Site", "same-origin"}
		if code := send(d, "10.0.0.9:7", own...); code != http.StatusForbidden {
			t.Errorf("%s by a browser of another host: %d", d, code)
		}
		for _, host := range []string{"127.0.0.1:7", "[::1]:7", "[::ffff:127.0.0.1]:7"} {
			if code := send(d, host, own...); code == http.StatusForbidden {
				t.Errorf("%s by a browser of this host, %s: %d", d, host, code)
			}
		}
		if code := send(d, "10.0.0.9:7"); code == http.StatusForbidden {
			t.Errorf("%s by a program of another host: %d", d, code)
		}
	}
	if code := send("GET /status", "10.0.0.9:7", "Origin", "http://10.0.0.5:8080"); code != http.StatusOK {
		t.Errorf("a look from another host: %d", code)
	}
}

type answer struct {
	header http.Header
	code   int
}

func (a *answer) Header() http.Header  { return a.header }
func (a *answer) WriteHeader(code int) { a.code = code }
func (a *answer) Write(b []byte) (int, error) {
	if a.code == 0 {
		a.code = http.StatusOK
	}
	return len(b), nil
}

// The engines of a proxy in this process are listed and drained; where there is none the routes say so.
func TestEnginesOfTheProcess(t *testing.T) {
	n := newPageNode(t, true, nil)
	h := n.web.Config.Handler
	code, body := ask(h, "GET", "http://localhost/engines", "")
	var got struct{ Engines []admin.ProxyEngine }
	if code != 200 || json.Unmarshal([]byte(body), &got) != nil || len(got.Engines) != 2 || got.Engines[0].Draining {
		t.Errorf("%d %s", code, body)
	}
	if code, body := ask(h, "POST", "http://localhost/engines/drain?url=http://10.0.0.1:8100", ""); code != 200 || !n.isDrained() {
		t.Errorf("%d %s", code, body)
	}
	if code, body := ask(h, "POST", "http://localhost/engines/undrain?url=http://10.0.0.1:8100", ""); code != 200 || n.isDrained() {
		t.Errorf("%d %s", code, body)
	}
	if code, body := ask(h, "POST", "http://localhost/engines/drain?url=http://10.0.0.9:1", ""); code != 404 || !strings.Contains(body, "no such engine") {
		t.Errorf("%d %s", code, body)
	}
	alone := admin.Handler(newServer(t), admin.Options{})
	for _, route := range []string{"GET /engines", "POST /engines/drain", "POST /engines/undrain"} {
		method, path, _ := strings.Cut(route, " ")
		if code, body := ask(alone, method, "http://localhost"+path, ""); code != 404 || !strings.Contains(body, "no proxy runs in this process") {
			t.Errorf("%s: %d %s", route, code, body)
		}
	}
}

// Only addresses of pages are links.
func TestPeerAddresses(t *testing.T) {
	for address, want := range map[string]bool{"http://h:8080": true, "https://h": true, "javascript:alert(1)": false, "h:8080": false, "http://": false, "http://u:p@h": false, "ftp://h": false, "": false} {
		if err := admin.CheckPeer(address); (err == nil) != want {
			t.Errorf("%q: %v", address, err)
		}
	}
}
