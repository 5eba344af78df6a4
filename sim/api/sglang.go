// SPDX-License-Identifier: Apache-2.0

package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/sim/engine"
)

// SGLangOptions configures a SGLang. A zero field means its default.
type SGLangOptions struct {
	Version   string
	Mode      string                  // prefill, decode or null; default null
	Page      int                     // tokens in a page of KV; default 16. A D that gets a P of another size ends its process
	Bootstrap int                     // port of P's bootstrap server; default 8998
	Timeout   time.Duration           // SGLang's bootstrap and waiting timeouts; default 300 s
	Metrics   func(*metrics.Registry) // as in Options
	Log       *slog.Logger            // nil: nothing is logged
}

// SGLang is the API of a simulated engine, as SGLang 0.5.23 serves it, with SGLang's way of P and D: a request to P or D carries the
// address of P's bootstrap server and a room. The KV bytes move as in a simulated vLLM: Boot also stands for the registry at which D
// learns P's engine id.
type SGLang struct {
	a    *API
	o    SGLangOptions
	mux  *http.ServeMux
	http *http.Client
	dead atomic.Bool  // P's process has ended, as far as clients can see
	bad  atomic.Int64 // requests with a room that no router may send

	mu struct {
		sync.Mutex
		running map[string]context.CancelFunc // by request id (rid)
		queued  int                           // requests that wait for the other side
	}
}

// NewSGLang returns the API of an engine. The caller must close the engine. Its MooncakeConnector must be kv_producer for prefill,
// kv_consumer for decode.
func NewSGLang(e *engine.Engine, o SGLangOptions) *SGLang {
	o.Mode = cmp.Or(o.Mode, "null")
	o.Bootstrap = cmp.Or(o.Bootstrap, 8998)
	o.Page = cmp.Or(o.Page, 16)
	o.Timeout = cmp.Or(o.Timeout, 300*time.Second)
	s := &SGLang{a: New(e, Options{Version: o.Version, Metrics: o.Metrics, Log: o.Log}), o: o, mux: http.NewServeMux(), http: &http.Client{Timeout: 5 * time.Second}}
	s.mu.running = make(map[string]context.CancelFunc)
	ok := func(http.ResponseWriter, *http.Request) {}
	for _, path := range []string{"GET /ready", "GET /health", "GET /health_generate"} {
		s.mux.HandleFunc(path, ok)
	}
	info := func(w http.ResponseWriter, _ *http.Request) {
		reply(w, 200, map[string]any{
			"version": o.Version, "status": "ready", "disaggregation_mode": o.Mode, "disaggregation_bootstrap_port": o.Bootstrap, "served_model_name": e.Model(), "page_size": o.Page,
			"api_key": "secret", "launch_command": "sglang --api-key secret",
		})
	}
	s.mux.HandleFunc("GET /server_info", info)
	s.mux.HandleFunc("GET /get_server_info", info)
	s.mux.HandleFunc("GET /model_info", func(w http.ResponseWriter, _ *http.Request) {
		reply(w, 200, map[string]any{"model_path": e.Model(), "served_model_name": e.Model(), "disaggregation_mode": o.Mode})
	})
	s.mux.HandleFunc("GET /v1/loads", s.loads)
	s.mux.HandleFunc("POST /abort_request", s.abort)
	s.mux.HandleFunc("POST /generate", s.generate)
	s.mux.HandleFunc("POST /v1/completions", s.completions)
	s.mux.HandleFunc("POST /v1/chat/completions", s.chat)
	for _, path := range []string{"/v1/models", "/metrics", "/tokenize", "/detokenize", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"} {
		s.mux.Handle(path, s.a)
	}
	return s
}

// Close closes idle connections.
func (s *SGLang) Close() { s.http.CloseIdleConnections() }

// ServeHTTP implements http.Handler.
func (s *SGLang) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if s.dead.Load() {
		panic(http.ErrAbortHandler)
	}
	s.mux.ServeHTTP(w, r)
}

// BadRooms returns how many requests had a room that would hang D or end P's process.
func (s *SGLang) BadRooms() int64 { return s.bad.Load() }

// Waiting returns how many requests wait for the other side.
func (s *SGLang) Waiting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.queued
}

func (s *SGLang) waits(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.queued += n
}

func (s *SGLang) loads(w http.ResponseWriter, _ *http.Request) {
	n, waiting := s.a.e.Stats(), s.Waiting()
	disagg := map[string]any{"mode": s.o.Mode, "prefill_inflight_queue_reqs": 0, "decode_transfer_queue_reqs": 0}
	switch s.o.Mode {
	case "prefill":
		disagg["prefill_inflight_queue_reqs"] = waiting
	case "decode":
		disagg["decode_transfer_queue_reqs"] = waiting
	}
	reply(w, 200, map[string]any{"loads": []any{map[string]any{
		"dp_rank": 0, "num_running_reqs": n.Running, "num_waiting_reqs": n.Waiting, "num_used_tokens": 0, "disaggregation": disagg,
	}}})
}

func (s *SGLang) abort(w http.ResponseWriter, r *http.Request) {
	var in struct {
		RID string `json:"rid"`
		All bool   `json:"abort_all"`
	}
	if json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16)).Decode(&in) != nil {
		s.fail(w, r, 400, "malformed")
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch _, known := s.mu.running[in.RID]; {
	case in.All:
		s.endLocked("")
	case known:
		s.endLocked(in.RID)
	}
}

// endLocked ends all requests whose ids begin with id, as SGLang does.
func (s *SGLang) endLocked(id string) {
	for rid, cancel := range s.mu.running {
		if strings.HasPrefix(rid, id) {
			cancel()
		}
	}
}

// sglangRequest is the body of a request on any of SGLang's routes.
type sglangRequest struct {
	Text     json.RawMessage `json:"text"`
	InputIDs json.RawMessage `json:"input_ids"`
	Prompt   json.RawMessage `json:"prompt"`
	Messages []message       `json:"messages"`
	Sampling struct {
		Max *int `json:"max_new_tokens"`
		N   int  `json:"n"`
	} `json:"sampling_params"`
	Model       string `json:"model"`
	RID         string `json:"rid"`
	MaxTokens   *int   `json:"max_tokens"`
	N           int    `json:"n"`
	Stream      bool   `json:"stream"`
	StreamUsage struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
	Salt string `json:"cache_salt"`

	Host json.RawMessage `json:"bootstrap_host"`
	Port json.RawMessage `json:"bootstrap_port"`
	Room json.RawMessage `json:"bootstrap_room"`

	ids   []uint32
	list  bool // the prompt came as a list of one
	chat  bool
	limit int
}

func (s *SGLang) fail(w http.ResponseWriter, r *http.Request, status int, text string) {
	if r.URL.Path == "/generate" {
		reply(w, status, map[string]any{"error": map[string]any{"message": text}})
		return
	}
	reply(w, status, map[string]any{"object": "error", "message": text, "type": http.StatusText(status), "param": nil, "code": status})
}

func (s *SGLang) generate(w http.ResponseWriter, r *http.Request) {
	s.serve(w, r, func(q *sglangRequest) string {
		q.limit = 128
		if q.Sampling.Max != nil {
			q.limit = *q.Sampling.Max
		}
		q.N = q.Sampling.N
		if len(q.Text) > 0 {
			return q.prompt(q.Text)
		}
		return q.prompt(q.InputIDs)
	})
}

func (s *SGLang) completions(w http.ResponseWriter, r *http.Request) {
	s.serve(w, r, func(q *sglangRequest) string {
		q.limit = 16
		if q.MaxTokens != nil {
			q.limit = *q.MaxTokens
		}
		return q.prompt(q.Prompt)
	})
}

func (s *SGLang) chat(w http.ResponseWriter, r *http.Request) {
	s.serve(w, r, func(q *sglangRequest) string {
		q.limit, q.chat = 16, true
		if q.MaxTokens != nil {
			q.limit = *q.MaxTokens
		}
		if len(q.Messages) == 0 {
			return "messages is missing"
		}
		q.ids = tokenize(chatText(q.Messages))
		return ""
	})
}

// prompt parses one prompt: a text, token ids, or a list with one of these.
func (q *sglangRequest) prompt(raw json.RawMessage) string {
	var text string
	var list []json.RawMessage
	switch {
	case json.Unmarshal(raw, &text) == nil && text != "":
		q.ids = tokenize(text)
	case json.Unmarshal(raw, &q.ids) == nil && len(q.ids) > 0:
	case json.Unmarshal(raw, &list) == nil && len(list) == 1 && !q.list:
		q.list, q.ids = true, nil
		return q.prompt(list[0])
	default:
		return "one prompt is wanted"
	}
	return ""
}

// serve serves a request. check parses the request's prompt and returns what is wrong with it; "": nothing.
func (s *SGLang) serve(w http.ResponseWriter, r *http.Request, check func(*sglangRequest) string) {
	var q sglangRequest
	text, bad := s.a.text(w, r)
	if bad != nil {
		s.fail(w, r, bad.status, bad.message)
		return
	}
	err := json.Unmarshal(text, &q)
	wrong := ""
	if err == nil {
		wrong = check(&q)
	} else {
		wrong = err.Error()
	}
	if wrong == "" && q.limit < 1 {
		wrong = "max_new_tokens must be at least 0"
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	var params *wire.KVTransferParams
	var room string
	if wrong == "" {
		room, wrong = s.bootstrapRoom(&q)
	}
	if wrong != "" {
		s.refuse(w, r, &q, wrong)
		return
	}
	q.RID = cmp.Or(q.RID, newRID())
	s.mu.Lock()
	_, twice := s.mu.running[q.RID]
	if !twice {
		s.mu.running[q.RID] = cancel
	}
	s.mu.Unlock()
	if twice {
		s.refuse(w, r, &q, "Duplicate request ID detected: "+q.RID)
		return
	}
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.mu.running, q.RID)
		if r.Context().Err() != nil { // its client has left
			s.endLocked(q.RID)
		}
	}()
	if s.o.Mode != "null" && q.N > 1 { // all samples would share one room
		s.hang(ctx, w, r, room)
		return
	}
	if params, err = s.params(ctx, &q, room); err != nil {
		s.fail(w, r, 500, fmt.Sprintf("Decode handshake failed for request rid=%s bootstrap_room=%s: %v", q.RID, room, err))
		return
	}
	released := make(chan struct{})
	limit := q.limit
	if s.o.Mode == "prefill" {
		limit = 1
	}
	stream, err := s.a.e.Submit(ctx, engine.Request{
		ID: q.RID + "-" + newRID(), Tokens: q.ids, MaxTokens: limit, Salt: s.a.adapters.salt(adapterOf(q.Model), q.Salt), Params: params, Released: sync.OnceFunc(func() { close(released) }),
	})
	if err != nil {
		s.refuse(w, r, &q, err.Error())
		return
	}
	n := &sglangAnswer{s: s, w: w, r: r, q: &q, rc: http.NewResponseController(w), room: room, released: released}
	n.follow(ctx, stream)
}

// newRID returns an id such that no other id begins with it.
func newRID() string { return fmt.Sprintf("%016x", lastRID.Add(1)) }

var lastRID atomic.Int64

// adapterOf returns the adapter that SGLang reads from a model's name of the form base:adapter.
func adapterOf(model string) string {
	_, adapter, _ := strings.Cut(model, ":")
	return adapter
}

// refuse tells the client what is wrong with its request; in a stream, as an event.
func (s *SGLang) refuse(w http.ResponseWriter, r *http.Request, q *sglangRequest, text string) {
	if !q.Stream {
		s.fail(w, r, 400, text)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	inner := map[string]any{"message": text}
	if r.URL.Path != "/generate" {
		inner = map[string]any{"object": "error", "message": text, "type": "BAD_REQUEST", "param": nil, "code": 400}
	}
	event, _ := json.Marshal(map[string]any{"error": inner}) // plain values always encode
	fmt.Fprintf(w, "data: %s\n\ndata: [DONE]\n\n", event)
}

// bootstrapRoom returns the request's room. wrong says what is wrong with it; "": nothing.
func (s *SGLang) bootstrapRoom(q *sglangRequest) (room, wrong string) {
	if s.o.Mode == "null" {
		return "", ""
	}
	room = strings.Trim(string(q.Room), "[]")
	switch n, err := strconv.ParseUint(room, 10, 64); {
	case room == "" || room == "null":
		return "", "Invalid request: Disaggregated request received without bootstrap room id."
	case strings.HasPrefix(room, "-"), err == nil && n == 0, err == nil && n >= 1<<63:
		s.bad.Add(1)
		if n >= 1<<63 && s.o.Mode == "prefill" {
			s.dead.Store(true)
		}
		return "", "Metadata corruption detected"
	case err != nil:
		return "", "Input should be a valid integer, unable to parse string as an integer"
	}
	return room, ""
}

// hang waits, as D does, for KV that never comes: until ctx ends, or until Timeout, after which the client gets an error.
func (s *SGLang) hang(ctx context.Context, w http.ResponseWriter, r *http.Request, room string) {
	s.waits(1)
	defer s.waits(-1)
	select {
	case <-ctx.Done():
	case <-time.After(s.o.Timeout):
		s.fail(w, r, 500, fmt.Sprintf("Request %s timed out after %.1fs in KVPoll.WaitingForInput", room, s.o.Timeout.Seconds()))
	}
}

// params returns the transfer params of a request. D asks P's bootstrap server for P's engine id.
func (s *SGLang) params(ctx context.Context, q *sglangRequest, room string) (*wire.KVTransferParams, error) {
	transfer := "sglang-" + room
	switch s.o.Mode {
	case "prefill":
		return wire.RemoteDecode(transfer), nil
	case "decode":
	default:
		return nil, nil
	}
	var host string
	var port int
	if json.Unmarshal(unlisted(q.Host), &host) != nil || json.Unmarshal(unlisted(q.Port), &port) != nil {
		return nil, errors.New("bootstrap_host and bootstrap_port are wanted")
	}
	base := fmt.Sprintf("http://%s:%d", host, port)
	var sizes struct {
		TP   int `json:"attn_tp_size"`
		Page int `json:"page_size"`
	}
	if err := s.get(ctx, base+"/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1", &sizes); err != nil {
		return nil, err
	}
	if sizes.Page != s.o.Page {
		s.dead.Store(true)
		return nil, fmt.Errorf("page size mismatch: P has %d, D %d", sizes.Page, s.o.Page)
	}
	var at struct {
		IP   string `json:"rank_ip"`
		Port int    `json:"rank_port"`
	}
	if err := s.get(ctx, base+"/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0", &at); err != nil {
		return nil, err
	}
	side := fmt.Sprintf("http://%s:%d", at.IP, at.Port)
	c, err := bootstrap.NewClient(side, bootstrap.ClientOptions{Attempts: 1})
	if err != nil {
		return nil, err
	}
	d, err := c.Query(ctx)
	if err := errors.Join(err, c.Close()); err != nil {
		return nil, err
	}
	return wire.RemotePrefill(side, d[0].ID, transfer), nil
}

// unlisted returns the only element of a list of one; any other value unchanged.
func unlisted(raw json.RawMessage) json.RawMessage {
	var list []json.RawMessage
	if json.Unmarshal(raw, &list) == nil && len(list) == 1 {
		return list[0]
	}
	return raw
}

func (s *SGLang) get(ctx context.Context, url string, into any) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := s.http.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != 200 {
		return fmt.Errorf("%s: status %d", url, resp.StatusCode)
	}
	return json.NewDecoder(http.MaxBytesReader(nil, resp.Body, 1<<16)).Decode(into)
}
