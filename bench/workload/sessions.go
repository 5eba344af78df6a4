// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"
)

// aiperfKeys are the keys that only lines of AIPerf have.
var aiperfKeys = []string{"session_id", "delay", "text_input", "messages", "payload"}

// line is one line of an AIPerf trace (AIPerf 0.13.0, MooncakeTrace in dataset/loader/models.py).
type line struct {
	session   string
	stamp     *float64
	delay     *float64
	input     *int
	output    int
	ids       []int64
	text      *string
	messages  json.RawMessage
	tools     json.RawMessage
	payload   json.RawMessage
	contained bool // the line has messages or payload, and so the whole prompt
}

// session is the state of a session that its next turn continues.
type session struct {
	number  int
	turns   int
	arrival time.Duration // arrival of its last turn
	ended   time.Duration // estimated end of its last turn, by TraceOptions.TokenTime
	form    string        // messages or payload, if its turns are whole prompts
	prompt  prompt
}

// parse parses a line of any format.
func (t *Reader) parse(text []byte) (Request, error) {
	var m map[string]json.RawMessage
	if json.Unmarshal(text, &m) != nil || m == nil {
		return Request{}, fmt.Errorf("%s is no JSON object", cut(text))
	}
	f := t.o.Format
	if f == FormatAuto && slices.ContainsFunc(aiperfKeys, func(k string) bool { return present(m[k]) }) {
		f = FormatAIPerf
	}
	if f == FormatAIPerf {
		return t.turn(m)
	}
	q, err := t.o.parse(m)
	q.Conversation = t.chats
	t.chats++
	return q, err
}

func present(raw json.RawMessage) bool { return len(raw) > 0 && string(raw) != "null" }

// readLine reads the keys of an AIPerf line.
func (o *TraceOptions) readLine(m map[string]json.RawMessage) (l line, err error) {
	read := func(key string, to any, want string) {
		if raw := m[key]; err == nil && present(raw) && json.Unmarshal(raw, to) != nil {
			err = fmt.Errorf("%s is %s, %s is expected", key, cut(raw), want)
		}
	}
	read("session_id", &l.session, "a text")
	read(o.Timestamp, &l.stamp, "a number")
	read("delay", &l.delay, "a number")
	read(o.InputLength, &l.input, "a whole number")
	read(o.OutputLength, &l.output, "a whole number")
	read(o.HashIDs, &l.ids, "a list of whole numbers")
	read("text_input", &l.text, "a text")
	l.messages, l.tools, l.payload = m["messages"], m["tools"], m["payload"]
	if err != nil {
		return l, err
	}
	forms := 0
	for _, there := range []bool{l.input != nil, l.text != nil, present(l.messages), present(l.payload)} {
		if there {
			forms++
		}
	}
	l.contained = present(l.messages) || present(l.payload)
	switch {
	case forms != 1:
		return l, fmt.Errorf("%d of %s, text_input, messages and payload are there, one is expected", forms, o.InputLength)
	case present(m[o.HashIDs]) && l.input == nil:
		return l, fmt.Errorf("%s is given without %s", o.HashIDs, o.InputLength)
	case present(l.tools) && !present(l.messages):
		return l, errors.New("tools is given without messages")
	case l.output < 0 || l.output > maxInputTokens:
		return l, fmt.Errorf("%s %d is outside 0 to %d", o.OutputLength, l.output, maxInputTokens)
	}
	for key, v := range map[string]*float64{o.Timestamp: l.stamp, "delay": l.delay} {
		if v != nil && !(*v*o.Seconds >= 0 && *v*o.Seconds < maxSeconds) {
			return l, fmt.Errorf("%s %v is no time from 0 to 292 years", key, *v)
		}
	}
	return l, nil
}

// maxSeconds bounds the times in a trace, in seconds. A later time is ErrTrace.
const maxSeconds = float64(math.MaxInt64) / 1e9

// turn parses a line of AIPerf. A later turn of a session is a delta: its prompt is the prompt of the turn before it, the answer to
// that, and what the line adds. A line with messages or payload has the whole prompt.
func (t *Reader) turn(m map[string]json.RawMessage) (q Request, err error) {
	l, err := t.o.readLine(m)
	if err != nil {
		return q, err
	}
	s := t.sessions[l.session]
	if s == nil || l.session == "" {
		if l.session != "" && len(t.sessions) >= t.o.maxSessions {
			return q, fmt.Errorf("the trace has more than %d sessions: play fewer requests of it", t.o.maxSessions)
		}
		s = &session{number: t.chats, prompt: prompt{size: t.o.BlockTokens}}
	}
	if err = s.check(&l); err != nil {
		return q, err
	}
	before := s.prompt.weight()
	q = Request{BlockTokens: t.o.BlockTokens, Conversation: s.number, Turn: s.turns, Output: l.output}
	if err = t.setArrival(s, &l, &q); err != nil {
		return q, err
	}
	if err = t.o.extend(s, &l); err != nil {
		return q, err
	}
	if q.Input = s.prompt.tokens(); q.Input < 1 || q.Input > maxInputTokens {
		return q, fmt.Errorf("turn %d has a prompt of %d tokens, 1 to %d are possible", s.turns+1, q.Input, maxInputTokens)
	}
	q.Blocks = s.prompt.names()
	s.arrival, s.ended = q.Arrival, q.Arrival+min(time.Duration(l.output)*t.o.TokenTime, math.MaxInt64-q.Arrival)
	if s.turns == 0 {
		t.chats++
		if l.session != "" {
			t.sessions[l.session] = s
		}
	}
	if !l.contained {
		s.prompt.unique(pieceAnswer, s.number, s.turns, l.output)
	}
	s.turns++
	if l.session == "" {
		return q, nil
	}
	if l.contained {
		s.prompt = prompt{size: t.o.BlockTokens}
	}
	if t.kept += s.prompt.weight() - before; t.kept > t.o.maxBlocks {
		return q, fmt.Errorf("the prompts of the trace's sessions take more than %d bytes: play fewer requests of it", 8*t.o.maxBlocks)
	}
	return q, nil
}

// check returns an error for a turn whose form does not match the earlier turns of its session, as AIPerf does.
func (s *session) check(l *line) error {
	form := ""
	switch {
	case present(l.messages):
		form = "messages"
	case present(l.payload):
		form = "payload"
	}
	if s.turns > 0 && form != s.form {
		name := func(form string) string {
			if form == "" {
				return "prompts that continue one another"
			}
			return form
		}
		return fmt.Errorf("the session has %s and %s, one form is expected", name(s.form), name(form))
	}
	s.form = form
	return nil
}

// setArrival sets when a turn arrives: at its timestamp; without a timestamp, its delay after the end of the turn before it.
func (t *Reader) setArrival(s *session, l *line, q *Request) error {
	units := func(v float64) time.Duration { return time.Duration(v * t.o.Seconds * float64(time.Second)) }
	switch {
	case l.stamp != nil:
		q.Arrival = max(units(*l.stamp), s.arrival)
	case s.turns > 0:
		q.Arrival = s.ended
		if l.delay != nil {
			q.Pause = units(*l.delay)
			q.Arrival += min(q.Pause, math.MaxInt64-q.Arrival)
		}
	}
	if q.Arrival.Seconds() >= maxSeconds {
		return fmt.Errorf("turn %d comes later than in 292 years", s.turns+1)
	}
	return nil
}

// extend adds the content of a line to the prompt of its session.
func (o *TraceOptions) extend(s *session, l *line) error {
	switch {
	case l.text != nil:
		s.prompt.text([]byte(*l.text))
	case present(l.messages):
		return chat(&s.prompt, l.messages, l.tools)
	case present(l.payload):
		return body(&s.prompt, l.payload)
	default:
		return o.extendBlocks(s, *l.input, l.ids)
	}
	return nil
}

// extendBlocks adds tokens that begin with named blocks. No other prompt has the tokens after these blocks. As in AIPerf, the last
// block may be partial.
func (o *TraceOptions) extendBlocks(s *session, input int, ids []int64) error {
	if input < 1 || input > maxInputTokens {
		return fmt.Errorf("%s %d is outside 1 to %d", o.InputLength, input, maxInputTokens)
	}
	if most := (input + o.BlockTokens - 1) / o.BlockTokens; len(ids) > most {
		return fmt.Errorf("%d %s for %s %d: %d of %d tokens are the most", len(ids), o.HashIDs, o.InputLength, input, most, o.BlockTokens)
	}
	for _, id := range ids {
		n := min(o.BlockTokens, input)
		s.prompt.add(pieceHash, uint64(id), n)
		input -= n
	}
	s.prompt.unique(pieceFresh, s.number, s.turns, input)
	return nil
}

// chat adds the messages of a chat to a prompt: its tools, then each role and content.
func chat(p *prompt, messages, tools json.RawMessage) error {
	var list []struct {
		Role    *string
		Content json.RawMessage
		Calls   json.RawMessage `json:"tool_calls"`
	}
	if json.Unmarshal(messages, &list) != nil || len(list) == 0 {
		return fmt.Errorf("messages is %s, a list of messages with a role is expected", cut(messages))
	}
	var text []byte
	if present(tools) {
		var some []json.RawMessage
		if json.Unmarshal(tools, &some) != nil || len(some) == 0 {
			return fmt.Errorf("tools is %s, a list of tools is expected", cut(tools))
		}
		text = compact(text, tools)
	}
	for i, m := range list {
		if m.Role == nil {
			return fmt.Errorf("message %d has no role", i+1)
		}
		text = append(append(text, *m.Role...), '\n')
		var content string
		if json.Unmarshal(m.Content, &content) == nil {
			text = append(text, content...)
		} else {
			text = compact(text, m.Content)
		}
		text = append(compact(text, m.Calls), '\n')
	}
	p.text(text)
	return nil
}

// body adds the prompt in the body of a request.
func body(p *prompt, payload json.RawMessage) error {
	var m map[string]json.RawMessage
	if json.Unmarshal(payload, &m) != nil || len(m) == 0 {
		return fmt.Errorf("payload is %s, the body of a request is expected", cut(payload))
	}
	if present(m["messages"]) {
		return chat(p, m["messages"], m["tools"])
	}
	var text string
	switch raw := m["prompt"]; {
	case json.Unmarshal(raw, &text) == nil && text != "":
		p.text([]byte(text))
	case present(raw):
		p.text(compact(nil, raw))
	default:
		p.text(compact(nil, payload))
	}
	return nil
}

// compact appends JSON without blanks to `to`.
func compact(to []byte, raw json.RawMessage) []byte {
	b := bytes.NewBuffer(to)
	if !present(raw) || json.Compact(b, raw) != nil {
		return to
	}
	return b.Bytes()
}

// prompt is a prompt that is being built: tokens in blocks of size tokens. Each block is named by its content. Equal names mean equal
// tokens after equal prefixes.
type prompt struct {
	size   int
	blocks []int64 // names of the full blocks
	tail   []piece // pieces of the block that is not full
	filled int     // tokens in tail
}

// piece is a part of a block.
type piece struct {
	kind    byte
	id      uint64
	from, n int    // range of the tokens that id names
	text    string // only for pieceText
}

// The kinds of pieces.
const (
	pieceHash   = 'h' // a block that the trace names
	pieceText   = 't'
	pieceFresh  = 'f' // tokens that no other prompt has
	pieceAnswer = 'a' // tokens that the engine generated
)

// tokens returns how many tokens the prompt has.
func (p *prompt) tokens() int { return len(p.blocks)*p.size + p.filled }

// weight returns how much memory the prompt takes, in words of 8 bytes.
func (p *prompt) weight() int {
	n := len(p.blocks)
	for i := range p.tail {
		n += 6 + len(p.tail[i].text)/8
	}
	return n
}

// names returns the names of all blocks.
func (p *prompt) names() []int64 {
	out := slices.Grow(slices.Clone(p.blocks), 1)
	if p.filled > 0 {
		out = append(out, name(p.tail))
	}
	return out
}

// unique adds n tokens that no other prompt has, except those that continue this one: `kind`, pieceFresh or pieceAnswer, the number of the
// session and the number of its turn identify them.
func (p *prompt) unique(kind byte, number, turn, n int) {
	p.add(kind, uint64(number)<<32|uint64(uint32(turn)), n)
}

// add appends n tokens of the content that id names.
func (p *prompt) add(kind byte, id uint64, n int) {
	for from := 0; from < n; {
		some := min(n-from, p.size-p.filled)
		p.put(piece{kind: kind, id: id, from: from, n: some})
		from += some
	}
}

// textToken is how many bytes of text count as one token.
const textToken = 4

// text appends a text, with one token for four bytes.
func (p *prompt) text(s []byte) {
	for len(s) > 0 {
		some := min((len(s)+textToken-1)/textToken, p.size-p.filled)
		end := min(some*textToken, len(s))
		p.put(piece{kind: pieceText, n: some, text: string(s[:end])})
		s = s[end:]
	}
}

func (p *prompt) put(x piece) {
	p.tail = append(p.tail, x)
	if p.filled += x.n; p.filled == p.size {
		p.blocks = append(p.blocks, name(p.tail))
		p.tail, p.filled = p.tail[:0], 0
	}
}

// name returns the name of a block that consists of these pieces. A block that the trace names keeps that name.
func name(pieces []piece) int64 {
	if len(pieces) == 1 && pieces[0].kind == pieceHash && pieces[0].from == 0 {
		return int64(pieces[0].id)
	}
	h := sha256.New()
	var b [33]byte
	for _, x := range pieces {
		b[0] = x.kind
		binary.LittleEndian.PutUint64(b[1:], x.id)
		binary.LittleEndian.PutUint64(b[9:], uint64(x.from))
		binary.LittleEndian.PutUint64(b[17:], uint64(x.n))
		binary.LittleEndian.PutUint64(b[25:], uint64(len(x.text)))
		h.Write(b[:])
		h.Write([]byte(x.text))
	}
	return int64(binary.LittleEndian.Uint64(h.Sum(nil)))
}
