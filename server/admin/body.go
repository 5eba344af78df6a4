// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
)

// Limits on bodies with lists. A body is read as it arrives. In addition to its elements it takes a buffer for its longest value.
const (
	maxListBodies = 2  // bodies that are read and answered at the same time; others wait
	maxSkipDepth  = 64 // lists and objects, one in the other, in a field that is skipped; a body with more of them is refused
)

// listBodies bounds the requests with lists that are served at the same time. All routes share it.
type listBodies chan struct{}

func newListBodies() listBodies { return make(listBodies, maxListBodies) }

// handler returns a handler that waits for a free place and then calls f. If the client leaves while it waits, f is not called.
func (l listBodies) handler(f http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case l <- struct{}{}:
			defer func() { <-l }()
			f(w, r)
		case <-r.Context().Done():
		}
	})
}

// readBody reads a JSON object of at most limit bytes. fields has a function for each field name, which reads the value. Fields with other
// names are skipped.
func readBody(w http.ResponseWriter, r *http.Request, limit int64, fields map[string]func(*json.Decoder) error) error {
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, limit))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return errors.Join(errors.New("not an object"), err)
	}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return err
		}
		name, _ := t.(string) // the decoder accepts no other keys
		read := fields[name]
		for other, f := range fields {
			if read == nil && strings.EqualFold(other, name) { // as encoding/json does
				read = f
			}
		}
		if read == nil {
			err = skipValue(d)
		} else if err = read(d); err != nil {
			err = fmt.Errorf("%.40s: %w", name, err)
		}
		if err != nil {
			return err
		}
	}
	_, err := d.Token()
	return err
}

// readStrict reads a small JSON object into v. A field that v does not have is an error, because it could be meant to limit what the
// request removes.
func readStrict(w http.ResponseWriter, r *http.Request, v any) error {
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one object")
	}
	return nil
}

// because returns ": " and the text of err; empty for no error.
func because(err error) string {
	if err == nil {
		return ""
	}
	return ": " + err.Error()
}

// value returns a function that reads a field into v.
func value(v any) func(*json.Decoder) error {
	return func(d *json.Decoder) error { return d.Decode(v) }
}

// list returns a function that reads a list of at most `most` elements, or null, into v, one element at a time. With more elements the
// function returns a *tooManyError.
func list[T any](v *[]T, most int) func(*json.Decoder) error {
	return func(d *json.Decoder) error {
		t, err := d.Token()
		if err != nil {
			return err
		}
		*v = nil
		if t == nil {
			return nil
		}
		if t != json.Delim('[') {
			return errors.New("not a list")
		}
		*v = []T{}
		for d.More() {
			if len(*v) == most {
				return &tooManyError{most}
			}
			var one T
			if err := d.Decode(&one); err != nil {
				return fmt.Errorf("element %d: %w", len(*v), err)
			}
			*v = append(*v, one)
		}
		_, err = d.Token()
		return err
	}
}

// tooManyError means that a list has more elements than one request may have.
type tooManyError struct{ most int }

func (e *tooManyError) Error() string {
	return fmt.Sprintf("more than %d elements, the most in one request", e.most)
}

// skipValue skips one value.
func skipValue(d *json.Decoder) error {
	for depth := 0; ; {
		t, err := d.Token()
		if err != nil {
			return err
		}
		switch t {
		case json.Delim('{'), json.Delim('['):
			if depth++; depth > maxSkipDepth {
				return fmt.Errorf("values are nested more than %d deep", maxSkipDepth)
			}
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
		if depth == 0 {
			return nil
		}
	}
}
