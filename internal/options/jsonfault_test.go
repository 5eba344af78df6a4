// SPDX-License-Identifier: Apache-2.0

package options_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/options"
)

// An error names the place and key of the fault, without words of Go.
func TestExplain(t *testing.T) {
	type inner struct {
		Rate float64 `json:"rate"`
	}
	type file struct {
		N     int      `json:"n"`
		List  []int    `json:"list"`
		Name  *string  `json:"name"`
		On    bool     `json:"on"`
		Inner inner    `json:"inner"`
		Rates []inner  `json:"rates"`
		Any   []string `json:"any"`
	}
	f := func(text string, want ...string) {
		t.Helper()
		dec := json.NewDecoder(bytes.NewReader([]byte(text)))
		dec.DisallowUnknownFields()
		err := options.ExplainJSON([]byte(text), dec.Decode(new(file)))
		if err == nil {
			t.Fatalf("%q is taken", text)
		}
		for _, w := range want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q: %v, want %q", text, err, w)
			}
		}
		for _, word := range []string{"json:", "Go ", "unmarshal", "type ", "float64", "jsonfault"} {
			if strings.Contains(err.Error(), word) {
				t.Errorf("%q: %v: %q is a word of Go", text, err, word)
			}
		}
	}
	f("", "line 1: empty")
	f("{\n\"n\": \"x\"}", "line 2", "key n is a string, a whole number is expected")
	f(`{"n": 1.5}`, "key n is 1.5, a whole number is expected")
	f(`{"n": [1]}`, "key n is a list")
	f(`{"list": 3}`, "key list is a number, a list is expected")
	f(`{"name": {}}`, "key name is an object, a string is expected")
	f(`{"on": "yes"}`, "key on is a string, true or false is expected")
	f(`{"inner": {"rate": true}}`, "inner.rate is true or false, a number is expected")
	f(`{"inner": {"rate": 1e999}}`, "inner.rate is 1e999, a smaller number is expected")
	f(`{"inner": "x"}`, "key inner is a string, an object is expected")
	f(`[1]`, "the text is a list, an object is expected")
	f("{\n\"n\": }", "line 2", "invalid character")
	f(`{"n": 1`, "the text ends in the middle")
	f(`{"m": 1}`, `there is no key "m"`)
}

func TestWords(t *testing.T) {
	var n int
	err := options.JSONWords(json.Unmarshal([]byte(`"x"`), &n))
	if err == nil || err.Error() != "the text is a string, a whole number is expected" {
		t.Error(err)
	}
	if err := options.JSONWords(io.ErrClosedPipe); !errors.Is(err, io.ErrClosedPipe) {
		t.Error(err)
	}
	if options.JSONWords(nil) != nil || options.ExplainJSON(nil, nil) != nil {
		t.Error("no error is one")
	}
}
