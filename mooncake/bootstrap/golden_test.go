// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
)

// script is a conversation with vLLM's own server, from an empty registry.
type script struct {
	Name  string
	Steps []struct {
		Method, Path string
		Headers      map[string]string
		Body         []byte
		Status       int
		Type         string
		Allow        string
		Location     string
		Answer       []byte
	}
}

// differs lists by name the scripts in which we differ from vLLM's server, and why.
// The text of a 422 may differ anywhere, and where vLLM's server fails to write its
// own refusal (500) ours is 400 or 422.
var differs = map[string]string{
	"life":                          "the newcomer has the old one's address, so the old one is gone: it is replaced",
	"refused leaves":                "the same",
	"mismatch before duplicate":     "the same",
	`engine_id "\ud800"`:            "vLLM's accepts a lone surrogate and answers every later query with 500; here 422",
	`engine_id "\udc00\ud800"`:      "the same",
	`addr "\ud800"`:                 "the same",
	`addr "\udc00\ud800"`:           "the same",
	"bytes 7":                       "the same, in bytes that are no UTF-8: 400",
	"bytes 3":                       "no UTF-8: 400",
	"body 94":                       "an integer of 4,301 digits is too long for Python; here it is a body that is no object, 422",
	`dp_rank 9223372036854775808`:   "Python's integers have no end, ours are 64 bits wide; here 422",
	`tp_rank 9223372036854775808`:   "the same",
	`pp_rank 9223372036854775808`:   "the same",
	`dp_rank "9223372036854775808"`: "the same",
	`tp_rank "9223372036854775808"`: "the same",
	`pp_rank "9223372036854775808"`: "the same",
}

func scripts(t testing.TB) []script {
	t.Helper()
	f, err := os.Open("testdata/fastapi.jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var all []script
	in := bufio.NewScanner(z)
	in.Buffer(nil, 1<<20)
	for in.Scan() {
		var s script
		if err := json.Unmarshal(in.Bytes(), &s); err != nil {
			t.Fatal(err)
		}
		if s.Name != "" { // the first line names versions
			all = append(all, s)
		}
	}
	if in.Err() != nil || len(all) < 1000 {
		t.Fatalf("%d scripts, %v", len(all), in.Err())
	}
	return all
}

// open opens a registry and closes it when the test ends.
func open(t testing.TB, o Options) *Registry {
	t.Helper()
	r, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// Status, content type and body are those of vLLM's server wherever a request
// succeeds or is refused with 400; 422 is in FastAPI's shape.
func TestGolden(t *testing.T) {
	steps, found := 0, map[string]bool{}
	for _, s := range scripts(t) {
		r := open(t, Options{})
		r.prober.dial = func(context.Context, string) error { return nil } // all side channels live
		for i, st := range s.Steps {
			steps++
			req := httptest.NewRequest(st.Method, st.Path, bytes.NewReader(st.Body))
			req.Host = "127.0.0.1:8998"
			for k, v := range st.Headers {
				req.Header.Set(k, strings.Trim(v, " "))
			}
			rec := httptest.NewRecorder()
			r.ServeHTTP(rec, req)
			got, body := rec.Result(), rec.Body.Bytes()
			if st.Method == http.MethodHead {
				body = nil // net/http sends none
			}
			var ok bool
			switch refusal := bytes.HasPrefix(body, []byte(`{"detail":`)) && json.Valid(body); st.Status {
			case 500:
				ok = refusal && (got.StatusCode == 400 || got.StatusCode == 422)
			case 422:
				ok = refusal && got.StatusCode == 422 && bytes.Contains(body, []byte(`"loc":["body"`))
			default:
				ok = got.StatusCode == st.Status && got.Header.Get("Content-Type") == st.Type && bytes.Equal(body, st.Answer) &&
					got.Header.Get("Location") == st.Location && (st.Path == "/register" || got.Header.Get("Allow") == st.Allow) // DELETE /register is ours
			}
			if ok {
				continue
			}
			found[s.Name] = true
			if differs[s.Name] == "" {
				t.Errorf("%s, step %d: %s %s %v %.300q\n got %d %s %.600q %s\nwant %d %s %.600q %s", s.Name, i, st.Method, st.Path, st.Headers, st.Body,
					got.StatusCode, got.Header.Get("Content-Type"), body, got.Header.Get("Location"), st.Status, st.Type, st.Answer, st.Location)
			}
		}
	}
	for name := range differs {
		if !found[name] {
			t.Errorf("%s is listed as different and is not", name)
		}
	}
	t.Logf("%d cases", steps)
}
