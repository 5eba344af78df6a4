// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"context"
	"errors"
	"io"
	"time"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/internal/openai"
)

// maxEvent bounds one event of a stream whose usage is corrected, bytes.
const maxEvent = 4 << 20

// fixesUsage returns what corrects cached_tokens in D's answer: D counts all that came from P, the
// client is to see what P had. nil: there is nothing to correct.
func (e *exchange) fixesUsage(stream bool) func([]byte) []byte {
	if !e.split || stream && !e.q.StreamOptions.Has() {
		return nil
	}
	return func(data []byte) []byte {
		if e.prefillEnded != nil && bytes.Contains(data, []byte(`"cached_tokens"`)) {
			// P has computed all that D has; only its answer may still be on its way.
			late := time.NewTimer(prefillGrace)
			defer late.Stop()
			select {
			case <-e.prefillEnded:
			case <-late.C:
			case <-e.r.Context().Done():
			}
		}
		if cached := e.cached.Load(); cached >= 0 {
			return openai.SetCached(data, int(cached))
		}
		return data
	}
}

// passEvents is pass for a stream in which the usage is corrected, event by event.
func (e *exchange) passEvents(b *backend, resp *http1.Response, first []byte, fix func([]byte) []byte) (outcome string) {
	from := &rest{data: first, resp: resp, e: e}
	events := openai.NewReader(from, maxEvent)
	end := openai.NewEnd(openai.APIOf(e.r.URL.Path))
	for {
		event, err := events.Next()
		if err == nil {
			end.Add(event.Raw)
			e.extend(time.Now())
			if _, werr := e.w.Write(fix(event.Raw)); werr != nil {
				return "client_left"
			}
			if werr := e.rc.Flush(); werr != nil {
				return "client_left"
			}
			continue
		}
		switch left := append(events.Rest(), from.data...); {
		case errors.Is(err, openai.ErrEvent): // too long to be held: what follows passes as it is
			return e.passBytes(b, resp, left, true, end)
		case from.ended && len(left) > 0: // in good order, without an empty line behind the last event
			end.Add(left)
			if _, werr := e.w.Write(left); werr != nil {
				return "client_left"
			}
			err = io.EOF
		}
		return e.ended(b, resp.Status, true, end, err)
	}
}

// rest reads an answer from its first bytes on.
type rest struct {
	data  []byte
	resp  *http1.Response
	e     *exchange
	ended bool // the answer ended as HTTP says
}

func (r *rest) Read(b []byte) (int, error) {
	if len(r.data) == 0 {
		r.resp.Until(time.Now().Add(r.e.p.o.Stall))
		var err error
		if r.data, err = r.resp.Next(); err != nil {
			r.ended = errors.Is(err, io.EOF)
			return 0, err
		}
	}
	n := copy(b, r.data)
	r.data = r.data[n:]
	return n, nil
}

// maxFrees bounds requests that only free P's memory.
const maxFrees = 64

// free asks a decode engine to take KV from P that no request wants any more. Else P would keep it
// until its own limit, 480 s by default.
func (p *Proxy) free(e *exchange, params []byte) {
	if p.releases.Add(1) > maxFrees {
		p.releases.Add(-1)
		return
	}
	edits := []openai.Edit{
		{Key: "kv_transfer_params", Value: params},
		{Key: "max_tokens", Value: []byte("1")},
		{Key: "stream", Value: []byte("false")},
		{Key: "stream_options"},
		{Key: "min_tokens"},
		{Key: "ec_transfer_params"},
	}
	pieces, _ := e.q.Apply(append(edits, e.salt...)...)
	held, w := e.body, want{model: e.want.model}
	f := &exchange{p: p, r: e.r, fields: e.fields, id: e.id}
	held.hold()
	started := p.goBackground(func() {
		defer p.releases.Add(-1)
		defer held.release()
		ctx, cancel := context.WithTimeout(p.ctx, 30*time.Second)
		defer cancel()
		for ctx.Err() == nil {
			if b := p.fleet.another(&w); b != nil {
				err := f.take(ctx, b, pieces)
				p.fleet.leave(b, 0)
				if err == nil {
					p.n.freed.Add(1)
					return
				}
				w.tried = append(w.tried, b)
				continue
			}
			w.tried = nil // all failed, or have no room: later they may not
			select {
			case <-time.After(p.o.HealthInterval):
			case <-ctx.Done():
			}
		}
		p.o.Log.Warn("P keeps KV that no request wants, until its own limit", "request", f.id)
	})
	if !started {
		held.release()
		p.releases.Add(-1)
	}
}

// take sends a request and drops its answer.
func (e *exchange) take(ctx context.Context, b *backend, pieces [][]byte) error {
	n, err := b.client.Conn(ctx)
	if err != nil {
		return errNotSent
	}
	resp, err := e.send(ctx, b, n, pieces, e.legFields(b, rank{}), time.Now().Add(30*time.Second))
	if err != nil {
		return err
	}
	defer resp.Close()
	if resp.Status >= 500 {
		return errFailed
	}
	_, err = resp.ReadAll(maxWhole)
	return err
}
