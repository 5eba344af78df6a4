// SPDX-License-Identifier: Apache-2.0

package proxy

// SGLang's P and D. Both get the same request at the same time, with the address of P's bootstrap server and a room: D asks there
// where P listens, and both know the transfer by the room. P waits for D, and D for P.
//
// Source: SGLang 0.5.23 (disaggregation/common/conn.py, managers/io_struct.py, entrypoints/http_server.py).

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/internal/openai"
	"github.com/kvasir-kv/kvasir/internal/transferlog"
)

// sglang is what an engine of SGLang says of itself.
type sglang struct {
	asked bool   // it has answered; before, it is an engine of SGLang because the operator says so
	mode  string // prefill, decode or null
	port  int    // of P's bootstrap server
	ranks int    // P's data-parallel ranks, by which rooms are divided
}

// defaultBootstrapPort is SGLang's.
const defaultBootstrapPort = 8998

// answers asks an engine whether it is well.
func (p *Proxy) answers(ctx context.Context, b *backend) bool {
	if p.o.Detect || p.o.Dialect == SGLang {
		b.mu.Lock()
		missed := b.mu.misses > 0
		b.mu.Unlock()
		if !b.identified || missed {
			p.identify(ctx, b)
		}
	}
	s := b.sglang.Load()
	if s == nil {
		_, well := p.get(ctx, b, "/health")
		if b.identified = b.identified || well; well && b.registry != nil {
			well = p.refresh(ctx, b)
		}
		return well
	}
	if _, ready := p.get(ctx, b, "/ready"); !ready { // /health of an idle engine computes a token
		return false
	}
	problem := s.notFor(b.role)
	if problem == "" && b.role == prefill {
		problem = p.askBootstrap(ctx, b, s)
	}
	if problem != b.problem && ctx.Err() == nil {
		if b.problem = problem; problem != "" {
			p.o.Log.Warn("an engine of SGLang gets no requests", "engine", b.url, "reason", problem)
		}
	}
	return problem == ""
}

// identify asks an engine whether it is one of SGLang, and what it does.
func (p *Proxy) identify(ctx context.Context, b *backend) {
	if _, ok := p.get(ctx, b, "/model_info"); !ok { // SGLang alone has it; vLLM's /server_info of its development mode takes seconds
		return
	}
	text, ok := p.get(ctx, b, "/server_info")
	var info struct {
		Mode *string `json:"disaggregation_mode"`
		Port int     `json:"disaggregation_bootstrap_port"`
	}
	if !ok || json.Unmarshal(text, &info) != nil || info.Mode == nil {
		return
	}
	s := &sglang{asked: true, mode: *info.Mode, port: info.Port}
	if old := b.sglang.Load(); old != nil {
		s.ranks = old.ranks
	} else {
		p.o.Log.Info("an engine is one of SGLang", "engine", b.url, "mode", s.mode)
	}
	b.sglang.Store(s)
	b.identified = true
}

// notFor returns why an engine cannot have a role; "": it can.
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
	host, port = b.host, cmp.Or(s.port, defaultBootstrapPort)
	if u, err := url.Parse(b.bootstrap); err == nil && b.bootstrap != "" {
		host = u.Hostname()
		if given, err := strconv.Atoi(u.Port()); err == nil && given > 0 && (!b.guessed || s.port == 0) {
			port = given
		}
	}
	return host, port
}

// askBootstrap returns why P's bootstrap server does not know P as a whole; "": it does.
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
		Follow bool `json:"follow_bootstrap_room"`
	}
	if err := json.Unmarshal(text, &sizes); err != nil {
		return fmt.Sprintf("%s is no bootstrap server of SGLang", at)
	}
	ranks := 0
	if sizes.Follow && sizes.DP > 1 && sizes.DP <= 4096 {
		ranks = sizes.DP
	}
	if ranks != s.ranks {
		updated := *s
		updated.ranks = ranks
		b.sglang.Store(&updated)
	}
	return ""
}

// sglangLoad returns how many requests an engine of SGLang has, over its data-parallel ranks.
func (p *Proxy) sglangLoad(ctx context.Context, b *backend) (n int64, ok bool) {
	text, ok := p.get(ctx, b, "/v1/loads?include=core,disagg")
	var list struct {
		Loads []struct {
			Running int64          `json:"num_running_reqs"`
			Waiting int64          `json:"num_waiting_reqs"`
			Disagg  map[string]any `json:"disaggregation"`
		} `json:"loads"`
	}
	if !ok || json.Unmarshal(text, &list) != nil {
		return 0, false
	}
	for _, l := range list.Loads {
		n += max(l.Running, 0) + max(l.Waiting, 0)
		for _, queue := range []string{"prefill_bootstrap_queue_reqs", "prefill_inflight_queue_reqs", "decode_prealloc_queue_reqs", "decode_transfer_queue_reqs"} {
			if v, ok := l.Disagg[queue].(float64); ok && v > 0 && v < 1e9 {
				n += int64(v)
			}
		}
	}
	return n, true
}

// hasKind reports whether an engine of a kind is there.
func (f *fleet) hasKind(k kind) bool {
	return slices.ContainsFunc(f.engines(), func(b *backend) bool { return b.kind() == k })
}

func (f *fleet) noneWell() bool {
	return !slices.ContainsFunc(f.engines(), func(b *backend) bool { return b.well.Load() })
}

// pairsSGLang reports whether D's of SGLang serve a model.
func (f *fleet) pairsSGLang(model string) bool {
	return slices.ContainsFunc(f.engines(), func(b *backend) bool {
		return b.role == decode && b.kind() == sglangKind && b.serves(model)
	})
}

// byRooms returns the sequences of a request to P and D of SGLang, each of which has a room of its own; nil: it is one. The error is a
// *refusal.
//
// SGLang gives all answers to a prompt one room, so that D waits for all but one of them (0.5.23).
func (e *exchange) byRooms() ([]openai.Sequence, error) {
	e.rooms = true
	e.want.alone, e.want.many = false, false
	bad := func(status int, kind, text string) error {
		return &refusal{status: status, kind: kind, text: text, outcome: "bad_request"}
	}
	previous, _ := e.q.Text(e.q.Previous)
	background, _ := e.q.Bool(e.q.Background)
	switch path := e.r.URL.Path; {
	case path == "/v1/messages", path == "/inference/v1/generate":
		return nil, bad(http.StatusNotImplemented, "NotImplementedError", path+" does not reach P and D of SGLang: it has no bootstrap room there")
	case path == "/v1/responses" && (previous != "" || background):
		return nil, bad(http.StatusNotImplemented, "NotImplementedError", "previous_response_id and background do not reach P and D of SGLang: P does not have the response")
	}
	all, err := e.q.Sequences(openai.APIOf(e.r.URL.Path), e.p.o.MaxPrompts)
	if err != nil {
		return nil, bad(http.StatusBadRequest, "BadRequestError", err.Error())
	}
	if len(all) < 2 {
		return nil, nil
	}
	size := 0
	for _, s := range all {
		_, n := e.q.Apply(s.Edits...)
		size += n
	}
	if size > maxJoined {
		return nil, bad(http.StatusBadRequest, "BadRequestError", fmt.Sprintf("the requests for each prompt and answer would have more than %d bytes", maxJoined))
	}
	return all, nil
}

// sglangEdits are the changes of a request to an engine of SGLang: the room of this attempt, and the name of an adapter as SGLang takes
// it. A client's own room never passes: 0 hangs D, and 2^63 ends P's process.
func (e *exchange) sglangEdits(b *backend) []openai.Edit {
	edits := slices.Clone(e.salt)
	if list := b.models.Load(); list != nil && e.q.Model.Has() {
		for _, m := range *list {
			if m.id == e.want.model && m.sent != "" {
				name, _ := json.Marshal(m.sent) // a text
				edits = append(edits, openai.Edit{Key: "model", Value: name})
			}
		}
	}
	if e.key != nil {
		edits = append(edits, openai.Edit{Key: "kv_hints"}) // of an orchestrator, never of a client
	}
	if e.boot == nil || b.role == both {
		return append(edits, openai.Edit{Key: "bootstrap_host"}, openai.Edit{Key: "bootstrap_port"}, openai.Edit{Key: "bootstrap_room"}, openai.Edit{Key: "bootstrap_pair_key"})
	}
	return append(edits, e.boot...)
}

// rooms are from 1 to maxRoom: 0 means none, and from 2^63 on they are no numbers to P. Some are left, since SGLang counts on from a room.
const maxRoom = 1<<63 - 1<<20

// newRoom returns a room that no other transfer has, and that means one of P's ranks.
func (b *backend) newRoom() int64 {
	room := 1 + rand.Int64N(maxRoom)
	if ranks := int64(b.sglang.Load().ranks); ranks > 1 { // those take turns
		turn := int64(b.rankTurn.Add(1) % uint64(ranks))
		room = room - room%ranks + turn
		if room <= 0 || room > maxRoom {
			room = ranks + turn
		}
	}
	return room
}

// bootFields are the fields by which P and D of SGLang find each other. A client does not choose ranks, which follow from the room.
func bootFields(host string, port int, room int64) []openai.Edit {
	name, _ := json.Marshal(host) // a text
	return []openai.Edit{
		{Key: "bootstrap_host", Value: name},
		{Key: "bootstrap_port", Value: strconv.AppendInt(nil, int64(port), 10)},
		{Key: "bootstrap_room", Value: strconv.AppendInt(nil, room, 10)},
		{Key: "bootstrap_pair_key"},
		{Key: "disagg_prefill_dp_rank"},
		{Key: "routed_dp_rank"},
		{Key: "data_parallel_rank"},
	}
}

// roomPieces is the request for P of SGLang, which ends with the first token. The body is held. P does not stream: so its errors have a
// status.
func (e *exchange) roomPieces(b *backend) ([][]byte, *body) {
	edits := e.sglangEdits(b)
	if stream, _ := e.q.Bool(e.q.Stream); stream {
		edits = append(edits, openai.Edit{Key: "stream", Value: no}, openai.Edit{Key: "stream_options"})
	}
	pieces, _ := e.q.Apply(edits...)
	e.body.hold()
	return pieces, e.body
}

// byRoom sends the request to P and D of SGLang at the same time.
//
// D's leg ends first, whatever happens: a P that is left alone does not tell D, which then holds the prompt's memory for its whole waiting
// timeout. A D that had the request is not replaced by another under the same room.
func (e *exchange) byRoom(ctx context.Context, cancel context.CancelCauseFunc, c choice) (outcome string, err error) {
	n, who, err := e.reach(ctx, c.prefill, c.rank)
	if err != nil {
		e.p.fleet.give(c)
		return "", err
	}
	host, port := c.prefill.bootstrapAt()
	room := c.prefill.newRoom()
	e.boot = bootFields(host, port, room)
	e.hands(strconv.FormatInt(room, 10), "", c, transferlog.Computing, "P computes")
	handed := e.handed
	pieces, held := e.roomPieces(c.prefill)
	fields := e.legFields(c.prefill, who)
	prefilling, abort := context.WithCancel(context.WithoutCancel(ctx))
	done, started := make(chan struct{}), false
	e.prefillEnded = done
	leaveP := sync.OnceFunc(func() { e.p.fleet.leave(c.prefill, c.lacks[1]) })
	defer context.AfterFunc(c.prefill.life(), func() {
		if !e.answers.Load() {
			cancel(errSilent)
		}
	})()
	begin := func() error {
		started = e.p.goBackground(func() {
			defer close(done)
			defer leaveP()
			defer context.AfterFunc(e.p.ctx, abort)()
			l, err := e.prefill(prefilling, n, c.prefill, fields, pieces, held)
			switch {
			case err == nil:
				e.cached.Store(int64(l.cached))
				e.prefilled.Store(int64(time.Since(e.start)))
				handed.Next(transferlog.Waiting, untilD, nil)
			case !e.answers.Load(): // D would wait for its whole timeout
				cancel(err)
			}
		})
		if !started {
			return unavailable("the proxy is stopping")
		}
		return nil
	}
	defer func() { // D's leg has ended
		if !started {
			abort()
			n.Close()
			held.release()
			leaveP()
			return
		}
		if outcome != "ok" {
			abort()
			<-done
			return
		}
		leaveP() // D has the whole KV
		select {
		case <-done:
			abort()
		default: // it goes on beside the next requests
			time.AfterFunc(prefillGrace, abort)
		}
	}()
	outcome, err = e.answer(ctx, c.engine, 0, nil, begin)
	if a, ok := errors.AsType[*refusedByP](context.Cause(ctx)); ok && err != nil {
		return "", a
	}
	return outcome, err
}

var jsonFields = []http1.Field{{Name: "Content-Type", Value: "application/json"}}

// shownInfo are the fields of /server_info that clients see: the others have the engine's command line, and with it its keys.
var shownInfo = map[string]bool{
	"version": true, "status": true, "model_path": true, "served_model_name": true, "tokenizer_path": true, "disaggregation_mode": true, "disaggregation_transfer_backend": true,
	"page_size": true, "max_total_num_tokens": true, "max_running_requests": true, "max_req_input_len": true, "context_length": true, "tp_size": true, "dp_size": true, "pp_size": true,
	"ep_size": true, "dtype": true, "kv_cache_dtype": true, "quantization": true, "chunked_prefill_size": true, "schedule_policy": true, "reasoning_parser": true, "tool_call_parser": true,
}

// serveServerInfo answers with what an engine of SGLang says of itself, without what is the operator's.
func (p *Proxy) serveServerInfo(w http.ResponseWriter, r *http.Request) {
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
		if !b.well.Load() || b.role == prefill || b.kind() != sglangKind {
			continue
		}
		text, ok := p.get(r.Context(), b, "/server_info")
		info, err := openai.Scan(text)
		if !ok || err != nil {
			fail(w, unavailable("the engine does not answer"))
			return
		}
		out := []byte{'{'}
		info.Each(func(name string, value []byte) {
			if !shownInfo[name] {
				return
			}
			if len(out) > 1 {
				out = append(out, ',')
			}
			out = append(append(strconv.AppendQuote(out, name), ':'), value...)
		})
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(append(out, '}')) // the client has gone
		return
	}
	fail(w, unavailable("no engine is well"))
}

// maxAbort bounds the body of a request to end another one, bytes.
const maxAbort = 64 << 10

// serveAbort ends a request by the id that its client gave it, at all engines of SGLang, D's first. Ids are not of one client, so that
// clients with keys close their connections instead.
func (p *Proxy) serveAbort(w http.ResponseWriter, r *http.Request) {
	bad := func(text string) {
		fail(w, &refusal{status: http.StatusBadRequest, kind: "BadRequestError", text: text})
	}
	switch {
	case r.Method != http.MethodPost:
		w.Header().Set("Allow", http.MethodPost)
		fail(w, &refusal{status: http.StatusMethodNotAllowed, kind: "BadRequestError", text: "POST is wanted"})
		return
	case !p.allowed(r):
		failUnauthorized(w)
		return
	case p.o.Keys != nil:
		fail(w, &refusal{status: http.StatusNotImplemented, kind: "NotImplementedError", text: "an id may be another client's: close the connection of a request to end it"})
		return
	}
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxAbort))
	var asked struct {
		RID string `json:"rid"`
		All bool   `json:"abort_all"`
	}
	if err != nil || json.Unmarshal(text, &asked) != nil {
		bad("an object with rid is wanted")
		return
	}
	if asked.RID == "" || asked.All {
		bad("rid must name one request: the requests of others go on")
		return
	}
	body, _ := json.Marshal(map[string]string{"rid": asked.RID}) // a text
	ctx, cancel := context.WithTimeout(r.Context(), 10*time.Second)
	defer cancel()
	for _, role := range []role{decode, both, prefill} {
		for _, b := range p.fleet.engines() {
			if b.role == role && b.kind() == sglangKind && b.well.Load() {
				p.abortAt(ctx, b, body)
			}
		}
	}
}

func (p *Proxy) abortAt(ctx context.Context, b *backend, body []byte) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, b.url+"/abort_request", bytes.NewReader(body))
	if err != nil {
		return
	}
	r.Header.Set("Content-Type", "application/json")
	if key := p.keyFor(b); key != "" {
		r.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := p.client.Do(r)
	if err != nil {
		p.o.Log.Warn("an engine does not answer", "engine", b.url, "path", "/abort_request", "err", err)
		return
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxAbort)) // so that the connection can be used again
	resp.Body.Close()
}
