// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/proxy"
	"github.com/kvasir-kv/kvasir/sim/api"
	"github.com/kvasir-kv/kvasir/sim/engine"
)

// sgl is a simulated engine of SGLang.
type sgl struct {
	*served
	api  *api.SGLang
	boot *api.Boot
	at   string // of boot, host:port
	port int    // of boot
}

// startSGLang starts an engine of SGLang; mode is prefill, decode or null.
func startSGLang(t testing.TB, mode string, o engine.Options) *sgl {
	t.Helper()
	x := &sgl{}
	config := map[string]string{"prefill": "", "decode": consumer, "null": ""}[mode]
	if mode == "prefill" {
		registry, err := bootstrap.Open(bootstrap.Options{})
		if err != nil {
			t.Fatal(err)
		}
		x.boot = api.NewBoot(registry, 16, 1)
		web := httptest.NewUnstartedServer(x.boot)
		web.Listener.Close()
		web.Listener = testkit.Listen(t)
		x.at = web.Listener.Addr().String()
		x.port = web.Listener.Addr().(*net.TCPAddr).Port
		web.Start()
		t.Cleanup(func() { web.CloseClientConnections(); web.Close(); registry.Close() })
		config = producer("http://"+x.at, x.at)
	}
	if o.Getenv == nil {
		o.Getenv = keepFor("15") // longer than a machine stands still
	}
	x.served = serveWith(t, "", config, o)
	x.api = api.NewSGLang(x.Engine, api.SGLangOptions{Version: "0.5.23", Mode: mode, Bootstrap: x.port, Timeout: 15 * time.Second})
	x.web.Config.Handler = x.api
	if x.boot != nil {
		x.boot.Register()
	}
	t.Cleanup(x.api.Close)
	return x
}

// keepFor is the environment of an engine whose P keeps the KV for so many seconds that no D takes.
func keepFor(seconds string) func(name string) (string, bool) {
	return func(name string) (string, bool) {
		v, ok := map[string]string{"VLLM_HOST_IP": "127.0.0.1", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": seconds}[name]
		return v, ok
	}
}

// sglDeployment is P's, D's and a proxy of SGLang.
type sglDeployment struct {
	*deployment
	ps, ds []*sgl
	alone  *sgl
}

func deploySGLang(t testing.TB, p, d int, o proxy.Options, eo engine.Options) *sglDeployment {
	t.Helper()
	x := &sglDeployment{deployment: &deployment{t: t}}
	x.stopAll()
	o.HealthInterval = 30 * time.Millisecond
	for range p {
		e := startSGLang(t, "prefill", eo)
		x.ps, x.p = append(x.ps, e), append(x.p, e.served)
		o.Prefill = append(o.Prefill, proxy.Prefill{URL: e.web.URL, Registry: "http://" + e.at})
	}
	for range d {
		e := startSGLang(t, "decode", eo)
		x.ds, x.d = append(x.ds, e), append(x.d, e.served)
		o.Decode = append(o.Decode, e.web.URL)
	}
	x.alone = startSGLang(t, "null", engine.Options{})
	t.Cleanup(func() { x.alone.stop(t) })
	x.start(o)
	return x
}

// waitIdle waits until no engine has a request or KV, and fails for requests that routers must never send.
func (x *sglDeployment) waitIdle() {
	x.t.Helper()
	x.idle()
	for _, e := range append(x.ps, x.ds...) {
		testkit.Eventually(x.t, "nothing waits for the other side", func() bool { return e.api.Waiting() == 0 })
		if n := e.api.BadRooms(); n > 0 {
			x.t.Errorf("%d requests had a room that no router may send", n)
		}
	}
	testkit.Eventually(x.t, "no place is taken", func() bool { return x.proxy.Taken() == "" })
}

func askSGLang(t testing.TB, url, path, body string) (int, string) {
	t.Helper()
	r, err := http.Post(url+path, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		return r.StatusCode, string(text) + " cut"
	}
	return r.StatusCode, string(text)
}

// sglAnswer has the texts of an answer of SGLang by index, whole or streamed, and the usage.
type sglAnswer struct {
	texts []string
	usage [2]int
	ids   map[string]bool
	list  bool
}

func readSGLang(t testing.TB, answer string) (a sglAnswer) {
	t.Helper()
	a.ids = map[string]bool{}
	put := func(i int, text string, all bool) {
		for len(a.texts) <= i {
			a.texts = append(a.texts, "")
		}
		if all {
			a.texts[i] = ""
		}
		a.texts[i] += text
	}
	type event struct {
		ID      string
		Text    *string
		Index   int
		Choices []struct {
			Index          int
			Text           string
			Message, Delta struct{ Content string }
		}
		Usage *struct {
			Prompt     int `json:"prompt_tokens"`
			Completion int `json:"completion_tokens"`
		}
	}
	var events []event
	a.list = strings.HasPrefix(answer, "[")
	switch {
	case a.list:
		if err := json.Unmarshal([]byte(answer), &events); err != nil {
			t.Fatalf("%s: %v", answer, err)
		}
		for i := range events {
			events[i].Index = i
		}
	default:
		for line := range strings.Lines(answer) {
			line = strings.TrimPrefix(strings.TrimSpace(line), "data: ")
			if line == "" || line == "[DONE]" {
				continue
			}
			var e event
			if err := json.Unmarshal([]byte(line), &e); err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			events = append(events, e)
		}
	}
	for _, e := range events {
		if e.Text != nil {
			put(e.Index, *e.Text, true)
		}
		for _, c := range e.Choices {
			put(c.Index, c.Text+c.Message.Content+c.Delta.Content, false)
		}
		if e.Usage != nil {
			a.usage = [2]int{e.Usage.Prompt, e.Usage.Completion}
		}
		if e.ID != "" {
			a.ids[e.ID] = true
		}
	}
	return a
}
