package bootstrap

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"log/slog"
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
var differs = map[string]string{
	`engine_id "\ud800"`:            "vLLM's accepts a lone surrogate and answers every later query with 500; here 422",
	`engine_id "\udc00\ud800"`:      "the same",
	`addr "\ud800"`:                 "the same",
	`addr "\udc00\ud800"`:           "the same",
	"bytes 7":                       "the same",
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

// quiet is a registry without a log that ends with the test.
func open(t testing.TB, o Options) *Registry {
	t.Helper()
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
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

// Status, content type and body are those of vLLM's server, byte for byte.
func TestGolden(t *testing.T) {
	steps, different := 0, 0
	for _, s := range scripts(t) {
		r := open(t, Options{Strict: true})
		same := true
		for i, st := range s.Steps {
			steps++
			req := httptest.NewRequest(st.Method, st.Path, bytes.NewReader(st.Body))
			req.Host = "127.0.0.1:8998"
			for k, v := range st.Headers {
				req.Header.Set(k, strings.Trim(v, " "))
			}
			rec := httptest.NewRecorder()
			r.ServeHTTP(rec, req)
			got := rec.Result()
			body := rec.Body.Bytes()
			if st.Method == http.MethodHead {
				body = nil // net/http sends none
			}
			ok := got.StatusCode == st.Status && got.Header.Get("Content-Type") == st.Type && bytes.Equal(body, st.Answer) && got.Header.Get("Location") == st.Location
			if ok && st.Path != "/register" {
				ok = got.Header.Get("Allow") == st.Allow // DELETE /register is ours
			}
			if !ok && differs[s.Name] == "" {
				t.Errorf("%s, step %d: %s %s %v %.300q\n got %d %s %.600q %s\nwant %d %s %.600q %s", s.Name, i, st.Method, st.Path, st.Headers, st.Body,
					got.StatusCode, got.Header.Get("Content-Type"), body, got.Header.Get("Location"), st.Status, st.Type, st.Answer, st.Location)
			}
			same = same && ok
		}
		if !same {
			different++
		} else if differs[s.Name] != "" {
			t.Errorf("%s is listed as different and is not", s.Name)
		}
	}
	if different != len(differs) {
		t.Errorf("%d scripts differ, %d are listed", different, len(differs))
	}
	t.Logf("%d cases", steps)
}
