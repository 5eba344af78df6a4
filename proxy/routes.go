// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/openai"
)

// routeKind says how requests on a route are served.
type routeKind uint8

const (
	unknown    routeKind = iota // answered 404, never forwarded
	throughPD                   // served by P and D, or by an engine that does both
	atOne                       // served by an engine that does both, or by D alone
	form                        // at one engine; the body is a multipart form
	ofResponse                  // served by the engine that stores the response
	ofAnEngine                  // a GET at any engine
	refusedBy                   // refused, with a reason
	serverInfo                  // SGLang's: information about an engine, without its secrets
	aborts                      // SGLang's: ends another request
)

// routes are the paths of vLLM 0.32 that clients may use. Paths that change an engine (/v1/load_lora_adapter, /sleep,
// /reset_prefix_cache, /collective_rpc) are not among them.
var routes = map[string]routeKind{
	"/v1/completions": throughPD, "/v1/chat/completions": throughPD, "/v1/responses": throughPD, "/v1/messages": throughPD, "/inference/v1/generate": throughPD,
	"/v1/chat/completions/batch": atOne, "/v1/messages/count_tokens": atOne, "/v1/embeddings": atOne, "/v2/embed": atOne, "/pooling": atOne, "/classify": atOne,
	"/score": atOne, "/v1/score": atOne, "/rerank": atOne, "/v1/rerank": atOne, "/v2/rerank": atOne, "/tokenize": atOne, "/detokenize": atOne,
	"/invocations": atOne, "/v1/completions/render": atOne, "/v1/chat/completions/render": atOne, "/v1/completions/derender": atOne, "/v1/chat/completions/derender": atOne,
	"/v1/audio/transcriptions": form, "/v1/audio/translations": form, "/version": ofAnEngine,
	"/v1/tokenize": atOne, "/v1/detokenize": atOne, "/v1/classify": atOne, "/encode": atOne,
	"/generate": throughPD, "/model_info": ofAnEngine, "/get_model_info": ofAnEngine, "/server_info": serverInfo, "/get_server_info": serverInfo, "/abort_request": aborts,
	"/v1/realtime": refusedBy, "/v1/audio/speech": refusedBy,
}

// ofSGLang are the routes that only engines of SGLang have.
var ofSGLang = map[string]bool{
	"/v1/tokenize": true, "/v1/detokenize": true, "/v1/classify": true, "/encode": true,
	"/generate": true, "/model_info": true, "/get_model_info": true, "/server_info": true, "/get_server_info": true, "/abort_request": true,
}

// withoutKV are routes of kind atOne that compute no KV: a D of SGLang serves them, too.
var withoutKV = map[string]bool{
	"/tokenize": true, "/detokenize": true, "/v1/tokenize": true, "/v1/detokenize": true, "/v1/messages/count_tokens": true, "/v1/completions/render": true,
	"/v1/chat/completions/render": true, "/v1/completions/derender": true, "/v1/chat/completions/derender": true,
}

// reasons are the texts with which listed routes are refused.
var reasons = map[string]string{
	"/v1/realtime":     "the proxy does not speak WebSocket: ask an engine itself",
	"/v1/audio/speech": "vLLM makes no speech",
}

// routeOf returns how a path is served, and the id of the stored response that it names, if any.
func routeOf(path string) (routeKind, string) {
	if r, ok := routes[path]; ok {
		return r, ""
	}
	if id, ok := strings.CutPrefix(path, "/v1/responses/"); ok {
		id = strings.TrimSuffix(id, "/cancel")
		if id != "" && !strings.Contains(id, "/") {
			return ofResponse, id
		}
	}
	return unknown, ""
}

// aloneOf reports whether one engine must serve the whole request, although its route goes through P and D. many means that it must
// because of several prompts or answers: P's leg would not be one prompt.
func (e *exchange) aloneOf() (alone, many bool) {
	q, path := e.q, e.r.URL.Path
	is := func(at openai.Range, values ...string) bool {
		for _, v := range values {
			if string(at.Of(q.Body)) == v {
				return true
			}
		}
		return !at.Has()
	}
	api := openai.APIOf(path)
	if api != openai.Completions && e.p.o.Dialect != Mooncake && e.p.paramless[api].Load() {
		return true, false // P's answer would not tell D where the KV is
	}
	switch {
	case path == "/v1/responses": // a conversation whose state is at the engine that answers
		return !is(q.Previous, "null", `""`) || !is(q.Background, "false", "null"), false
	case path == "/v1/messages":
		return false, false
	case path == "/inference/v1/generate":
		sampling, err := openai.Scan(q.Sampling.Of(q.Body))
		many = q.Sampling.Has() && (err != nil || !sampling.OneSequence())
		return many, many
	}
	many = !q.OneSequence()
	return many, many
}

// promptOf returns the range of the body that contains the prompt.
func (e *exchange) promptOf() openai.Range {
	switch e.r.URL.Path {
	case "/v1/responses":
		return e.q.Input
	case "/inference/v1/generate":
		return e.q.TokenIDs
	case "/generate":
		if e.q.TextIn.Has() && string(e.q.TextIn.Of(e.q.Body)) != "null" {
			return e.q.TextIn
		}
		return e.q.InputIDs
	}
	if e.q.Prompt.Has() {
		return e.q.Prompt
	}
	return e.q.Messages
}

// maxResponses is the largest number of responses whose engines are remembered. Beyond it, the oldest is forgotten: requests for it are
// answered as for a response that does not exist.
const maxResponses = 1 << 16

// responses remembers, for each response of /v1/responses, which engine stores it and which key asked for it.
type responses struct {
	mu struct {
		sync.Mutex
		by    map[string]responseAt
		order []string // ring of ids, for the order
		next  int
	}
}

type responseAt struct {
	engine *backend
	who    string // key that asked; "": the proxy has no keys
}

func (r *responses) add(id string, at responseAt) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.by == nil {
		r.mu.by = make(map[string]responseAt)
	}
	if _, known := r.mu.by[id]; !known {
		if len(r.mu.order) < maxResponses {
			r.mu.order = append(r.mu.order, id)
		} else {
			delete(r.mu.by, r.mu.order[r.mu.next])
			r.mu.order[r.mu.next] = id
			r.mu.next = (r.mu.next + 1) % maxResponses
		}
	}
	r.mu.by[id] = at
}

func (r *responses) find(id, who string) *backend {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at, ok := r.mu.by[id]; ok && at.who == who {
		return at.engine
	}
	return nil
}

func (e *exchange) keyName() string {
	if e.key == nil {
		return ""
	}
	return e.key.Name
}

// maxResponseID is the largest length of a response's id, in bytes; a response with a longer id is not remembered.
const maxResponseID = 256

// noteResponse remembers that the engine b stores the response. first, the beginning of the answer, contains the response's id.
func (e *exchange) noteResponse(b *backend, first []byte) {
	if e.r.URL.Path != "/v1/responses" {
		return
	}
	i := bytes.Index(first, []byte(`"resp_`))
	if i < 0 {
		return
	}
	id, _, ok := bytes.Cut(first[i+1:min(len(first), i+1+maxResponseID)], []byte(`"`))
	if key := bytes.TrimRight(first[:i], " :"); ok && bytes.HasSuffix(key, []byte(`"id"`)) {
		e.p.responses.add(string(id), responseAt{b, e.keyName()})
	}
}

func noResponse(id string) error {
	text := "Response with id '" + id[:min(len(id), 128)] + "' not found."
	return &refusal{status: http.StatusNotFound, kind: "NotFoundError", param: "response_id", text: text, outcome: "bad_request"}
}

// bindToResponseEngine binds a request that continues a response to the engine that stores the response. The error is a *refusal.
func (e *exchange) bindToResponseEngine() error {
	id, ok := e.q.Text(e.q.Previous)
	if !ok || id == "" || e.r.URL.Path != "/v1/responses" {
		return nil
	}
	if e.want.only = e.p.responses.find(id, e.keyName()); e.want.only == nil && e.key != nil {
		return noResponse(id) // it may belong to another key
	}
	return nil
}

// serveStored serves a request about a stored response: GET, or POST to cancel it. It ignores the body of the request.
func (p *Proxy) serveStored(w http.ResponseWriter, r *http.Request, id string) {
	cancel := strings.HasSuffix(r.URL.Path, "/cancel")
	if want := map[bool]string{false: http.MethodGet, true: http.MethodPost}[cancel]; r.Method != want {
		w.Header().Set("Allow", want)
		fail(w, &refusal{status: http.StatusMethodNotAllowed, kind: "BadRequestError", text: want + " is wanted"})
		return
	}
	who := ""
	if p.o.Keys != nil {
		secret, ok := apiKey(r)
		key := p.o.Keys.Find(secret)
		if !ok || key == nil {
			failUnauthorized(w)
			return
		}
		who = key.Name
	}
	b := p.responses.find(id, who)
	if b == nil || !p.fleet.has(b) {
		failWith(w, noResponse(id))
		return
	}
	p.forward(w, r, b)
}

func failUnauthorized(w http.ResponseWriter) {
	fail(w, &refusal{status: http.StatusUnauthorized, kind: "AuthenticationError", text: "the API key is missing or unknown"})
}

// forward sends a small request without a body to an engine, and passes the answer back. An engine that stays silent for longer than
// Options.FirstByte, or within an answer for longer than Options.Stall, ends the request.
func (p *Proxy) forward(w http.ResponseWriter, r *http.Request, b *backend) {
	if refuseQuery(w, r) {
		return
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	defer context.AfterFunc(b.life(), func() { cancel(errSilent) })()
	late := time.AfterFunc(p.o.FirstByte, func() { cancel(errLate) })
	defer late.Stop()
	target := b.url + r.URL.EscapedPath()
	if r.URL.RawQuery != "" {
		target += "?" + r.URL.RawQuery
	}
	q, err := http.NewRequestWithContext(ctx, r.Method, target, nil)
	if err != nil {
		fail(w, &refusal{status: http.StatusBadRequest, kind: "BadRequestError", text: "the path is malformed"})
		return
	}
	if key := p.keyFor(b); key != "" {
		q.Header.Set("Authorization", "Bearer "+key)
	} else if p.o.Keys == nil && r.Header.Get("Authorization") != "" {
		q.Header.Set("Authorization", r.Header.Get("Authorization"))
	}
	resp, err := p.client.Do(q)
	if err != nil {
		p.o.Log.Warn("an engine does not answer", "engine", b.url, "path", r.URL.Path, "err", cmp.Or(context.Cause(ctx), err))
		if errors.Is(context.Cause(ctx), errLate) {
			fail(w, &refusal{status: http.StatusGatewayTimeout, kind: "GatewayTimeout", text: "the engine did not answer in time"})
			return
		}
		fail(w, unavailable("the engine does not answer"))
		return
	}
	defer resp.Body.Close()
	if kind := resp.Header.Get("Content-Type"); kind != "" {
		w.Header().Set("Content-Type", kind)
	}
	w.WriteHeader(resp.StatusCode)
	rc := http.NewResponseController(w)
	for buf := make([]byte, 16<<10); ; {
		late.Reset(p.o.Stall)
		n, err := resp.Body.Read(buf)
		late.Stop()
		_ = rc.SetWriteDeadline(time.Now().Add(p.o.SendTimeout)) // not every ResponseWriter has deadlines
		if _, werr := w.Write(buf[:n]); werr != nil {
			return
		}
		_ = rc.Flush() // the client may have gone
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			panic(http.ErrAbortHandler) // a cut answer is incomplete
		}
	}
}

// serveOfAnEngine passes a GET on to an engine that is well.
func (p *Proxy) serveOfAnEngine(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.Method != http.MethodGet:
		w.Header().Set("Allow", http.MethodGet)
		fail(w, &refusal{status: http.StatusMethodNotAllowed, kind: "BadRequestError", text: "GET is wanted"})
		return
	case !p.allowed(r):
		failUnauthorized(w)
		return
	}
	for _, b := range p.fleet.engines() {
		if b.well.Load() && b.role != prefill && (!ofSGLang[r.URL.Path] || b.kind() == sglangKind) {
			p.forward(w, r, b)
			return
		}
	}
	fail(w, unavailable("no engine is well"))
}

// formModel returns the model that a multipart form names; "": none. It refuses a form that an engine might read differently: vLLM
// decodes the names of parts in the form's charset, takes the last of several parts with one name, and accepts any disposition.
func formModel(contentType string, body []byte) (model string, err error) {
	bad := func(text string) error {
		return &refusal{status: http.StatusBadRequest, kind: "BadRequestError", text: text, outcome: "bad_request"}
	}
	kind, params, err := mime.ParseMediaType(contentType)
	if err != nil || kind != "multipart/form-data" || params["boundary"] == "" {
		return "", bad("a multipart form is wanted")
	}
	if charset, ok := params["charset"]; ok && !strings.EqualFold(charset, "utf-8") {
		return "", bad("the form must be in utf-8")
	}
	for parts := multipart.NewReader(bytes.NewReader(body), params["boundary"]); ; {
		part, err := parts.NextRawPart()
		if errors.Is(err, io.EOF) {
			return model, nil
		}
		if err != nil || len(part.Header["Content-Disposition"]) != 1 || part.FormName() == "" {
			return "", bad("the form is malformed")
		}
		var text []byte
		switch part.FormName() {
		case "model":
			text, err = io.ReadAll(io.LimitReader(part, 1<<10))
			model = string(text)
		case "vllm_xargs":
			if text, err = io.ReadAll(part); err == nil { // a part has at most the body's size
				if err := checkArgs("vllm_xargs", text); err != nil {
					return "", err
				}
			}
		}
		if err != nil {
			return "", bad("the form is malformed")
		}
	}
}

// scannedForm does what scanned does, for a multipart form, which the proxy does not change.
func (e *exchange) scannedForm() (err error) {
	name, err := formModel(e.r.Header.Get("Content-Type"), e.body.b)
	if err != nil {
		return err
	}
	if name == "" {
		if name, err = e.p.onlyModel(anyKind); err != nil {
			return err
		}
	}
	e.q, _ = openai.Scan([]byte("{}"))
	e.want.model, e.want.bytes = name, len(e.body.b)
	return nil
}

// nested returns an edit of the field key, whose value is `object`, that makes the given edits inside that object.
func nested(key string, object []byte, edits ...openai.Edit) []openai.Edit {
	r, err := openai.Scan(object)
	if err != nil {
		return nil // not an object: P refuses it
	}
	pieces, _ := r.Apply(edits...)
	return []openai.Edit{{Key: key, Value: bytes.Join(pieces, nil)}}
}
