// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/kvasir-kv/kvasir/internal/openai"
)

func scan(t testing.TB, body string) *openai.Request {
	t.Helper()
	r, err := openai.Scan([]byte(body))
	if err != nil {
		t.Fatalf("%.200s: %v", body, err)
	}
	return r
}

func TestScan(t *testing.T) {
	body := ` {"model" : "m\u0031", "prompt":["a \"quoted\" one",[1,2,{"model":"no"}]],"stream":true , "max_tokens":-12,"x":1.5e-3,
		"messages":[{"role":"user","content":"ü 漢"}],"kv_transfer_params":{"a":null},"cache_salt":"s","max_completion_tokens":7,"model":"last"} `
	r := scan(t, body)
	if s, ok := r.Text(r.Model); !ok || s != "last" {
		t.Errorf("model %q", s)
	}
	if n, ok := r.Int(r.MaxTokens); !ok || n != -12 {
		t.Errorf("max_tokens %d", n)
	}
	if n, ok := r.Int(r.MaxNew); !ok || n != 7 {
		t.Errorf("max_completion_tokens %d", n)
	}
	if v, ok := r.Bool(r.Stream); !ok || !v {
		t.Error("stream")
	}
	if got := string(r.Prompt.Of(r.Body)); got != `["a \"quoted\" one",[1,2,{"model":"no"}]]` {
		t.Error(got)
	}
	if got := string(r.Params.Of(r.Body)); got != `{"a":null}` {
		t.Error(got)
	}
	if r := scan(t, `{"m\u006fdel":"x","cache\u005fsalt":"y"}`); string(r.Model.Of(r.Body)) != `"x"` || string(r.Salt.Of(r.Body)) != `"y"` {
		t.Error("keys with escapes are not seen")
	}
	if s, ok := r.Text(scan(t, `{"cache_salt":3}`).Salt); ok {
		t.Errorf("%q is no text", s)
	}
	if _, ok := r.Int(openai.Range{}); ok {
		t.Error("nothing is no number")
	}
}

// Numbers and booleans are read as by Pydantic's lax mode, which engines use.
func TestNumbersAndTruths(t *testing.T) {
	f := func(value string, wantN int, isInt, wantV, isBool bool) {
		t.Helper()
		r := scan(t, `{"max_tokens":`+value+`,"stream":`+value+`}`)
		n, ok := r.Int(r.MaxTokens)
		v, truth := r.Bool(r.Stream)
		if ok != isInt || n != wantN || truth != isBool || v != wantV {
			t.Errorf("%s: %d %v, %v %v", value, n, ok, v, truth)
		}
	}
	f("5", 5, true, false, false)
	f("5.0", 5, true, false, false)
	f("5e0", 5, true, false, false)
	f("50e-1", 5, true, false, false)
	f(`"5"`, 5, true, false, false)
	f(`" +5.0 "`, 5, true, false, false)
	f(`"\u0035"`, 5, true, false, false)
	f(`"5_0"`, 50, true, false, false)
	f("-0", 0, true, false, true)
	f("-0.0", 0, true, false, true)
	f("1.0", 1, true, true, true)
	f("true", 1, true, true, true)
	f("false", 0, true, false, true)
	f(`"TRUE"`, 0, false, true, true)
	f(`"Yes"`, 0, false, true, true)
	f(`"off"`, 0, false, false, true)
	for _, none := range []string{"5.5", `"5e0"`, `"0x5"`, `"x"`, `""`, "null", "[]", "1e30", `"Infinity"`, `"nan"`, "99999999999999999999", `" true"`} {
		f(none, 0, false, false, false)
	}
}

// Each text that is not a JSON object is refused, with the place of the fault.
func TestScanRefuses(t *testing.T) {
	f := func(body string, offset int) {
		t.Helper()
		_, err := openai.Scan([]byte(body))
		e, ok := errors.AsType[*openai.SyntaxError](err)
		if !ok || e.Offset != offset {
			t.Errorf("%.60q: %v, want position %d", body, err, offset)
		}
	}
	f("", 0)
	f("[1]", 0)
	f(`{"a"`, 4)
	f(`{"a":}`, 5)
	f(`{"a":1,}`, 7)
	f(`{"a":1 "b":2}`, 7)
	f(`{"a":"b`, 7)
	f(`{"a":"\x"}`, 7)
	f(`{"a":"\u12g4"}`, 10)
	f("{\"a\":\"\n\"}", 6)
	f("{\"a\":\"12345678\x00\"}", 14)
	f("{\"a\":\"\xff\"}", 6)
	f(`{"a":01}`, 7)
	f(`{"a":1.}`, 7)
	f(`{"a":tru}`, 5)
	f(`{"a":[1,2}`, 9)
	f(`{"a":1}{`, 7)
	f(`{"a":`+strings.Repeat("[", 600), 517)
}

// Edits change only the keys that they name.
func TestApply(t *testing.T) {
	f := func(body, want string, edits ...openai.Edit) {
		t.Helper()
		pieces, n := scan(t, body).Apply(edits...)
		got := string(bytes.Join(pieces, nil))
		if got != want || len(got) != n {
			t.Errorf("%s\n got %s (%d)\nwant %s", body, got, n, want)
		}
	}
	one, gone := openai.Edit{Key: "max_tokens", Value: []byte("1")}, openai.Edit{Key: "stream_options"}
	f(`{"max_tokens": 20, "z":[ ] }`, `{"max_tokens": 1, "z":[ ] }`, one)
	f(`{"z":1}`, `{"z":1,"max_tokens":1}`, one)
	f(`{ }`, `{ "max_tokens":1}`, one)
	f(`{"a":1,"stream_options":{},"b":2}`, `{"a":1,"b":2}`, gone)
	f(`{"stream_options":{},"b":2}`, `{"b":2}`, gone)
	f(`{"a":1, "stream_options":{}}`, `{"a":1}`, gone)
	f(`{"stream_options":{}}`, `{}`, gone)
	f(`{"stream_options":{}}`, `{"max_tokens":1}`, gone, one)
	f(`{"stream_options":{},"stream_options":1}`, `{}`, gone)
	f(`{"max_tokens":5,"a":2,"max_tokens":6}`, `{"max_tokens":1,"a":2,"max_tokens":1}`, one)
	f(`{"max\u005ftokens":5}`, `{"max\u005ftokens":1}`, one)
	f(`{"a":1}`, `{"a":1}`, gone)
	b := openai.Edit{Key: "b"}
	f(`{"a":1,"stream_options":{},"b":2}`, `{"a":1}`, gone, b)
	f(`{"a":1,"stream_options":{},"b":2}`, `{"a":1,"max_tokens":1}`, gone, b, one)
	f(`{"a":1 , "b":2 , "stream_options":{} , "b":3 }`, `{"a":1 }`, gone, b)
	f(`{"max_tokens":20,"b":1,"stream_options":{}}`, `{"max_tokens":1}`, gone, b, one)
	f(`{"b":1,"stream_options":{}}`, `{"max_tokens":1}`, gone, b, one)
	f(`{"b":1,"a":1,"b":2,"stream_options":{}}`, `{"a":1}`, gone, b)
}

// Whichever keys are removed, changed or added, and in whatever order a body has them, the rest is JSON with the same meaning.
func TestApplyToEveryOrder(t *testing.T) {
	edits := []openai.Edit{{Key: "x"}, {Key: "y"}, {Key: "z", Value: []byte("7")}, {Key: "new", Value: []byte(`"v"`)}}
	names := []string{"x", "y", "z", "a"}
	for _, n := range []int{1, 2, 3, 4, 5} {
		for code := range int(math.Pow(float64(len(names)), float64(n))) {
			var fields []string
			for i, c := 0, code; i < n; i, c = i+1, c/len(names) {
				fields = append(fields, fmt.Sprintf("%q:%d", names[c%len(names)], i))
			}
			for _, comma := range []string{",", " , "} {
				for used := range len(edits) + 1 {
					body := "{" + strings.Join(fields, comma) + "}"
					pieces, length := scan(t, body).Apply(edits[:used]...)
					got := bytes.Join(pieces, nil)
					want, err := same([]byte(body), edits[:used])
					have, err2 := same(got, nil)
					if err != nil || err2 != nil || len(got) != length || !reflect.DeepEqual(have, want) {
						t.Fatalf("%s, %d edits: %s, %v", body, used, got, err2)
					}
				}
			}
		}
	}
}

// same applies edits to decoded JSON.
func same(body []byte, edits []openai.Edit) (map[string]any, error) {
	var m map[string]any
	if err := json.Unmarshal(body, &m); err != nil {
		return nil, err
	}
	for _, e := range edits {
		delete(m, e.Key)
		if e.Value != nil {
			var v any
			if err := json.Unmarshal(e.Value, &v); err != nil {
				return nil, err
			}
			m[e.Key] = v
		}
	}
	return m, nil
}

// Scan accepts the texts that encoding/json accepts, and edits have the same result as in the decoded JSON.
func FuzzScan(f *testing.F) {
	f.Add([]byte(`{"model":"m","prompt":"x","stream_options":{"a":[1]},"max_tokens":3}`))
	f.Add([]byte(`{"a":1,"a":2,"stream":false, "stream_options":null}`))
	f.Add([]byte("{\"a\":\"\\ud800\"}"))
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := openai.Scan(body)
		var object map[string]json.RawMessage
		theirs := json.Unmarshal(body, &object)
		if theirs == nil && object == nil { // null
			theirs = errors.New("null")
		}
		if err != nil {
			if theirs == nil && !bytes.ContainsFunc(body, func(r rune) bool { return r == 0xFFFD }) && len(object) < 1000 && bytes.Count(body, []byte("[")) < 500 && bytes.Count(body, []byte("{")) < 500 {
				t.Fatalf("%q: %v", body, err)
			}
			return
		}
		if theirs != nil {
			t.Fatalf("%q is accepted: %v", body, theirs)
		}
		edits := []openai.Edit{{Key: "max_tokens", Value: []byte("1")}, {Key: "stream_options"}, {Key: "kv_transfer_params", Value: []byte(`{"a":"b"}`)}, {Key: "a"}}
		pieces, n := r.Apply(edits...)
		got := bytes.Join(pieces, nil)
		want, err := same(body, edits)
		if err != nil {
			t.Fatal(err)
		}
		have, err := same(got, nil)
		if err != nil || len(got) != n || !reflect.DeepEqual(have, want) {
			t.Fatalf("%q\n%q\n%v", body, got, err)
		}
	})
}

// Strings of every length, with a byte that needs a check at every place.
func TestStringsOfEveryLength(t *testing.T) {
	for n := range 80 {
		for at := range n {
			for _, odd := range []string{`\"`, `\\`, "é", "漢", "\x01", "\x1f", "\x7f", `"`} {
				text := strings.Repeat("x", at) + odd + strings.Repeat("y", n-at-1)
				body := []byte(`{"prompt":"` + text + `","m":"n"}`)
				var want map[string]string
				theirs := json.Unmarshal(body, &want)
				r, err := openai.Scan(body)
				if (err == nil) != (theirs == nil) {
					t.Fatalf("%q: %v and %v", body, err, theirs)
				}
				if err == nil {
					if got, ok := r.Text(r.Prompt); !ok || got != want["prompt"] {
						t.Fatalf("%q: %q", body, got)
					}
				}
			}
		}
	}
}

// A long string is searched in windows: bytes that need a check are found on both sides of a window's end, and across it.
func TestLongStrings(t *testing.T) {
	const window = 16 << 10
	long := strings.Repeat("x", 3*window)
	for at := window - 12; at < window+12; at++ {
		for _, odd := range []string{`\"`, `\\`, `\n`, `\u00e9`, `\ud83d\ude00`, "é", "漢", "😀", "漢漢漢漢", "\x01", "\x80", "\xe6\xbc", "\xf0\x9f\x98", `\x`, `"`} {
			for _, text := range []string{long[:at] + odd, long[:at] + odd + long, long[:at+window] + odd + odd + long[:at] + odd + "y"} {
				body := []byte(`{"prompt":"` + text + `","m":"n"}`)
				var want map[string]string
				theirs := json.Unmarshal(body, &want)
				if !utf8.Valid(body) {
					theirs = errors.New("no UTF-8") // encoding/json replaces it
				}
				r, err := openai.Scan(body)
				if (err == nil) != (theirs == nil) {
					t.Fatalf("%q at %d: %v and %v", odd, at, err, theirs)
				}
				if err == nil {
					if got, ok := r.Text(r.Prompt); !ok || got != want["prompt"] {
						t.Fatalf("%q at %d: another text", odd, at)
					}
				}
			}
		}
	}
}

func BenchmarkScan(b *testing.B) {
	for _, size := range []int{2 << 10, 16 << 10, 220 << 10, 1 << 20} {
		var text strings.Builder
		rnd := rand.New(rand.NewPCG(1, 1))
		for text.Len() < size {
			fmt.Fprintf(&text, "word%d ", rnd.IntN(1000))
			if rnd.IntN(40) == 0 {
				text.WriteString(`\n`)
			}
		}
		body := []byte(`{"model":"m","messages":[{"role":"user","content":"` + text.String() + `"}],"stream":true,"max_tokens":100}`)
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := openai.Scan(body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// Each visits every key in order, escapes in names undone.
func TestEach(t *testing.T) {
	r, err := openai.Scan([]byte(`{"a":1, "b\u0063" : {"x":[2]},"a":"z"}`))
	if err != nil {
		t.Fatal(err)
	}
	got := ""
	r.Each(func(name string, value []byte) { got += name + "=" + string(value) + ";" })
	if got != `a=1;bc={"x":[2]};a="z";` {
		t.Error(got)
	}
}
