// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/internal/openai"
)

// front sends a client comments before the answer begins. After a comment another engine can still answer, but the client has got the
// head of a stream: it is sent with the first comment.
type front struct {
	mu     sync.Mutex
	e      *exchange
	open   bool // the head has been sent
	sealed bool // the answer has begun: no comment follows
}

// seal ends the comments, and reports whether the head of a stream has been sent.
func (f *front) seal() (open bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sealed = true
	return f.open
}

// comment sends comments to the client. A part of a list drops them: its answer may still become an error with a status.
func (f *front) comment(b []byte, fields []http1.Field) error {
	if f.e.list != nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.sealed {
		return nil
	}
	if !f.open {
		f.open = true
		f.e.writeHead(fields, http.StatusOK, -1)
	}
	f.e.extend(time.Now())
	if _, err := f.e.w.Write(b); err != nil {
		return err
	}
	return f.e.rc.Flush()
}

var keepAliveFields = []http1.Field{{Name: "Content-Type", Value: "text/event-stream; charset=utf-8"}, {Name: "Cache-Control", Value: "no-cache"}}

// beginKeepAlive begins to send comments to a client that waits for a stream, if Options.KeepAlive is set. front.seal ends them.
func (e *exchange) beginKeepAlive() {
	stream, _ := e.q.Bool(e.q.Stream)
	if e.p.o.KeepAlive == 0 || !stream || e.list != nil || openai.APIOf(e.r.URL.Path) == openai.Other {
		return
	}
	f := &e.front
	var again func()
	again = func() {
		f.mu.Lock()
		done := f.sealed
		f.mu.Unlock()
		if done || e.r.Context().Err() != nil || f.comment([]byte(": keep-alive\n\n"), keepAliveFields) != nil {
			return
		}
		time.AfterFunc(e.p.o.KeepAlive, again)
	}
	time.AfterFunc(e.p.o.KeepAlive, again)
}

// endEarly ends, with an error event, a stream whose head is sent but that has had no event.
func (e *exchange) endEarly(status int, kind, text string) (outcome string) {
	api := openai.APIOf(e.r.URL.Path)
	event := api.AppendError(nil, status, kind, text)
	if api.EndsWithDone() {
		event = openai.AppendEvent(event, []byte(openai.Done))
	}
	e.extend(time.Now())
	_, _ = e.w.Write(event) // the client may have gone
	_ = e.rc.Flush()
	if status < 500 {
		return "bad_request"
	}
	return "failed"
}

// endEarlyAs ends the stream as endEarly does, with the error in body, the whole answer of an engine that did not stream.
func (e *exchange) endEarlyAs(status int, body []byte) (outcome string) {
	kind, text := openai.ErrorIn(body)
	if text == "" {
		text = fmt.Sprintf("the engine answered with status %d", status)
	}
	return e.endEarly(status, kind, text)
}

// maxOpening is how many bytes of a stream are held back until it has data. When more have come, the client gets them, and no other
// engine is tried.
const maxOpening = 64 << 10

const pingComment = ": ping\n\n"

var errEmptyAnswer = errors.New("the engine's answer is empty")

// firstData returns the beginning of a stream up to the first data of its answer, including the events that it held back before that
// data. It passes comments and pings on at once: until there is data, another engine can answer. Errors are errFailed, errEmptyAnswer,
// those of refusedIn, and those of the connection.
func (e *exchange) firstData(b *backend, resp *http1.Response, first []byte) (begin []byte, err error) {
	api := openai.APIOf(e.r.URL.Path)
	if n := openai.EventLen(first); n > 0 && api.KindOf(first[:n]) == openai.Data { // the usual case
		return first, refusedIn(api, b, first[:n])
	}
	held, rest := []byte(nil), append([]byte(nil), first...)
	for {
		for n := openai.EventLen(rest); n > 0; n = openai.EventLen(rest) {
			switch event := rest[:n]; api.KindOf(event) {
			case openai.Nothing:
				if len(held) > 0 && event[0] != ':' { // keep the ping behind the events held back, and send the client a comment in its place
					if len(held)+n < maxOpening/2 {
						held = append(held, event...)
					}
					event = []byte(pingComment)
				}
				_ = e.front.comment(event, resp.Fields) // a client that has gone ends the request
				rest = rest[n:]
				continue
			case openai.Failure:
				if err := refusedIn(api, b, event); err != nil {
					return nil, err
				}
				return nil, fmt.Errorf("%w: %.200s", errFailed, event)
			case openai.Opening:
				held, rest = append(held, event...), rest[n:]
				if len(held) < maxOpening {
					continue
				}
			default:
				if err := refusedIn(api, b, event); err != nil {
					return nil, err
				}
			}
			return append(held, rest...), nil
		}
		if len(rest) > maxOpening {
			return append(held, rest...), nil
		}
		data, err := resp.Next()
		switch {
		case errors.Is(err, io.EOF) && len(held)+len(rest) > 0:
			return append(held, rest...), nil
		case errors.Is(err, io.EOF):
			return nil, errEmptyAnswer
		case err != nil && len(held) > 0 && e.attempts >= e.p.o.Attempts && !isTimeout(err) && e.r.Context().Err() == nil:
			return append(held, rest...), nil // too late to ask another engine: the client gets what has come
		case err != nil:
			return nil, err
		}
		rest = append(rest, data...)
	}
}

// refusedIn returns the error that the first data of SGLang's stream carries, in the same form as that of an answer that is no stream:
// a *refusedByP if the request is at fault, an *engineAnswer if the engine has no room; nil: the data carries no such error.
func refusedIn(api openai.API, b *backend, event []byte) error {
	if b.kind() != sglangKind {
		return nil
	}
	switch status, text := api.Refused(event); {
	case status == 0:
		return nil
	case isEngineAnswer(status):
		return &engineAnswer{b, status, jsonFields, text}
	default:
		return &refusedByP{jsonFields, status, text}
	}
}
