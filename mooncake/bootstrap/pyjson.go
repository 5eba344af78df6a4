package bootstrap

import (
	"bytes"
	"errors"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// The server echoes what it refuses, so it must read JSON as Python's json
// module (3.12) does: NaN and infinities, integers of any length, the last of
// equal keys at the place of the first, lone surrogates, and errors with their
// texts and with offsets in code points.
//
// Strings are kept as UTF-8 in which a lone surrogate has its three-byte form
// (ED A0..BF xx), as Python's "surrogatepass" reads it.

type kind uint8

const (
	kindNull kind = iota
	kindBool
	kindInt   // text: decimal digits with an optional minus
	kindFloat // num
	kindString
	kindList
	kindObject
)

// value is one JSON value.
type value struct {
	kind  kind
	truth bool
	num   float64
	text  string
	list  []value // of a list, or an object's values beside keys
	keys  []string
}

func (v *value) get(key string) (*value, bool) {
	for i := range v.keys {
		if v.keys[i] == key {
			return &v.list[i], true
		}
	}
	return nil, false
}

// syntaxError is Python's JSONDecodeError.
type syntaxError struct {
	pos int // in code points
	msg string
}

func (e *syntaxError) Error() string { return e.msg + " at " + strconv.Itoa(e.pos) }

// errUnreadable stands for the other ways in which json.loads fails: bytes that
// are no text, integers of more than 4,300 digits, nesting without end.
var errUnreadable = errors.New("bootstrap: body cannot be read")

const (
	maxDepth  = 256 // Python gives up somewhere between 500 and 1,500
	maxDigits = 4300
)

// parseJSON reads a whole text. Its errors are *syntaxError and errUnreadable.
func parseJSON(body []byte) (value, error) {
	body = bytes.TrimPrefix(body, []byte("\xef\xbb\xbf"))
	if !validText(body) {
		return value{}, errUnreadable
	}
	p := &parser{s: string(body)}
	i := p.blank(0)
	v, i, err := p.value(i, 0)
	if err != nil {
		return value{}, err
	}
	if i = p.blank(i); i != len(p.s) {
		return value{}, p.fail("Extra data", i)
	}
	return v, nil
}

// validText accepts UTF-8 and lone surrogates.
func validText(b []byte) bool {
	for len(b) > 0 {
		if b[0] < utf8.RuneSelf {
			b = b[1:]
			continue
		}
		_, n := utf8.DecodeRune(b)
		if n == 1 {
			if len(b) < 3 || b[0] != 0xED || b[1] < 0xA0 || b[1] > 0xBF || b[2] < 0x80 || b[2] > 0xBF {
				return false
			}
			n = 3
		}
		b = b[n:]
	}
	return true
}

type parser struct{ s string }

func (p *parser) fail(msg string, at int) error {
	pos := 0
	for i := 0; i < at && i < len(p.s); i++ {
		if p.s[i]&0xC0 != 0x80 { // not a continuation byte
			pos++
		}
	}
	return &syntaxError{pos: pos, msg: msg}
}

// at returns the byte at i, 0 past the end (where no caller asks for 0).
func (p *parser) at(i int) byte {
	if i < len(p.s) {
		return p.s[i]
	}
	return 0
}

func (p *parser) blank(i int) int {
	for i < len(p.s) && (p.s[i] == ' ' || p.s[i] == '\t' || p.s[i] == '\n' || p.s[i] == '\r') {
		i++
	}
	return i
}

func (p *parser) value(i, depth int) (value, int, error) {
	if depth > maxDepth {
		return value{}, i, errUnreadable
	}
	switch p.at(i) {
	case '"':
		s, j, err := p.str(i)
		return value{kind: kindString, text: s}, j, err
	case '{':
		return p.object(i+1, depth+1)
	case '[':
		return p.array(i+1, depth+1)
	}
	for _, w := range literals {
		if strings.HasPrefix(p.s[i:], w.text) {
			return w.v, i + len(w.text), nil
		}
	}
	return p.number(i)
}

var literals = []struct {
	text string
	v    value
}{
	{"null", value{kind: kindNull}},
	{"true", value{kind: kindBool, truth: true}},
	{"false", value{kind: kindBool}},
	{"NaN", value{kind: kindFloat, num: math.NaN()}},
	{"Infinity", value{kind: kindFloat, num: math.Inf(1)}},
	{"-Infinity", value{kind: kindFloat, num: math.Inf(-1)}},
}

func (p *parser) number(start int) (value, int, error) {
	i := start
	if p.at(i) == '-' {
		i++
	}
	switch c := p.at(i); {
	case c == '0':
		i++
	case c >= '1' && c <= '9':
		i = p.digits(i)
	default:
		return value{}, i, p.fail("Expecting value", start)
	}
	whole := i
	if p.at(i) == '.' {
		if j := p.digits(i + 1); j > i+1 {
			i = j
		}
	}
	if c := p.at(i); c == 'e' || c == 'E' {
		j := i + 1
		if c := p.at(j); c == '+' || c == '-' {
			j++
		}
		if k := p.digits(j); k > j {
			i = k
		}
	}
	text := p.s[start:i]
	if i > whole {
		f, _ := strconv.ParseFloat(text, 64) // out of range: an infinity, as in Python
		return value{kind: kindFloat, num: f}, i, nil
	}
	if len(strings.TrimPrefix(text, "-")) > maxDigits {
		return value{}, i, errUnreadable
	}
	if text == "-0" {
		text = "0"
	}
	return value{kind: kindInt, text: text}, i, nil
}

func (p *parser) digits(i int) int {
	for c := p.at(i); c >= '0' && c <= '9'; c = p.at(i) {
		i++
	}
	return i
}

func (p *parser) array(i, depth int) (value, int, error) {
	v := value{kind: kindList}
	if i = p.blank(i); p.at(i) == ']' {
		return v, i + 1, nil
	}
	for {
		item, j, err := p.value(i, depth)
		if err != nil {
			return v, j, err
		}
		v.list = append(v.list, item)
		i = p.blank(j)
		switch p.at(i) {
		case ']':
			return v, i + 1, nil
		case ',':
			i = p.blank(i + 1)
		default:
			return v, i, p.fail("Expecting ',' delimiter", i)
		}
	}
}

func (p *parser) object(i, depth int) (value, int, error) {
	v := value{kind: kindObject}
	place := map[string]int{}
	if i = p.blank(i); p.at(i) == '}' {
		return v, i + 1, nil
	}
	for {
		if p.at(i) != '"' {
			return v, i, p.fail("Expecting property name enclosed in double quotes", i)
		}
		key, j, err := p.str(i)
		if err != nil {
			return v, j, err
		}
		if i = p.blank(j); p.at(i) != ':' {
			return v, i, p.fail("Expecting ':' delimiter", i)
		}
		item, j, err := p.value(p.blank(i+1), depth)
		if err != nil {
			return v, j, err
		}
		if at, ok := place[key]; ok {
			v.list[at] = item
		} else {
			place[key] = len(v.keys)
			v.keys, v.list = append(v.keys, key), append(v.list, item)
		}
		i = p.blank(j)
		switch p.at(i) {
		case '}':
			return v, i + 1, nil
		case ',':
			i = p.blank(i + 1)
		default:
			return v, i, p.fail("Expecting ',' delimiter", i)
		}
	}
}

// str reads the string whose quote is at open.
func (p *parser) str(open int) (string, int, error) {
	start := open + 1
	for i := start; i < len(p.s); i++ {
		switch c := p.s[i]; {
		case c == '"':
			return p.s[start:i], i + 1, nil
		case c < 0x20:
			return "", i, p.fail("Invalid control character at", i)
		case c == '\\':
			return p.escaped(open, start, i)
		}
	}
	return "", len(p.s), p.fail("Unterminated string starting at", open)
}

// escaped reads on from the first backslash of a string.
func (p *parser) escaped(open, start, i int) (string, int, error) {
	b := append([]byte(nil), p.s[start:i]...)
	for i < len(p.s) {
		c := p.s[i]
		switch {
		case c == '"':
			return string(b), i + 1, nil
		case c < 0x20:
			return "", i, p.fail("Invalid control character at", i)
		case c != '\\':
			b = append(b, c)
			i++
			continue
		}
		if i+1 == len(p.s) {
			break
		}
		if p.s[i+1] == 'u' {
			r, j, err := p.unicode(i)
			if err != nil {
				return "", j, err
			}
			b, i = appendRune(b, r), j
			continue
		}
		at := strings.IndexByte(`"\/bfnrt`, p.s[i+1])
		if at < 0 {
			return "", i, p.fail(`Invalid \escape`, i)
		}
		b = append(b, "\"\\/\b\f\n\r\t"[at])
		i += 2
	}
	return "", len(p.s), p.fail("Unterminated string starting at", open)
}

// unicode reads \uXXXX at i, and a second one when both make a surrogate pair.
func (p *parser) unicode(i int) (rune, int, error) {
	const bad = `Invalid \uXXXX escape`
	end := i + 6
	if end >= len(p.s) { // Python wants one more character, the quote
		return 0, i, p.fail(bad, i+1)
	}
	hi, ok := hex4(p.s[i+2 : end])
	if !ok {
		return 0, i, p.fail(bad, i+1)
	}
	if hi < 0xD800 || hi > 0xDBFF || end+6 >= len(p.s) || p.s[end] != '\\' || p.s[end+1] != 'u' {
		return hi, end, nil
	}
	lo, ok := hex4(p.s[end+2 : end+6])
	if !ok {
		return 0, i, p.fail(bad, end+1)
	}
	if lo < 0xDC00 || lo > 0xDFFF {
		return hi, end, nil
	}
	return 0x10000 + (hi-0xD800)<<10 + (lo - 0xDC00), end + 6, nil
}

func hex4(s string) (rune, bool) {
	n, err := strconv.ParseUint(s, 16, 16) // without base prefix: no sign, no underscore
	return rune(n), err == nil
}

func appendRune(b []byte, r rune) []byte {
	if r >= 0xD800 && r <= 0xDFFF {
		return append(b, 0xED, byte(r>>6)&0x3F|0x80, byte(r)&0x3F|0x80)
	}
	return utf8.AppendRune(b, r)
}

// errUnwritable means a value that Python's json.dumps(allow_nan=False,
// ensure_ascii=False) or the encoding to UTF-8 after it refuses.
var errUnwritable = errors.New("bootstrap: value cannot be written")

// appendJSON writes v as Starlette's JSONResponse does.
func appendJSON(b []byte, v *value) ([]byte, error) {
	var err error
	switch v.kind {
	case kindNull:
		return append(b, "null"...), nil
	case kindBool:
		return strconv.AppendBool(b, v.truth), nil
	case kindInt:
		return append(b, v.text...), nil
	case kindFloat:
		return appendFloat(b, v.num)
	case kindString:
		if !utf8.ValidString(v.text) {
			return b, errUnwritable
		}
		return appendString(b, v.text), nil
	case kindList:
		b = append(b, '[')
		for i := range v.list {
			if i > 0 {
				b = append(b, ',')
			}
			if b, err = appendJSON(b, &v.list[i]); err != nil {
				return b, err
			}
		}
		return append(b, ']'), nil
	}
	b = append(b, '{')
	for i := range v.list {
		if i > 0 {
			b = append(b, ',')
		}
		if !utf8.ValidString(v.keys[i]) {
			return b, errUnwritable
		}
		b = append(appendString(b, v.keys[i]), ':')
		if b, err = appendJSON(b, &v.list[i]); err != nil {
			return b, err
		}
	}
	return append(b, '}'), nil
}

// appendFloat writes Python's repr: shortest digits, an exponent below 1e-4 and
// from 1e16 on, and always a point or an exponent.
func appendFloat(b []byte, f float64) ([]byte, error) {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return b, errUnwritable
	}
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.AppendFloat(b, f, 'e', -1, 64), nil // two digits of exponent at least, as Python
	}
	start := len(b)
	b = strconv.AppendFloat(b, f, 'f', -1, 64)
	if bytes.IndexByte(b[start:], '.') < 0 {
		b = append(b, ".0"...)
	}
	return b, nil
}

// appendString writes a JSON string, escaping only what JSON demands.
func appendString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	done := 0
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c >= 0x20 && c != '"' && c != '\\' {
			continue
		}
		b = append(b, s[done:i]...)
		done = i + 1
		if at := strings.IndexByte("\"\\\b\f\n\r\t", c); at >= 0 {
			b = append(b, '\\', `"\bfnrt`[at])
		} else {
			b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		}
	}
	return append(append(b, s[done:]...), '"')
}
