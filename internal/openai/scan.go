// SPDX-License-Identifier: Apache-2.0

// Package openai knows as much of the OpenAI API as a proxy needs: where in a request the fields are that the proxy reads or changes,
// and where the events of a stream end.
//
// A request is scanned once and never decoded. Everything that is not changed passes byte for byte, including unknown fields and the
// order of fields.
package openai

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Range is the range of bytes [From, To) of a body. The zero Range means none.
type Range struct{ From, To int }

// Has reports whether the range is not empty.
func (r Range) Has() bool { return r.To > r.From }

// Of returns the bytes of body in the range.
func (r Range) Of(body []byte) []byte { return body[r.From:r.To] }

// Request is a scanned body, which is a JSON object. Its Ranges are those of the values of keys; the range of a string includes its
// quotes. If a key occurs twice, its last value counts, as in JSON decoders.
type Request struct {
	Body []byte

	Model     Range
	Prompt    Range // of /v1/completions
	Messages  Range // of /v1/chat/completions
	Stream    Range
	MaxTokens Range
	MaxNew    Range // max_completion_tokens
	MinTokens Range
	Params    Range // kv_transfer_params
	ECParams  Range // ec_transfer_params
	XArgs     Range // vllm_xargs
	Salt      Range // cache_salt

	StreamOptions Range

	Input      Range // of /v1/responses
	MaxOutput  Range // max_output_tokens
	Previous   Range // previous_response_id
	Background Range
	TokenIDs   Range // of /inference/v1/generate
	Sampling   Range // sampling_params
	TextIn     Range // text, of /generate
	InputIDs   Range // input_ids, of /generate

	ToolChoice Range

	Embeds Range // prompt_embeds
	N      Range
	BestOf Range
	Beam   Range // use_beam_search

	fields []field // all keys of the object, in order
}

// field is one key of the object.
type field struct {
	name  Range // includes the quotes
	value Range
	end   int // end of the text to cut if the key is removed: after its comma, if it has one
}

// Limits of a body. Scan refuses a body beyond one of them.
const (
	maxDepth  = 512  // objects and lists in one another
	maxFields = 1024 // keys of an object
)

// SyntaxError says at which byte, and why, a body is not a valid JSON object.
type SyntaxError struct {
	Offset int // byte
	Text   string
}

func (e *SyntaxError) Error() string {
	return fmt.Sprintf("openai: position %d: %s", e.Offset, e.Text)
}

// Scan finds the fields of a body. It keeps body and allocates little else. The error is a *SyntaxError: body is not JSON, is nested
// deeper than 512, or is an object with more than 1,024 keys.
func Scan(body []byte) (*Request, error) {
	r := &Request{Body: body, fields: make([]field, 0, usualFields)}
	if err := r.scan(); err != nil {
		return nil, err
	}
	return r, nil
}

// usualFields is the number of keys that most objects do not exceed.
const usualFields = 12

// scan scans r.Body as Scan does. It allocates only if there are more keys than r.fields has room for.
func (r *Request) scan() error {
	s := scanner{b: r.Body}
	s.space()
	if !s.take('{') {
		return s.fail("an object is wanted")
	}
	if err := s.members(r); err != nil {
		return err
	}
	s.space()
	if s.at < len(r.Body) {
		return s.fail("more than one value")
	}
	return nil
}

type scanner struct {
	b  []byte
	at int
}

func (s *scanner) fail(text string) error { return &SyntaxError{s.at, text} }

func (s *scanner) space() {
	for s.at < len(s.b) {
		switch s.b[s.at] {
		case ' ', '\t', '\n', '\r':
			s.at++
		default:
			return
		}
	}
}

func (s *scanner) take(c byte) bool {
	if s.at < len(s.b) && s.b[s.at] == c {
		s.at++
		return true
	}
	return false
}

// members reads an object after its opening brace, and records its fields in r.
func (s *scanner) members(r *Request) error {
	s.space()
	if s.take('}') {
		return nil
	}
	for {
		if len(r.fields) == maxFields {
			return s.fail("too many keys")
		}
		s.space()
		var f field
		f.name.From = s.at
		if err := s.text(); err != nil {
			return err
		}
		f.name.To = s.at
		s.space()
		if !s.take(':') {
			return s.fail("a colon is wanted")
		}
		s.space()
		f.value.From = s.at
		if err := s.value(1); err != nil {
			return err
		}
		f.value.To, f.end = s.at, s.at
		s.space()
		more := s.take(',')
		if more {
			f.end = s.at
		}
		r.fields = append(r.fields, f)
		r.note(f)
		if more {
			continue
		}
		if !s.take('}') {
			return s.fail("a comma or a brace is wanted")
		}
		return nil
	}
}

// note records the range of a field that a proxy reads.
func (r *Request) note(f field) {
	name := f.name.Of(r.Body)
	if name = name[1 : len(name)-1]; bytes.IndexByte(name, '\\') >= 0 { // engines decode escapes in keys
		text, _ := r.Text(f.name)
		name = []byte(text)
	}
	switch string(name) {
	case "model":
		r.Model = f.value
	case "prompt":
		r.Prompt = f.value
	case "messages":
		r.Messages = f.value
	case "stream":
		r.Stream = f.value
	case "max_tokens":
		r.MaxTokens = f.value
	case "max_completion_tokens":
		r.MaxNew = f.value
	case "min_tokens":
		r.MinTokens = f.value
	case "kv_transfer_params":
		r.Params = f.value
	case "ec_transfer_params":
		r.ECParams = f.value
	case "vllm_xargs":
		r.XArgs = f.value
	case "cache_salt":
		r.Salt = f.value
	case "stream_options":
		r.StreamOptions = f.value
	case "tool_choice":
		r.ToolChoice = f.value
	case "input":
		r.Input = f.value
	case "max_output_tokens":
		r.MaxOutput = f.value
	case "previous_response_id":
		r.Previous = f.value
	case "background":
		r.Background = f.value
	case "token_ids":
		r.TokenIDs = f.value
	case "sampling_params":
		r.Sampling = f.value
	default:
		r.noteRare(string(name), f.value)
	}
}

// noteRare records, like note, fields that few requests have.
func (r *Request) noteRare(name string, value Range) {
	switch name {
	case "text":
		r.TextIn = value
	case "input_ids":
		r.InputIDs = value
	case "prompt_embeds":
		r.Embeds = value
	case "n":
		r.N = value
	case "best_of":
		r.BestOf = value
	case "use_beam_search":
		r.Beam = value
	}
}

func (s *scanner) value(depth int) error {
	if s.at >= len(s.b) {
		return s.fail("the text ends")
	}
	if depth > maxDepth {
		return s.fail("nested too deeply")
	}
	switch c := s.b[s.at]; {
	case c == '"':
		return s.text()
	case c == '{':
		return s.list('}', depth, true)
	case c == '[':
		return s.list(']', depth, false)
	case c == '-' || c >= '0' && c <= '9':
		return s.number()
	}
	for _, word := range []string{"true", "false", "null"} {
		if bytes.HasPrefix(s.b[s.at:], []byte(word)) {
			s.at += len(word)
			return nil
		}
	}
	return s.fail("a value is wanted")
}

// list reads an array, or an object if object is true, from its opening bracket to `closing`. It fails if the elements, at depth+1, lie
// deeper than maxDepth.
func (s *scanner) list(closing byte, depth int, object bool) error {
	s.at++
	s.space()
	if s.take(closing) {
		return nil
	}
	for {
		s.space()
		if object {
			if err := s.text(); err != nil {
				return err
			}
			s.space()
			if !s.take(':') {
				return s.fail("a colon is wanted")
			}
			s.space()
		}
		if err := s.value(depth + 1); err != nil {
			return err
		}
		s.space()
		switch {
		case s.take(closing):
			return nil
		case !s.take(','):
			return s.fail("a comma or an end is wanted")
		}
	}
}

func (s *scanner) digits() bool {
	from := s.at
	for s.at < len(s.b) && s.b[s.at] >= '0' && s.b[s.at] <= '9' {
		s.at++
	}
	return s.at > from
}

func (s *scanner) number() error {
	s.take('-')
	zero := s.at < len(s.b) && s.b[s.at] == '0'
	from := s.at
	if !s.digits() || zero && s.at > from+1 {
		return s.fail("a number is wanted")
	}
	if s.take('.') && !s.digits() {
		return s.fail("a digit is wanted")
	}
	if s.take('e') || s.take('E') {
		if !s.take('+') {
			s.take('-')
		}
		if !s.digits() {
			return s.fail("a digit is wanted")
		}
	}
	return nil
}

// window is how many bytes of a string are searched at a time, for a quote, for backslashes and for bytes that are not plain. So they
// stay in the processor's first cache between the searches.
const window = 16 << 10

// text reads a string. It jumps from one backslash or quote to the next, which it finds many bytes at a time.
func (s *scanner) text() error {
	if !s.take('"') {
		return s.fail("expected a string")
	}
	to, quote := -1, false // end of the current window, and whether a quote is there
	for {
		if to < s.at || to == s.at && !quote {
			to, quote = s.window()
		}
		run := s.b[s.at:to]
		slash := bytes.IndexByte(run, '\\')
		if slash >= 0 {
			run = run[:slash]
		}
		if !plain(run) {
			return s.notPlain(run)
		}
		s.at += len(run)
		switch {
		case slash >= 0:
			if err := s.escape(); err != nil {
				return err
			}
		case quote:
			s.at++
			return nil
		case s.at >= len(s.b):
			return s.fail("the text ends inside a string")
		}
	}
}

// window returns the end of the next window (`to`): at a quote, between two runes, or at the end of the text. quote means that a quote is
// there.
func (s *scanner) window() (to int, quote bool) {
	to = min(len(s.b), s.at+window)
	if i := bytes.IndexByte(s.b[s.at:to], '"'); i >= 0 {
		return s.at + i, true
	}
	for range utf8.UTFMax - 1 {
		if to < len(s.b) && !utf8.RuneStart(s.b[to]) {
			to--
		}
	}
	return to, false
}

// notPlain returns an error for the first byte of a run that makes the run not plain, or nil.
func (s *scanner) notPlain(run []byte) error {
	for len(run) > 0 {
		r, n := utf8.DecodeRune(run)
		switch {
		case run[0] < 0x20:
			return s.fail("a control character inside a string")
		case r == utf8.RuneError && n == 1:
			return s.fail("not UTF-8")
		}
		run = run[n:]
		s.at += n
	}
	panic("BUG: openai: the run is plain")
}

func (s *scanner) escape() error {
	s.at++
	if s.at >= len(s.b) {
		return s.fail("the text ends inside a string")
	}
	switch s.b[s.at] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		s.at++
		return nil
	case 'u':
		for range 4 {
			if s.at++; s.at >= len(s.b) || !hexDigit(s.b[s.at]) {
				return s.fail("four hexadecimal digits are wanted")
			}
		}
		s.at++
		return nil
	}
	return s.fail("a backslash without a known escape")
}

func hexDigit(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F'
}

// plain reports whether b is UTF-8 without control characters.
func plain(b []byte) bool {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	var low, high uint64 // their top bits are set if there is a control character, or a byte that is not ASCII
	rest := b
	for ; len(rest) >= 32; rest = rest[32:] {
		w0, w1 := binary.LittleEndian.Uint64(rest), binary.LittleEndian.Uint64(rest[8:])
		w2, w3 := binary.LittleEndian.Uint64(rest[16:]), binary.LittleEndian.Uint64(rest[24:])
		// A byte below 0x20 borrows from the next higher byte, which may then count as such a byte, too.
		low |= (w0-ones*0x20)&^w0 | (w1-ones*0x20)&^w1 | (w2-ones*0x20)&^w2 | (w3-ones*0x20)&^w3
		high |= w0 | w1 | w2 | w3
	}
	for ; len(rest) >= 8; rest = rest[8:] {
		w := binary.LittleEndian.Uint64(rest)
		low, high = low|(w-ones*0x20)&^w, high|w
	}
	switch {
	case len(rest) == 0:
	case len(b) >= 8: // checks the last 8 bytes, some of them a second time
		w := binary.LittleEndian.Uint64(b[len(b)-8:])
		low, high = low|(w-ones*0x20)&^w, high|w
	default:
		for _, c := range rest {
			if c < 0x20 {
				return false
			}
			high |= uint64(c) * ones
		}
	}
	return low&highs == 0 && (high&highs == 0 || utf8.Valid(b))
}

// Text returns the string at a range; ok is false if the value is not a string, or is missing.
func (r *Request) Text(at Range) (s string, ok bool) {
	if !at.Has() {
		return "", false
	}
	v := at.Of(r.Body)
	if v[0] != '"' {
		return "", false
	}
	if bytes.IndexByte(v, '\\') < 0 {
		return string(v[1 : len(v)-1]), true
	}
	s, err := unquote(v)
	return s, err == nil
}

// Int returns the whole number at a range as engines read it; ok is false for any other value, or none. vLLM parses requests with
// Pydantic in lax mode, which also accepts 3.0, 3e0, "3", " +3.0 " and true.
func (r *Request) Int(at Range) (n int, ok bool) {
	number := string(at.Of(r.Body))
	text, isText := r.Text(at)
	switch {
	case number == "true" || number == "false":
		return map[string]int{"true": 1}[number], true
	case isText:
		number = strings.ReplaceAll(strings.TrimSpace(text), "_", "") // Pydantic ignores _ between digits
		if strings.ContainsAny(number, "eExXnNpP") {
			return 0, false
		}
	}
	n, err := strconv.Atoi(number)
	if err == nil {
		return n, true
	}
	f, err := strconv.ParseFloat(number, 64)
	if err != nil || f != math.Trunc(f) || math.Abs(f) >= 1<<53 {
		return 0, false
	}
	return int(f), true
}

// Countable reports whether the value at a range is a number above 0, null or missing: the values that an engine accepts as a limit of
// tokens.
func (r *Request) Countable(at Range) bool {
	n, ok := r.Int(at)
	return ok && n > 0 || !at.Has() || string(at.Of(r.Body)) == "null"
}

// Bool returns the boolean at a range as engines read it; ok is false for any other value, or none. Pydantic's lax mode also accepts 1,
// 1.0 and words such as "true", "on" and "Yes".
func (r *Request) Bool(at Range) (v, ok bool) {
	text, isText := r.Text(at)
	if !isText {
		n, ok := r.Int(at)
		return n == 1, ok && (n == 0 || n == 1)
	}
	switch strings.ToLower(text) {
	case "true", "1", "on", "yes", "t", "y":
		return true, true
	case "false", "0", "off", "no", "f", "n":
		return false, true
	}
	return false, false
}
