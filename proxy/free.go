// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/http1"
)

// P keeps the KV of a prompt until a D has pulled it, or until P's own limit, 480 s by default. If no D has pulled the KV, the proxy
// sends a D a request with a prompt of one token: D pulls one block, and P then frees all blocks. That request repeats nothing of the
// client's request, so that D cannot refuse it for the same reason.

// freeing is a transfer whose KV no request wants any more.
type freeing struct {
	path, id string
	model    string
	body     []byte
	secrets  []byte // header lines with the client's credentials, which D may demand
	until    time.Time
	unsure   bool // D may have freed the transfer already
}

// frees holds the transfers that wait to be freed.
type frees struct {
	mu struct {
		sync.Mutex
		waiting []freeing
		running int
	}
	watched atomic.Int64 // transfers for which freeIfGone waits
}

// maxWatched is the largest number of transfers whose D is watched at a time after their client has left.
const maxWatched = 1024

// maxFrees is the largest number of requests at a time that only free P's memory; further ones wait.
const maxFrees = 64

const (
	freeTimeout = 8 * time.Minute  // how long the proxy offers a transfer to D's: as long as P keeps it. The restart of a D may take minutes
	takeTimeout = 30 * time.Second // how long one D may take to answer
	freeRounds  = 2                // after that many rounds in which D's failed, the proxy assumes that P no longer has the KV
)

// mustFree reports whether, after an attempt that ended with err, D has not taken P's KV, or may not have taken it. A D that had the
// whole request when the client left frees the KV by itself.
func (e *exchange) mustFree(err error) bool {
	if e.r.Context().Err() == nil {
		return err != nil || e.refused
	}
	for _, how := range []error{errNotSent, errLost, errFailed, errNoRoom, errLate, errSilent, http1.ErrCut} {
		if errors.Is(err, how) {
			return true
		}
	}
	return e.refused
}

// freeLeft frees P's KV after an attempt that the client left and that ended with err, unless D frees it. A D that had the whole request
// does so when it notices that the client has left, but not if it ends before.
func (e *exchange) freeLeft(err error, f func() freeing) {
	switch {
	case e.mustFree(err):
		e.p.free(f())
	case !e.answers.Load(): // a D that answers has taken the KV
		e.p.freeIfGone(e.asked, f())
	}
}

// freeIfGone waits for the next full health check of the D that was to take a transfer. It frees the transfer if D is not well then, or was
// unwell in between. D may have freed the transfer before, so it is offered only until a D has got the request. Beyond maxWatched
// transfers at a time freeIfGone does nothing: P keeps the KV until its own limit.
func (p *Proxy) freeIfGone(d *backend, f freeing) {
	f.unsure, f.until = true, time.Now().Add(freeTimeout)
	life, looks := d.id.Load(), d.looks.Load()+2 // a check that runs now may have asked D before
	if p.frees.watched.Add(1) > maxWatched {
		p.frees.watched.Add(-1)
		return
	}
	p.goBackground(func() { // a closed proxy does not run it, and frees nothing any more
		defer p.frees.watched.Add(-1)
		for d.looks.Load() < looks && slices.Contains(p.fleet.engines(), d) {
			select {
			case <-time.After(min(p.o.HealthInterval, time.Until(f.until))):
			case <-p.ctx.Done():
				return
			}
			if !time.Now().Before(f.until) {
				return
			}
		}
		if !d.well.Load() || d.id.Load() != life {
			p.free(f)
		}
	})
}

// abandon ends P's leg after D's leg failed. P's leg gets prefillGrace to end, so that the proxy learns whether P has the KV
// (computed). If P has it and free is true, abandon frees it.
func (e *exchange) abandon(done <-chan struct{}, abort func(), computed func() bool, free bool, f freeing) {
	end := func() {
		abort()
		<-done
		if free && computed() {
			e.p.free(f)
		}
	}
	select {
	case <-done:
		end()
		return
	default:
	}
	if !e.p.goBackground(func() {
		late := time.NewTimer(e.p.o.prefillGrace)
		defer late.Stop()
		select {
		case <-done:
		case <-late.C:
		case <-e.p.ctx.Done():
		}
		end()
	}) {
		end()
	}
}

// freeing returns the request that frees the transfer named by params.
//
// The first release of MooncakeConnector pairs by request ids, whose form depends on the API. In that dialect the request therefore
// goes to the client's API, and has only those fields of the client's request that make up its prompt.
//
// The model is P's base model, if P lists one: D may have refused an adapter.
func (e *exchange) freeing(p *backend, params []byte) freeing {
	f := freeing{path: "/v1/completions", id: e.sentID, model: e.want.model, secrets: e.secrets}
	if list := p.models.Load(); list != nil {
		if i := slices.IndexFunc(*list, func(m model) bool { return m.base != "" }); i >= 0 && e.p.fleet.hasDecode((*list)[i].id) {
			f.model = (*list)[i].id
		}
	}
	fields := make(map[string]json.RawMessage)
	put := func(name string, value any) {
		fields[name], _ = json.Marshal(value) // plain values always encode
	}
	if e.p.o.Dialect == Mooncake013 && e.q != nil {
		f.path = e.r.URL.Path
	}
	switch f.path {
	case "/v1/completions":
		put("prompt", []int{1})
		put("max_tokens", 1)
	case "/inference/v1/generate":
		put("token_ids", []int{1})
		put("sampling_params", map[string]int{"max_tokens": 1})
	default:
		e.q.Each(func(name string, value []byte) {
			if ofPrompt[name] {
				fields[name] = bytes.Clone(value)
			}
		})
		if put("max_tokens", 1); f.path == "/v1/responses" {
			delete(fields, "max_tokens")
			put("max_output_tokens", 1)
			put("store", false)
		}
	}
	if f.model != "" {
		put("model", f.model)
	}
	put("cache_salt", newID()) // what D pulls is not the KV of this prompt, so no other request may find it in D's cache
	fields["kv_transfer_params"] = params
	f.body, _ = json.Marshal(fields) // valid JSON
	return f
}

// ofPrompt are the fields of chats, responses and messages of which engines make the prompt.
var ofPrompt = map[string]bool{
	"messages": true, "tools": true, "documents": true, "chat_template": true, "chat_template_kwargs": true, "add_generation_prompt": true,
	"continue_final_message": true, "add_special_tokens": true, "mm_processor_kwargs": true, "input": true, "instructions": true, "system": true,
}

// free makes a decode engine take KV from P that no request wants any more. It runs at most maxFrees such requests at a time; the
// others wait.
func (p *Proxy) free(f freeing) {
	if f.until.IsZero() {
		f.until = time.Now().Add(freeTimeout)
	}
	q := &p.frees
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.mu.running == maxFrees {
		q.mu.waiting = append(q.mu.waiting, f)
		return
	}
	if p.goBackground(func() { p.freeAll(f) }) {
		q.mu.running++
	}
}

// freeAll frees the transfer f, and then, one after the other, the transfers that wait.
func (p *Proxy) freeAll(f freeing) {
	q := &p.frees
	for {
		p.freeOne(f)
		q.mu.Lock()
		if len(q.mu.waiting) == 0 || p.ctx.Err() != nil {
			q.mu.running--
			q.mu.Unlock()
			return
		}
		f = q.mu.waiting[0]
		q.mu.waiting = q.mu.waiting[1:]
		q.mu.Unlock()
	}
}

// freeOne offers a transfer to D's until one has taken it. A D may fail because P no longer has the KV, or because D itself is about to
// end; a D that ends is not well at the next health check. So freeOne gives up only after freeRounds rounds in which D's failed, with a
// health check between two rounds.
func (p *Proxy) freeOne(f freeing) {
	ctx, cancel := context.WithDeadline(p.ctx, f.until)
	defer cancel()
	w, failed, rounds := needs{model: f.model}, false, 0
	for ctx.Err() == nil {
		if b := p.fleet.takeOtherDecode(&w); b != nil {
			err := p.take(ctx, b, f)
			p.fleet.leave(b, 0)
			if err == nil {
				p.n.freed.Add(1)
				return
			}
			if f.unsure && !errors.Is(err, errNotSent) && !errors.Is(err, errNoRoom) {
				return // P most probably does not know the transfer any more
			}
			failed = failed || errors.Is(err, errFailed)
			w.tried = append(w.tried, b)
			continue
		}
		if failed {
			if rounds++; rounds == freeRounds {
				return
			}
		}
		w.tried, failed = nil, false // no D can be reached or has room, or all failed: a later round may succeed
		select {
		case <-time.After(p.o.HealthInterval):
		case <-ctx.Done():
		}
	}
	if p.ctx.Err() == nil {
		p.o.Log.Warn("no D freed the KV of a transfer that ended: P keeps it until its own limit", "request", f.id)
	}
}

// take sends the engine b, a D, the request that frees f, and drops the answer. The error is errNotSent, errNoRoom, errFailed, or that of
// the connection.
func (p *Proxy) take(ctx context.Context, b *backend, f freeing) error {
	n, err := b.client.Conn(ctx)
	if err != nil {
		return errNotSent
	}
	r := http1.Request{Method: http.MethodPost, Target: f.path, Body: [][]byte{f.body}, Whole: true}
	r.Fields = []byte("Content-Type: application/json\r\nX-Request-Id: " + f.id + "\r\n")
	switch key := p.keyFor(b); {
	case key != "":
		r.Fields = append(r.Fields, "Authorization: Bearer "+key+"\r\n"...)
	case !b.found || p.o.EngineKeyToFound:
		r.Fields = append(r.Fields, f.secrets...)
	}
	resp, err := n.Do(ctx, &r, time.Now().Add(takeTimeout))
	if err != nil {
		return err
	}
	defer resp.Close()
	switch resp.Status {
	case http.StatusOK:
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		return errNoRoom
	default:
		return errFailed
	}
	_, err = resp.ReadAll(maxWhole)
	return err
}
