// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// countedBody counts what is read of a body.
type countedBody struct {
	io.Reader
	read int
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	b.read += n
	return n, err
}

func listRequest(method, path string, body io.Reader) *http.Request {
	r := httptest.NewRequest(method, "http://localhost"+path, body)
	r.Header.Set("Content-Type", "application/json")
	return r
}

// A list is read up to its limit: what follows is not read, and the memory does not
// grow with the body.
func TestListsAreReadUpToTheirLimit(t *testing.T) {
	h := admin.Handler(newServer(t), admin.Options{})
	f := func(method, path, head, element string, maxRead, maxBytes int) {
		t.Helper()
		body := &countedBody{Reader: strings.NewReader(head + strings.Repeat(element+",", 8<<20/(len(element)+1)) + element + "]}")}
		w := httptest.NewRecorder()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		h.ServeHTTP(w, listRequest(method, path, body))
		runtime.ReadMemStats(&after)
		if w.Code != http.StatusBadRequest {
			t.Errorf("%s %s: %d %s", method, path, w.Code, w.Body)
		}
		if body.read > maxRead {
			t.Errorf("%s %s of %s: %d bytes are read", method, path, element, body.read)
		}
		if testkit.Race { // builds with the race detector allocate more for each element
			maxBytes *= 2
		}
		if n := int(after.TotalAlloc - before.TotalAlloc); n > maxBytes {
			t.Errorf("%s %s of %s: %d bytes are allocated", method, path, element, n)
		}
	}
	for _, element := range []string{"{}", "null", `{"model_name":"m"}`} {
		f("DELETE", "/cache/objects", `{"tier":"l1","keys":[`, element, 1<<20, 16<<20)
	}
	f("POST", "/cache/pins", `{"model_name":"m","world_size":1,"token_ids":[`, "1", 3<<20, 128<<20)
	f("DELETE", "/cache/pins", `{"model_name":"m","world_size":1,"token_ids":[`, "1", 3<<20, 128<<20)
	f("POST", "/cache/prefetches", `{"model_name":"m","world_size":1,"token_ids":[`, "1", 3<<20, 128<<20)
	f("DELETE", "/cache/objects", `{"tier":"l1","other":`, strings.Repeat("[", 1000), 1<<20, 4<<20)
}

// No more than two bodies with lists are read at a time, on all routes together; the
// others are read when one of them is answered.
func TestListBodiesTakeTurns(t *testing.T) {
	h := admin.Handler(newServer(t), admin.Options{})
	begun := make(chan *io.PipeWriter, 8)
	done := make(chan int, 8)
	for i := range 6 {
		method, path := "DELETE", "/cache/objects"
		if i%2 == 1 {
			method, path = "POST", "/cache/pins"
		}
		in, out := io.Pipe()
		go func() {
			if _, err := out.Write([]byte(`{`)); err == nil { // until the body is read
				begun <- out
			}
		}()
		go func() {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, listRequest(method, path, in))
			done <- w.Code
		}()
	}
	one, two := <-begun, <-begun
	select {
	case <-begun:
		t.Fatal("a third body is read while two are")
	case <-time.After(100 * time.Millisecond):
	}
	_, _ = one.Close(), two.Close()
	for range 4 {
		_ = (<-begun).Close()
	}
	for range 6 {
		if code := <-done; code != http.StatusBadRequest {
			t.Errorf("half a body: %d", code)
		}
	}
}
