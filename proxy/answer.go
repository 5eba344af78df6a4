// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/internal/openai"
	"github.com/kvasir-kv/kvasir/internal/transferlog"
)

func isTimeout(err error) bool {
	e, ok := errors.AsType[net.Error](err)
	return ok && e.Timeout()
}

// send sends the leg's request over the connection n to the engine b. It returns the head of the answer, which must come before until.
func (e *exchange) send(ctx context.Context, b *backend, n *http1.Conn, pieces [][]byte, fields []byte, until time.Time) (*http1.Response, error) {
	r := http1.Request{Method: http.MethodPost, Target: e.r.URL.EscapedPath(), Fields: fields, Body: pieces, Whole: b.role == decode && e.split}
	if e.r.URL.RawQuery != "" {
		r.Target += "?" + e.r.URL.RawQuery
	}
	resp, err := n.Do(ctx, &r, until)
	if errors.Is(err, http1.ErrStale) && !b.registered() && ctx.Err() == nil {
		if n, err = b.client.Dial(ctx); err == nil {
			resp, err = n.Do(ctx, &r, until)
		}
	}
	switch {
	case err == nil, ctx.Err() != nil:
	case isTimeout(err):
		err = errLate
	case !errors.Is(err, http1.ErrStale):
		e.p.trouble(b, err)
	}
	return resp, err
}

// Limits of how much of an answer the proxy reads before it sends anything to the client, in bytes.
const (
	maxWhole = 1 << 20  // of an answer that is no stream; the client gets what follows as it comes
	maxError = 64 << 10 // of an answer with an error status; what follows is dropped
)

var legNames = [...]string{both: "generate", prefill: "prefill", decode: "decode"}

// answer runs the leg whose answer the client gets: of one engine alone, or of D with P's transfer params. If it returns an error, the
// client has got nothing yet. answer calls begin, unless it is nil, when it has a connection to the engine. From then on the engine gets
// the whole request, even if the client leaves, so that D can release the KV that P computes for it. lacks is how many bytes of the
// prompt the engine was expected to compute; answer subtracts them from the engine's pending bytes.
func (e *exchange) answer(ctx context.Context, b *backend, lacks int, params []byte, begin func() error) (outcome string, err error) {
	defer func() { e.p.fleet.leave(b, lacks) }()
	began := false
	outer := ctx
	defer func() {
		if !began && outer.Err() == nil { // a leg with data is judged below; no leg is judged if the client left or P failed
			e.judge(b, err)
		}
	}()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(b.life(), func() { cancel(errSilent) })()
	if ctx.Err() != nil {
		return "", fmt.Errorf("%w: %w", errNotSent, context.Cause(ctx))
	}
	n, err := b.client.Conn(ctx)
	if err != nil {
		if ctx.Err() == nil {
			e.p.trouble(b, err)
		}
		return "", fmt.Errorf("%s: %w: %w", b.url, errNotSent, err)
	}
	if begin != nil {
		if err := begin(); err != nil {
			n.Close()
			return "", err
		}
	}
	fields := e.legFields(b, rank{})
	span, fields := e.legSpan(fields)
	start := time.Now()
	defer func() { e.legEnded(span, legNames[b.role], b, start, err) }()
	if e.p.o.AnswerTimeout > 0 {
		defer time.AfterFunc(e.p.o.AnswerTimeout, func() { cancel(errLate) }).Stop()
	}
	resp, err := e.send(ctx, b, n, e.pieces(b, params), fields, start.Add(e.p.o.FirstByte))
	if err != nil {
		if ctx.Err() == nil && !errors.Is(err, errLate) {
			err = fmt.Errorf("%w: %w", errLost, err)
		}
		return "", fmt.Errorf("%s: %w", b.url, err)
	}
	defer resp.Close()
	if isEngineAnswer(resp.Status) {
		text, _ := resp.ReadAll(maxError)
		return "", &engineAnswer{b, resp.Status, resp.Fields, text}
	}
	first, stream, err := e.beginning(b, resp)
	if refused, ok := errors.AsType[*refusedByP](err); ok {
		return "", refused
	}
	switch {
	case errors.Is(err, errFailed), errors.Is(err, errNoRoom), errors.Is(err, errEmptyAnswer):
		return "", fmt.Errorf("%s: %w", b.url, err)
	case err == nil, errors.Is(err, io.EOF) && resp.Status != http.StatusOK:
	case errors.Is(err, io.EOF):
		return "", fmt.Errorf("%s: %w", b.url, errEmptyAnswer)
	case ctx.Err() != nil:
		return "", context.Cause(ctx)
	case isTimeout(err):
		return "", fmt.Errorf("%s: %w: %v have passed", b.url, errLate, e.p.o.FirstByte)
	default:
		e.p.trouble(b, err)
		return "", fmt.Errorf("%s: %w: %w", b.url, errLost, err)
	}
	e.refused = resp.Status != http.StatusOK
	e.answers.Store(true)
	began = true
	e.judge(b, nil)
	e.p.fleet.computed(b, lacks)
	lacks = 0
	return e.pass(b, resp, first, stream), nil
}

// beginning reads an answer up to its first data: engines send the head of a stream long before they know whether the request succeeds.
// first are the bytes read; stream means that the answer is an event stream. Errors are those of firstData and of the connection, and
// errFailed for a request that the engine has aborted, if another engine can still be tried.
func (e *exchange) beginning(b *backend, resp *http1.Response) (first []byte, stream bool, err error) {
	first, err = resp.Next()
	stream = strings.HasPrefix(resp.Field("Content-Type"), "text/event-stream")
	switch {
	case err != nil:
		return first, stream, err
	case !stream && !e.readWhole(resp, &first):
		return nil, false, io.ErrUnexpectedEOF
	case resp.Status != http.StatusOK:
		return first, stream, nil
	case stream:
		if first, err = e.firstData(b, resp, first); err != nil {
			return first, stream, err
		}
	}
	if openai.APIOf(e.r.URL.Path).Aborted(first) && e.attempts < e.p.o.Attempts && e.hasOther(b) {
		return nil, stream, fmt.Errorf("%w: it aborted the request before the first token", errFailed)
	}
	return first, stream, nil
}

// hasOther reports whether another engine of b's role, which the request has not tried yet, could take the request.
func (e *exchange) hasOther(b *backend) bool {
	w := e.want
	w.tried = append(slices.Clone(w.tried), b)
	return e.p.fleet.hasUntried(b.role, &w)
}

// pieces returns the body of the request for the engine that answers. Only the proxy, and never the client, says from where D loads KV
// or encoder outputs.
func (e *exchange) pieces(b *backend, params []byte) [][]byte {
	if e.route == form { // a form names no transfer, and e.q does not describe a form
		return [][]byte{e.body.b}
	}
	if b.kind() == sglangKind {
		pieces, _ := e.q.Apply(e.sglangEdits(b)...)
		return pieces
	}
	edits := e.salt
	if b.role != both || e.key != nil && (e.q.Params.Has() || e.q.ECParams.Has()) {
		edits = append([]openai.Edit{{Key: "kv_transfer_params", Value: params}, {Key: "ec_transfer_params"}}, edits...)
	}
	if len(edits) == 0 {
		return [][]byte{e.body.b}
	}
	pieces, _ := e.q.Apply(edits...)
	return pieces
}

// readWhole reads the rest of an answer that is no stream, up to about maxWhole bytes: as long as the client has got nothing, another
// engine can answer. It returns false if the answer was cut. Otherwise *first is all that was read, and more may follow if the answer
// is longer than maxWhole.
func (e *exchange) readWhole(resp *http1.Response, first *[]byte) bool {
	if resp.Length == int64(len(*first)) {
		return true
	}
	all := make([]byte, 0, max(2*len(*first), int(min(resp.Length, maxWhole))))
	all = append(all, *first...)
	for len(all) < maxWhole {
		data, err := resp.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return false
		}
		all = append(all, data...)
	}
	*first = all
	return true
}

// head sends an answer's status and fields to the client, unless comments have already opened the stream. length is the body's length;
// -1: unknown.
func (e *exchange) head(fields []http1.Field, status, length int) {
	if !e.front.seal() {
		e.writeHead(fields, status, length)
	}
}

func (e *exchange) writeHead(fields []http1.Field, status, length int) {
	h := e.w.Header()
	values := make([]string, len(fields))
	var named []string // fields that the engine's Connection field names; they are not passed on
	for _, f := range fields {
		if f.Name == "Connection" {
			named = append(named, f.Value)
		}
	}
	for i, f := range fields {
		if !hop[f.Name] && !ofEngines[f.Name] && !strings.HasPrefix(f.Name, "Access-Control-") && (named == nil || !connectionNames(named, f.Name)) {
			values[i] = f.Value
			h[f.Name] = append(h[f.Name], values[i:i+1:i+1]...)
		}
	}
	h["X-Request-Id"] = []string{e.id}
	if length >= 0 {
		h["Content-Length"] = []string{strconv.Itoa(length)}
	}
	e.extend(time.Now())
	e.w.WriteHeader(status)
}

// extend sets the client's write deadline to SendTimeout from now, or up to a quarter later. Setting a deadline costs more than reading
// the clock, so extend does it only when a quarter of SendTimeout has passed since the last time.
func (e *exchange) extend(now time.Time) {
	if now.Sub(e.extended) > e.p.o.SendTimeout/4 {
		e.extended = now
		_ = e.rc.SetWriteDeadline(now.Add(e.p.o.SendTimeout + e.p.o.SendTimeout/4)) // not every ResponseWriter has deadlines
	}
}

// pass passes an answer on to the client; first are the bytes of it that were read already.
func (e *exchange) pass(b *backend, resp *http1.Response, first []byte, stream bool) (outcome string) {
	good := resp.Status == http.StatusOK
	fix := e.fixesUsage(stream)
	length := int(resp.Length)
	if fix != nil {
		length = -1 // the corrected number may have fewer digits than D's number
	}
	if !stream && fix != nil {
		first = fix(first)
	}
	if good {
		e.noteResponse(b, first)
		e.noteStored()
		e.learn(b)
	}
	e.releaseBody()
	e.p.n.began(e, good)
	if good {
		e.handed.End(transferlog.Done, "")
	}
	if e.front.seal() && (!good || !stream) { // the client has got the head of a stream
		text := first
		if rest, err := resp.ReadAll(maxError); err == nil {
			text = append(bytes.Clone(first), rest...)
		}
		return e.endEarlyAs(resp.Status, text)
	}
	e.head(resp.Fields, resp.Status, length)
	if stream && fix != nil {
		return e.passEvents(b, resp, first, fix)
	}
	return e.passBytes(b, resp, first, stream, openai.NewEnd(openai.APIOf(e.r.URL.Path)))
}

// passBytes passes the rest of an answer on to the client, beginning with data. end has seen the bytes that were passed on before.
func (e *exchange) passBytes(b *backend, resp *http1.Response, data []byte, stream bool, end *openai.End) (outcome string) {
	err := error(nil)
	renewed, events := time.Time{}, -1
	for err == nil {
		now := time.Now()
		if stream {
			end.Add(data)
		}
		if n := end.Events(); !stream || n != events { // comments do not count as data of an answer
			events = n
			if now.Sub(renewed) > e.p.o.Stall/4 {
				renewed = now
				resp.Until(now.Add(e.p.o.Stall + e.p.o.Stall/4))
			}
		}
		e.extend(now)
		if _, werr := e.w.Write(data); werr != nil {
			return "client_left"
		}
		if stream && !resp.More() {
			if werr := e.rc.Flush(); werr != nil {
				return "client_left"
			}
		}
		data, err = resp.Next()
	}
	if !stream && errors.Is(err, io.EOF) {
		end = openai.NewEnd(openai.Other)
	}
	return e.ended(b, resp.Status, stream, end, err)
}

// ended returns the outcome of an answer that was passed on until err. If the answer is incomplete, it cuts the client's connection.
func (e *exchange) ended(b *backend, status int, stream bool, end *openai.End, err error) (outcome string) {
	clean := errors.Is(err, io.EOF)
	switch {
	case e.r.Context().Err() != nil:
		return "client_left"
	case clean && status != http.StatusOK:
		return "bad_request"
	case clean && end.State() == openai.Failed, clean && end.State() == openai.Complete && end.Failed():
		return "failed"
	case clean && end.State() == openai.Complete:
		return "ok"
	case clean:
		err = fmt.Errorf("%w %s", errNoLast, openai.APIOf(e.r.URL.Path).Last())
	}
	e.brokenOff(b, stream, err)
	return ""
}

// errNoLast means that an engine ended a stream as HTTP demands, but without the event that ends an answer.
var errNoLast = errors.New("the stream ended without its last event,")

// brokenOff ends an incomplete answer by cutting the client's connection, so that the client does not take it for a complete one.
func (e *exchange) brokenOff(b *backend, stream bool, err error) {
	if !isTimeout(err) && !errors.Is(err, errNoLast) { // an engine that ends its streams as HTTP demands is well
		e.p.trouble(b, err)
	}
	e.p.o.Log.Warn("an engine broke off in the middle of an answer", "engine", b.url, "request", e.id, "err", err)
	if stream {
		api := openai.APIOf(e.r.URL.Path)
		_, _ = e.w.Write(api.AppendError([]byte("\n\n"), http.StatusBadGateway, "InternalServerError", "the engine broke off")) // the client may have gone
		_ = e.rc.Flush()
	}
	panic(http.ErrAbortHandler) // cuts the connection
}
