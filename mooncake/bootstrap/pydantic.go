// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// errUnreadable means that a body is not UTF-8, or is nested too deeply. FastAPI answers it with 400.
var errUnreadable = errors.New("bootstrap: the body is not UTF-8, or is nested too deeply")

// problem is one entry in the body of a 422 answer.
type problem struct {
	Type  string            `json:"type"`
	Loc   []any             `json:"loc"`
	Msg   string            `json:"msg"`
	Input json.RawMessage   `json:"input"`
	Ctx   map[string]string `json:"ctx,omitempty"`
}

// problems collects what is wrong with a body, in the shape of FastAPI's 422 answer. The zero value is ready.
type problems []problem

// Add appends one problem. An empty field means the body as a whole.
func (p *problems) Add(kind, field, msg string, input json.RawMessage) {
	loc := []any{"body"}
	if field != "" {
		loc = append(loc, field)
	}
	*p = append(*p, problem{Type: kind, Loc: loc, Msg: msg, Input: input})
}

// Body returns the body of a 422 answer with these problems.
func (p problems) Body() []byte {
	b, err := json.Marshal(map[string]problems{"detail": p})
	if err != nil {
		panic("BUG: pydantic: encode problems: " + err.Error()) // only texts, and JSON that was parsed before
	}
	return b
}

// bodyFields maps each key of a body that is a JSON object to its value, and "" to the whole body.
type bodyFields map[string]json.RawMessage

// parseObject parses a request's body as FastAPI and pydantic 2 do in lax mode. Two things differ: integers have at most 64 bits, and
// Text may have a limit. If p is not empty, the body is not an object. The only error is errUnreadable.
func parseObject(contentType string, body []byte) (in bodyFields, p problems, err error) {
	if len(body) > 0 && !isJSON(contentType) {
		text, _ := json.Marshal(string(body)) // a string always has a JSON text
		p.Add("model_attributes_type", "", "Input should be a valid dictionary or object to extract fields from", text)
		return nil, p, nil
	}
	if !utf8.Valid(body) {
		return nil, nil, errUnreadable
	}
	body = bytes.TrimSpace(bytes.TrimPrefix(body, []byte("\ufeff")))
	if len(body) == 0 || string(body) == "null" {
		p.Add("missing", "", "Field required", json.RawMessage("null"))
		return nil, p, nil
	}
	if err := json.Unmarshal(body, &in); err != nil {
		se, ok := errors.AsType[*json.SyntaxError](err)
		switch {
		case ok && strings.Contains(se.Error(), "exceeded max depth"):
			return nil, nil, errUnreadable
		case ok:
			p = problems{{"json_invalid", []any{"body", se.Offset}, "JSON decode error", json.RawMessage("{}"), map[string]string{"error": se.Error()}}}
		default:
			p.Add("model_attributes_type", "", "Input should be a valid dictionary or object to extract fields from", body)
		}
		return nil, p, nil
	}
	in[""] = body
	return in, nil, nil
}

// isJSON reports whether FastAPI takes a body of that content type for JSON: application/json, or application/ with +json. A body
// without a content type is not JSON.
func isJSON(contentType string) bool {
	t, _, _ := strings.Cut(contentType, ";")
	t = strings.ToLower(strings.TrimSpace(t))
	subtype, ok := strings.CutPrefix(t, "application/")
	return ok && !strings.Contains(subtype, "/") && (subtype == "json" || strings.HasSuffix(subtype, "+json"))
}

// Text returns the field name if it is a string of at most limit bytes; otherwise it adds a problem.
func (p *problems) Text(in bodyFields, name string, limit int) (s string) {
	raw, ok := in[name]
	switch {
	case !ok:
		p.Add("missing", name, "Field required", in[""])
	case raw[0] != '"' || json.Unmarshal(raw, &s) != nil:
		p.Add("string_type", name, "Input should be a valid string", raw)
	case strings.ContainsRune(s, utf8.RuneError): // replaces half of a surrogate pair, so two different names would become equal
		p.Add("string_unicode", name, "Input should be a valid string, unable to parse raw data as a unicode string", json.RawMessage("null"))
	case len(s) > limit:
		p.Add("string_too_long", name, fmt.Sprintf("String should have at most %d bytes, got %d", limit, len(s)), json.RawMessage("null"))
	default:
		return s
	}
	return ""
}

// Integer returns the field name if it is true or false (1 or 0), a number without a fraction, or a string with such a number;
// otherwise it adds a problem.
func (p *problems) Integer(in bodyFields, name string) int {
	raw, ok := in[name]
	text := string(raw)
	switch {
	case !ok:
		p.Add("missing", name, "Field required", in[""])
		return 0
	case text == "true":
		return 1
	case text == "false":
		return 0
	case raw[0] == '"':
		var s string
		_ = json.Unmarshal(raw, &s) // it was parsed before
		digits, ok := laxInt(s)
		if !ok {
			p.Add("int_parsing", name, "Input should be a valid integer, unable to parse string as an integer", raw)
			return 0
		}
		text = digits
	case strings.IndexByte("-0123456789", raw[0]) < 0:
		p.Add("int_type", name, "Input should be a valid integer", raw)
		return 0
	case strings.ContainsAny(text, ".eE"):
		f, err := strconv.ParseFloat(text, 64)
		switch {
		case err != nil:
			p.Add("finite_number", name, "Input should be a finite number", raw)
			return 0
		case f != math.Trunc(f):
			p.Add("int_from_float", name, "Input should be a valid integer, got a number with a fractional part", raw)
			return 0
		case f > math.MinInt64 && f < math.MaxInt64:
			return int(f)
		}
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		p.Add("int_parsing_size", name, "Unable to parse input string as an integer, exceeded maximum size", raw)
	}
	return n
}

// laxInt returns the digits of the integer in s by pydantic's rules: s may have blanks around the number, a sign, single underscores
// between digits, and a point followed by zeros only.
func laxInt(s string) (string, bool) {
	s = strings.TrimSpace(s)
	if whole, zeros, ok := strings.Cut(s, "."); ok {
		if zeros == "" || strings.Trim(zeros, "0") != "" {
			return "", false
		}
		s = whole
	}
	digits := strings.TrimPrefix(s, "-")
	sign := s[:len(s)-len(digits)]
	if sign == "" {
		digits = strings.TrimPrefix(digits, "+")
	}
	if digits == "" || digits[0] == '_' || digits[len(digits)-1] == '_' || strings.Contains(digits, "__") ||
		strings.Trim(digits, "0123456789_") != "" {
		return "", false
	}
	return sign + strings.ReplaceAll(digits, "_", ""), true
}

// appendPythonString appends s to b as a JSON string, as Python's json writes it with ensure_ascii=False: it escapes only what JSON
// requires.
func appendPythonString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	for i := range len(s) {
		c := s[i]
		if at := strings.IndexByte("\"\\\b\f\n\r\t", c); at >= 0 {
			b = append(b, '\\', `"\bfnrt`[at])
		} else if c < 0x20 {
			b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		} else {
			b = append(b, c)
		}
	}
	return append(b, '"')
}
