// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"context"
	"fmt"
	"hash/crc32"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/transferlog"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/store/hitcurve"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier"
)

// Names that clients choose: what a page must show as it is, and never as HTML.
const (
	evilModel = "m</script><script>alert(2)</script>"
	evilSalt  = "<img src=x onerror=alert(1)>"
)

var longName = strings.Repeat("a-very-long-name-of-a-model/", 20)

// pageNode is a server with everything that the page shows: tiers, tenants, curves, parts of the process, an hour of history.
type pageNode struct {
	*server.Server
	memory  *tier.Memory
	history *admin.History
	o       admin.Options
	url     string
	web     *httptest.Server

	mu      sync.Mutex
	drained bool
}

func newPageNode(t *testing.T, tiered bool, edit func(*admin.Options)) *pageNode {
	t.Helper()
	const bytes = 128 * 4096
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: bytes, Dir: t.TempDir(), ChunkTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	memory := tier.NewMemory(1 << 20)
	below := tier.Counted(memory, "memory")
	lives := evict.NewLifetimes()
	of := store.Options{Policy: lives.Watch(evict.NewLRU()), Curves: &hitcurve.Options{Policy: "lru", Bytes: bytes}}
	so := server.Options{Lifetimes: lives, ChunkTokens: 16, Version: "v1.2.3-0.20261125163938-cac70bbbfafe", Log: slog.New(slog.DiscardHandler)}
	if tiered { // then lookups of what is not in the pool wait for it
		of.Below, so.Tiers, so.Contents = below, []*tier.Counting{below}, map[string]tier.Tier{"memory": memory}
	}
	st := store.New(p, of)
	s := server.New(st, so)
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { s.Run(ctx) })
	t.Cleanup(func() { stop(); running.Wait(); _, _ = s.Close(), st.Close() })
	n := &pageNode{Server: s, memory: memory}
	for i, model := range []string{"m", evilModel, longName} {
		n.register(model, 7+i)
	}
	for i := range 12 {
		n.play("m", "", fmt.Sprintf("chat-%d", i), 2+i%3, 7)
		n.play("m", "green", fmt.Sprintf("green-%d", i), 3, 7)
	}
	n.play(evilModel, evilSalt, "<b>id</b>", 4, 8)
	n.play(longName, longName, longName, 4, 9)
	if err := st.SetTTL("green", time.Hour); err != nil {
		t.Fatal(err)
	}
	n.history = admin.NewHistory(s)
	n.history.FillHistory(3600, func(i int) uint64 { return 20_000 + uint64(i%97)*300 }, func(i int) uint64 { return 9_000 + uint64(i%61)*150 })
	n.history.FillTenants(60, []string{"", "green", evilSalt, longName}, func(i int, salt string) uint64 { return uint64(10+i%7) * 1000 }, func(i int, salt string) uint64 { return uint64(len(salt)%7+i%5) * 500 })
	n.o = admin.Options{History: n.history, Parts: n.parts(t), Cost: admin.Cost{PrefillTokens: 10_000, GPUHourPrice: 2.5}, Peers: []string{"http://127.0.0.1:8081"}}
	if edit != nil {
		edit(&n.o)
	}
	n.web = httptest.NewServer(admin.Handler(s, n.o))
	n.url = n.web.URL + "/"
	t.Cleanup(func() { n.web.CloseClientConnections(); n.web.Close() })
	return n
}

func (n *pageNode) call(op lmcache.Op, p ...[]byte) {
	n.Answer(append([][]byte{{0}, lmcache.AppendOp(nil, op)}, p...))
}

func (n *pageNode) register(model string, id int) {
	reg := lmcache.EngineDriven{InstanceID: int64(id), Model: model, WorldSize: 1, BlockSize: 16, Layers: 1, Hidden: 128, DType: "bfloat16", SinglePlane: true, PhysicalSlots: 16}
	n.call(lmcache.OpRegisterEngineDriven, reg.Append(nil))
}

// play looks a prompt of four chunks up, stores some of its chunks, looks it up again and loads them.
func (n *pageNode) play(model, salt, request string, chunks, worker int) {
	key := lmcache.Key{Model: model, Salt: salt, WorldSize: 1, Worker: lmcache.AllWorkers, Tokens: make([]uint32, 64), End: 64, RequestID: request, Readers: 1}
	for i := 32; i < len(key.Tokens); i++ { // prompts differ from the third chunk on
		key.Tokens[i] = 1 + crc32.ChecksumIEEE([]byte(request))
	}
	id := lmcache.AppendInt(nil, int64(worker))
	n.call(lmcache.OpLookup, key.Append(nil), lmcache.AppendInt(nil, 1))
	n.call(lmcache.OpEndSession, lmcache.AppendString(nil, request))
	stored := key
	stored.Worker, stored.End, stored.Tokens = 0, 16*chunks, key.Tokens[:16*chunks]
	n.call(lmcache.OpPrepareStore, stored.Append(nil), id)
	n.call(lmcache.OpCommitStore, stored.Append(nil), id, lmcache.AppendBytes(nil, nil))
	n.call(lmcache.OpLookup, key.Append(nil), lmcache.AppendInt(nil, 1))
	key.Worker, key.End = 0, 16*chunks
	n.call(lmcache.OpPrepareRetrieve, key.Append(nil), id)
	n.call(lmcache.OpCommitRetrieve, key.Append(nil), id)
	n.call(lmcache.OpEndSession, lmcache.AppendString(nil, request))
}

// parts are what runs beside the server, and what they say.
func (n *pageNode) parts(t *testing.T) *admin.Parts {
	type relay struct {
		Pulled int64 `counter:"kvasir_relay_pulled_total" help:"Pulled."`
	}
	type proxy struct {
		Queued int64 `gauge:"kvasir_proxy_requests_queued" help:"Queued."`
	}
	parts := new(admin.Parts)
	parts.Add("relay", func() any { return relay{7} })
	parts.Add("proxy", func() any { return proxy{3} })
	parts.AddTransfers("relay", func() []transferlog.Transfer { return someTransfers(t) })
	parts.AddEngines(func() []bootstrap.EngineState {
		return []bootstrap.EngineState{{ID: "p-1", Host: "10.0.0.1", Workers: 2, Shown: true, Heard: 3}, {ID: "<b>p-2</b>", Workers: 1, Why: "1 of 2 TP ranks are registered"}}
	})
	parts.AddProxy(func() []admin.ProxyEngine {
		n.mu.Lock()
		defer n.mu.Unlock()
		return []admin.ProxyEngine{{URL: "http://10.0.0.1:8100", Role: "prefill", Well: true, Draining: n.drained, Requests: 2, Models: []string{evilModel}}, {URL: "http://10.0.0.2:8200", Role: "decode"}}
	}, func(url, role string, on bool) error {
		n.mu.Lock()
		defer n.mu.Unlock()
		if url != "http://10.0.0.1:8100" || role != "prefill" && role != "" {
			return admin.ErrNoEngine
		}
		n.drained = on
		return nil
	})
	return parts
}

func (n *pageNode) isDrained() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.drained
}

// someTransfers are one of each state; the names are what peers chose.
func someTransfers(t *testing.T) []transferlog.Transfer {
	var l transferlog.Log
	for _, state := range []transferlog.State{transferlog.Done, transferlog.Failed, transferlog.Expired, transferlog.Sending} {
		e := l.Begin(transferlog.Transfer{
			ID: "kvasir-0123456789abcdef-" + string(state), Request: evilSalt, From: "p-1 at 10.0.0.1", To: "10.0.0.2:4000", Rank: "TP rank 1 of 2", Model: evilModel,
			Blocks: 64, Bytes: 64 << 20,
		}, transferlog.Computing, "waits for P")
		began := time.Now()
		e.Receiving("P sends", func() (time.Time, uint64) { return began.Add(time.Millisecond), 16 << 20 })
		e.From("P")
		switch state {
		case transferlog.Sending:
		case transferlog.Done:
			e.Next(transferlog.Sending, "relay sends to D", func() (time.Time, uint64) { return began, 64 << 20 })
			e.End(state, "")
		default:
			e.End(state, "<i>no</i> block of "+string(state))
		}
	}
	return l.Last()
}

// looksRight is a program for the page: it returns what a person could not read. A text may not be cut, an element not be wider than the page, and the
// contrast is that of WCAG's AA.
const looksRight = `(() => {
  const out = [], say = (why, e) => out.push(why + ": " + (e.id || e.className.baseVal || e.className || e.tagName) + " " + JSON.stringify(e.textContent.slice(0, 40)));
  if (document.documentElement.scrollWidth > innerWidth) out.push("the page is " + document.documentElement.scrollWidth + " wide");
  const light = c => { const f = c.map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : Math.pow((v + .055) / 1.055, 2.4)); return .2126 * f[0] + .7152 * f[1] + .0722 * f[2]; };
  const parse = c => c.match(/[\d.]+/g).map(Number);
  const ground = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; } return [255, 255, 255]; };
  let seen = 0;
  for (const e of document.body.querySelectorAll("*")) {
    if (["SCRIPT", "STYLE", "OPTION", "TITLE"].includes(e.tagName.toUpperCase())) continue;
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own || !e.getClientRects().length || e.closest(".skip") || e.closest("details:not([open]) > :not(summary)")) continue;
    seen++;
    const style = getComputedStyle(e), box = e.getBoundingClientRect(), svg = e.closest("svg");
    if (svg) {
      const b = svg.getBoundingClientRect();
      if (e.tagName === "text" && (box.left < b.left - 1 || box.right > b.right + 1 || box.top < b.top - 1 || box.bottom > b.bottom + 1)) say("outside of its chart", e);
    } else {
      if (e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1 && !e.closest(".scroll, textarea")) say("cut", e);
      if (e.closest("td, th") && e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1) say("cut in its cell", e);
      for (let p = e.parentElement; p && !p.closest(".scroll"); p = p.parentElement) {
        const b = p.getBoundingClientRect();
        if (p.clientWidth > 0 && box.right > b.right + 1) { say("beyond " + (p.id || p.tagName), e); break; }
      }
    }
    const a = light(parse(svg ? style.fill : style.color)), b = light(ground(e)), ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    const px = parseFloat(style.fontSize), large = px >= 24 || px >= 18.66 && style.fontWeight >= 700;
    if (ratio < (large ? 3 : 4.5)) say("contrast " + ratio.toFixed(2), e);
  }
  for (const t of document.querySelectorAll(".scroll")) if (t.scrollWidth > t.clientWidth && !(getComputedStyle(t).overflowX === "auto" && t.tabIndex === 0)) say("does not scroll", t);
  for (const c of document.querySelectorAll(".chart svg")) {
    const boxes = [...c.querySelectorAll("text")].map(t => [t.getBoundingClientRect(), t.textContent]);
    boxes.forEach(([a, s], i) => boxes.slice(i + 1).forEach(([b, t]) => { if (a.left < b.right && b.left < a.right && a.top < b.bottom - 3 && b.top < a.bottom - 3) out.push("ticks overlap in " + c.parentElement.id + ": " + s + ", " + t); }));
  }
  if (seen < 100) out.push("only " + seen + " texts were looked at");
  return out.join("\n");
})()`

// roundTicks is a program for the page: it returns the axes whose ticks are not 1, 2 or 5 times a power of ten apart, or, where they multiply, such numbers
// themselves; and the texts of ticks that do not say their number.
const roundTicks = `(() => {
  const out = [], round = v => [1, 2, 5].includes(+(v / Math.pow(10, Math.floor(Math.log10(v) + 1e-9))).toPrecision(6));
  for (const id of ["hit", "speed", "time", "load"]) {
    const c = charts[id].c, t = c.y.ticks, x = c.x.ticks.map(t => t[0] / 60);
    if (t.length < 2 || t.length > 12) out.push(id + " has " + t.length + " ticks");
    if (id === "time" ? !t.every(round) : t[0] !== 0 || !t.slice(1).every((v, i) => Math.abs(v - t[i] - t[1]) < t[1] * 1e-6) || !round(t[1])) out.push(id + ": " + t);
    if (x.length < 3 || !x.slice(1).every((v, i) => v - x[i] === x[1] - x[0]) || !round(x[1] - x[0])) out.push(id + ": " + x);
    const shown = [...$(id).querySelectorAll("svg text")].map(t => t.textContent);
    for (const v of t) if (!shown.includes(c.tick(v))) out.push(id + ": no text for " + v);
    if (id !== "time" && t.some(v => { const n = parseFloat(c.tick(v)); return v > 0 && ![1, 100, 1e-3, 1e-6, 1e-9].some(u => Math.abs(n - v * u) < n * 1e-6); })) out.push(id + ": texts " + t.map(c.tick));
  }
  return out.join("\n");
})()`

const ready = `document.querySelector("#state").textContent === "healthy" && document.querySelector("#t-pool").textContent !== "–" && document.querySelector("#worker-list").childElementCount > 0`

// In a real browser the page asks only its server, says nothing on the console, cuts no text and has enough contrast, at four widths and in both themes,
// whatever peers call themselves.
func TestPageInABrowser(t *testing.T) {
	b := startBrowser(t)
	n := newPageNode(t, false, nil)
	b.open(n.url, 1280, 900)
	b.until(ready)
	for _, dark := range []string{"light", "dark"} {
		b.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": dark}}}, nil)
		for _, width := range []int{360, 800, 1280, 1920} {
			b.size(width, 900)
			b.until(fmt.Sprintf(`innerWidth === %d && [...document.querySelectorAll(".chart svg")].every(s => !s.viewBox.baseVal || s.viewBox.baseVal.width === Math.max(200, s.clientWidth))`, width))
			if why := b.text(looksRight); why != "" {
				t.Errorf("%d pixels, %s:\n%s", width, dark, why)
			}
		}
	}
	if odd := b.text(roundTicks); odd != "" {
		t.Errorf("ticks:\n%s", odd)
	}
	for _, top := range []string{"0.3", "1", "7", "23", "999", "1e3", "1.234e9", "81e9"} {
		if bad := b.text(fmt.Sprintf(`(t => t.length > 7 || t[t.length - 1] < %s * (1 - 1e-9) || ![1, 2, 5].includes(+(t[1] / Math.pow(10, Math.floor(Math.log10(t[1]) + 1e-9))).toPrecision(6)) ? t.join() : "")(linear(%s).ticks)`, top, top)); bad != "" {
			t.Errorf("an axis up to %s has the ticks %s", top, bad)
		}
	}
	if made := b.eval(`document.querySelectorAll("main img, main b, td i, li > b, main script").length`); made != 0.0 {
		t.Errorf("%v elements are of peers' texts", made)
	}
	for id, want := range map[string]string{
		"who": "cac70bbb, process", "t-hit-sub": "since the start", "t-pool-sub": "of 512 KiB", "t-time": "s", "t-saved-sub": "of prefill, at 10,000 tokens/s; ", "by-list": evilModel, "owners": "m, green:", "tier-list": "There is none",
		"tenant-list": "green", "worker-list": "engine_driven", "engine-list": "does not answer", "part-list": "relay: transfers pulled from P", "peers": "127.0.0.1:8081", "more-text": "possible", "pairs": "p-1 at 10.0.0.1 → 10.0.0.2:4000",
		"p-list": "1 of 2 TP ranks are registered", "reasons": "never stored", "normal-head": "no action",
	} {
		if got := b.text(fmt.Sprintf("document.getElementById(%q).textContent", id)); !strings.Contains(got, want) {
			t.Errorf("#%s: %q, want %q", id, got, want)
		}
	}

	// So are the hours of tenants, those without terms of their own included.
	if got := b.text(`[...document.querySelectorAll("#tenant-list tbody tr")].map(r => r.children[0].textContent + " " + r.querySelectorAll("svg.hour .line").length + " " + r.children[2].textContent).sort().join("\n")`); got != strings.Join(slices.Sorted(slices.Values([]string{
		"_default 1 7.8 %", "green 1 27.1 %", evilSalt + " 1 7.8 %", longName + " 1 7.8 %",
	})), "\n") {
		t.Errorf("the hours of tenants:\n%s", got)
	}

	// An hour is there at once, in each range.
	points := func() float64 {
		v, _ := b.eval(`charts.hit.c.xs.length`).(float64)
		return v
	}
	for minutes, want := range map[int]float64{5: 60, 15: 180, 60: 180} {
		b.eval(fmt.Sprintf(`document.querySelector("[data-range='%d']").click()`, minutes))
		if got := points(); got < want-3 || got > want+3 {
			t.Errorf("%d minutes: %v points, want %v", minutes, got, want)
		}
	}
	if n := b.eval(`document.querySelectorAll("#map rect:not(.free)").length`); n == 0.0 {
		t.Error("the map shows no chunk")
	}
	b.faultless(n.url)
}

// Everything that can be used is reached with the keyboard alone, and charts are read with it.
func TestPageWithTheKeyboard(t *testing.T) {
	b := startBrowser(t)
	n := newPageNode(t, false, nil)
	b.open(n.url, 1280, 900)
	b.until(ready)
	b.key("Tab")
	if at := b.eval(`document.activeElement.className`); at != "skip" {
		t.Errorf("the first stop is %v", at)
	}
	b.eval(`window.reached = new Set(); document.addEventListener("focusin", e => reached.add(e.target.dataset.key || e.target.id || e.target.dataset.deed || e.target.textContent || e.target.closest("section").id))`)
	want, _ := b.eval(`[...document.querySelectorAll("a[href], button:not(:disabled), input, summary, [tabindex='0']")].filter(e => e.getClientRects().length && !e.matches(".skip") && !e.closest("dialog")).length`).(float64)
	if want < 30 {
		t.Fatalf("only %v things can be used", want)
	}
	stops := 0
	for ; stops < 300 && b.eval(`document.activeElement === document.body || document.activeElement.className === "skip"`) != (stops > 0); stops++ {
		b.key("Tab")
	}
	missed := b.text(`[...document.querySelectorAll("a[href], button:not(:disabled), input, summary, [tabindex='0']")].filter(e => e.getClientRects().length && !e.matches(".skip") && !e.closest("dialog")).map(e => e.dataset.key || e.id || e.dataset.deed || e.textContent || e.closest("section").id).filter(k => !reached.has(k)).join(" | ")`)
	if missed != "" {
		t.Errorf("after %d stops these were not reached: %s", stops, missed)
	}
	b.key("p")
	b.until(`document.querySelector("#pause").getAttribute("aria-pressed") === "true" && document.querySelector("#state").textContent === "paused"`)
	b.key("p")
	b.until(ready)
	b.key("2")
	if at := b.eval(`document.activeElement.id`); at == "" || at == nil {
		t.Errorf("2 leads to %v", at)
	}
	b.key("r")
	if at := b.eval(`document.querySelector("[data-range='60']").getAttribute("aria-pressed")`); at != "true" {
		t.Errorf("r: the hour is pressed: %v", at)
	}
	b.eval(`document.querySelector("#hit svg").focus()`)
	b.key("ArrowLeft")
	b.key("ArrowLeft")
	if got := b.text(`document.querySelector("#hit .legend").textContent`); !strings.Contains(got, " ago, ") {
		t.Errorf("the chart's cursor: %q", got)
	}
	b.eval(`document.querySelector("[data-key='hour of green']").focus()`)
	b.key("ArrowLeft")
	b.key("ArrowLeft")
	b.until(`/^green, [0-9]+ (s|min) ago, [0-9:]{5}: hit [0-9.]+ % of [0-9,]+ tokens in 60 s$/.test(document.querySelector("#tenant-read").textContent) && !!document.querySelector("[data-key='hour of green'] .cursor")`)
	first := b.text(`document.querySelector("#tenant-read").textContent`)
	b.key("Home")
	b.until(`document.querySelector("#tenant-read").textContent.startsWith("green, 59 min ago")`)
	if at := b.text(`document.activeElement.dataset.key`); at != "hour of green" || first == "" {
		t.Errorf("the focus is at %q", at)
	}
	b.key("Escape")
	b.until(`!document.querySelector("#tenant-list .cursor")`)
	ground := func() any { return b.eval(`getComputedStyle(document.body).backgroundColor`) }
	b.key("t")
	light := ground()
	b.key("t")
	if dark := ground(); light == dark || light == nil {
		t.Errorf("both themes are %v", dark)
	}
	b.key("/")
	if at := b.eval(`document.activeElement.id`); at != "request" {
		t.Errorf("/ leads to %v", at)
	}
	b.write("pt1")
	b.key("Enter")
	b.until(`document.querySelector("#request-text").textContent.startsWith("Request pt1 is not remembered") && !document.querySelector("#waterfall table") && location.hash === "#request=pt1"`)
	b.faultless(n.url)
}

// A link leads to one request, step by step, also where it is the first that a browser opens.
func TestPageOfARequest(t *testing.T) {
	b := startBrowser(t)
	n := newPageNode(t, false, nil)
	b.open(n.url+"#request=chat-3", 1280, 900)
	shows := func(id, text string) {
		t.Helper()
		b.until(fmt.Sprintf(`document.querySelector("#request-text").textContent.startsWith(%q)`, id+", "+text))
		for _, what := range []string{"lookup", "prepare_retrieve", "the engine copies", "commit_retrieve", "end_session"} {
			b.until(fmt.Sprintf(`[...document.querySelectorAll("#waterfall td")].some(td => td.textContent.startsWith(%q))`, what))
		}
	}
	shows("chat-3", "m: 32 of 64 tokens hit")
	if bars, _ := b.eval(`document.querySelectorAll("#waterfall svg[role=img][aria-label] rect").length`).(float64); bars < 5 {
		t.Errorf("the waterfall has %v bars", bars)
	}
	b.eval(`document.querySelector("[data-list=ended]").click()`)
	b.until(`[...document.querySelectorAll("#request-list a")].some(a => a.textContent === "<b>id</b>") || document.querySelectorAll("#request-list a").length > 3`)
	b.eval(`document.querySelector("[data-list=last]").click()`)
	b.until(`(() => { const x = [...document.querySelectorAll("#request-list a")].find(x => x.textContent === "<b>id</b>"); if (x) x.click(); return !!x; })()`)
	b.until(`location.hash === "#request=" + encodeURIComponent("<b>id</b>")`)
	shows("<b>id</b>", evilModel+", tenant "+evilSalt)
	transfers(b)
	b.faultless(n.url)
}

// transfers looks at the table of single transfers.
func transfers(b *browser) {
	b.t.Helper()
	cell := func(row, column int) string {
		return b.text(fmt.Sprintf(`document.querySelectorAll("#pd-list tbody tr")[%d].children[%d].innerText`, row, column))
	}
	b.until(`document.querySelectorAll("#pd-list tbody tr").length === 4`)
	for row, want := range []string{"sending", "expired", "failed", "done"} {
		if got := cell(row, 0); got != want {
			b.t.Errorf("row %d is %q, want %q", row, got, want)
		}
	}
	for column, want := range map[int]string{1: "kvasir-01234567…\n" + evilSalt, 3: "p-1 at 10.0.0.1 → 10.0.0.2:4000, TP rank 1 of 2", 4: evilModel, 5: "64", 6: "64 MiB"} {
		if got := cell(3, column); got != want {
			b.t.Errorf("column %d: %q, want %q", column, got, want)
		}
	}
	if got := cell(0, 6); got != "25.0 % of 64 MiB" {
		b.t.Errorf("one that runs: %q", got)
	}
	if got := cell(2, 1); !strings.HasSuffix(got, "<i>no</i> block of failed") {
		b.t.Errorf("one that failed: %q", got)
	}
	if got := b.text(`document.querySelector("#pairs tbody").innerText`); !strings.Contains(got, "\t4\t2\t") {
		b.t.Errorf("the pair of P and D: %q", got)
	}
}

// A page that is open notices a server that goes away, and one that comes back with counters from 0 on. A clock that jumps changes nothing.
func TestPageOfALostServer(t *testing.T) {
	b := startBrowser(t)
	var away struct {
		sync.Mutex
		is bool
	}
	first, second := newPageNode(t, false, nil), newPageNode(t, false, nil)
	handler := admin.Handler(first.Server, first.o)
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		away.Lock()
		h, gone := handler, away.is
		away.Unlock()
		if gone {
			panic(http.ErrAbortHandler)
		}
		h.ServeHTTP(w, r)
	}))
	proxy.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	t.Cleanup(func() { proxy.CloseClientConnections(); proxy.Close() })
	b.open(proxy.URL+"/", 1280, 900)
	b.until(ready)
	before := b.text(`document.querySelector("#t-pool-sub").textContent`)
	b.eval(`(() => { const real = Date.now; Date.now = () => real() + 3600e3; })()`)
	b.until(`now.now_s > 0 && past.at_s.length >= 715 && charts.hit.c.xs.length > 170`)
	away.Lock()
	away.is = true
	away.Unlock()
	proxy.CloseClientConnections()
	b.until(`document.querySelector("#state").textContent.includes("figures are old") && document.querySelector("#main").className === "old"`)
	if got := b.text(`document.querySelector("#t-pool-sub").textContent`); got != before {
		t.Errorf("the last figures are gone: %q", got)
	}
	away.Lock()
	away.is, handler = false, admin.Handler(second.Server, admin.Options{})
	away.Unlock()
	b.until(ready + ` && document.querySelector("#main").className === "" && past.at_s.length < 10`)
}

// A server without traffic, workers or tiers has a page that says so.
func TestPageOfANewServer(t *testing.T) {
	b := startBrowser(t)
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: 64 * 4096, Dir: t.TempDir(), ChunkTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	st := store.New(p, store.Options{})
	s := server.New(st, server.Options{ChunkTokens: 16, Log: slog.New(slog.DiscardHandler)})
	t.Cleanup(func() { _, _ = s.Close(), st.Close() })
	web := httptest.NewServer(admin.Handler(s, admin.Options{}))
	t.Cleanup(func() { web.CloseClientConnections(); web.Close() })
	b.open(web.URL+"/", 1280, 900)
	b.until(ready)
	for id, want := range map[string]string{"by-list": "No prompt was asked for.", "request-list": "None came.", "worker-list": "No engine has registered.", "tier-list": "There is none", "act-list": "no worker that can be served", "hit": "no prompt was asked for", "t-hit": "–", "t-time": "–", "more-text": "does not estimate"} {
		if got := b.text(fmt.Sprintf("document.getElementById(%q).textContent", id)); !strings.Contains(got, want) {
			t.Errorf("#%s: %q, want %q", id, got, want)
		}
	}
	if hidden := b.eval(`document.querySelector("#pd").hidden && document.querySelector("#engines").hidden && document.querySelector("#parts").hidden && document.querySelector("#peers").hidden`); hidden != true {
		t.Error("a server that runs alone shows parts of a node")
	}
	if why := b.text(looksRight); why != "" && !strings.HasPrefix(why, "only ") {
		t.Error(why)
	}
	b.faultless(web.URL + "/")
}

// The pictures of docs, of the server that KVASIR_PAGE names: make page PICTURES=FOLDER.
func TestPagePictures(t *testing.T) {
	url := os.Getenv("KVASIR_PAGE")
	if url == "" || os.Getenv("KVASIR_PICTURES") == "" {
		t.Skip("KVASIR_PAGE names no server, or KVASIR_PICTURES no folder")
	}
	b := startBrowser(t)
	b.open(url, 1280, 900)
	b.until(ready)
	b.eval(`document.querySelector("[data-range='` + os.Getenv("KVASIR_PAGE_RANGE") + `']")?.click()`)
	time.Sleep(3 * time.Second) // rates need two looks; no plain test waits
	for _, theme := range []string{"light", "dark"} {
		b.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": theme}}}, nil)
		for _, width := range []int{360, 1280, 1920} {
			b.size(width, 900)
			time.Sleep(1500 * time.Millisecond)
			b.picture(fmt.Sprintf("page-%d-%s.png", width, theme))
			if why := b.text(looksRight); why != "" {
				t.Errorf("%d pixels, %s:\n%s", width, theme, why)
			}
		}
	}
}
