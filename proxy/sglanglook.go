// SPDX-License-Identifier: Apache-2.0

package proxy

// Health checks of engines of SGLang: their mode, whether they are well, and how many requests they have.

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// sglang is what an engine of SGLang reports about itself.
type sglang struct {
	asked bool   // it has answered; before that, only the operator's options say that it is SGLang's
	mode  string // prefill, decode or null
	port  int    // port of P's bootstrap server
	page  int    // tokens in a page of KV; 0: not known
	ranks int    // P's data-parallel ranks, if the room selects the rank; else 0
}

// defaultBootstrapPort is SGLang's default.
const defaultBootstrapPort = 8998

// answers asks an engine whether it is well. heard means that the engine has answered at all, so that it does not count as silent.
func (p *Proxy) answers(ctx context.Context, b *backend) (well, heard bool) {
	if (p.o.Detect || p.o.Dialect == SGLang) && (!b.identified || b.missed) { // another engine may have taken its address
		p.identify(ctx, b)
	}
	s := b.sglang.Load()
	if s == nil {
		if p.o.Detect && !b.identified {
			return false, false
		}
		_, status := p.read(ctx, b.url+"/health", p.keyFor(b))
		if well = status == http.StatusOK; well && b.registry != nil {
			well = p.refresh(ctx, b)
		}
		return well, status != 0
	}
	problem := s.notFor(b.role)
	switch _, status := p.read(ctx, b.url+"/ready", p.keyFor(b)); { // /health would make an idle engine compute a token
	case locked(status):
		problem = wantsKey
	case status == http.StatusNotFound:
		problem = noReady
	case status != http.StatusOK:
		return false, status != 0
	}
	if problem == "" && b.role == prefill {
		problem = p.askBootstrap(ctx, b, s)
	}
	if problem == "" {
		problem = p.fleet.unlikePages(b)
	}
	if ctx.Err() == nil {
		p.setProblem(b, problem)
	}
	return problem == "", true
}

// setProblem records the reason why an engine gets no requests, and logs a new reason; "": it gets requests.
func (p *Proxy) setProblem(b *backend, problem string) {
	if problem == b.problem() {
		return
	}
	if b.reason.Store(&problem); problem != "" {
		p.o.Log.Warn("an engine of SGLang gets no requests", "engine", b.url, "reason", problem)
	}
}

// problem returns the reason why an engine of SGLang gets no requests; "": it gets requests.
func (b *backend) problem() string {
	if reason := b.reason.Load(); reason != nil {
		return *reason
	}
	return ""
}

// wantsKey is the problem of an engine of SGLang that demands an API key.
const wantsKey = "it wants an API key: set --engine-api-key"

// noReady is the problem of an engine of SGLang that is too old to have /ready.
const noReady = "it has no /ready: SGLang 0.5.23 is served, and later releases"

func locked(status int) bool {
	return status == http.StatusUnauthorized || status == http.StatusForbidden
}

// identify finds out whether an engine is SGLang's, and its disaggregation mode. While an engine does not answer, what was known about
// it stays.
//
// It asks /model_info first, which only SGLang has. vLLM has a /server_info in its development mode, which takes seconds. SGLang's
// /server_info asks the scheduler and may be slow at a busy engine; the mode is in /model_info, too (0.5.23).
func (p *Proxy) identify(ctx context.Context, b *backend) {
	old := b.sglang.Load()
	text, status := p.read(ctx, b.url+"/model_info", p.keyFor(b))
	switch {
	case status == 0, status == http.StatusBadGateway, status == http.StatusServiceUnavailable, status == http.StatusGatewayTimeout:
		return
	case status != http.StatusOK:
		if p.isOther(b); b.role != both && locked(status) { // vLLM has no such path, whether a key is sent or not
			p.setProblem(b, wantsKey)
		}
		return
	}
	var info struct {
		Mode *string `json:"disaggregation_mode"`
	}
	_ = json.Unmarshal(text, &info) // in releases without the mode there, /server_info has it
	s := &sglang{asked: true}
	if old != nil {
		s.port, s.page, s.ranks = old.port, old.page, old.ranks
	}
	whole := p.serverInfo(ctx, b, s, &info.Mode)
	switch {
	case info.Mode != nil:
		s.mode = *info.Mode
	case whole:
		p.isOther(b)
		return
	default:
		return
	}
	if old == nil {
		p.o.Log.Info("an engine is one of SGLang", "engine", b.url, "mode", s.mode)
	}
	p.fleet.rooms.Store(true)
	b.sglang.Store(s)
	b.identified = whole
}

// isOther records that an engine is not SGLang's, unless the operator has set the dialect SGLang.
func (p *Proxy) isOther(b *backend) {
	if p.o.Dialect != SGLang {
		b.sglang.Store(nil)
	}
	b.identified = true
}

// serverInfo reads an engine's /server_info into s and mode. It returns true if the answer is final: a 200 or a 4xx.
func (p *Proxy) serverInfo(ctx context.Context, b *backend, s *sglang, mode **string) bool {
	if until, ok := ctx.Deadline(); ok { // leaves half of the time to the rest of the health check
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Until(until)/2)
		defer cancel()
	}
	text, status := p.read(ctx, b.url+"/server_info", p.keyFor(b))
	if status != http.StatusOK {
		return status >= 400 && status < 500
	}
	var info map[string]json.RawMessage
	if json.Unmarshal(text, &info) != nil {
		return true
	}
	number := func(name string, most int) (n int) {
		if json.Unmarshal(info[name], &n) != nil || n < 0 || n > most {
			return 0
		}
		return n
	}
	s.port, s.page = number("disaggregation_bootstrap_port", 65535), number("page_size", 1<<20)
	var said *string
	if json.Unmarshal(info["disaggregation_mode"], &said) == nil && said != nil {
		*mode = said
	}
	return true
}

// unlikePages returns a problem if no engine of the other role has KV pages of the same length as b's: a D that gets a P with other
// pages ends its process (SGLang 0.5.23). "" means that some engine matches or may match.
func (f *fleet) unlikePages(b *backend) string {
	own, other := b.page(), 0
	if own == 0 || b.role == both {
		return ""
	}
	for _, o := range f.engines() {
		if o.kind() != sglangKind || o.role == b.role || o.role == both {
			continue
		}
		if page := o.page(); page == 0 || page == own {
			return ""
		} else {
			other = page
		}
	}
	if other == 0 {
		return ""
	}
	return fmt.Sprintf("its pages have %d tokens, those of the engines beside it %d: P and D need one --page-size", own, other)
}

// page returns the number of tokens in a page of KV of an engine of SGLang; 0: not known.
func (b *backend) page() int {
	if s := b.sglang.Load(); s != nil {
		return s.page
	}
	return 0
}

// notFor returns the reason why an engine cannot have the role r; "": it can.
func (s *sglang) notFor(r role) string {
	want := map[role]string{both: "null", prefill: "prefill", decode: "decode"}[r]
	if !s.asked || s.mode == want {
		return ""
	}
	return fmt.Sprintf("its disaggregation mode is %.32q, %q is wanted of a %s", s.mode, want, r)
}

// bootstrapAt returns the address of P's bootstrap server, as D dials it.
func (b *backend) bootstrapAt() (host string, port int) {
	s := b.sglang.Load()
	if s == nil { // identify has just found that another engine has its address
		s = &sglang{}
	}
	host, port = b.host, cmp.Or(s.port, defaultBootstrapPort)
	if u, err := url.Parse(b.bootstrap); err == nil && b.bootstrap != "" {
		host = u.Hostname()
		if given, err := strconv.Atoi(u.Port()); err == nil && given > 0 && (!b.guessed || s.port == 0) {
			port = given
		}
	}
	return host, port
}

// askBootstrap asks P's bootstrap server for P's sizes and stores them in s. It returns a problem if the server does not know all of P;
// "" if it does.
func (p *Proxy) askBootstrap(ctx context.Context, b *backend, s *sglang) (problem string) {
	host, port := b.bootstrapAt()
	at := net.JoinHostPort(host, strconv.Itoa(port))
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+at+"/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1", nil)
	if err != nil {
		return err.Error()
	}
	resp, err := p.client.Do(r)
	if err != nil {
		return fmt.Sprintf("its bootstrap server %s does not answer: %v", at, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Sprintf("its bootstrap server %s answers with status %d: %.200s", at, resp.StatusCode, text)
	}
	var sizes struct {
		DP     int  `json:"dp_size"`
		Page   int  `json:"page_size"`
		Follow bool `json:"follow_bootstrap_room"`
	}
	if err := json.Unmarshal(text, &sizes); err != nil {
		return fmt.Sprintf("%s is no bootstrap server of SGLang", at)
	}
	ranks := 0
	if sizes.Follow && sizes.DP > 1 && sizes.DP <= 4096 {
		ranks = sizes.DP
	}
	page := s.page
	if sizes.Page > 0 && sizes.Page <= 1<<20 { // D compares its own page size with it
		page = sizes.Page
	}
	if ranks != s.ranks || page != s.page {
		updated := *s
		updated.ranks, updated.page = ranks, page
		b.sglang.Store(&updated)
	}
	return ""
}

// sglangLoad returns how many running and waiting requests an engine of SGLang has, summed over its data-parallel ranks. ok is false if the
// engine does not say it.
func (p *Proxy) sglangLoad(ctx context.Context, b *backend) (n int64, ok bool) {
	text, ok := p.get(ctx, b, "/v1/loads?include=core,disagg")
	var list struct {
		Loads []map[string]any `json:"loads"`
	}
	if !ok || json.Unmarshal(text, &list) != nil {
		return 0, false
	}
	sum := 0.0
	for _, l := range list.Loads {
		disagg, _ := l["disaggregation"].(map[string]any)
		for _, v := range []any{
			l["num_running_reqs"], l["num_waiting_reqs"], disagg["prefill_bootstrap_queue_reqs"], disagg["prefill_inflight_queue_reqs"],
			disagg["decode_prealloc_queue_reqs"], disagg["decode_transfer_queue_reqs"],
		} {
			v, _ := v.(float64) // 0 if it is no number
			sum += max(v, 0)
		}
	}
	return int64(min(sum, maxRequests)), true
}
