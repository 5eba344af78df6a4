// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

// kinds returns the types of problems, joined by blanks.
func kinds(t *testing.T, p problems) string {
	t.Helper()
	var body struct {
		Detail []struct {
			Type string `json:"type"`
		} `json:"detail"`
	}
	if err := json.Unmarshal(p.Body(), &body); err != nil {
		t.Fatalf("Body is not JSON: %v", err)
	}
	var list []string
	for _, d := range body.Detail {
		list = append(list, d.Type)
	}
	return strings.Join(list, " ")
}

// Integers are read as leniently as pydantic reads them, and no more so.
func TestInteger(t *testing.T) {
	f := func(raw string, want int, problem string) {
		t.Helper()
		in, p, err := parseObject("application/json", []byte(`{"a":0,"n":`+raw+`}`))
		if err != nil || len(p) > 0 {
			t.Fatalf("Object(%s): %v, %v", raw, p, err)
		}
		got := p.Integer(in, "n")
		if k := kinds(t, p); got != want && problem == "" || k != problem {
			t.Errorf("Integer(%s) = %d with problems %q, want %d with %q", raw, got, k, want, problem)
		}
	}
	f(`7`, 7, "")
	f(`-7`, -7, "")
	f(`true`, 1, "")
	f(`false`, 0, "")
	f(`2.0`, 2, "")
	f(`2e3`, 2000, "")
	f(`" +1_000.00 "`, 1000, "")
	f(`"-4"`, -4, "")
	f(`9223372036854775807`, 9223372036854775807, "")
	f(`9223372036854775808`, 0, "int_parsing_size")
	f(`1e400`, 0, "finite_number")
	f(`2.5`, 0, "int_from_float")
	f(`"2.5"`, 0, "int_parsing")
	f(`"1__0"`, 0, "int_parsing")
	f(`"-+1"`, 0, "int_parsing")
	f(`""`, 0, "int_parsing")
	f(`null`, 0, "int_type")
	f(`[1]`, 0, "int_type")
}

// A text is a string of whole characters within its limit.
func TestText(t *testing.T) {
	f := func(raw, want, problem string) {
		t.Helper()
		in, p, err := parseObject("application/vnd.api+json; charset=utf-8", []byte(`{"s":`+raw+`}`))
		if err != nil || len(p) > 0 {
			t.Fatalf("Object(%s): %v, %v", raw, p, err)
		}
		if got := p.Text(in, "s", 4); got != want || kinds(t, p) != problem {
			t.Errorf("Text(%s) = %q with problems %q, want %q with %q", raw, got, kinds(t, p), want, problem)
		}
	}
	f(`"abcd"`, "abcd", "")
	f(`"\u00e9"`, "é", "")
	f(`"abcde"`, "", "string_too_long")
	f(`"\ud800"`, "", "string_unicode")
	f(`7`, "", "string_type")
	var p problems
	if p.Text(bodyFields{"": []byte("{}")}, "s", 4); kinds(t, p) != "missing" {
		t.Errorf("no key: problems %q", kinds(t, p))
	}
}

// Only an object under a JSON content type has fields.
func TestObject(t *testing.T) {
	f := func(contentType, body, problem string, want error) {
		t.Helper()
		in, p, err := parseObject(contentType, []byte(body))
		if k := kinds(t, p); k != problem || !errors.Is(err, want) || (in != nil) != (problem == "" && want == nil) {
			t.Errorf("Object(%q, %.40q) = %v with problems %q, %v, want %q, %v", contentType, body, in, k, err, problem, want)
		}
	}
	f("application/json", `{"a":1}`, "", nil)
	f("Application/JSON", "\ufeff {} ", "", nil)
	f("", `{"a":1}`, "model_attributes_type", nil)
	f("text/json", `{"a":1}`, "model_attributes_type", nil)
	f("application/json", `[1]`, "model_attributes_type", nil)
	f("application/json", ``, "missing", nil)
	f("application/json", `null`, "missing", nil)
	f("application/json", `{"a"`, "json_invalid", nil)
	f("application/json", "\xff", "", errUnreadable)
	f("application/json", strings.Repeat("[", 20000), "", errUnreadable)
}

// appendPythonString escapes what JSON demands and keeps everything else as it is.
func TestAppendString(t *testing.T) {
	const s = "a\"\\\b\f\n\r\t\x01\x1fé<&"
	got := string(appendPythonString(nil, s))
	if want := `"a\"\\\b\f\n\r\t\u0001\u001fé<&"`; got != want {
		t.Fatalf("%s, want %s", got, want)
	}
	var back string
	if err := json.Unmarshal([]byte(got), &back); err != nil || back != s {
		t.Fatalf("%q, %v", back, err)
	}
}
