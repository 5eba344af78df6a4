// SPDX-License-Identifier: Apache-2.0

// Command mockengine is an OpenAI-compatible engine that costs almost nothing, to measure what stands in front of it.
//
// It answers /v1/completions and /v1/chat/completions (JSON and SSE), /v1/models, /health, /metrics, the tokenizing
// routes and the small discovery endpoints that routers probe, after a configurable delay. Request bodies are scanned once, not decoded.
// Given --bootstrap it also serves the Mooncake bootstrap GET /query with its engine id.
//
// With --sglang prefill or decode it is a P or D of SGLang 0.5.23: it has the routes that SGLang's routers ask for, its bootstrap servers
// answer GET /route and /health, and the room of a request must be one that no request in progress has; its bootstrap server must be named.
// A request without a room, as from a client without a router, counts as one of neither kind.
//
// Every request body is checked: if it carries "user":"crc:<hex>", the CRC-32 of the longest JSON string in the body
// must match, else 400. The same word comes back in the first token, so that a client can tell answers apart.
//
// Besides the engine API: GET /mock/stats, GET /mock/legs (the last requests with start, end, aborted), POST /mock/reset,
// POST /mock/config {"ttft_ms":…, "tpot_ms":…, "engine_id":…}.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

type listFlag []string

func (l *listFlag) String() string     { return strings.Join(*l, ",") }
func (l *listFlag) Set(s string) error { *l = append(*l, s); return nil }

// body is what the scanner takes out of a request, without copying.
type body struct {
	top     map[string][]byte // raw values of the top-level keys of interest
	longest []byte            // contents of the longest string literal, quotes excluded
}

var wanted = map[string]bool{
	"stream": true, "max_tokens": true, "max_completion_tokens": true, "kv_transfer_params": true,
	"user": true, "stream_options": true, "bootstrap_room": true, "bootstrap_host": true, "bootstrap_port": true, "n": true, "request_id": true,
}

var errJSON = errors.New("malformed JSON body")

// endOfString returns the index of the closing quote of the literal that opens at b[i].
func endOfString(b []byte, i int) int {
	for j := i + 1; ; {
		k := bytes.IndexByte(b[j:], '"')
		if k < 0 {
			return -1
		}
		j += k
		n := 0
		for b[j-1-n] == '\\' {
			n++
		}
		if n%2 == 0 {
			return j
		}
		j++
	}
}

// scan walks one JSON object, keeping raw values of wanted top-level keys. It balances brackets; it is not a validator.
func scan(b []byte) (*body, error) {
	out := &body{top: map[string][]byte{}}
	b = bytes.TrimSpace(b)
	if len(b) < 2 || b[0] != '{' || b[len(b)-1] != '}' {
		return nil, errJSON
	}
	depth, key, valueAt := 0, "", -1
	closeValue := func(i int) {
		if key != "" && valueAt >= 0 && wanted[key] {
			out.top[key] = bytes.TrimSpace(b[valueAt:i])
		}
		key, valueAt = "", -1
	}
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '{', '[':
			depth++
		case '}', ']':
			depth--
			if depth == 0 {
				closeValue(i)
			}
		case ',':
			if depth == 1 {
				closeValue(i)
			}
		case ':':
			if depth == 1 && valueAt < 0 {
				valueAt = i + 1
			}
		case '"':
			j := endOfString(b, i)
			if j < 0 {
				return nil, errJSON
			}
			s := b[i+1 : j]
			if depth == 1 && valueAt < 0 {
				key = string(s)
			} else if len(s) > len(out.longest) {
				out.longest = s
			}
			i = j
		}
	}
	if depth != 0 {
		return nil, errJSON
	}
	return out, nil
}

type leg struct {
	Path     string  `json:"path"`
	Kind     string  `json:"kind"` // prefill, decode, plain
	StartMS  float64 `json:"start_ms"`
	EndMS    float64 `json:"end_ms"`
	Tokens   int     `json:"tokens"`
	Aborted  bool    `json:"aborted"`
	Status   int     `json:"status"`
	KVParams string  `json:"kv_transfer_params,omitempty"`
	Extra    string  `json:"extra,omitempty"`
	XReq     string  `json:"x_request_id,omitempty"`
}

type engine struct {
	model, name string
	engineID    atomic.Pointer[string]
	ttft, tpot  atomic.Int64
	kvCheck     string
	kvHang      time.Duration
	keepLegs    int
	verbose     bool
	noTokens    bool
	peerInfo    string
	sglang      string   // prefill, decode, or empty
	rooms       sync.Map // of requests in progress

	in, out, reqs, aborted, bad, prefills, decodes, stale atomic.Int64
	inflight                                              atomic.Int64
	mu                                                    sync.Mutex
	paths                                                 map[string]int64
	byAddress                                             map[string]int64 // requests of each address that listens
	legs                                                  []leg
	queries                                               atomic.Int64
}

var bufs = sync.Pool{New: func() any { return bytes.NewBuffer(make([]byte, 0, 64<<10)) }}

func nowMS() float64 { return float64(time.Now().UnixMicro()) / 1000 }

func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func (e *engine) fail(w http.ResponseWriter, status int, msg string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"error":{"message":%q,"type":"mock","code":%d}}`, msg, status)
}

// knows asks the bootstrap server at addr whether it still lists id.
func knows(ctx context.Context, addr, id string) bool {
	req, err := http.NewRequestWithContext(ctx, "GET", addr+"/query", nil)
	if err != nil {
		return false
	}
	req.Header.Set(ownQuery, "1")
	r, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	defer r.Body.Close()
	var m map[string]struct {
		EngineID string `json:"engine_id"`
	}
	if json.NewDecoder(io.LimitReader(r.Body, 1<<20)).Decode(&m) != nil {
		return false
	}
	for _, v := range m {
		// vLLM appends _dp<rank> to the id in some set-ups; the mock's ids never contain one another.
		if v.EngineID == id {
			return true
		}
	}
	return false
}

func (e *engine) complete(w http.ResponseWriter, r *http.Request, chat bool) {
	e.inflight.Add(1)
	defer e.inflight.Add(-1)
	l := leg{Path: r.URL.Path, Kind: "plain", StartMS: nowMS(), Status: 200, XReq: r.Header.Get("X-Request-Id")}
	buf := bufs.Get().(*bytes.Buffer)
	defer bufs.Put(buf)
	buf.Reset()
	if n := r.ContentLength; n > 0 && n < 64<<20 {
		buf.Grow(int(n) + 512)
	}
	_, err := buf.ReadFrom(http.MaxBytesReader(w, r.Body, 64<<20))
	e.in.Add(int64(buf.Len()))
	e.reqs.Add(1)
	e.mu.Lock()
	e.byAddress[r.Context().Value(http.LocalAddrContextKey).(net.Addr).String()]++
	e.mu.Unlock()
	defer func() {
		if r.Context().Err() != nil {
			l.Aborted = true
			e.aborted.Add(1)
		}
		if e.keepLegs > 0 {
			l.EndMS = nowMS()
			e.mu.Lock()
			e.legs = append(e.legs, l)
			if len(e.legs) > e.keepLegs {
				e.legs = e.legs[len(e.legs)-e.keepLegs:]
			}
			e.mu.Unlock()
		}
	}()
	if err != nil {
		l.Status = 400
		e.fail(w, 400, err.Error())
		return
	}
	b, err := scan(buf.Bytes())
	if err != nil {
		e.bad.Add(1)
		l.Status = 400
		e.fail(w, 400, err.Error())
		return
	}
	word := strings.Trim(string(b.top["user"]), `"`)
	if h, ok := strings.CutPrefix(word, "crc:"); ok {
		if got := fmt.Sprintf("%08x", crc32.ChecksumIEEE(b.longest)); got != h {
			e.bad.Add(1)
			l.Status = 400
			e.fail(w, 400, "prompt checksum mismatch: "+got+" instead of "+h)
			return
		}
	}
	n := 16
	for _, k := range []string{"max_tokens", "max_completion_tokens"} {
		if v, ok := b.top[k]; ok {
			if i, err := strconv.Atoi(string(v)); err == nil && i > 0 && i <= 1<<20 {
				n = i
			}
		}
	}
	var kv struct {
		DoRemoteDecode  bool    `json:"do_remote_decode"`
		DoRemotePrefill bool    `json:"do_remote_prefill"`
		TransferID      *string `json:"transfer_id,omitempty"`
		RemoteEngineID  string  `json:"remote_engine_id"`
		RemoteBootstrap string  `json:"remote_bootstrap_addr"`
	}
	if raw := b.top["kv_transfer_params"]; len(raw) > 0 {
		_ = json.Unmarshal(raw, &kv)
		if e.keepLegs > 0 {
			l.KVParams = string(raw)
		}
	}
	if raw := b.top["bootstrap_room"]; len(raw) > 0 && e.keepLegs > 0 {
		l.Extra = "bootstrap_room=" + string(raw)
	}
	switch {
	case kv.DoRemoteDecode:
		l.Kind = "prefill"
		e.prefills.Add(1)
	case kv.DoRemotePrefill:
		l.Kind = "decode"
		e.decodes.Add(1)
	}
	end, wrong := e.enterRoom(b, &l)
	if wrong != "" {
		e.bad.Add(1)
		l.Status = 400
		e.fail(w, 400, wrong)
		return
	}
	defer end()
	ctx := r.Context()
	if l.Kind == "decode" && e.sglang == "" && e.kvCheck != "off" && !knows(ctx, kv.RemoteBootstrap, kv.RemoteEngineID) {
		e.stale.Add(1)
		if e.kvCheck == "hang" && !sleep(ctx, e.kvHang) {
			return
		}
		l.Status = 500
		e.fail(w, 500, "remote engine id "+kv.RemoteEngineID+" is not known at "+kv.RemoteBootstrap)
		return
	}
	if !sleep(ctx, time.Duration(e.ttft.Load())) {
		return
	}
	stream := string(b.top["stream"]) == "true"
	obj, piece := "text_completion", `"text":"%s","logprobs":null`
	if chat {
		obj, piece = "chat.completion", `"message":{"role":"assistant","content":"%s"}`
		if stream {
			obj, piece = "chat.completion.chunk", `"delta":{"content":"%s"}`
		}
	}
	head := `{"id":"cmpl-mock","object":"` + obj + `","created":1700000000,"model":"` + e.model + `","choices":[{"index":0,`
	// About four characters per token is close enough for a usage figure that only has to be passed through.
	prompt := max(1, len(b.longest)/4)
	usage := fmt.Sprintf(`{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":null}`, prompt, prompt+n, n)
	tpot := time.Duration(e.tpot.Load())
	if !stream {
		if !sleep(ctx, tpot*time.Duration(n-1)) {
			return
		}
		params := "null"
		if kv.DoRemoteDecode {
			tid := ""
			if kv.TransferID != nil {
				tid = *kv.TransferID
			}
			params = fmt.Sprintf(`{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":%q,"remote_block_ids":[[1,2,3]],`+
				`"remote_host":"127.0.0.1","remote_port":5600,"tp_size":1,"transfer_id":%q}`, *e.engineID.Load(), tid)
		}
		l.Tokens = n
		s := head + fmt.Sprintf(piece, word+strings.Repeat(" tok", n-1)) + `,"finish_reason":"length"}],"usage":` + usage + `,"kv_transfer_params":` + params + `}`
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", strconv.Itoa(len(s)))
		k, _ := io.WriteString(w, s)
		e.out.Add(int64(k))
		return
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	f := w.(http.Flusher)
	first := "data: " + head + fmt.Sprintf(piece, word) + `,"finish_reason":null}]}` + "\n\n"
	mid := []byte("data: " + head + fmt.Sprintf(piece, " tok") + `,"finish_reason":null}]}` + "\n\n")
	last := "data: " + head + fmt.Sprintf(piece, " tok") + `,"finish_reason":"length"}]}` + "\n\n"
	for i := range n {
		if i > 0 && !sleep(ctx, tpot) {
			return
		}
		var k int
		var err error
		switch {
		case i == n-1 && n > 1:
			k, err = io.WriteString(w, last)
		case i == 0:
			k, err = io.WriteString(w, first)
		default:
			k, err = w.Write(mid)
		}
		e.out.Add(int64(k))
		if err != nil {
			l.Aborted = true
			return
		}
		l.Tokens++
		f.Flush()
	}
	if bytes.Contains(b.top["stream_options"], []byte("true")) {
		k, _ := io.WriteString(w, `data: {"id":"cmpl-mock","object":"`+obj+`","created":1700000000,"model":"`+e.model+`","choices":[],"usage":`+usage+"}\n\n")
		e.out.Add(int64(k))
	}
	k, _ := io.WriteString(w, "data: [DONE]\n\n")
	e.out.Add(int64(k))
}

func reply(w http.ResponseWriter, s string) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, s)
}

// ownQuery marks the mock decode engine's bootstrap queries, so that /mock/stats counts those of routers only.
const ownQuery = "X-Mock-Engine"

// tokens answers the tokenizing routes of vLLM (/tokenize, /v1/completions/render, /v1/chat/completions/render), which some routers ask for every
// prompt: one id per four bytes of the longest string in the body, a function of these bytes, so that equal prefixes give equal ids.
func (e *engine) tokens(w http.ResponseWriter, r *http.Request) {
	buf := bufs.Get().(*bytes.Buffer)
	defer bufs.Put(buf)
	buf.Reset()
	if n := r.ContentLength; n > 0 && n < 64<<20 {
		buf.Grow(int(n) + 512)
	}
	if _, err := buf.ReadFrom(http.MaxBytesReader(w, r.Body, 64<<20)); err != nil {
		e.fail(w, 400, err.Error())
		return
	}
	e.in.Add(int64(buf.Len()))
	if e.noTokens {
		http.NotFound(w, r)
		return
	}
	b, err := scan(buf.Bytes())
	if err != nil {
		e.fail(w, 400, err.Error())
		return
	}
	n := (len(b.longest) + 3) / 4
	out := make([]byte, 0, 7*n+512)
	switch r.URL.Path {
	case "/tokenize":
		out = fmt.Appendf(out, `{"count":%d,"max_model_len":1048576,"tokens":[`, n)
	case "/v1/completions/render":
		out = append(out, `[{"request_id":"cmpl-render","token_ids":[`...)
	default:
		out = append(out, `{"request_id":"chatcmpl-render","token_ids":[`...)
	}
	for i := 0; i < len(b.longest); i += 4 {
		var h uint32 = 2166136261
		for _, c := range b.longest[i:min(i+4, len(b.longest))] {
			h = (h ^ uint32(c)) * 16777619
		}
		if i > 0 {
			out = append(out, ',')
		}
		out = strconv.AppendUint(out, uint64(h%150000), 10)
	}
	switch r.URL.Path {
	case "/tokenize":
		out = append(out, `],"token_strs":null}`...)
	case "/v1/completions/render":
		out = fmt.Appendf(out, `],"features":null,"sampling_params":{"max_tokens":16,"temperature":0.0},"model":%q,"stream":false,"priority":0}]`, e.model)
	default:
		out = fmt.Appendf(out, `],"features":null,"sampling_params":{"max_tokens":16,"temperature":0.0},"model":%q,"stream":false,"priority":0}`, e.model)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(len(out)))
	k, _ := w.Write(out)
	e.out.Add(int64(k))
}

func (e *engine) query(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get(ownQuery) == "" {
		e.queries.Add(1)
	}
	reply(w, fmt.Sprintf(`{"0":{"engine_id":%q,"worker_addr":{"0":{"0":"tcp://127.0.0.1:1"}}}}`, *e.engineID.Load()))
}

func (e *engine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/v1/completions":
		e.complete(w, r, false)
		return
	case "/v1/chat/completions":
		e.complete(w, r, true)
		return
	}
	e.mu.Lock()
	e.paths[r.Method+" "+r.URL.Path]++
	e.mu.Unlock()
	if e.verbose && !strings.HasPrefix(r.URL.Path, "/mock/") {
		log.Printf("%s %s %s", e.name, r.Method, r.URL)
	}
	if e.sglang != "" && e.sglangPaths(w, r) {
		return
	}
	switch r.URL.Path {
	case "/tokenize", "/v1/completions/render", "/v1/chat/completions/render":
		e.tokens(w, r)
	case "/health", "/ping", "/health_generate", "/ready":
		w.WriteHeader(200)
	case "/v1/models":
		reply(w, fmt.Sprintf(`{"object":"list","data":[{"id":%q,"object":"model","created":1700000000,"owned_by":"vllm","root":%q,"parent":null,"max_model_len":1048576}]}`, e.model, e.model))
	case "/version":
		reply(w, `{"version":"0.33.0"}`)
	case "/server_info", "/get_server_info":
		if e.peerInfo == "" {
			http.NotFound(w, r)
			return
		}
		reply(w, e.peerInfo)
	case "/metrics":
		w.Header().Set("Content-Type", "text/plain; version=0.0.4")
		n := e.inflight.Load()
		fmt.Fprintf(w, "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=%q} %d\n# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{model_name=%q} 0\n# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{model_name=%q} 0.1\n", e.model, n, e.model, e.model)
	case "/query":
		e.query(w, r)
	case "/mock/stats":
		e.mu.Lock()
		defer e.mu.Unlock()
		_ = json.NewEncoder(w).Encode(map[string]any{
			"name": e.name, "engine_id": *e.engineID.Load(), "requests": e.reqs.Load(), "inflight": e.inflight.Load(),
			"bytes_in": e.in.Load(), "bytes_out": e.out.Load(), "aborted": e.aborted.Load(), "bad": e.bad.Load(), "prefill": e.prefills.Load(),
			"decode": e.decodes.Load(), "stale_engine_id": e.stale.Load(), "bootstrap_queries": e.queries.Load(), "other_paths": e.paths,
			"by_address": e.byAddress,
		})
	case "/mock/legs":
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.legs == nil {
			e.legs = []leg{}
		}
		_ = json.NewEncoder(w).Encode(e.legs)
	case "/mock/reset":
		e.mu.Lock()
		defer e.mu.Unlock()
		e.legs, e.paths, e.byAddress = nil, map[string]int64{}, map[string]int64{}
		for _, c := range []*atomic.Int64{&e.in, &e.out, &e.reqs, &e.aborted, &e.bad, &e.prefills, &e.decodes, &e.stale, &e.queries} {
			c.Store(0)
		}
		reply(w, "{}")
	case "/mock/config":
		var c struct {
			TTFT     *float64 `json:"ttft_ms"`
			TPOT     *float64 `json:"tpot_ms"`
			EngineID *string  `json:"engine_id"`
		}
		if err := json.NewDecoder(io.LimitReader(r.Body, 1<<20)).Decode(&c); err != nil {
			e.fail(w, 400, err.Error())
			return
		}
		if c.TTFT != nil {
			e.ttft.Store(int64(*c.TTFT * 1e6))
		}
		if c.TPOT != nil {
			e.tpot.Store(int64(*c.TPOT * 1e6))
		}
		if c.EngineID != nil {
			e.engineID.Store(c.EngineID)
		}
		reply(w, "{}")
	default:
		http.NotFound(w, r)
	}
}

func main() {
	var listen, boots listFlag
	flag.Var(&listen, "listen", "address of the OpenAI API, e.g. 127.0.0.1:8100 (repeatable: same engine, more ports)")
	flag.Var(&boots, "bootstrap", "address of the Mooncake bootstrap server GET /query (repeatable)")
	model := flag.String("model", "mock", "model name in /v1/models and in answers")
	name := flag.String("name", "engine", "name in logs and /mock/stats")
	id := flag.String("engine-id", fmt.Sprintf("mock-%d", os.Getpid()), "engine id that the bootstrap server answers")
	ttft := flag.Duration("ttft", 0, "delay before the first token")
	tpot := flag.Duration("tpot", 0, "delay between tokens")
	kvCheck := flag.String("kv-check", "off", "what a decode request with an engine id unknown to its bootstrap server gets: off, fail (500 at once) or hang (500 after --kv-hang)")
	kvHang := flag.Duration("kv-hang", 480*time.Second, "see --kv-check")
	keep := flag.Int("keep-legs", 0, "remember this many requests for /mock/legs (0 = none, for speed)")
	info := flag.String("server-info", "", "JSON body of /server_info and /get_server_info (default: 404 as vLLM without the dev endpoints)")
	sglang := flag.String("sglang", "", "be a P (prefill) or D (decode) of SGLang")
	noTokens := flag.Bool("no-tokenize", false, "answer 404 on the tokenizing routes (/tokenize, …/render), as engines without them")
	verbose := flag.Bool("v", false, "log requests other than completions")
	flag.Parse()
	if len(listen) == 0 || *sglang != "" && *sglang != "prefill" && *sglang != "decode" || (*kvCheck != "off" && *kvCheck != "fail" && *kvCheck != "hang") {
		flag.Usage()
		os.Exit(2)
	}
	e := &engine{model: *model, name: *name, kvCheck: *kvCheck, kvHang: *kvHang, keepLegs: *keep, verbose: *verbose, noTokens: *noTokens, peerInfo: *info, paths: map[string]int64{}, byAddress: map[string]int64{}}
	e.engineID.Store(id)
	e.ttft.Store(int64(*ttft))
	e.tpot.Store(int64(*tpot))
	bmux := http.NewServeMux()
	bmux.HandleFunc("GET /query", e.query)
	if e.sglang = *sglang; e.sglang != "" {
		e.likeSGLang(boots, bmux)
	}
	serve := func(addr string, h http.Handler) {
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			log.Fatal(err)
		}
		go func() { log.Fatal((&http.Server{Handler: h, ReadHeaderTimeout: 30 * time.Second}).Serve(ln)) }()
	}
	for _, a := range listen {
		serve(a, e)
	}
	for _, a := range boots {
		serve(a, bmux)
	}
	c := make(chan os.Signal, 1)
	signal.Notify(c, os.Interrupt, syscall.SIGTERM)
	<-c
}
