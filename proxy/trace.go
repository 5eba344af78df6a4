// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"strconv"
	"time"

	"github.com/kvasir-kv/kvasir/internal/otlp"
)

// traced begins the span of a request, as a child of the client's span.
func (e *exchange) traced() {
	if e.p.o.Spans == nil {
		return
	}
	parent, ok := otlp.Parse(e.r.Header.Get("Traceparent"))
	if ok {
		e.parent = parent.Span
	}
	e.span = otlp.New(parent)
}

// legSpan begins the span of a leg. It returns fields with the traceparent that the engine gets.
func (e *exchange) legSpan(fields []byte) (otlp.Context, []byte) {
	if e.p.o.Spans == nil {
		return otlp.Context{}, fields
	}
	c := otlp.New(e.span)
	return c, append(append(append(fields, "Traceparent: "...), c.String()...), "\r\n"...)
}

// legEnded ends and exports the span c of a leg at the engine b, which began at start and ended with err. Without Options.Spans it does
// nothing.
func (e *exchange) legEnded(c otlp.Context, name string, b *backend, start time.Time, err error) {
	if e.p.o.Spans == nil {
		return
	}
	s := otlp.Span{Context: c, Parent: e.span.Span, Name: name, Kind: otlp.Client, Start: start, End: time.Now(), Attributes: map[string]string{"server.address": b.url}}
	if err != nil {
		s.Err = err.Error()
	}
	e.p.o.Spans.Add(s)
}

// requestEnded ends the span of the request.
func (e *exchange) requestEnded(outcome string) {
	if e.p.o.Spans == nil {
		return
	}
	s := otlp.Span{
		Context: e.span, Parent: e.parent, Name: e.r.Method + " " + e.r.URL.Path, Kind: otlp.Server, Start: e.start, End: time.Now(),
		Attributes: map[string]string{
			"gen_ai.request.model": e.want.model, "kvasir.request_id": e.id, "kvasir.outcome": outcome, "kvasir.attempts": strconv.Itoa(e.attempts),
		},
	}
	if outcome != "ok" {
		s.Err = outcome
	}
	e.p.o.Spans.Add(s)
}
