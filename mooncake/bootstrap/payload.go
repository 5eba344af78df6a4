package bootstrap

import (
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// answer is a response: JSON, or text for a 500.
type answer struct {
	status int
	body   []byte
}

var (
	okAnswer       = answer{http.StatusOK, []byte(`{"status":"ok"}`)}
	internalAnswer = answer{http.StatusInternalServerError, []byte("Internal Server Error")}
)

// detailAnswer is FastAPI's HTTPException.
func detailAnswer(status int, detail string) answer {
	b := append([]byte(nil), `{"detail":`...)
	return answer{status, append(appendString(b, strings.ToValidUTF8(detail, "\uFFFD")), '}')}
}

// problems collects what is wrong with a body, in pydantic's shape.
type problems struct {
	b     []byte
	n     int
	wrong bool // an input cannot be written: FastAPI answers 500
}

// add appends one entry; loc is the field, empty for the body as a whole.
func (p *problems) add(kind, loc, msg string, input *value) {
	if p.n++; p.n > 1 {
		p.b = append(p.b, ',')
	}
	p.b = append(appendString(append(p.b, `{"type":`...), kind), `,"loc":["body"`...)
	if loc != "" {
		p.b = appendString(append(p.b, ','), loc)
	}
	p.b = append(appendString(append(p.b, `],"msg":`...), msg), `,"input":`...)
	b, err := appendJSON(p.b, input)
	p.b = append(b, '}')
	p.wrong = p.wrong || err != nil
}

func (p *problems) answer() answer {
	if p.wrong {
		return internalAnswer
	}
	return answer{http.StatusUnprocessableEntity, append(append([]byte(`{"detail":[`), p.b...), "]}"...)}
}

// decodeRegistration reads the body of POST /register as FastAPI 0.136 and
// pydantic 2 in lax mode do. When ok is false, the answer says why.
func decodeRegistration(contentType string, body []byte) (r Registration, refused answer, ok bool) {
	var p problems
	in := value{kind: kindNull}
	if len(body) > 0 {
		if !isJSON(contentType) {
			in = value{kind: kindString, text: string(body)} // bytes, shown as text
		} else {
			var err error
			if in, err = parseJSON(body); err != nil {
				return r, unreadable(err), false
			}
		}
	}
	switch in.kind {
	case kindNull:
		p.add("missing", "", "Field required", &in)
		return r, p.answer(), false
	case kindObject:
	default:
		p.add("model_attributes_type", "", "Input should be a valid dictionary or object to extract fields from", &in)
		return r, p.answer(), false
	}
	r.EngineID = p.text(&in, "engine_id", MaxEngineIDBytes)
	r.DPRank = p.integer(&in, "dp_rank")
	r.TPRank = p.integer(&in, "tp_rank")
	r.PPRank = p.integer(&in, "pp_rank")
	r.Addr = p.text(&in, "addr", MaxAddrBytes)
	r.TPSize = p.size(&in, "tp_size", r.TPRank)
	r.PPSize = p.size(&in, "pp_size", r.PPRank)
	r.Lease = p.lease(&in)
	if p.n > 0 {
		return r, p.answer(), false
	}
	return r, answer{}, true
}

// isJSON is FastAPI's rule: application/json, or application/ with +json; a body
// without a content type is no JSON.
func isJSON(contentType string) bool {
	t, _, _ := strings.Cut(contentType, ";")
	t = strings.ToLower(strings.TrimSpace(t))
	subtype, ok := strings.CutPrefix(t, "application/")
	return ok && !strings.Contains(subtype, "/") && (subtype == "json" || strings.HasSuffix(subtype, "+json"))
}

func unreadable(err error) answer {
	se, ok := err.(*syntaxError)
	if !ok {
		return detailAnswer(http.StatusBadRequest, "There was an error parsing the body")
	}
	b := append([]byte(nil), `{"detail":[{"type":"json_invalid","loc":["body",`...)
	b = append(strconv.AppendInt(b, int64(se.pos), 10), `],"msg":"JSON decode error","input":{},"ctx":{"error":`...)
	return answer{http.StatusUnprocessableEntity, append(appendString(b, se.msg), "}}]}"...)}
}

func (p *problems) text(in *value, name string, limit int) string {
	v, ok := in.get(name)
	switch {
	case !ok:
		p.add("missing", name, "Field required", in)
	case v.kind != kindString:
		p.add("string_type", name, "Input should be a valid string", v)
	case !utf8.ValidString(v.text): // vLLM's accepts it, and cannot answer /query afterwards
		p.add("string_unicode", name, "Input should be a valid string, unable to parse raw data as a unicode string", &value{kind: kindNull})
	case len(v.text) > limit:
		p.add("string_too_long", name, fmt.Sprintf("String should have at most %d bytes, got %d", limit, len(v.text)), &value{kind: kindNull})
	default:
		return v.text
	}
	return ""
}

func (p *problems) integer(in *value, name string) int {
	v, ok := in.get(name)
	if !ok {
		p.add("missing", name, "Field required", in)
		return 0
	}
	return p.toInt(v, name)
}

// toInt is pydantic's lax integer. Unlike Python's, ours end at 64 bits.
func (p *problems) toInt(v *value, name string) int {
	const tooLarge = "Unable to parse input string as an integer, exceeded maximum size"
	switch v.kind {
	case kindBool:
		if v.truth {
			return 1
		}
		return 0
	case kindInt:
		n, err := strconv.Atoi(v.text)
		if err != nil {
			p.add("int_parsing_size", name, tooLarge, v)
		}
		return n
	case kindFloat:
		switch {
		case math.IsNaN(v.num) || math.IsInf(v.num, 0):
			p.add("finite_number", name, "Input should be a finite number", v)
		case v.num != math.Trunc(v.num):
			p.add("int_from_float", name, "Input should be a valid integer, got a number with a fractional part", v)
		case v.num <= math.MinInt64 || v.num >= math.MaxInt64:
			p.add("int_parsing_size", name, tooLarge, v)
		default:
			return int(v.num)
		}
	case kindString:
		digits, ok := laxInt(v.text)
		if !ok {
			p.add("int_parsing", name, "Input should be a valid integer, unable to parse string as an integer", v)
			return 0
		}
		n, err := strconv.Atoi(digits)
		if err != nil {
			p.add("int_parsing_size", name, tooLarge, v)
		}
		return n
	default:
		p.add("int_type", name, "Input should be a valid integer", v)
	}
	return 0
}

// laxInt takes an integer out of a string as pydantic does: blanks around it, a
// sign, single underscores between digits, and a point followed by zeros only.
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

// size reads a key that stock workers do not send.
func (p *problems) size(in *value, name string, rank int) int {
	v, ok := in.get(name)
	if !ok || v.kind == kindNull {
		return 0
	}
	before := p.n
	n := p.toInt(v, name)
	if p.n == before && (n < 1 || n > MaxSize || rank < 0 || rank >= n) {
		p.add("value_error", name, fmt.Sprintf("Input should be an integer from 1 to %d and larger than the rank, which is %d", MaxSize, rank), v)
	}
	return n
}

// MinLease and MaxLease bound the lease that can be asked for.
const (
	MinLease = 500 * time.Millisecond
	MaxLease = 24 * time.Hour
)

func (p *problems) lease(in *value) time.Duration {
	v, ok := in.get("lease_s")
	if !ok || v.kind == kindNull {
		return 0
	}
	f := v.num
	if v.kind == kindInt {
		f, _ = strconv.ParseFloat(v.text, 64)
	}
	if (v.kind != kindInt && v.kind != kindFloat) || !(f >= MinLease.Seconds()) || f > MaxLease.Seconds() {
		p.add("value_error", "lease_s", fmt.Sprintf("Input should be a number of seconds from %v to %v", MinLease.Seconds(), MaxLease.Seconds()), v)
		return 0
	}
	return time.Duration(f * float64(time.Second))
}
