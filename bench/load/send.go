// SPDX-License-Identifier: Apache-2.0

package load

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/kvasir-kv/kvasir/bench"
	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/internal/openai"
)

// The limits of one answer. maxEvent is the longest event, in bytes; with a longer one, the request fails.
const (
	maxEvent   = 16 << 20 // bytes
	maxMessage = 200      // most bytes of an error's text that are kept; "..." follows where it was cut
	maxKept    = 1 << 20  // bytes of generated text after which no more is kept
)

// event has the fields of a stream's event that matter here.
type event struct {
	Choices []struct {
		Text  string
		Delta struct {
			Content string
		}
		FinishReason *string `json:"finish_reason"`
	}
	Usage *struct {
		Prompt     *int `json:"prompt_tokens"`
		Completion int  `json:"completion_tokens"`
		Details    *struct {
			Cached *int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	Error json.RawMessage
}

// send sends one request, reads its answer, and fills in its Sample. Sample.Start is the time since `zero`. It returns the moment at which
// the request was sent.
func (g *Generator) send(ctx context.Context, r *workload.Request, s *bench.Sample, zero time.Time) (began time.Time) {
	body, err := g.body(r)
	s.Input = r.Input
	ctx, cancel := context.WithTimeout(ctx, g.o.Timeout)
	defer cancel()
	var req *http.Request
	if err == nil {
		req, err = http.NewRequestWithContext(ctx, http.MethodPost, g.url, bytes.NewReader(body))
	}
	if err != nil {
		s.Error = clean(err.Error())
		return time.Now()
	}
	req.Header = g.header()
	began = time.Now()
	s.Start = began.Sub(zero).Seconds()
	res, err := g.client.Do(req)
	if err != nil {
		s.Error = reason(err)
		return began
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		s.Error = fmt.Sprintf("HTTP %d: %s", res.StatusCode, message(head(res.Body, 64<<10)))
		return began
	}
	a := answer{g: g, s: s, began: began, last: began, most: 4*max(r.Output, 64) + 64}
	if err := a.read(res.Body); err != nil {
		s.Error = reason(err)
	} else if a.events == 0 {
		s.Error = clean("no token came: HTTP 200, Content-Type " + strconv.Quote(res.Header.Get("Content-Type")))
	} else if !a.finished {
		s.Error = "the stream ended before its last token"
	}
	s.Latency = a.last.Sub(began).Seconds()
	if s.Output == 0 {
		s.Output = a.events
	}
	s.Text = a.text.String()
	return began
}

// answer reads the stream of one request.
type answer struct {
	g           *Generator
	s           *bench.Sample
	began, last time.Time
	events      int // events with a choice
	most        int // largest number of events that is accepted
	finished    bool
	text        strings.Builder
}

func (a *answer) read(body io.Reader) error {
	r := openai.NewReader(body, maxEvent)
	for {
		raw, err := r.Next()
		now := time.Now()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, io.ErrUnexpectedEOF):
			return fmt.Errorf("the stream was cut after %d events", a.events)
		case err != nil:
			return err
		case len(raw.Data) == 0:
			continue // a comment of the event stream
		case string(raw.Data) == openai.Done:
			a.finished = true
			continue
		}
		var e event
		if err := json.Unmarshal(raw.Data, &e); err != nil {
			return fmt.Errorf("event %d is no JSON of a completion: %.60q", a.events+1, raw.Data)
		}
		if len(e.Error) > 0 && string(e.Error) != "null" {
			return errors.New(message(raw.Data))
		}
		if err := a.take(&e, now); err != nil {
			return err
		}
	}
}

// take records an event. As in vLLM, an event with a choice counts as a token, whatever it contains.
func (a *answer) take(e *event, now time.Time) error {
	s := a.s
	if len(e.Choices) > 0 {
		if a.events++; a.events > a.most {
			return fmt.Errorf("more than %d events came: the endpoint does not keep max_tokens", a.most)
		}
		if a.events == 1 {
			s.TTFT = now.Sub(a.began).Seconds()
		} else {
			s.ITL = append(s.ITL, now.Sub(a.last).Seconds())
		}
		a.last = now
		a.g.tokens.Add(1)
		c := &e.Choices[0]
		if a.g.o.KeepText && a.text.Len() < maxKept {
			a.text.WriteString(c.Text)
			a.text.WriteString(c.Delta.Content)
		}
		a.finished = a.finished || c.FinishReason != nil
	}
	if u := e.Usage; u != nil {
		s.Output = max(s.Output, u.Completion)
		if u.Prompt != nil && *u.Prompt >= 0 {
			s.Input = *u.Prompt
		}
		if u.Details != nil && u.Details.Cached != nil {
			s.Cached = max(0, *u.Details.Cached)
		}
	}
	return nil
}

// body returns the JSON of a request.
func (g *Generator) body(r *workload.Request) ([]byte, error) {
	b := []byte(`{"model":`)
	text, err := json.Marshal(g.o.Model)
	b = append(b, text...)
	limit := strconv.Itoa(max(1, r.Output))
	if g.o.Chat {
		prompt := r.Text
		if prompt == "" {
			prompt = words(r.Tokens())
		}
		content, _ := json.Marshal(prompt) // a text can always be encoded
		b = append(append(append(b, `,"messages":[{"role":"user","content":[{"type":"text","text":`...), content...), `}]}],"max_completion_tokens":`...)
	} else {
		b = append(b, `,"prompt":`...)
		if r.Text != "" {
			prompt, _ := json.Marshal(r.Text)
			b = append(b, prompt...)
		} else {
			b = appendIDs(b, r.Tokens(), uint32(g.o.Vocabulary))
		}
		b = append(b, `,"max_tokens":`...)
	}
	b = append(append(b, limit...), `,"stream":true,"stream_options":{"include_usage":true}`...)
	if g.o.IgnoreEOS {
		b = append(b, `,"ignore_eos":true`...)
	}
	for _, k := range slices.Sorted(maps.Keys(g.o.ExtraBody)) {
		key, _ := json.Marshal(k)
		b = append(append(append(append(b, ','), key...), ':'), g.o.ExtraBody[k]...)
	}
	return append(b, '}'), err
}

func appendIDs(b []byte, tokens []uint32, vocabulary uint32) []byte {
	b = append(b, '[')
	for i, t := range tokens {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, uint64(t%vocabulary), 10)
	}
	return append(b, ']')
}

// common are words that are a single token in most vocabularies.
var common = strings.Fields(`the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one
you were her all she there would their we him been has when who will more no if out so said what up its about into than them can only
other new some could time these two may then do first any my now such like our over man me even most made after also did many before must
through back years where much your way well down should because each just those people how too little state good very make world still own
see men work long get here between both life being under never day same another know while last might us great old year off come since
against go came right used take three`)

// words returns tokens as words, each after a blank. Equal tokens become equal words.
func words(tokens []uint32) string {
	var b strings.Builder
	for _, t := range tokens {
		b.WriteByte(' ')
		b.WriteString(common[int(t%uint32(len(common)))])
	}
	return b.String()
}

// head returns at most n bytes of r.
func head(r io.Reader, n int64) []byte {
	text, _ := io.ReadAll(io.LimitReader(r, n)) // on an error, the bytes that have come suffice
	return text
}

// message returns the message in the JSON of an error answer, or the answer's text.
func message(text []byte) string {
	var e struct {
		Error   json.RawMessage
		Message string
	}
	if json.Unmarshal(text, &e) == nil {
		var inner struct{ Message string }
		var plain string
		switch {
		case json.Unmarshal(e.Error, &inner) == nil && inner.Message != "":
			return clean(inner.Message)
		case json.Unmarshal(e.Error, &plain) == nil && plain != "":
			return clean(plain)
		case e.Message != "":
			return clean(e.Message)
		}
	}
	if len(bytes.TrimSpace(text)) == 0 {
		return "no text"
	}
	return clean(string(text))
}

// reason returns the text of an error without the URL and the local addresses, which differ between requests.
func reason(err error) string {
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return "timeout"
	}
	if op, ok := errors.AsType[*net.OpError](err); ok {
		return clean(op.Op + ": " + op.Err.Error())
	}
	return clean(err.Error())
}

// clean turns the text of an endpoint into one printable line.
func clean(text string) string {
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, text)
	if len(text) > maxMessage {
		text = strings.ToValidUTF8(text[:maxMessage], "") + "..."
	}
	return strings.TrimSpace(text)
}
