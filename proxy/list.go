// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/openai"
)

// list is a request of several prompts that goes through P and D. One transfer carries one prompt, so each prompt becomes a request of
// its own, called a part, and the answers of the parts are joined to one answer.
//
// Parts ask for engines one after the other, so that at most one of them waits in a queue, and only that part and those at engines have
// a body in memory. If one part fails, the others end as if their client had left, and the client gets that failure.
type list struct {
	e      *exchange // the client's request
	cancel context.CancelCauseFunc
	parts  int
	native bool          // of /generate, whose answer is a JSON list
	turn   chan struct{} // holds a token while a part asks for engines
	left   chan struct{} // gets a token when a part gives its places back
	places atomic.Int64  // number of parts that have places at engines
	memory atomic.Int64  // bytes of answers that wait until others are complete

	mu struct {
		sync.Mutex // also held during a write to the client
		open       bool
		over       bool        // nothing may be written any more
		begun      int         // number of parts whose stream has begun
		since      time.Time   // when the first part's stream began
		head       http.Header // head of the first part that began
		held       []byte      // events held back until the stream opens
		failure    *partWriter // the first part that failed
		outcome    string      // outcome of failure
		gone       bool        // a write to the client failed
	}
}

// The limits of what a list holds back.
const (
	maxJoined = 64 << 20        // bytes of answers that wait to be joined: with more, the request fails; also of the parts of a split request
	maxHeld   = 1 << 20         // bytes of events held back; with more, the stream to the client opens
	heldFor   = 2 * time.Second // after this time the stream opens, although some parts have not begun
)

var (
	errPartFailed = errors.New("another prompt of the request failed")
	errTooMuch    = fmt.Errorf("the answers have more than %d bytes", maxJoined)
)

// splitPrompts returns the prompts of a request that goes through P and D in parts, one prompt each; nil: the request stays whole. It
// refuses more than Options.MaxPrompts prompts. The error is a *refusal.
func (e *exchange) splitPrompts() ([]openai.Sequence, error) {
	prompts, n, ok := e.q.Prompts(e.p.o.MaxPrompts)
	if n < 2 || e.r.URL.Path != "/v1/completions" || !e.p.fleet.hasDecode(e.want.model) {
		return nil, nil
	}
	if n > e.p.o.MaxPrompts {
		return nil, &refusal{
			status: http.StatusBadRequest, kind: "BadRequestError", param: "prompt", outcome: "bad_request",
			text: fmt.Sprintf("the request has %d prompts, at most %d are allowed", n, e.p.o.MaxPrompts),
		}
	}
	rest := len(e.q.Body) - (e.q.Prompt.To - e.q.Prompt.From)
	if !ok || n*rest > maxJoined {
		return nil, nil
	}
	all := make([]openai.Sequence, n)
	for i, at := range prompts {
		all[i] = openai.Sequence{Prompt: i, Edits: []openai.Edit{{Key: "prompt", Value: at.Of(e.q.Body)}}}
	}
	return all, nil
}

// serveList serves a request of several prompts or answers: each of its sequences as a part of a list, all at the same time.
func (e *exchange) serveList(sequences []openai.Sequence) (outcome string) {
	ctx, cancel := context.WithCancelCause(e.r.Context())
	defer cancel(nil)
	l := &list{e: e, cancel: cancel, parts: len(sequences), turn: make(chan struct{}, 1), left: make(chan struct{}, 1)}
	r := e.r.WithContext(ctx)
	e.beginKeepAlive()
	defer e.front.seal()
	l.native = openai.APIOf(e.r.URL.Path) == openai.Native
	parts := make([]*partWriter, len(sequences))
	var wg sync.WaitGroup
	for i, s := range sequences {
		w := &partWriter{list: l, header: make(http.Header)}
		w.part = openai.Part{Index: i, Whole: e.id, Later: s.Sample > 0}
		if e.rooms {
			w.part.ID = e.id // SGLang creates ids of its own, unrelated to the request's id
		}
		parts[i] = w
		wg.Go(func() { l.serve(w, r, s) })
	}
	opening := time.AfterFunc(heldFor, l.openLate)
	wg.Wait()
	opening.Stop()
	return l.end(parts)
}

// serve serves the sequence s as a request of its own, r, whose answer goes to w. A panic ends only this part.
func (l *list) serve(w *partWriter, r *http.Request, s openai.Sequence) {
	e := l.e
	x := &exchange{
		p: e.p, w: w, r: r, rc: http.NewResponseController(w), start: e.start, id: fmt.Sprint(e.id, "-", w.part.Index), key: e.key, span: e.span, list: l,
		want: needs{who: e.want.who, session: e.want.session},
	}
	x.front.e = x
	x.cached.Store(-1)
	defer func() {
		x.releaseBody()
		x.givePlaces()
		x.leaveTurn()
		if v := recover(); v != nil {
			if v != http.ErrAbortHandler { // as net/http treats a panic of a request: the other parts go on
				e.p.o.Log.Error("BUG: a part of a request panicked", "request", e.id, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
			}
			w.ended("broken_off")
		}
	}()
	if !x.hasTurn() {
		return
	}
	pieces, n := e.q.Apply(s.Edits...)
	x.body = newBody(int64(n))
	for _, piece := range pieces {
		x.body.b = append(x.body.b, piece...)
	}
	if err := x.scanned(); err != nil {
		x.leaveTurn()
		w.ended(x.refuse(err))
		return
	}
	w.ended(x.serve())
}

// hasTurn waits until it is the part's turn to ask for engines. It returns false if the request has ended.
func (e *exchange) hasTurn() bool {
	if e.turn {
		return true
	}
	select {
	case e.list.turn <- struct{}{}:
		e.turn = true
		return true
	case <-e.r.Context().Done():
		return false
	}
}

// leaveTurn gives the turn to the next part.
func (e *exchange) leaveTurn() {
	if e.turn {
		e.turn = false
		<-e.list.turn
	}
}

// takePlaces takes places at engines for an attempt. A part first waits for its turn. If there is no room, it waits until other parts
// of its request end.
func (e *exchange) takePlaces() (choice, error) {
	l := e.list
	if l == nil {
		return e.p.takeNow(e.r.Context(), &e.want)
	}
	e.givePlaces()
	if !e.hasTurn() {
		return choice{}, e.r.Context().Err()
	}
	defer e.leaveTurn()
	for {
		c, err := e.p.takeNow(e.r.Context(), &e.want)
		if err == nil {
			e.hasPlaces = true
			l.places.Add(1)
			return c, nil
		}
		if r, ok := errors.AsType[*refusal](err); !ok || r.outcome != "refused" || l.places.Load() == 0 {
			return c, err
		}
		select {
		case <-l.left:
		case <-e.r.Context().Done():
			return c, e.r.Context().Err()
		}
	}
}

// givePlaces records that an attempt of a part has ended, and its places are free.
func (e *exchange) givePlaces() {
	if !e.hasPlaces {
		return
	}
	e.hasPlaces = false
	e.list.places.Add(-1)
	select {
	case e.list.left <- struct{}{}:
	default:
	}
}

// partWriter is the http.ResponseWriter of one part. It gives the part's answer to the list.
type partWriter struct {
	list   *list
	part   openai.Part
	header http.Header
	status int
	stream bool
	done   bool   // the stream has had its last event
	body   []byte // body of an answer; of a stream, the bytes of an incomplete event
	usage  []byte // the event with the stream's usage; nil: it has not come
}

func (w *partWriter) Header() http.Header { return w.header }

func (w *partWriter) WriteHeader(status int) {
	if w.status != 0 {
		return
	}
	w.status = status
	w.stream = status == http.StatusOK && strings.HasPrefix(w.header.Get("Content-Type"), "text/event-stream")
	if w.stream {
		w.list.began(w.header)
	}
}

// FlushError makes http.ResponseController.Flush succeed: the list flushes events as they come.
func (w *partWriter) FlushError() error { return nil }

// SetWriteDeadline makes http.ResponseController.SetWriteDeadline succeed: the list sets the client's deadlines.
func (w *partWriter) SetWriteDeadline(time.Time) error { return nil }

// Write receives a piece of the part's answer. It returns an error if the client's request has failed or ended; more than maxJoined bytes
// of waiting answers make the request fail.
func (w *partWriter) Write(b []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	if w.list.memory.Add(int64(len(b))) > maxJoined {
		w.list.fail(&partWriter{status: http.StatusBadGateway, body: (&refusal{status: http.StatusBadGateway, kind: "BadGateway", text: errTooMuch.Error()}).body()}, "failed")
		return 0, errTooMuch
	}
	w.body = append(w.body, b...)
	if !w.stream {
		return len(b), nil
	}
	for {
		n := openai.EventLen(w.body)
		if n == 0 {
			return len(b), nil
		}
		err := w.event(w.body[:n])
		w.body = append(w.body[:0], w.body[n:]...)
		w.list.memory.Add(-int64(n))
		if err != nil {
			return 0, err
		}
	}
}

// event gives an event of a stream to the list.
func (w *partWriter) event(raw []byte) error {
	event, err := openai.NewReader(bytes.NewReader(raw), len(raw)+1).Next()
	switch data := event.Data; {
	case err != nil && !errors.Is(err, io.EOF):
		return err
	case len(data) == 0: // a comment
		return w.list.write(raw)
	case string(data) == openai.Done:
		w.done = true
		return nil
	case bytes.HasPrefix(data, []byte(`{"error"`)):
		w.list.fail(&partWriter{stream: true, body: bytes.Clone(data)}, "failed")
		return errPartFailed
	case w.list.native:
		if status, _ := openai.Native.Refused(raw); status != 0 || openai.Native.KindOf(raw) == openai.Failure {
			w.list.fail(&partWriter{stream: true, body: openai.Native.ErrorOf(data)}, "failed")
			return errPartFailed
		}
		whole, err := w.part.NativeEvent(data)
		if err != nil {
			return err
		}
		return w.list.write(openai.AppendEvent(nil, whole))
	default:
		whole, usage, err := w.part.Event(data)
		if err != nil {
			return err
		}
		switch {
		case usage != nil:
			w.usage = bytes.Clone(usage)
			return nil
		case whole == nil:
			return nil
		}
		return w.list.write(openai.AppendEvent(nil, whole))
	}
}

// ended records how the part ended. Bytes left over from its stream are its last event, without the empty line that should follow.
func (w *partWriter) ended(outcome string) {
	if outcome == "ok" && w.stream && len(w.body) > 0 {
		_ = w.event(append(w.body, "\n\n"...)) // if the event cannot be read, the stream has no last event
		w.body = nil
	}
	if outcome != "ok" || w.status != http.StatusOK || w.stream && !w.done {
		w.list.fail(w, outcome)
	}
}

// fail ends the whole request with the failure of one part, unless the request is ending already.
func (l *list) fail(w *partWriter, outcome string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.failure == nil && l.e.r.Context().Err() == nil {
		l.mu.failure, l.mu.outcome = w, outcome
	}
	l.cancel(errPartFailed)
}

// began records that the stream of a part has begun.
func (l *list) began(h http.Header) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.begun++; l.mu.begun == 1 {
		l.mu.head, l.mu.since = h.Clone(), time.Now()
	}
	if l.mu.begun == l.parts {
		l.openLocked()
	}
}

// openLate opens the stream to the client if some part has begun and none has failed. It is called heldFor after the request began.
func (l *list) openLate() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.begun > 0 && l.mu.failure == nil && !l.mu.over {
		l.openLocked()
	}
}

// openLocked sends the client the head of the stream and the events held back.
func (l *list) openLocked() {
	if l.mu.open {
		return
	}
	l.mu.open = true
	l.headLocked(l.mu.head, http.StatusOK, -1)
	held := l.mu.held
	l.mu.held = nil
	l.sendLocked(held)
}

// headLocked sends the client the head of the answer, with the header fields of one part.
func (l *list) headLocked(from http.Header, status, length int) {
	e := l.e
	e.p.n.began(e, status == http.StatusOK)
	if e.front.seal() {
		return
	}
	h := e.w.Header()
	for k, v := range from {
		h[k] = v
	}
	h["X-Request-Id"] = []string{e.id}
	h.Del("Content-Length")
	if length >= 0 {
		h.Set("Content-Length", fmt.Sprint(length))
	}
	e.extend(time.Now())
	e.w.WriteHeader(status)
}

// write sends events to the client, or holds them back until the stream opens.
func (l *list) write(b []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.mu.open && (len(l.mu.held)+len(b) > maxHeld || time.Since(l.mu.since) > heldFor) {
		l.openLocked()
	}
	if !l.mu.open {
		l.mu.held = append(l.mu.held, b...)
		return nil
	}
	return l.sendLocked(b)
}

// sendLocked writes to the client. If that fails, the client has left.
func (l *list) sendLocked(b []byte) error {
	l.e.extend(time.Now())
	_, err := l.e.w.Write(b)
	if err == nil {
		err = l.e.rc.Flush()
	}
	if err != nil {
		l.mu.gone = true
		l.cancel(err)
	}
	return err
}

// end is called when all parts have ended. It sends the client the joined answer, or the last events of its stream; after a failure of a
// part it sends that failure. It returns the outcome of the whole request.
func (l *list) end(parts []*partWriter) (outcome string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.over = true
	switch {
	case l.mu.gone, l.e.r.Context().Err() != nil:
		return "client_left"
	case l.mu.failure != nil:
		return l.endFailedLocked()
	}
	var all []openai.Part
	var answers [][]byte
	for _, w := range parts {
		text := w.body
		if w.stream {
			text = w.usage
		}
		if text != nil {
			all, answers = append(all, w.part), append(answers, text)
		}
	}
	stream := parts[0].stream
	var joined []byte
	var err error
	switch {
	case len(answers) == 0:
	case l.native:
		joined, err = openai.JoinNative(answers)
	default:
		joined, err = openai.JoinAnswers(all, answers)
	}
	switch {
	case err != nil || !stream && len(answers) < len(parts):
		l.e.p.o.Log.Warn("the answers to the prompts of a request cannot be joined", "request", l.e.id, "err", err)
		l.mu.failure = &partWriter{status: http.StatusBadGateway, body: (&refusal{status: http.StatusBadGateway, kind: "BadGateway", text: "the answers of the engines cannot be joined"}).body()}
		l.mu.outcome = "failed"
		return l.endFailedLocked()
	case !stream && l.e.front.seal(): // the client asked for a stream
		return l.e.endEarly(http.StatusBadGateway, "BadGateway", "the engines did not stream")
	case !stream:
		l.headLocked(parts[0].header, http.StatusOK, len(joined))
		_, _ = l.e.w.Write(joined) // the client has gone
		return "ok"
	}
	l.openLocked()
	if joined != nil {
		joined = openai.AppendEvent(nil, joined)
	}
	if l.sendLocked(openai.AppendEvent(joined, []byte(openai.Done))) != nil {
		return "client_left"
	}
	return "ok"
}

// endFailedLocked sends the client the first failure: with its status if nothing has been sent, else as an event.
func (l *list) endFailedLocked() (outcome string) {
	f := l.mu.failure
	if l.e.front.seal() {
		l.mu.open = true
	}
	if !l.mu.open && !f.stream && f.status != 0 {
		if f.header == nil {
			f.header = http.Header{"Content-Type": {"application/json"}}
		}
		l.headLocked(f.header, f.status, len(f.body))
		_, _ = l.e.w.Write(f.body) // the client has gone
		return l.mu.outcome
	}
	l.openLocked()
	event := bytes.ReplaceAll(bytes.TrimSpace(f.body), []byte("\n"), nil)
	if !bytes.HasPrefix(event, []byte(`{"error"`)) {
		why := refusal{status: http.StatusBadGateway, kind: "InternalServerError", text: "the engine broke off"}
		if kind, text := openai.ErrorIn(event); text != "" && f.status >= 400 { // in the form of SGLang
			why = refusal{status: f.status, kind: kind, text: text}
		}
		event = why.body()
	}
	_ = l.sendLocked(openai.AppendEvent(nil, event)) // the client may have gone
	if l.mu.outcome == "failed" {
		_ = l.sendLocked(openai.AppendEvent(nil, []byte(openai.Done)))
		return l.mu.outcome
	}
	panic(http.ErrAbortHandler) // cuts the connection
}
