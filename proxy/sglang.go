// SPDX-License-Identifier: Apache-2.0

package proxy

// How SGLang's P and D serve a request. Both get the same request at the same time, with the address of P's bootstrap server and a
// room. D asks that server where P listens. The room names the transfer. P waits for D, and D for P.
//
// Source: SGLang 0.5.23 (disaggregation/common/conn.py, managers/io_struct.py, entrypoints/http_server.py).

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/internal/openai"
	"github.com/kvasir-kv/kvasir/internal/transferlog"
)

// hasKind reports whether the fleet has an engine of the kind k.
func (f *fleet) hasKind(k kind) bool {
	return slices.ContainsFunc(f.engines(), func(b *backend) bool { return b.kind() == k })
}

func (f *fleet) noneWell() bool {
	return !slices.ContainsFunc(f.engines(), func(b *backend) bool { return b.well.Load() })
}

// pairsSGLang reports whether a D of SGLang serves the model, even if it is not well now.
func (f *fleet) pairsSGLang(model string) bool {
	return f.rooms.Load() && slices.ContainsFunc(f.engines(), func(b *backend) bool {
		return b.role == decode && b.kind() == sglangKind && b.serves(model)
	})
}

// hasOthers reports whether an engine that does both, or a D of vLLM, serves the request's model and path, even if it is not well now.
func (f *fleet) hasOthers(w *needs) bool {
	return slices.ContainsFunc(f.engines(), func(b *backend) bool {
		k := b.kind()
		return (b.role == both || b.role == decode && k == vllmKind) && (w.kind == anyKind || w.kind == k) && b.serves(w.model)
	})
}

// withoutRoom leaves a request that P and D of SGLang cannot serve to other engines. If there are none, it returns err, which says why
// the request is refused.
func (e *exchange) withoutRoom(err error) ([]openai.Sequence, error) {
	switch {
	case !e.p.fleet.hasOthers(&e.want):
		return nil, err
	case e.want.many:
		e.want.noRoom = true
		return e.splitPrompts()
	}
	e.want.noRoom = true
	return nil, nil
}

// noRoomFor returns the refusal of a path that P and D of SGLang do not have.
func noRoomFor(path string) error {
	return &refusal{status: http.StatusNotImplemented, kind: "NotImplementedError", text: path + " does not reach P and D of SGLang: it has no bootstrap room there", outcome: "bad_request"}
}

// byRooms splits a request to P and D of SGLang into its sequences, because each sequence needs a room of its own. nil: the request is
// a single sequence, or other engines serve it. The error is a *refusal.
//
// SGLang itself (0.5.23) gives all answers to a prompt the same room, so that D would wait in vain for all of them but one.
func (e *exchange) byRooms() ([]openai.Sequence, error) {
	bad := func(status int, kind, text string) error {
		return &refusal{status: status, kind: kind, text: text, outcome: "bad_request"}
	}
	previous, _ := e.q.Text(e.q.Previous)
	background, _ := e.q.Bool(e.q.Background)
	switch path := e.r.URL.Path; {
	case path == "/v1/messages", path == "/inference/v1/generate":
		return e.withoutRoom(noRoomFor(path))
	case path == "/v1/responses" && (previous != "" || background):
		return e.withoutRoom(bad(http.StatusNotImplemented, "NotImplementedError", "previous_response_id and background do not reach P and D of SGLang: P does not have the response"))
	case e.q.OfVLLM() && e.p.fleet.hasOthers(&e.want):
		return e.withoutRoom(nil)
	}
	all, err := e.q.Sequences(e.r.URL.Path, e.p.o.MaxPrompts)
	if errors.Is(err, openai.ErrSequences) {
		return e.withoutRoom(bad(http.StatusBadRequest, "BadRequestError", err.Error()))
	}
	if err != nil {
		return nil, bad(http.StatusBadRequest, "BadRequestError", err.Error())
	}
	e.rooms = true
	e.want.alone, e.want.many = false, false
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

// sglangEdits returns the edits of a request to an engine of SGLang: the room of this attempt, and the name of an adapter in SGLang's
// form. A client's own room never passes: room 0 hangs D, and 2^63 ends P's process.
func (e *exchange) sglangEdits(b *backend) []openai.Edit {
	edits := slices.Clone(e.salt)
	if e.q.Model.Has() {
		if sent := b.nameFor(e.want.model, e.beside); sent != "" {
			name, _ := json.Marshal(sent) // a string always encodes
			edits = append(edits, openai.Edit{Key: "model", Value: name})
		}
	}
	if id, ok := e.q.PrefixID(e.idPrefix); ok && e.idPrefix != "" {
		edits = append(edits, id)
	}
	if e.attempts > 1 && e.r.URL.Path == "/v1/responses" { // there request_id is the request's id, which SGLang still has from the attempt before
		edits = append(edits, openai.Edit{Key: "request_id"})
	}
	if e.key != nil {
		edits = append(edits, ofOrchestrators...)
	}
	if e.boot != nil && b.role != both {
		return append(edits, e.boot...)
	}
	if e.key != nil {
		edits = append(edits, ranksOfClients...)
	}
	return append(edits, openai.Edit{Key: "bootstrap_host"}, openai.Edit{Key: "bootstrap_port"}, openai.Edit{Key: "bootstrap_room"}, openai.Edit{Key: "bootstrap_pair_key"})
}

// nameFor returns the name that a request to an engine of SGLang must carry for an adapter; "": the given name. If the engine has not
// listed its models, those of the engine `beside` count: SGLang treats a name that it does not know as the base model, and P and D must
// compute the same.
func (b *backend) nameFor(name string, beside *backend) string {
	list := b.models.Load()
	if list == nil && beside != nil {
		list = beside.models.Load()
	}
	if list != nil {
		for _, m := range *list {
			if m.id == name {
				return m.sent
			}
		}
	}
	return ""
}

// lister returns P or D, whichever has listed its models; nil: neither has, or there is no P.
func (c choice) lister() *backend {
	for _, b := range []*backend{c.prefill, c.engine} {
		if c.prefill != nil && b.models.Load() != nil {
			return b
		}
	}
	return nil
}

// ofOrchestrators are fields of SGLang's requests that only its own processes, or an operator's orchestrator, should set (0.5.23,
// io_struct.py): they say where embeddings come from and where answers go. The proxy removes them from requests of clients with keys.
var ofOrchestrators = []openai.Edit{
	{Key: "kv_hints"},
	{Key: "kv_router_hint"}, // its name in other releases
	{Key: "http_worker_ipc"},
	{Key: "encoder_urls"},
	{Key: "num_items_assigned"},
	{Key: "need_wait_for_mm_inputs"},
	{Key: "lora_id"},
	{Key: "decode_tp_size"},
	{Key: "external_trace_header"},
	{Key: "received_time"},
}

// ranksOfClients are the fields with which clients choose data-parallel ranks.
var ranksOfClients = []openai.Edit{{Key: "disagg_prefill_dp_rank"}, {Key: "routed_dp_rank"}, {Key: "data_parallel_rank"}}

// newIDPrefix returns the prefix that the client's own request ids get in this attempt; "": none.
//
// SGLang refuses an id that it already has, and keeps ids of ended attempts for some seconds. When a request ends early, SGLang also
// ends all requests whose ids begin with its id (0.5.23). So the ids of clients with keys get a unique prefix.
func (e *exchange) newIDPrefix(c choice) string {
	switch {
	case c.engine.kind() != sglangKind:
	case e.key != nil:
		return newID() + "-"
	case e.attempts > 1:
		return attemptPrefix(e.attempts)
	}
	return ""
}

func attemptPrefix(n int) string { return strconv.Itoa(n) + "-" }

// maxRoom is the largest number of a room. Rooms are numbers from 1 on: 0 means no room, and P cannot read 2^63 or more. maxRoom leaves some
// numbers below 2^63, because SGLang counts upwards from a room.
const maxRoom = 1<<63 - 1<<20

// newRoom returns a random room. With several ranks of P, the room selects the rank whose turn it is.
func (b *backend) newRoom() int64 {
	room := 1 + rand.Int64N(maxRoom)
	ranks := int64(1)
	if s := b.sglang.Load(); s != nil {
		ranks = int64(s.ranks)
	}
	if ranks > 1 { // the ranks take turns
		turn := int64(b.rankTurn.Add(1) % uint64(ranks))
		room = room - room%ranks + turn
		if room <= 0 || room > maxRoom {
			room = ranks + turn
		}
	}
	return room
}

// bootFields returns the edits by which P and D of SGLang find each other. The client cannot choose ranks: they follow from the room.
func bootFields(host string, port int, room int64) []openai.Edit {
	name, _ := json.Marshal(host) // a string always encodes
	return []openai.Edit{
		{Key: "bootstrap_host", Value: name},
		{Key: "bootstrap_port", Value: strconv.AppendInt(nil, int64(port), 10)},
		{Key: "bootstrap_room", Value: strconv.AppendInt(nil, room, 10)},
		{Key: "bootstrap_pair_key"},
		ranksOfClients[0], ranksOfClients[1], ranksOfClients[2],
	}
}

// roomPieces returns the body of the request for a P of SGLang, which ends with the first token. The request holds the body; the caller
// must release it. P does not stream, so that its errors have a status.
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
// D's leg must always end first: P does not tell D that P's leg was cut, and D would then hold the prompt's memory for its whole
// waiting timeout. No other D gets the request under the same room.
func (e *exchange) byRoom(ctx context.Context, cancel context.CancelCauseFunc, c choice) (outcome string, err error) {
	n, who, err := e.reach(ctx, c.prefill, c.rank)
	if err != nil {
		e.p.fleet.give(c)
		return "", err
	}
	host, port := c.prefill.bootstrapAt()
	room := c.prefill.newRoom()
	e.boot = bootFields(host, port, room)
	e.beginHandover(strconv.FormatInt(room, 10), "", c, transferlog.Computing, "P computes")
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
			case !e.answers.Load(): // otherwise D would wait for its whole timeout
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
		leaveP() // D has all of the KV
		select {
		case <-done:
			abort()
		default: // P's leg goes on in the background
			time.AfterFunc(e.p.o.prefillGrace, abort)
		}
	}()
	outcome, err = e.answer(ctx, c.engine, 0, nil, begin)
	if a, ok := errors.AsType[*refusedByP](context.Cause(ctx)); ok && err != nil {
		return "", a
	}
	return outcome, err
}

var jsonFields = []http1.Field{{Name: "Content-Type", Value: "application/json"}}

// shownInfo are the fields of /server_info that clients may see. Other fields contain the engine's command line, and in it its keys.
var shownInfo = map[string]bool{
	"version": true, "status": true, "model_path": true, "served_model_name": true, "tokenizer_path": true, "disaggregation_mode": true, "disaggregation_transfer_backend": true,
	"page_size": true, "max_total_num_tokens": true, "max_running_requests": true, "max_req_input_len": true, "context_length": true, "tp_size": true, "dp_size": true, "pp_size": true,
	"ep_size": true, "dtype": true, "kv_cache_dtype": true, "quantization": true, "chunked_prefill_size": true, "schedule_policy": true, "reasoning_parser": true, "tool_call_parser": true,
}

// serveServerInfo answers with the /server_info of an engine of SGLang, reduced to the fields in shownInfo.
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
	ctx, cancel := context.WithTimeout(r.Context(), 2*maxInfoTime)
	defer cancel()
	why := "no engine is well"
	for _, b := range p.fleet.engines() {
		if !b.well.Load() || b.role == prefill || b.kind() != sglangKind {
			continue
		}
		look, cancel := context.WithTimeout(ctx, min(p.o.FirstByte, maxInfoTime))
		text, ok := p.get(look, b, "/server_info")
		cancel()
		info, err := openai.Scan(text)
		if !ok || err != nil { // another engine may still answer in time
			why = "no engine answers"
			continue
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
	fail(w, unavailable(why))
}

// maxInfoTime is how long an engine may take to answer /server_info, for which it asks its scheduler; then the next engine is asked.
const maxInfoTime = 10 * time.Second

// maxAbort is the largest body of a request to /abort_request, in bytes; a larger one is refused.
const maxAbort = 64 << 10

// serveAbort ends the request with the id that its client gave it, at all engines of SGLang, first at D's. It refuses clients with
// keys, because the id may be another client's: such clients must close their connections instead.
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
	var bodies [][]byte
	for n := range p.o.Attempts { // engines may have the request under the id of any attempt
		rid := asked.RID
		if n > 0 {
			rid = attemptPrefix(n+1) + rid
		}
		body, _ := json.Marshal(map[string]string{"rid": rid}) // a string always encodes
		bodies = append(bodies, body)
	}
	for _, role := range []role{decode, both, prefill} {
		p.abortOf(r.Context(), role, bodies)
	}
}

// maxAbortTime is how long the proxy waits until the engines of one role have answered that they end a request; then it goes on.
const maxAbortTime = 3 * time.Second

// abortOf ends requests at all engines of a role, also at engines that are not well: a stopping engine still finishes its requests. A
// silent engine does not delay the others.
func (p *Proxy) abortOf(ctx context.Context, of role, bodies [][]byte) {
	ctx, cancel := context.WithTimeout(ctx, maxAbortTime)
	defer cancel()
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, b := range p.fleet.engines() {
		if b.role == of && b.kind() == sglangKind {
			wg.Go(func() {
				for _, body := range bodies {
					if !p.abortAt(ctx, b, body) {
						return
					}
				}
			})
		}
	}
}

// abortAt asks an engine to end a request. It returns false if the engine does not answer.
func (p *Proxy) abortAt(ctx context.Context, b *backend, body []byte) bool {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, b.url+"/abort_request", bytes.NewReader(body))
	if err != nil {
		return false
	}
	r.Header.Set("Content-Type", "application/json")
	if key := p.keyFor(b); key != "" {
		r.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := p.client.Do(r)
	if err != nil {
		if b.well.Load() { // health checks have reported the engines that are not well
			p.o.Log.Warn("an engine does not answer", "engine", b.url, "path", "/abort_request", "err", err)
		}
		return false
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxAbort)) // so that the connection can be used again
	resp.Body.Close()
	return true
}
