// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/transferlog"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// browser is a headless Chromium that is told what to do over two pipes, as its DevTools
// protocol wants it: JSON texts that end with a zero byte.
type browser struct {
	t       *testing.T
	in      io.Writer
	session string

	mu      sync.Mutex
	last    int
	answers map[int]chan json.RawMessage

	requests []string // addresses that the page asked for
	faults   []string // errors and exceptions of the page
}

// startBrowser starts Chromium; where there is none the test is skipped.
func startBrowser(t *testing.T) *browser {
	t.Helper()
	path := os.Getenv("KVASIR_CHROMIUM")
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable"} {
		if found, err := exec.LookPath(name); path == "" && err == nil {
			path = found
		}
	}
	if path == "" {
		t.Skip("there is no Chromium here: the page was not looked at (KVASIR_CHROMIUM names one)")
	}
	toIt, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	out, fromIt, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking", "--disable-extensions",
		"--hide-scrollbars", "--remote-debugging-pipe", "--user-data-dir="+t.TempDir(), "about:blank")
	c.Env = append(os.Environ(), "HOME="+t.TempDir())
	c.ExtraFiles = []*os.File{toIt, fromIt} // 3 and 4
	if err := c.Start(); err != nil {
		t.Skipf("%s does not start: the page was not looked at: %v", path, err)
	}
	toIt.Close()
	fromIt.Close()
	b := &browser{t: t, in: in, answers: make(map[int]chan json.RawMessage)}
	done := make(chan struct{})
	go func() { defer close(done); b.read(out) }()
	t.Cleanup(func() {
		in.Close()
		timer := time.AfterFunc(20*time.Second, func() { _ = c.Process.Kill() })
		_ = c.Wait() // it ends when its pipe does, or is killed
		timer.Stop()
		out.Close()
		<-done
	})
	return b
}

// read takes answers and events until the pipe ends.
func (b *browser) read(out io.Reader) {
	for r := bufio.NewReader(out); ; {
		text, err := r.ReadBytes(0)
		if err != nil {
			return
		}
		var m struct {
			ID     int             `json:"id"`
			Method string          `json:"method"`
			Params json.RawMessage `json:"params"`
			Result json.RawMessage `json:"result"`
			Error  json.RawMessage `json:"error"`
		}
		if json.Unmarshal(text[:len(text)-1], &m) != nil {
			continue
		}
		b.mu.Lock()
		switch {
		case m.ID != 0:
			if m.Error != nil {
				b.faults = append(b.faults, "DevTools: "+string(m.Error))
			}
			b.answers[m.ID] <- m.Result
			delete(b.answers, m.ID)
		case m.Method == "Network.requestWillBeSent":
			var p struct{ Request struct{ URL string } }
			_ = json.Unmarshal(m.Params, &p)
			b.requests = append(b.requests, p.Request.URL)
		case m.Method == "Runtime.exceptionThrown", m.Method == "Runtime.consoleAPICalled", m.Method == "Log.entryAdded", m.Method == "Audits.issueAdded":
			b.faults = append(b.faults, m.Method+" "+string(m.Params))
		}
		b.mu.Unlock()
	}
}

// call sends a command and decodes its answer into out, nil for none.
func (b *browser) call(method string, params map[string]any, out any) {
	b.t.Helper()
	answer := make(chan json.RawMessage, 1)
	b.mu.Lock()
	b.last++
	id := b.last
	b.answers[id] = answer
	b.mu.Unlock()
	m := map[string]any{"id": id, "method": method, "params": params}
	if b.session != "" {
		m["sessionId"] = b.session
	}
	text, err := json.Marshal(m)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := b.in.Write(append(text, 0)); err != nil {
		b.t.Fatal(err)
	}
	select {
	case result := <-answer:
		if out != nil {
			if err := json.Unmarshal(result, out); err != nil {
				b.t.Fatalf("%s: %v: %s", method, err, result)
			}
		}
	case <-time.After(90 * time.Second):
		b.t.Fatalf("%s is not answered", method)
	}
}

// open opens a page in a window of a size.
func (b *browser) open(url string, width, height int) {
	b.t.Helper()
	var target struct{ TargetID string }
	b.session = ""
	b.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	var session struct{ SessionID string }
	b.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &session)
	b.session = session.SessionID
	for _, domain := range []string{"Page", "Runtime", "Network", "Log", "Audits"} {
		b.call(domain+".enable", map[string]any{}, nil)
	}
	b.size(width, height)
	b.call("Page.navigate", map[string]any{"url": url}, nil)
}

func (b *browser) size(width, height int) {
	b.t.Helper()
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}, nil)
}

// eval returns the value of an expression.
func (b *browser) eval(expression string) any {
	b.t.Helper()
	var out struct {
		Result struct{ Value any }
	}
	b.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true}, &out)
	return out.Result.Value
}

// until waits until an expression is true.
func (b *browser) until(expression string) {
	b.t.Helper()
	for end := time.Now().Add(90 * time.Second); b.eval(expression) != true; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			b.t.Fatalf("never: %s\n%v", expression, b.eval("document.body.innerText"))
		}
	}
}

func (b *browser) key(key string) {
	b.t.Helper()
	for _, kind := range []string{"keyDown", "keyUp"} {
		p := map[string]any{"type": kind, "key": key}
		if len(key) == 1 && kind == "keyDown" {
			p["text"] = key
		}
		if key == "Tab" {
			p["windowsVirtualKeyCode"], p["code"] = 9, "Tab"
		}
		if key == "Enter" {
			p["windowsVirtualKeyCode"], p["code"] = 13, "Enter"
			if kind == "keyDown" {
				p["text"] = "\r"
			}
		}
		b.call("Input.dispatchKeyEvent", p, nil)
	}
}

// picture writes the whole page as it is seen into the folder that KVASIR_PICTURES names, if it names one.
func (b *browser) picture(name string) {
	b.t.Helper()
	dir := os.Getenv("KVASIR_PICTURES")
	if dir == "" {
		return
	}
	var layout struct {
		CSSContentSize struct{ Width, Height float64 }
	}
	b.call("Page.getLayoutMetrics", map[string]any{}, &layout)
	var out struct{ Data string }
	b.call("Page.captureScreenshot", map[string]any{"format": "png", "captureBeyondViewport": true, "clip": map[string]any{
		"x": 0, "y": 0, "width": layout.CSSContentSize.Width, "height": layout.CSSContentSize.Height, "scale": 1,
	}}, &out)
	png, err := base64.StdEncoding.DecodeString(out.Data)
	if err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, name), png, 0o644); err != nil {
		b.t.Fatal(err)
	}
}

// pageURL returns the page to look at: a server of this test, or KVASIR_PAGE.
func pageURL(t *testing.T) string {
	if url := os.Getenv("KVASIR_PAGE"); url != "" {
		return url
	}
	type relay struct {
		Pulled int64 `counter:"kvasir_relay_pulled_total" help:"Pulled."`
	}
	parts := new(admin.Parts)
	parts.Add("relay", func() any { return relay{7} })
	parts.AddTransfers("relay", func() []transferlog.Transfer { return someTransfers(t) })
	parts.AddEngines(func() []bootstrap.EngineState {
		return []bootstrap.EngineState{{ID: "p-1", Host: "10.0.0.1", Workers: 2, Shown: true, Heard: 3}, {ID: "<b>p-2</b>", Workers: 1, Why: "1 of 2 TP ranks are registered"}}
	})
	s := newServer(t)
	loadPrompt(s, "chat-1")
	if err := s.Store().SetTTL("green", time.Hour); err != nil {
		t.Fatal(err)
	}
	web := httptest.NewServer(admin.Handler(s, admin.Options{Parts: parts}))
	t.Cleanup(func() { web.CloseClientConnections(); web.Close() })
	return web.URL + "/"
}

// someTransfers are one of each state; the names are what peers chose.
func someTransfers(t *testing.T) []transferlog.Transfer {
	var l transferlog.Log
	for _, state := range []transferlog.State{transferlog.Done, transferlog.Failed, transferlog.Expired, transferlog.Sending} {
		e := l.Begin(transferlog.Transfer{
			ID: "kvasir-0123456789abcdef-" + string(state), Request: "<img src=x onerror=alert(1)>", From: "p-1 at 10.0.0.1", To: "10.0.0.2:4000", Rank: "TP rank 1 of 2", Model: "m</script><script>alert(2)</script>",
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

// transfers looks at the table of single transfers.
func transfers(b *browser) {
	b.t.Helper()
	cell := func(row, column int) string {
		text, _ := b.eval(fmt.Sprintf(`document.querySelectorAll("#pd-list tbody tr")[%d].children[%d].innerText`, row, column)).(string)
		return text
	}
	b.until(`document.querySelectorAll("#pd-list tbody tr").length === 4`)
	for row, want := range []string{"sending", "expired", "failed", "done"} {
		if got := cell(row, 0); got != want {
			b.t.Errorf("row %d is %q, want %q", row, got, want)
		}
	}
	for column, want := range map[int]string{1: "kvasir-01234567…\n<img src=x onerror=alert(1)>", 2: "p-1 at 10.0.0.1 → 10.0.0.2:4000, TP rank 1 of 2", 3: "m</script><script>alert(2)</script>", 4: "64", 5: "64.0 MiB"} {
		if got := cell(3, column); got != want {
			b.t.Errorf("column %d: %q, want %q", column, got, want)
		}
	}
	if got := cell(0, 5); got != "25.0 % of 64.0 MiB" {
		b.t.Errorf("one that runs: %q", got)
	}
	if got := cell(2, 1); !strings.HasSuffix(got, "<i>no</i> block of failed") {
		b.t.Errorf("one that failed: %q", got)
	}
	if bars, _ := b.eval(`document.querySelectorAll("#pd-list tbody tr")[3].querySelectorAll("svg[role=img][aria-label*='relay sends to D'] rect").length`).(float64); bars != 2 && bars != 3 {
		b.t.Errorf("the bar of one that is done has %v parts", bars)
	}
	if made := b.eval(`document.querySelectorAll("#pd img, #pd i, #pd b, #pd script").length`); made != 0.0 {
		b.t.Errorf("%v elements are of peers' texts", made)
	}
	if text, _ := b.eval(`document.querySelector("#p-list").innerText`).(string); !strings.Contains(text, "<b>p-2</b>") || !strings.Contains(text, "1 of 2 TP ranks are registered") {
		b.t.Errorf("the registry's engines: %q", text)
	}
	b.eval(`document.querySelector("#pd-list").focus()`) // it scrolls by keys, so it must take the focus
	if at := b.eval(`document.activeElement.id + document.activeElement.tabIndex`); at != "pd-list0" {
		b.t.Errorf("the list of transfers takes no focus: %v", at)
	}
}

// waterfall chooses requests by a button, from the keyboard, and by their ids.
func waterfall(b *browser) {
	b.t.Helper()
	for id, want := range map[string]string{"hit-pool": "50.0 %", "hit-tiers": "0.0 %", "tenant-list": "green–––60 min–"} {
		if text, _ := b.eval(fmt.Sprintf("document.getElementById(%q).textContent", id)).(string); !strings.Contains(text, want) {
			b.t.Errorf("#%s: %q", id, text)
		}
	}
	b.until(`[...document.querySelectorAll("#by-list td")].map(td => td.textContent).join() === "m,none,–,50.0 %,0.0 %,64"`) // nobody asks now
	b.until(`(() => { const x = [...document.querySelectorAll("#recent-list button")].find(x => x.textContent === "chat-1"); if (x) x.click(); return !!x; })()`)
	b.until(`document.querySelector("#request-text").textContent.startsWith("chat-1, m: 32 of 64 tokens hit, 0 of them from tiers")`)
	for _, what := range []string{"lookup", "prepare_retrieve", "the engine copies", "commit_retrieve", "end_session"} {
		b.until(fmt.Sprintf(`[...document.querySelectorAll("#waterfall td")].some(td => td.textContent === %q)`, what))
	}
	if n, _ := b.eval(`document.querySelectorAll("#waterfall svg[role=img][aria-label] rect").length`).(float64); n < 5 {
		b.t.Errorf("the waterfall has %v bars", n)
	}
	b.eval(`document.querySelector("#request").focus()`)
	b.eval(`document.querySelector("#request").value = ""`)
	for _, key := range "pt1" {
		b.key(string(key))
	}
	if at := b.eval(`document.activeElement.id + document.querySelector("#request").value + document.querySelector("#pause").getAttribute("aria-pressed")`); at != "requestpt1false" {
		b.t.Errorf("typing an id: %v", at)
	}
	b.key("Enter")
	b.until(`document.querySelector("#request-text").textContent.startsWith("Request pt1 is not remembered") && !document.querySelector("#waterfall table")`)
}

// The page works in a real browser: it asks nobody but its server, says nothing on the
// console, is wide enough at 360 pixels, is used with the keyboard, and has both themes.
func TestPageInABrowser(t *testing.T) {
	b := startBrowser(t)
	url := pageURL(t)
	b.open(url, 360, 780)
	for _, width := range []int{360, 800, 1200} {
		b.size(width, 900)
		b.until(`document.querySelector("#state").textContent === "healthy" && document.querySelector("#lookups").textContent !== "–"`)
		if wide := b.eval(`document.documentElement.scrollWidth`); wide != float64(width) {
			t.Errorf("at %d pixels the page is %v wide", width, wide)
		}
		if wait, err := time.ParseDuration(os.Getenv("KVASIR_PICTURES_AFTER")); err == nil && width == 360 {
			time.Sleep(wait) // so that there is something to see; no test waits
		}
		b.picture(fmt.Sprintf("page-%d.png", width))
	}
	for id, want := range map[string]string{"who": "process", "pool-text": "chunks of", "workers": "engine_driven", "findings": "", "session-text": "session", "parts": "relay: transfers pulled from P"} {
		if text, _ := b.eval(fmt.Sprintf("document.getElementById(%q).textContent", id)).(string); !strings.Contains(text, want) || text == "" {
			t.Errorf("#%s: %q", id, text)
		}
	}
	if n, _ := b.eval(`document.querySelectorAll("#map rect").length`).(float64); n < 64 {
		t.Errorf("the map has %v cells", n)
	}
	b.until(`document.querySelector("#hit-chart").getAttribute("aria-label").includes("the last")`)

	// The skip link, the buttons and the sections are reached from the keyboard.
	b.key("Tab")
	if at := b.eval(`document.activeElement.className`); at != "skip" {
		t.Errorf("the first stop is %v", at)
	}
	b.key("Tab")
	b.key("Enter")
	b.until(`document.querySelector("#pause").getAttribute("aria-pressed") === "true" && document.querySelector("#state").textContent === "paused"`)
	b.key("p")
	b.until(`document.querySelector("#state").textContent === "healthy"`)
	b.key("2")
	if at := b.eval(`document.activeElement.id`); at != "hits" {
		t.Errorf("2 leads to %v", at)
	}
	ground := func() any { return b.eval(`getComputedStyle(document.body).backgroundColor`) }
	b.key("t")
	light := ground()
	b.key("t")
	if dark := ground(); light == dark || light == nil {
		t.Errorf("both themes are %v", dark)
	}
	b.picture("page-1200-dark.png")
	b.size(360, 900)
	b.picture("page-360-dark.png")
	b.size(1200, 900)
	b.key("t")
	b.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": "dark"}}}, nil)
	if system := ground(); system == light {
		t.Errorf("a system that is dark gets %v", system)
	}

	if os.Getenv("KVASIR_PAGE") == "" {
		waterfall(b)
		transfers(b)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.requests {
		if !strings.HasPrefix(r, url) && !strings.HasPrefix(r, "data:") {
			t.Errorf("it asked for %s", r)
		}
	}
	if len(b.requests) < 2 {
		t.Errorf("requests: %v", b.requests)
	}
	for _, f := range b.faults {
		t.Errorf("%s", f)
	}
}
