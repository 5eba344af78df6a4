// SPDX-License-Identifier: Apache-2.0

package http1

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
)

// Each part of a body is sent once it is ready. A part that never becomes ready ends the request.
func TestBodiesThatBecomeReady(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err == nil {
			_, _ = w.Write(body)
		}
	}))
	defer s.Close()
	c := client(t, s.URL)
	for _, n := range []int{10, 3000, 100_000} {
		parts := [][]byte{make([]byte, n), make([]byte, n)}
		want := bytes.Repeat([]byte("x"), 2*n)
		_, got, err := ask(t, c, &Request{Method: "PUT", Target: "/", Body: parts, Ready: func(i int) error {
			copy(parts[i], want) // only now
			return nil
		}})
		if err != nil || got != string(want) {
			t.Errorf("%d bytes: %v, %d bytes came back", n, err, len(got))
		}
		gone := errors.New("gone")
		_, _, err = ask(t, c, &Request{Method: "PUT", Target: "/", Body: parts, Ready: func(i int) error {
			if i == 1 {
				return gone
			}
			return nil
		}})
		if !errors.Is(err, gone) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
}
