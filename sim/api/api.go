// SPDX-License-Identifier: Apache-2.0

// Package api is the OpenAI API of a simulated engine, as vLLM serves it: completions and
// chats with streaming, models, tokens, health, and metrics under vLLM's names.
package api

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/histogram"
	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/sim/engine"
)

// Options configures an API. A zero field means its default.
type Options struct {
	Version string
	// SameIDs keeps request ids as clients gave them, as vLLM 0.13 does: then P and D can
	// pair by them. Later releases append random characters.
	SameIDs bool
	MaxBody int64        // bytes of a request; default 64 MiB
	Log     *slog.Logger // nil discards
}

// Limits of one request.
const (
	maxID       = 1024             // bytes of an id that a client chose
	sendTimeout = 60 * time.Second // for one event, or a whole answer, to a client that does not read
)

// API serves one engine.
type API struct {
	e       *engine.Engine
	o       Options
	mux     *http.ServeMux
	created int64
	stats   stats
}

// New returns an API of an engine, which stays the caller's.
func New(e *engine.Engine, o Options) *API {
	o.MaxBody = cmp.Or(o.MaxBody, 64<<20)
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	a := &API{e: e, o: o, mux: http.NewServeMux(), created: time.Now().Unix()}
	a.stats = stats{histogram.Times(), histogram.Times(), histogram.Times()}
	reg := metrics.New(o.Version)
	labels := map[string]string{"model_name": e.Model(), "engine": "0"}
	metrics.AddWith(reg, labels, a.metrics)
	e.Collect(reg, labels)
	ok := func(w http.ResponseWriter, _ *http.Request) {}
	a.mux.HandleFunc("POST /v1/completions", a.completions)
	a.mux.HandleFunc("POST /v1/chat/completions", a.chat)
	a.mux.HandleFunc("GET /v1/models", a.models)
	a.mux.HandleFunc("GET /health", ok)
	a.mux.HandleFunc("GET /healthz", ok)
	a.mux.HandleFunc("GET /healthcheck", ok)
	a.mux.HandleFunc("/ping", ok)
	a.mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) { reply(w, 200, map[string]string{"version": o.Version}) })
	a.mux.HandleFunc("POST /tokenize", a.tokenize)
	a.mux.HandleFunc("POST /detokenize", a.detokenize)
	a.mux.HandleFunc("POST /reset_prefix_cache", a.reset)
	a.mux.Handle("GET /metrics", reg.Handler())
	return a
}

// ServeHTTP implements http.Handler.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) { a.mux.ServeHTTP(w, r) }

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the client has gone
}

type errorBody struct {
	Error struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    int     `json:"code"`
	} `json:"error"`
}

func (a *API) fail(w http.ResponseWriter, e *apiError) {
	reply(w, e.status, e.body())
}

func (e *apiError) body() (b errorBody) {
	b.Error.Message, b.Error.Type, b.Error.Code = e.message, e.kind, e.status
	if e.param != "" {
		b.Error.Param = &e.param
	}
	return b
}

// read decodes a request and checks its model.
func (a *API) read(w http.ResponseWriter, r *http.Request) (*body, *apiError) {
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, a.o.MaxBody))
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return nil, &apiError{413, "BadRequestError", "", fmt.Sprintf("the request is longer than %d bytes", a.o.MaxBody)}
		}
		return nil, badRequest("", "%v", err)
	}
	b, bad := decode(text)
	if bad == nil && b.Model != "" && b.Model != a.e.Model() {
		bad = &apiError{404, "NotFoundError", "model", fmt.Sprintf("The model `%.128s` does not exist.", b.Model)}
	}
	return b, bad
}

func (a *API) completions(w http.ResponseWriter, r *http.Request) {
	b, bad := a.read(w, r)
	var tokens []uint32
	if bad == nil {
		tokens, bad = b.prompt()
	}
	if bad != nil {
		a.fail(w, bad)
		return
	}
	a.serve(w, r, b, tokens, 16, false)
}

func (a *API) chat(w http.ResponseWriter, r *http.Request) {
	b, bad := a.read(w, r)
	if bad == nil && len(b.Messages) == 0 {
		bad = badRequest("messages", "messages is missing")
	}
	if bad != nil {
		a.fail(w, bad)
		return
	}
	tokens := tokenize(chatText(b.Messages))
	a.serve(w, r, b, tokens, max(1, a.e.MaxModel()-len(tokens)), true)
}

// ids returns the request's id for the client and for the engine.
func (a *API) ids(r *http.Request, b *body, chat bool) (shown, own string, bad *apiError) {
	id := cmp.Or(r.Header.Get("X-Request-Id"), b.RequestID, strings.ToLower(rand.Text()))
	if len(id) > maxID { // logs and connectors repeat it
		return "", "", badRequest("request_id", "request_id has %d bytes, at most %d are allowed.", len(id), maxID)
	}
	shown = "cmpl-" + id
	own = shown + "-0"
	if chat {
		shown = "chatcmpl-" + id
		own = shown
	}
	if !a.o.SameIDs {
		own += "-" + strings.ToLower(rand.Text()[:8])
	}
	return shown, own, nil
}

// serve runs a request and writes its answer.
func (a *API) serve(w http.ResponseWriter, r *http.Request, b *body, tokens []uint32, usual int, chat bool) {
	limit, bad := b.limit(usual)
	var params *wire.KVTransferParams
	if bad == nil {
		params, bad = b.params()
	}
	if n := len(tokens); bad == nil && n >= a.e.MaxModel() {
		bad = badRequest("input_tokens", "This model's maximum context length is %d tokens. However, your prompt contains %d input tokens, "+
			"which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.", a.e.MaxModel(), n)
	} else if bad == nil && limit > a.e.MaxModel()-n {
		bad = badRequest("input_tokens", "This model's maximum context length is %d tokens. However, you requested %d output tokens and your prompt "+
			"contains %d input tokens, for a total of %d tokens. Please reduce the length of the input prompt or the number of requested output tokens.",
			a.e.MaxModel(), limit, n, uint64(n)+uint64(limit))
	}
	if bad != nil {
		a.fail(w, bad)
		return
	}
	shown, own, bad := a.ids(r, b, chat)
	if bad != nil {
		a.fail(w, bad)
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel() // a client that leaves ends its request
	start := time.Now()
	s, err := a.e.Submit(ctx, engine.Request{
		ID: own, Tokens: tokens, MaxTokens: limit, Priority: b.Priority, Salt: b.Salt, SkipCache: b.SkipCache, Params: params,
	})
	if err != nil {
		a.fail(w, failure(err))
		return
	}
	an := &answer{a: a, w: w, body: b, id: shown, chat: chat, prompt: tokens, start: start}
	an.rc = http.NewResponseController(w)
	// The server's limit on reading ends with the body. Left on, it would pass for a client that leaves.
	_ = an.rc.SetReadDeadline(time.Time{}) // not every ResponseWriter has deadlines
	for {
		more, end, err := s.Next(r.Context())
		if err != nil {
			return // the client has gone
		}
		if !an.take(more, end) {
			return
		}
	}
}

// failure says an engine's error to a client.
func failure(err error) *apiError {
	switch {
	case errors.Is(err, engine.ErrTooLong):
		return badRequest("input_tokens", "%v", err)
	case errors.Is(err, engine.ErrInUse):
		return badRequest("request_id", "%v", err)
	case errors.Is(err, engine.ErrClosed):
		return &apiError{503, "ServiceUnavailable", "", "the engine is stopping"}
	}
	return &apiError{500, "InternalServerError", "", err.Error()}
}

func (a *API) models(w http.ResponseWriter, _ *http.Request) {
	reply(w, 200, map[string]any{"object": "list", "data": []any{map[string]any{
		"id": a.e.Model(), "object": "model", "created": a.created, "owned_by": "kvasir", "root": a.e.Model(), "max_model_len": a.e.MaxModel(),
	}}})
}

func (a *API) tokenize(w http.ResponseWriter, r *http.Request) {
	b, bad := a.read(w, r)
	var tokens []uint32
	switch {
	case bad != nil:
	case len(b.Messages) > 0:
		tokens = tokenize(chatText(b.Messages))
	default:
		tokens, bad = b.prompt()
	}
	if bad != nil {
		a.fail(w, bad)
		return
	}
	reply(w, 200, map[string]any{"count": len(tokens), "max_model_len": a.e.MaxModel(), "tokens": tokens, "token_strs": nil})
}

func (a *API) detokenize(w http.ResponseWriter, r *http.Request) {
	var in struct{ Tokens []uint32 }
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, a.o.MaxBody)).Decode(&in); err != nil {
		a.fail(w, badRequest("tokens", "%v", err))
		return
	}
	reply(w, 200, map[string]string{"prompt": tokenText(in.Tokens)})
}

func (a *API) reset(w http.ResponseWriter, r *http.Request) {
	if !a.e.ResetPrefixCache(r.URL.Query().Get("reset_running_requests") == "true") {
		a.fail(w, &apiError{500, "InternalServerError", "", "blocks are in use: the prefix cache was not reset"})
	}
}
