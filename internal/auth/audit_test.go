// SPDX-License-Identifier: Apache-2.0

package auth

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

func deeds(t *testing.T, path string) (out []AuditRecord) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for l := range strings.Lines(string(text)) {
		var d AuditRecord
		if err := json.Unmarshal([]byte(l), &d); err != nil || !strings.HasSuffix(l, "\n") {
			t.Fatalf("%q: %v", l, err)
		}
		out = append(out, d)
	}
	return out
}

// Each deed is one line that names who did it. Looks and refused requests have no line. A line has no login and no control character.
func TestDeedsAreLogged(t *testing.T) {
	dir := t.TempDir()
	log, tokens := filepath.Join(dir, "audit"), filepath.Join(dir, "tokens")
	secret, line, _ := NewToken("ops", Admin, time.Time{})
	reader, line2, _ := NewToken("r", Read, time.Time{})
	if err := os.WriteFile(tokens, []byte(line+"\n"+line2+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	all, err := OpenTokens(tokens)
	if err != nil {
		t.Fatal(err)
	}
	a, err := OpenAudit(log)
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Listener: "http", Tokens: all, Keys: []string{"key"}, Audit: a, Need: func(r *http.Request) Need {
		if r.Method == http.MethodGet {
			return NeedRead
		}
		return map[bool]Need{true: NeedWrite, false: NeedAdmin}[r.URL.Path == "/write"]
	}}
	send := func(o Options, secret, route string, status int) {
		method, path, _ := strings.Cut(route, " ")
		r := httptest.NewRequest(method, path, nil)
		r.RemoteAddr = "10.0.0.1:7"
		if secret != "" {
			r.Header.Set("Authorization", "Bearer "+secret)
		}
		defer func() { _ = recover() }()
		New(o).Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if status == 0 {
				panic("a bug")
			}
			w.WriteHeader(status)
		})).ServeHTTP(httptest.NewRecorder(), r)
	}
	send(o, secret, "GET /status", 200)
	send(o, secret, "POST /write", 200)
	send(o, reader, "POST /cache/clear", 200)
	send(o, "", "POST /cache/clear", 200)
	send(o, secret, "POST /cache/clear", 403) // a handler behind the gate refuses it
	send(o, secret, "POST /cache/clear", 200)
	send(o, "key", "DELETE /write", 409)
	send(o, secret, "DELETE /engines?url=http://u:PASSWORD@h:1", 204)
	send(o, secret, "DELETE /engines?url=http%3A//u:PASSWORD%40h:1", 204)
	send(o, secret, "PUT /quota/a%0Ab"+strings.Repeat("x", 1000), 0)
	send(Options{Listener: "open", Audit: a, Need: o.Need}, "", "POST /cache/clear", 200)
	got := ""
	for _, d := range deeds(t, log) {
		if d.From != "10.0.0.1:7" || d.Time.IsZero() || len(d.Path) > maxAuditField || strings.Contains(fmt.Sprint(d), "PASSWORD") {
			t.Errorf("%+v", d)
		}
		got += fmt.Sprintf("%s %s %s %.12q %d;", d.Listener, d.Who, d.Method, d.Path, d.Status)
	}
	want := `http ops POST "/cache/clear" 200;http key DELETE "/write" 409;http ops DELETE "/engines" 204;http ops DELETE "/engines" 204;http ops PUT "/quota/a\nbxx" 500;open  POST "/cache/clear" 200;`
	if got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	if text, _ := os.ReadFile(log); strings.Contains(string(text), secret) {
		t.Error("a line has a secret")
	}
	// A deed that cannot be written is done and counted.
	if err := errors.Join(os.Remove(log), os.Mkdir(log, 0o700)); err != nil {
		t.Fatal(err)
	}
	g := New(o)
	r := httptest.NewRequest(http.MethodPost, "/cache/clear", nil)
	r.Header.Set("Authorization", "Bearer key")
	w := httptest.NewRecorder()
	g.Handler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusAccepted) })).ServeHTTP(w, r)
	if w.Code != http.StatusAccepted || g.Stats().Unaudited != 1 {
		t.Errorf("%d, %d lines are lost, want 202 and 1", w.Code, g.Stats().Unaudited)
	}
}

// The files are bounded, and two writers of one file lose no line while it is put aside.
func TestLogOfDeedsIsBounded(t *testing.T) {
	path := filepath.Join(t.TempDir(), "audit")
	open := func() *Audit {
		a, err := OpenAudit(path)
		if err != nil {
			t.Fatal(err)
		}
		a.maxBytes = 4 << 10
		return a
	}
	one, two := open(), open()
	write := func(n int) {
		var wg sync.WaitGroup
		for _, a := range []*Audit{one, two} {
			wg.Go(func() {
				for range n {
					if err := a.record(AuditRecord{Path: strings.Repeat("x", 100)}); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
	}
	write(30)
	lines := 0
	files, _ := filepath.Glob(path + "*")
	for _, f := range files {
		lines += len(deeds(t, f))
	}
	if lines != 60 || len(files) < 3 {
		t.Errorf("%d lines in %d files, want 60", lines, len(files))
	}
	write(200)
	files, _ = filepath.Glob(path + "*")
	for _, f := range files {
		if info, err := os.Stat(f); err != nil || info.Size() > 4<<10 || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", f, info, err)
		}
	}
	if len(files) != 1+auditFiles {
		t.Errorf("%d files, want %d", len(files), 1+auditFiles)
	}
}

// A path that is not a regular file, or whose folder is missing, is refused at the start.
func TestBadLogsOfDeeds(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{dir, fifo, filepath.Join(dir, "none", "audit")} {
		if _, err := OpenAudit(bad); err == nil || !strings.Contains(err.Error(), bad) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
