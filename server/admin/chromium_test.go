// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"bufio"
	"encoding/base64"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
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
		if out != nil && len(result) > 0 { // a page that is being left answers nothing
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
	b.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "userGesture": true}, &out)
	return out.Result.Value
}

// text returns the value of an expression that is a text.
func (b *browser) text(expression string) string {
	b.t.Helper()
	s, _ := b.eval(expression).(string)
	return s
}

// faultless reports what the page said on the console, and requests to others than its server.
func (b *browser) faultless(url string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.requests {
		if !strings.HasPrefix(r, url) && !strings.HasPrefix(r, "data:") {
			b.t.Errorf("it asked for %s", r)
		}
	}
	if len(b.requests) < 2 {
		b.t.Errorf("requests: %v", b.requests)
	}
	for _, f := range b.faults {
		b.t.Errorf("%s", f)
	}
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

// write types a text into what has the focus.
func (b *browser) write(text string) {
	b.t.Helper()
	b.call("Input.insertText", map[string]any{"text": text}, nil)
}

func (b *browser) key(key string) {
	b.t.Helper()
	for _, kind := range []string{"keyDown", "keyUp"} {
		p := map[string]any{"type": kind, "key": key}
		if len(key) == 1 && kind == "keyDown" {
			p["text"] = key
		}
		if key == "Escape" {
			p["windowsVirtualKeyCode"], p["code"] = 27, "Escape"
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
