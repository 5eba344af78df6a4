// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
)

// The engine's metrics include those of its connectors. Two connectors of one kind have separate metrics.
func TestConnectorFigures(t *testing.T) {
	c, err := kvconfig.Parse([]byte(`{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":[
		{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"},{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}]}}`))
	if err != nil {
		t.Fatal(err)
	}
	_, url := serve(t, engine.Options{Connectors: c})
	r, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`kvasir_mooncake_scheduler_receiving{connector="0",engine="0",model_name="m"} 0`, `kvasir_mooncake_scheduler_receiving{connector="1",`,
		`vllm:mooncake_num_failed_recvs_total{connector="1",`,
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %s", want)
		}
	}
}

// When an engine aborts all requests, each stream ends with a reason, and so does the answer to a client that
// waits for a whole one. The engine continues.
func TestAbortAll(t *testing.T) {
	e, url := serve(t, engine.Options{StepTime: 200 * time.Millisecond}) // no request ends by itself
	var bodies []io.ReadCloser
	for range 2 {
		r, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"prompt":"a b","max_tokens":500,"stream":true}`))
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		if _, err := r.Body.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		bodies = append(bodies, r.Body)
	}
	e.AbortAll()
	for _, body := range bodies {
		text, err := io.ReadAll(body)
		if err != nil || !strings.Contains(string(text), `"finish_reason":"abort"`) || !strings.HasSuffix(string(text), "data: [DONE]\n\n") {
			t.Errorf("%v, %.300q", err, text[max(0, len(text)-300):])
		}
	}
	if status, text := post(t, url+"/v1/completions", `{"prompt":"a b","max_tokens":2}`); status != 200 {
		t.Errorf("%d %s", status, text)
	}
	if s := e.Stats(); s.Aborted != 2 || s.Finished != 1 || s.Free != s.Blocks {
		t.Errorf("%+v", s)
	}
}
