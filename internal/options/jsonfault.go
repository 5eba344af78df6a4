// SPDX-License-Identifier: Apache-2.0

package options

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
)

// ExplainJSON turns an error from decoding text as JSON into plain words, with the line and the byte if they are known. It returns
// errors of other packages unchanged.
func ExplainJSON(text []byte, err error) error {
	if err == nil {
		return nil
	}
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	switch {
	case len(bytes.TrimSpace(text)) == 0:
		return errors.New("line 1: empty")
	case errors.As(err, &syntax):
		return fmt.Errorf("line %d, byte %d: %w", JSONLine(text, syntax.Offset), syntax.Offset, err)
	case errors.As(err, &kind):
		return fmt.Errorf("line %d, byte %d: %s", JSONLine(text, kind.Offset), kind.Offset, typeErrorWords(kind))
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("line %d: the text ends in the middle", JSONLine(text, int64(len(text))))
	}
	if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return fmt.Errorf("there is no key %s", name)
	}
	return err
}

// JSONWords does what ExplainJSON does, for callers that do not have the text.
func JSONWords(err error) error {
	var kind *json.UnmarshalTypeError
	if errors.As(err, &kind) {
		return errors.New(typeErrorWords(kind))
	}
	return err
}

func typeErrorWords(kind *json.UnmarshalTypeError) string {
	what := "the text"
	if kind.Field != "" {
		what = "key " + kind.Field
	}
	want := expected(kind.Type)
	if number := strings.HasPrefix(kind.Value, "number "); number && want == "a number" {
		want = "a smaller number"
	}
	return fmt.Sprintf("%s is %s, %s is expected", what, article(kind.Value), want)
}

// article turns encoding/json's name of a value ("array", "number 1.5", "bool") into words with an article.
func article(value string) string {
	switch {
	case value == "array":
		return "a list"
	case value == "bool":
		return "true or false"
	case value == "object":
		return "an object"
	case strings.HasPrefix(value, "number "):
		return value[len("number "):]
	}
	return "a " + value
}

func expected(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64, reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return "a whole number"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Pointer:
		return expected(t.Elem())
	}
	return "an object"
}

// JSONLine returns the number, from 1, of the line of text that has the byte at the offset `at`.
func JSONLine(text []byte, at int64) int {
	return 1 + bytes.Count(text[:min(max(at, 0), int64(len(text)))], []byte("\n"))
}
