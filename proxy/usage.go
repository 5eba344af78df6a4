// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"io"
	"time"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/internal/openai"
)

// maxEvent is the largest event of a stream whose usage is corrected, in bytes. A longer event, and all that follows it, passes
// unchanged.
const maxEvent = 4 << 20

// fixesUsage returns a function that corrects cached_tokens in D's answer: D counts all tokens that came from P, but the client should
// see how many P had found in its cache. nil means that there is nothing to correct.
func (e *exchange) fixesUsage(stream bool) func([]byte) []byte {
	if !e.split || stream && openai.APIOf(e.r.URL.Path) == openai.Completions && !e.q.StreamOptions.Has() {
		return nil
	}
	waited := false
	return func(data []byte) []byte {
		if e.prefillEnded != nil && !waited && openai.HasCached(data) && !(stream && openai.HasMoreEvents(data)) {
			// P has computed all that D has; only P's answer may still be on its way. The client waits for it once.
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

// passEvents passes a stream on as pass does, event by event, and corrects the usage in it with fix.
func (e *exchange) passEvents(b *backend, resp *http1.Response, first []byte, fix func([]byte) []byte) (outcome string) {
	from := &rest{data: first, resp: resp}
	events := openai.NewReader(from, maxEvent)
	end := openai.NewEnd(openai.APIOf(e.r.URL.Path))
	seen := -1
	for {
		if n := end.Events(); n != seen { // comments do not count as data of an answer
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
		case errors.Is(err, openai.ErrEvent): // the event is too long to be held: what follows passes unchanged
			return e.passBytes(b, resp, left, true, end)
		case from.ended && len(left) > 0: // the answer ended properly, but without the empty line after its last event
			end.Add(left)
			if _, werr := e.w.Write(left); werr != nil {
				return "client_left"
			}
			err = io.EOF
		}
		return e.ended(b, resp.Status, true, end, err)
	}
}

// rest reads an answer on from data, the bytes that were read already.
type rest struct {
	data  []byte
	resp  *http1.Response
	ended bool // the answer ended as HTTP demands
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
