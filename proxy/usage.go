// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"io"
	"time"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/internal/openai"
)

// maxEvent bounds one event of a stream whose usage is corrected, bytes.
const maxEvent = 4 << 20

// fixesUsage returns a function that corrects cached_tokens in D's answer: D counts all tokens that came
// from P, but the client should see those that P had cached. nil: there is nothing to correct.
func (e *exchange) fixesUsage(stream bool) func([]byte) []byte {
	if !e.split || stream && openai.APIOf(e.r.URL.Path) == openai.Completions && !e.q.StreamOptions.Has() {
		return nil
	}
	waited := false
	return func(data []byte) []byte {
		if e.prefillEnded != nil && !waited && openai.HasCached(data) && !(stream && openai.HasMoreEvents(data)) {
			// P has computed all that D has; only its answer may still be on its way. The client waits for it once.
			waited = true
			late := time.NewTimer(e.p.o.prefillGrace)
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
	from := &rest{data: first, resp: resp}
	events := openai.NewReader(from, maxEvent)
	end := openai.NewEnd(openai.APIOf(e.r.URL.Path))
	seen := -1
	for {
		if n := end.Events(); n != seen { // comments are no answer
			seen = n
			resp.Until(time.Now().Add(e.p.o.Stall))
		}
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
	ended bool // the answer ended as HTTP says
}

func (r *rest) Read(b []byte) (int, error) {
	if len(r.data) == 0 {
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
