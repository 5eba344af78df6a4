// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
)

// likeSGLang makes the engine a P or D of SGLang 0.5.23, with bootstrap servers at these addresses.
func (e *engine) likeSGLang(boots []string, mux *http.ServeMux) {
	port := 8998
	if len(boots) > 0 {
		_, p, _ := net.SplitHostPort(boots[0])
		port, _ = strconv.Atoi(p)
	}
	e.peerInfo = fmt.Sprintf(`{"version":"0.5.23","status":"ready","disaggregation_mode":%q,"disaggregation_bootstrap_port":%d,"served_model_name":%q,"model_path":%q,"page_size":16,"dp_size":1,"tp_size":1}`,
		e.sglang, port, e.model, e.model)
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "OK") })
	mux.HandleFunc("GET /route", func(w http.ResponseWriter, _ *http.Request) {
		reply(w, `{"attn_tp_size":1,"attn_cp_size":1,"dp_size":1,"pp_size":1,"page_size":16,"kv_cache_dtype":"auto","follow_bootstrap_room":true}`)
	})
}

// enterRoom takes the room of a request until end; wrong says why it cannot be taken.
func (e *engine) enterRoom(b *body, l *leg) (end func(), wrong string) {
	room := string(b.top["bootstrap_room"])
	if e.sglang == "" || room == "" {
		return func() {}, ""
	}
	l.Kind = e.sglang
	if e.sglang == "prefill" {
		e.prefills.Add(1)
	} else {
		e.decodes.Add(1)
	}
	n, err := strconv.ParseInt(room, 10, 64)
	if err != nil || n < 1 || len(b.top["bootstrap_host"]) < 3 || len(b.top["bootstrap_port"]) == 0 {
		return nil, "bootstrap_room " + room + " is none, or there is no bootstrap_host or bootstrap_port"
	}
	if _, twice := e.rooms.LoadOrStore(n, true); twice {
		return nil, "bootstrap_room " + room + " is another request's"
	}
	return func() { e.rooms.Delete(n) }, ""
}

// sglangPaths answers what SGLang's routers ask for and what other engines have not, or have otherwise; false for other paths. By some of
// it smg finds out which engine it is before.
func (e *engine) sglangPaths(w http.ResponseWriter, r *http.Request) bool {
	switch r.URL.Path {
	case "/model_info", "/get_model_info":
		reply(w, fmt.Sprintf(`{"model_path":%q,"served_model_name":%q,"is_generation":true}`, e.model, e.model))
	case "/v1/loads":
		reply(w, fmt.Sprintf(`{"loads":[{"dp_rank":0,"num_running_reqs":%d,"num_waiting_reqs":0,"num_used_tokens":0,"max_total_num_tokens":1048576,"token_usage":0,"disaggregation":{"mode":%q}}]}`,
			e.inflight.Load(), e.sglang))
	case "/v1/models":
		reply(w, fmt.Sprintf(`{"object":"list","data":[{"id":%q,"object":"model","created":1700000000,"owned_by":"sglang","root":%q,"parent":null,"max_model_len":1048576}]}`, e.model, e.model))
	case "/metrics":
		w.Header().Set("Content-Type", "text/plain; version=0.0.4")
		fmt.Fprintf(w, "# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{model_name=%q} %d\n", e.model, e.inflight.Load())
	case "/version":
		http.NotFound(w, r)
	default:
		return false
	}
	return true
}
