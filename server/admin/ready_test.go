// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/server/admin"
)

// A server is ready while its own socket answers, whatever HTTP says.
func TestReady(t *testing.T) {
	s := newServer(t)
	at, err := s.Listen(t.Context(), "tcp://127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := admin.Handler(s, admin.Options{Socket: at})
	until := func(code int, contains string) {
		t.Helper()
		for end := time.Now().Add(90 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			got, body := ask(h, "GET", "http://localhost/readyz", "")
			if got == code && strings.Contains(body, contains) {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%d %s", got, body)
			}
		}
	}
	until(http.StatusOK, "ready")
	if err := s.Close(); err != nil { // HTTP goes on
		t.Fatal(err)
	}
	until(http.StatusServiceUnavailable, "its own socket does not answer")
	if code, _ := ask(h, "GET", "http://localhost/healthcheck", ""); code != http.StatusOK {
		t.Errorf("the process lives: %d", code)
	}
}
