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
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/histogram"
	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/sim/engine"
)

// Options configures an API. A zero field means its default.
type Options struct {
	Version string
	// SameIDs keeps request ids as clients sent them, as vLLM 0.13 does, so that P and D can pair by them. Later releases append random
	// characters.
	SameIDs bool
	// Ranks is the number of data-parallel ranks that clients may name; default 1.
	Ranks int
	// KeepAlive is how long a stream may have no event before it gets a comment: vLLM's --sse-keep-alive-interval; 0: it gets none.
	KeepAlive time.Duration
	// Metrics adds figures to the registry of /metrics, of components other than the engine. nil: there are no such figures.
	Metrics func(*metrics.Registry)
	MaxBody int64        // longest request; default 64 MiB
	Log     *slog.Logger // nil: nothing is logged
}

// Limits of one request.
const (
	maxID       = 1024             // longest id that a client may choose, in bytes; a request with a longer one gets an error
	sendTimeout = 60 * time.Second // limit for one event, or a whole answer, to a client that does not read
)

// API is the HTTP API of one engine.
type API struct {
	e       *engine.Engine
	o       Options
	mux     *http.ServeMux
	created int64
	stats   stats

	adapters  adapters
	responses responseStore
}

// New returns the API of an engine. The caller must close the engine.
func New(e *engine.Engine, o Options) *API {
	o.MaxBody = cmp.Or(o.MaxBody, 64<<20)
	o.Ranks = max(o.Ranks, 1)
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	a := &API{e: e, o: o, mux: http.NewServeMux(), created: time.Now().Unix()}
	a.stats = stats{histogram.Times(), histogram.Times(), histogram.Times()}
	reg := metrics.New(o.Version)
	labels := map[string]string{"model_name": e.Model(), "engine": "0"}
	metrics.AddWith(reg, labels, a.metrics)
	e.Collect(reg, labels)
	if o.Metrics != nil {
		o.Metrics(reg)
	}
	ok := func(w http.ResponseWriter, _ *http.Request) {}
	post := func(path string, f http.HandlerFunc) { a.mux.HandleFunc("POST "+path, a.json(f)) }
	post("/v1/completions", a.completions)
	post("/v1/chat/completions", a.chat)
	post("/v1/chat/completions/batch", a.batch)
	post("/v1/responses", a.respond)
	a.mux.HandleFunc("GET /v1/responses/{id}", a.response)
	a.mux.HandleFunc("POST /v1/responses/{id}/cancel", a.response)
	post("/v1/messages", a.message)
	post("/v1/messages/count_tokens", a.countTokens)
	post("/inference/v1/generate", a.generate)
	post("/v1/load_lora_adapter", a.loadAdapter)
	post("/v1/unload_lora_adapter", a.unloadAdapter)
	a.mux.HandleFunc("GET /v1/models", a.models)
	a.mux.HandleFunc("GET /health", ok)
	a.mux.HandleFunc("GET /healthz", ok)
	a.mux.HandleFunc("GET /healthcheck", ok)
	a.mux.HandleFunc("/ping", ok)
	a.mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) { reply(w, 200, map[string]string{"version": o.Version}) })
	post("/tokenize", a.tokenize)
	post("/detokenize", a.detokenize)
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

// json returns a handler that refuses other media types than application/json, as vLLM does.
func (a *API) json(f http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		kind, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";")
		if !strings.EqualFold(strings.TrimSpace(kind), "application/json") {
			a.fail(w, badRequest("", "Unsupported Media Type: Only 'application/json' is allowed"))
			return
		}
		f(w, r)
	}
}

// text reads the body of a request.
func (a *API) text(w http.ResponseWriter, r *http.Request) ([]byte, *apiError) {
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, a.o.MaxBody))
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return nil, &apiError{413, "BadRequestError", "", fmt.Sprintf("the request is longer than %d bytes", a.o.MaxBody)}
		}
		return nil, badRequest("", "%v", err)
	}
	// The read deadline ends with the body. If it stayed, its passing would look as if the client had left.
	_ = http.NewResponseController(w).SetReadDeadline(time.Time{}) // not every ResponseWriter has deadlines
	return text, nil
}

// read decodes the body of a request and checks the model in it.
func (a *API) read(w http.ResponseWriter, r *http.Request) (*body, *apiError) {
	text, bad := a.text(w, r)
	if bad != nil {
		return nil, bad
	}
	b, bad := decode(text)
	if bad == nil {
		bad = a.known(b.Model)
	}
	return b, bad
}

// known returns an error for a model that the engine does not have.
func (a *API) known(model string) *apiError {
	if model != "" && model != a.e.Model() && !a.adapters.has(model) {
		return &apiError{404, "NotFoundError", "model", fmt.Sprintf("The model `%.128s` does not exist.", model)}
	}
	return nil
}

func (a *API) completions(w http.ResponseWriter, r *http.Request) {
	b, bad := a.read(w, r)
	var prompts [][]uint32
	var texts []string
	if bad == nil {
		bad = b.check(false)
	}
	if bad == nil {
		prompts, texts, bad = b.prompts()
	}
	if bad != nil {
		a.fail(w, bad)
		return
	}
	a.serve(w, r, b, prompts, texts, false)
}

func (a *API) chat(w http.ResponseWriter, r *http.Request) {
	b, bad := a.read(w, r)
	if bad == nil && len(b.Messages) == 0 {
		bad = badRequest("messages", "messages is missing")
	}
	if bad == nil {
		bad = b.check(true)
	}
	if bad != nil {
		a.fail(w, bad)
		return
	}
	a.serve(w, r, b, [][]uint32{tokenize(chatText(b.Messages))}, nil, true)
}

// batch serves a chat of several conversations, each of which gets an answer.
func (a *API) batch(w http.ResponseWriter, r *http.Request) {
	text, bad := a.text(w, r)
	var list struct {
		Messages [][]message `json:"messages"`
	}
	var rest map[string]json.RawMessage
	if bad == nil && (json.Unmarshal(text, &rest) != nil || json.Unmarshal(text, &list) != nil || len(list.Messages) == 0) {
		bad = badRequest("messages", "messages must be a list of conversations")
	}
	var b *body
	if bad == nil {
		delete(rest, "messages")
		text, _ = json.Marshal(rest) // it has just been decoded
		b, bad = decode(text)
	}
	var prompts [][]uint32
	if bad == nil {
		for _, messages := range list.Messages {
			if bad = checkMessages(messages); bad == nil && len(messages) == 0 {
				bad = badRequest("messages", "a conversation is empty")
			}
			if bad != nil {
				break
			}
			prompts = append(prompts, tokenize(chatText(messages)))
		}
	}
	if bad == nil {
		bad = a.known(b.Model)
	}
	if bad == nil && (bool(b.Stream) || b.answers() != 1) {
		bad = badRequest("stream", "a batch is neither streamed nor has n above 1")
	}
	if bad == nil {
		bad = b.check(true)
	}
	if bad != nil {
		a.fail(w, bad)
		return
	}
	a.serve(w, r, b, prompts, nil, true)
}

// ids returns the id of a request, as the client gets it and as the engine's ids begin with it.
func (a *API) ids(r *http.Request, b *body, prefix string) (shown string, bad *apiError) {
	id := cmp.Or(r.Header.Get("X-Request-Id"), b.RequestID, strings.ToLower(rand.Text()))
	if len(id) > maxID { // logs and connectors repeat it
		return "", badRequest("request_id", "request_id has %d bytes, at most %d are allowed.", len(id), maxID)
	}
	return prefix + id, nil
}

// answerID returns the engine's id for one answer to one prompt of a request, whose id is `shown`. answers is how many each prompt gets.
func (a *API) answerID(shown string, chat bool, prompt, answer, answers int) string {
	if !chat {
		shown += fmt.Sprint("-", prompt)
	} else if prompt > 0 {
		shown += fmt.Sprint("_", prompt)
	}
	if answers > 1 {
		shown = fmt.Sprint(answer, "_", shown)
	}
	if !a.o.SameIDs {
		shown += "-" + strings.ToLower(rand.Text()[:8])
	}
	return shown
}

// rank returns an error for a data-parallel rank that does not exist. Like vLLM, it ignores a value that is not a number.
func (a *API) rank(r *http.Request) *apiError {
	if n, err := strconv.Atoi(r.Header.Get("X-Data-Parallel-Rank")); err == nil && (n < 0 || n >= a.o.Ranks) {
		return badRequest("", "data_parallel_rank %d is out of range [0, %d).", n, a.o.Ranks)
	}
	return nil
}

// begin submits a request with some prompts to the engine, each with as many answers as the body asks for. All of them end when ctx
// ends. `usual` is how many tokens a completion generates if its body doesn't say; a chat then gets the rest of the longest sequence.
// `shown` is the id of the request, from which the ids of its answers in the engine are made.
//
// All of them get the request's kv_transfer_params, as in vLLM: one transfer id then belongs to several.
func (a *API) begin(ctx context.Context, r *http.Request, b *body, prompts [][]uint32, usual int, shown string, chat bool) ([]*sequence, *apiError) {
	if bad := a.rank(r); bad != nil {
		return nil, bad
	}
	limits := make([]int, len(prompts))
	for i, tokens := range prompts {
		n, most := len(tokens), a.e.MaxModel()
		normal := usual
		if chat {
			normal = max(1, most-n)
		}
		limit, bad := b.limit(normal)
		if bad == nil && n >= most {
			bad = badRequest("input_tokens", "This model's maximum context length is %d tokens. However, your prompt contains %d input tokens, "+
				"which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.", most, n)
		} else if bad == nil && limit > most-n {
			bad = badRequest("input_tokens", "This model's maximum context length is %d tokens. However, you requested %d output tokens and your prompt "+
				"contains %d input tokens, for a total of %d tokens. Please reduce the length of the input prompt or the number of requested output tokens.",
				most, limit, n, uint64(n)+uint64(limit))
		}
		if bad != nil {
			return nil, bad
		}
		limits[i] = limit
	}
	var seqs []*sequence
	for i, tokens := range prompts {
		for k := range b.answers() {
			params, bad := b.params()
			if bad != nil {
				return nil, bad
			}
			q := &sequence{index: len(seqs), prompt: tokens}
			var err error
			q.stream, err = a.e.Submit(ctx, engine.Request{
				ID: a.answerID(shown, chat, i, k, b.answers()), Tokens: tokens, MaxTokens: limits[i], Priority: b.Priority, Salt: a.adapters.salt(b.Model, b.Salt),
				SkipCache: b.SkipCache, Params: params, Stop: b.StopIDs,
			})
			if err != nil {
				return nil, failure(err)
			}
			seqs = append(seqs, q)
		}
	}
	return seqs, nil
}

// follow calls take with the tokens and the end of each sequence as they come, until take returns false. In pauses of Options.KeepAlive
// it calls idle; nil: it does not.
func (a *API) follow(ctx context.Context, seqs []*sequence, idle func() bool, take func(q *sequence, more []uint32, end *engine.End) bool) {
	if len(seqs) == 1 && (idle == nil || a.o.KeepAlive == 0) {
		for {
			more, end, err := seqs[0].stream.Next(ctx)
			if err != nil || !take(seqs[0], more, end) {
				return // the client has gone, or everything is written
			}
		}
	}
	type news struct {
		q    *sequence
		more []uint32
		end  *engine.End
	}
	ctx, cancel := context.WithCancel(ctx)
	come := make(chan news)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	for _, q := range seqs {
		wg.Go(func() {
			for {
				more, end, err := q.stream.Next(ctx)
				if err != nil {
					return
				}
				select {
				case come <- news{q, more, end}:
				case <-ctx.Done():
					return
				}
				if end != nil {
					return
				}
			}
		})
	}
	var beat <-chan time.Time
	if idle != nil && a.o.KeepAlive > 0 {
		t := time.NewTicker(a.o.KeepAlive)
		defer t.Stop()
		beat = t.C
	}
	for {
		select {
		case n := <-come:
			if !take(n.q, n.more, n.end) {
				return
			}
		case <-beat:
			if !idle() {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// serve runs a request of completions or chat and writes its answer.
func (a *API) serve(w http.ResponseWriter, r *http.Request, b *body, prompts [][]uint32, texts []string, chat bool) {
	prefix := "cmpl-"
	if chat {
		prefix = "chatcmpl-"
	}
	shown, bad := a.ids(r, b, prefix)
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel() // when the client leaves, its request ends
	start := time.Now()
	var seqs []*sequence
	if bad == nil {
		seqs, bad = a.begin(ctx, r, b, prompts, 16, shown, chat)
	}
	if bad != nil {
		a.fail(w, bad)
		return
	}
	for i, q := range seqs {
		if texts != nil {
			q.text = texts[i/b.answers()]
		}
	}
	an := &answer{a: a, w: w, body: b, id: shown, chat: chat, start: start, seqs: seqs, rc: http.NewResponseController(w)}
	var idle func() bool
	if b.Stream {
		idle = an.comment
	}
	a.follow(r.Context(), seqs, idle, an.take)
}

// failure returns the error that a client gets for an error of the engine.
func failure(err error) *apiError {
	switch {
	case errors.Is(err, engine.ErrTooLong), errors.Is(err, engine.ErrEmpty):
		return badRequest("input_tokens", "%v", err)
	case errors.Is(err, engine.ErrInUse):
		return badRequest("request_id", "%v", err)
	case errors.Is(err, engine.ErrClosed):
		return &apiError{503, "ServiceUnavailable", "", "the engine is stopping"}
	}
	return &apiError{500, "InternalServerError", "", err.Error()}
}

func (a *API) models(w http.ResponseWriter, _ *http.Request) {
	list := []any{map[string]any{
		"id": a.e.Model(), "object": "model", "created": a.created, "owned_by": "kvasir", "root": a.e.Model(), "parent": nil, "max_model_len": a.e.MaxModel(),
	}}
	for _, name := range a.adapters.names() {
		list = append(list, map[string]any{"id": name, "object": "model", "created": a.created, "owned_by": "kvasir", "root": name, "parent": a.e.Model()})
	}
	reply(w, 200, map[string]any{"object": "list", "data": list})
}

func (a *API) tokenize(w http.ResponseWriter, r *http.Request) {
	b, bad := a.read(w, r)
	var tokens []uint32
	switch {
	case bad != nil:
	case len(b.Messages) > 0:
		tokens = tokenize(chatText(b.Messages))
	default:
		var prompts [][]uint32
		if prompts, _, bad = b.prompts(); bad == nil && len(prompts) > 1 {
			bad = badRequest("prompt", "one prompt at a time, got %d", len(prompts))
		}
		if bad == nil {
			tokens = prompts[0]
		}
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
