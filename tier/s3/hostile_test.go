// SPDX-License-Identifier: Apache-2.0

package s3_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/s3"
	"github.com/kvasir-kv/kvasir/tier/s3/aws"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

type answer = func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool

// text writes an answer over the connection as it is, and ends it.
func text(of func(r *http.Request, normal *httptest.ResponseRecorder) string) answer {
	return func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool {
		c := hijack(w)
		defer c.Close()
		_, _ = c.Write([]byte(of(r, normal)))
		return true
	}
}

func fixed(s string) answer {
	return text(func(*http.Request, *httptest.ResponseRecorder) string { return s })
}

// whole is an answer as it goes over the wire.
func whole(normal *httptest.ResponseRecorder) string {
	var out strings.Builder
	fmt.Fprintf(&out, "HTTP/1.1 %d x\r\n", normal.Code)
	normal.Header().Set("Content-Length", fmt.Sprint(max(normal.Body.Len(), contentLength(normal))))
	_ = normal.Header().Write(&out)
	return out.String() + "\r\n" + normal.Body.String()
}

func contentLength(a *httptest.ResponseRecorder) (n int) {
	_, _ = fmt.Sscan(a.Header().Get("Content-Length"), &n)
	return n
}

// cut answers a part of the right answer: so much of its head and its body.
func cut(share float64, body bool) answer {
	return text(func(_ *http.Request, normal *httptest.ResponseRecorder) string {
		all := whole(normal)
		head := strings.Index(all, "\r\n\r\n") + 4
		if body {
			return all[:head+int(share*float64(len(all)-head))]
		}
		return all[:int(share*float64(head))]
	})
}

func status(code int, name string) answer {
	return func(w http.ResponseWriter, _ *http.Request, _ *httptest.ResponseRecorder) bool {
		refuse(w, code, name)
		return true
	}
}

// sized answers a body of another length, which the head states.
func sized(of func(int) int) answer {
	return text(func(_ *http.Request, normal *httptest.ResponseRecorder) string {
		body := bytes.Repeat(normal.Body.Bytes(), 3)
		body = body[:of(normal.Body.Len())]
		normal.Body.Reset()
		normal.Body.Write(body)
		normal.Header().Set("Content-Length", fmt.Sprint(len(body)))
		return whole(normal)
	})
}

// answers are wrong answers that a store may give.
var answers = map[string]answer{
	"500": status(500, "InternalError"), "503": status(503, "SlowDown"), "403": status(403, "AccessDenied"), "404": status(404, "NoSuchKey"), "no bucket": status(404, "NoSuchBucket"),
	"301": status(301, "PermanentRedirect"), "400": status(400, "ExpiredToken"), "412": status(412, "PreconditionFailed"), "409": status(409, "ConditionalRequestConflict"), "416": status(416, "InvalidRange"),
	"501": status(501, "NotImplemented"), "204": status(204, ""), "507": status(507, "QuotaExceeded"),
	"a page": func(w http.ResponseWriter, _ *http.Request, _ *httptest.ResponseRecorder) bool {
		_, _ = w.Write([]byte("<html>sign in</html>"))
		return true
	},
	"not HTTP": fixed("+OK\r\n"), "huge length": fixed("HTTP/1.1 200 OK\r\nContent-Length: 9223372036854775807\r\n\r\nx"), "two lengths": fixed("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxx"),
	"negative length": fixed("HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"), "no length": fixed("HTTP/1.1 200 OK\r\n\r\nxxxxx"), "chunks": fixed("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nxxxxx\r\n0\r\n\r\n"),
	"huge error": fixed("HTTP/1.1 500 x\r\nContent-Length: 1000000000\r\n\r\n" + strings.Repeat("<", 1<<20)), "huge head": fixed("HTTP/1.1 200 OK\r\n" + strings.Repeat("A: b\r\n", 100<<10)),
	"wrong range":    fixed("HTTP/1.1 206 x\r\nContent-Range: bytes 5-9/10\r\nContent-Length: 5\r\n\r\nxxxxx"),
	"no range":       fixed("HTTP/1.1 206 x\r\nContent-Length: 5\r\n\r\nxxxxx"),
	"negative range": fixed("HTTP/1.1 206 x\r\nContent-Range: bytes -5--9/-10\r\nContent-Length: 5\r\n\r\nxxxxx"),
	"cut before":     cut(0, false), "cut in the head": cut(0.5, false), "cut after the head": cut(0, true), "cut in the body": cut(0.5, true), "cut before its end": cut(0.9999, true),
	"half the length": sized(func(n int) int { return n / 2 }), "twice the length": sized(func(n int) int { return 2 * n }), "a byte less": sized(func(n int) int { return max(0, n-1) }), "a byte more": sized(func(n int) int { return n + min(1, n) }),
	"other bytes": text(func(_ *http.Request, normal *httptest.ResponseRecorder) string {
		b := normal.Body.Bytes()
		for i := range b {
			b[i] ^= 1
		}
		return whole(normal)
	}),
	"silence": func(_ http.ResponseWriter, r *http.Request, _ *httptest.ResponseRecorder) bool {
		<-r.Context().Done()
		return true
	},
	"silence in the body": func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool {
		normal.Header().Set("Content-Length", fmt.Sprint(normal.Body.Len()+1))
		send(w, normal)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
		return true
	},
}

// aboutBodies reports whether an answer differs from the right one only in its body.
func aboutBodies(what string) bool {
	return strings.Contains(what, "byte") || strings.Contains(what, " the length") || strings.Contains(what, "range") || what == "cut in the body" || what == "cut before its end"
}

// Whatever a store answers, each call ends, with the right bytes or with none (or with
// bytes whose checksum tells), and a Tier works again once the store does.
func TestHostileAnswers(t *testing.T) {
	const size = 150 << 10
	good, meta := tiertest.Object(1, size)
	k, other := tiertest.Key(1), tiertest.Key(2)
	for what, hostile := range answers {
		for _, o := range []s3.Options{{Part: 64 << 10}, {Layout: s3.LMCache}} {
			for _, method := range []string{http.MethodHead, http.MethodGet, http.MethodPut, http.MethodDelete} {
				if bodiless := method != http.MethodGet; bodiless && (o.Layout == s3.LMCache && method != http.MethodHead || aboutBodies(what)) {
					continue
				}
				t.Run(fmt.Sprintf("%s to %s in layout %d", what, method, o.Layout), func(t *testing.T) {
					t.Parallel()
					f := newFake(t)
					o := o
					o.URL, o.Timeout, o.Tries = f.url, time.Minute, 2
					x := open(t, o)
					write(t, x, k, meta, good)
					f.misbehave(func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool {
						return r.Method == method && hostile(w, r, normal)
					})
					limit := 20 * time.Second
					if strings.HasPrefix(what, "silence") {
						limit = 100 * time.Millisecond
					}
					call := func(f func(ctx context.Context)) {
						ctx, cancel := context.WithTimeout(t.Context(), limit)
						defer cancel()
						f(ctx)
					}
					call(func(ctx context.Context) { _ = x.Stat(ctx, []kv.Key{k, other}, make([]tier.Meta, 2)) })
					memory := bytes.Repeat([]byte{0xee}, 3*size)
					around := bytes.Repeat([]byte{0xee}, size)
					dst := memory[size : 2*size : 2*size]
					call(func(ctx context.Context) {
						m, err := x.Read(ctx, k, dst)
						if err == nil && (m != meta || !bytes.Equal(dst, good) && what != "other bytes") {
							t.Errorf("Read: %+v with wrong bytes", m)
						}
					})
					copy(dst, around)
					call(func(ctx context.Context) { _ = x.Write(ctx, other, meta, good) })
					call(func(ctx context.Context) { _ = x.Delete(ctx, []kv.Key{other}) })
					if !bytes.Equal(dst, around) || !bytes.Equal(memory[:size], around) || !bytes.Equal(memory[2*size:], around) {
						t.Error("memory was written that was not lent")
					}
					f.misbehave(nil)
					x2 := open(t, o) // a refusal to write rests for a minute
					for _, x := range []*s3.Tier{x, x2} {
						testkit.Eventually(t, "it works again", func() bool {
							m, err := x.Read(t.Context(), k, dst)
							return err == nil && m == meta && bytes.Equal(dst, good)
						})
					}
					write(t, x2, other, meta, good)
				})
			}
		}
	}
}

// A write that a store does not confirm counts as not written, and a refusal is no failure of the tier.
func TestUnconfirmedWriteFails(t *testing.T) {
	good, meta := tiertest.Object(1, 9<<10)
	for _, what := range []string{"500", "503", "403", "no bucket", "301", "400", "409", "not HTTP", "huge length", "negative length", "cut before", "cut in the head", "507"} {
		f := newFake(t)
		x := open(t, s3.Options{URL: f.url, Tries: 2})
		f.misbehave(func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool {
			f.mu.Lock()
			clear(f.objects) // the store may forget objects that it did not confirm
			f.mu.Unlock()
			return r.Method == http.MethodPut && answers[what](w, r, normal)
		})
		if err := x.Write(t.Context(), tiertest.Key(1), meta, good); err == nil {
			t.Errorf("%s: Write succeeds", what)
		} else if refused := errors.Is(err, tier.ErrNotKept); refused != (what == "403" || what == "409" || what == "507") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// The tier asks a busy store again, but the requests that it sends again are at most a part of
// all requests.
func TestRetriesHaveABudget(t *testing.T) {
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url})
	var mu sync.Mutex
	n := 0
	f.misbehave(func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool {
		mu.Lock()
		defer mu.Unlock()
		n++
		return n == 1 && status(503, "SlowDown")(w, r, normal)
	})
	b, meta := tiertest.Object(1, 100)
	write(t, x, tiertest.Key(1), meta, b) // the first answer was 503
	r, _ := x.Requests()
	if r.Retries["busy"] != 1 {
		t.Errorf("%+v", r)
	}
	f.misbehave(status(503, "SlowDown"))
	var wg sync.WaitGroup
	for range 40 {
		wg.Go(func() {
			if _, err := x.Read(t.Context(), tiertest.Key(1), make([]byte, 100)); err == nil {
				t.Error("it is busy")
			}
		})
	}
	wg.Wait()
	r, _ = x.Requests()
	if sent := r.Retries["busy"]; sent > 80 || r.Unspent["retries"] == 0 {
		t.Errorf("%d were sent again: %+v", sent, r)
	}
}

// lines counts log lines.
type lines struct {
	mu  sync.Mutex
	all []string
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, string(b))
	return len(b), nil
}

func (l *lines) with(part string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.all {
		if strings.Contains(line, part) {
			n++
		}
	}
	return n
}

// The log has a fault that an operator must mend in one line, once, however often it happens.
func TestCausesAreLoggedOnce(t *testing.T) {
	for code, c := range map[string]struct {
		status int
		says   string
	}{
		"ExpiredToken": {400, "have expired"}, "InvalidAccessKeyId": {403, "does not accept the credentials"}, "SignatureDoesNotMatch": {403, "does not accept the credentials"},
		"RequestTimeTooSkewed": {403, "clocks of this machine and of S3 differ"}, "NoSuchBucket": {404, "no such bucket"}, "PermanentRedirect": {301, "another region"},
		"AuthorizationHeaderMalformed": {400, "elsewhere-1"},
	} {
		f := newFake(t)
		var log lines
		x := open(t, s3.Options{URL: f.url, Log: slog.New(slog.NewTextHandler(&log, nil))})
		f.misbehave(func(w http.ResponseWriter, r *http.Request, _ *httptest.ResponseRecorder) bool {
			if r.Method == http.MethodHead {
				w.WriteHeader(c.status)
				return true
			}
			refuse(w, c.status, code)
			return true
		})
		b, meta := tiertest.Object(1, 100)
		for range 3 {
			if err := x.Stat(t.Context(), []kv.Key{tiertest.Key(1), tiertest.Key(2)}, make([]tier.Meta, 2)); err == nil {
				t.Errorf("%s: Stat succeeds", code)
			}
			if _, err := x.Read(t.Context(), tiertest.Key(1), b); err == nil || errors.Is(err, tier.ErrMissing) {
				t.Errorf("%s: Read: %v", code, err)
			}
			if err := x.Write(t.Context(), tiertest.Key(1), meta, b); err == nil || errors.Is(err, tier.ErrNotKept) {
				t.Errorf("%s: Write: %v", code, err)
			}
		}
		if log.with(c.says) != 1 || log.with("") != 1 {
			t.Errorf("%s: %q", code, log.all)
		}
	}
}

// With credentials that may only read, reads go on, and the log says once that nothing is written.
func TestReadOnlyCredentials(t *testing.T) {
	f := newFake(t)
	b, meta := tiertest.Object(1, 100)
	write(t, open(t, s3.Options{URL: f.url}), tiertest.Key(1), meta, b)
	var log lines
	x := open(t, s3.Options{URL: f.url, Log: slog.New(slog.NewTextHandler(&log, nil))})
	f.misbehave(func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool {
		return r.Method == http.MethodPut && status(403, "AccessDenied")(w, r, normal)
	})
	for i := range 5 {
		if err := x.Write(t.Context(), tiertest.Key(2), meta, b); !errors.Is(err, tier.ErrNotKept) {
			t.Errorf("Write: %v", err)
		}
		if m, err := x.Read(t.Context(), tiertest.Key(1), b); err != nil || m != meta {
			t.Errorf("Read %d: %v", i, err)
		}
	}
	r, _ := x.Requests()
	if log.with("refuses writes") != 1 || log.with("") != 1 || r.Requests["PUT"] != 1 || r.Unspent["read only"] != 4 {
		t.Errorf("%q, %+v", log.all, r)
	}
}

// Without the right to list a bucket S3 answers AccessDenied for a missing object. The tier reports a
// miss then, and serves the objects that are there.
func TestWithoutTheRightToList(t *testing.T) {
	f := newFake(t)
	var log lines
	x := open(t, s3.Options{URL: f.url, Log: slog.New(slog.NewTextHandler(&log, nil))})
	f.misbehave(func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool {
		if normal.Code != 404 {
			return false
		}
		if r.Method == http.MethodHead {
			w.WriteHeader(http.StatusForbidden)
			return true
		}
		return status(403, "AccessDenied")(w, r, normal)
	})
	b, meta := tiertest.Object(1, 100)
	write(t, x, tiertest.Key(1), meta, b)
	metas := make([]tier.Meta, 3)
	if err := x.Stat(t.Context(), []kv.Key{tiertest.Key(1), tiertest.Key(2), tiertest.Key(3)}, metas); err != nil || metas[0] != meta || metas[1] != (tier.Meta{}) {
		t.Errorf("%+v, %v", metas, err)
	}
	if m, err := x.Read(t.Context(), tiertest.Key(1), b); err != nil || m != meta {
		t.Errorf("%+v, %v", m, err)
	}
	if _, err := x.Read(t.Context(), tiertest.Key(2), b); !errors.Is(err, tier.ErrMissing) {
		t.Error(err)
	}
	if log.with("s3:ListBucket") != 1 {
		t.Errorf("%q", log.all)
	}
	if text, err := x.Note(t.Context()); text != nil || err != nil {
		t.Errorf("the note that is missing: %q, %v", text, err)
	}
	if err := x.SetNote(t.Context(), []byte("one")); err != nil {
		t.Error(err)
	}
	if text, err := x.Note(t.Context()); string(text) != "one" || err != nil {
		t.Errorf("the note: %q, %v", text, err)
	}
}

// SetNote does not replace a note that the tier may not read, since that note may know more.
func TestHiddenNoteIsNotReplaced(t *testing.T) {
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url})
	if err := x.SetNote(t.Context(), []byte("one")); err != nil {
		t.Fatal(err)
	}
	f.misbehave(func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool {
		return r.Method == http.MethodGet && status(403, "AccessDenied")(w, r, normal)
	})
	y := open(t, s3.Options{URL: f.url})
	if text, err := y.Note(t.Context()); text != nil || err != nil {
		t.Errorf("a note that may not be read: %q, %v", text, err)
	}
	if err := y.SetNote(t.Context(), []byte("other")); err == nil || !strings.Contains(err.Error(), "may not be read") {
		t.Errorf("a note was put in the place of one that may not be read: %v", err)
	}
	f.misbehave(nil)
	if text, err := y.Note(t.Context()); string(text) != "one" || err != nil {
		t.Errorf("the note: %q, %v", text, err)
	}
	if err := y.SetNote(t.Context(), []byte("two")); err != nil {
		t.Error(err)
	}
}

// A store whose certificate no authority signed gets neither objects nor a signature.
func TestUnknownCertificateIsRefused(t *testing.T) {
	f := startFake(t, httptest.NewTLSServer, "/bucket")
	var log lines
	x := open(t, s3.Options{URL: f.url, Log: slog.New(slog.NewTextHandler(&log, nil))})
	b, meta := tiertest.Object(1, 100)
	for range 2 {
		if err := x.Write(t.Context(), tiertest.Key(1), meta, b); err == nil || !strings.Contains(err.Error(), "certificate") {
			t.Errorf("Write: %v", err)
		}
	}
	if f.called("") > 0 || log.with("s3_ca_bundle") != 1 {
		t.Errorf("%d requests, %q", f.called(""), log.all)
	}
}

// From a store that does not serve ranges the tier reads whole objects.
func TestStoreWithoutRanges(t *testing.T) {
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url, Part: 64 << 10})
	b, meta := tiertest.Object(1, 200<<10)
	write(t, x, tiertest.Key(1), meta, b)
	f.misbehave(func(w http.ResponseWriter, r *http.Request, _ *httptest.ResponseRecorder) bool {
		r.Header.Del("Range")
		normal := httptest.NewRecorder()
		f.reply(normal, r, strings.TrimPrefix(r.URL.Path, "/bucket/"), nil)
		send(w, normal)
		return true
	})
	dst := make([]byte, len(b))
	if m, err := x.Read(t.Context(), tiertest.Key(1), dst); err != nil || m != meta || !bytes.Equal(dst, b) {
		t.Errorf("%+v, %v", m, err)
	}
}

// If an answer has other bytes of an object than the request asked for, the error
// says so.
func TestOtherRange(t *testing.T) {
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url, Part: 64 << 10, Tries: 1})
	b, meta := tiertest.Object(1, 128<<10)
	write(t, x, tiertest.Key(1), meta, b)
	f.misbehave(func(w http.ResponseWriter, _ *http.Request, normal *httptest.ResponseRecorder) bool {
		normal.Header().Set("Content-Range", fmt.Sprintf("bytes 0-9/%d", len(b)))
		send(w, normal)
		return true
	})
	if _, err := x.Read(t.Context(), tiertest.Key(1), make([]byte, len(b))); err == nil || !strings.Contains(err.Error(), "were asked for") || strings.Contains(err.Error(), "%!") {
		t.Error(err)
	}
}

// If an object is replaced while it is read in parts, a read never returns a mixture of both.
func TestObjectChangesWhileItIsRead(t *testing.T) {
	const size = 200 << 10
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url, Part: 64 << 10, Layout: s3.LMCache}) // where no checksum shows it
	b, meta := tiertest.Object(1, size)
	write(t, x, tiertest.Key(1), meta, b)
	one, two := bytes.Repeat([]byte{1}, size), bytes.Repeat([]byte{2}, size)
	f.change(func(stored) stored { return stored{one, ""} })
	changed := false
	var mu sync.Mutex
	f.misbehave(func(_ http.ResponseWriter, r *http.Request, _ *httptest.ResponseRecorder) bool {
		mu.Lock()
		defer mu.Unlock()
		if r.Method == http.MethodGet && !changed {
			changed = true
			f.change(func(stored) stored { return stored{two, ""} })
		}
		return false
	})
	dst := make([]byte, size)
	if _, err := x.Read(t.Context(), tiertest.Key(1), dst); err == nil && !bytes.Equal(dst, one) && !bytes.Equal(dst, two) {
		t.Error("a mixture of two objects")
	}
}

// Credentials that end are renewed, once, when a store says that they have.
func TestExpiredCredentialsAreRenewed(t *testing.T) {
	f := newFake(t)
	source := &changing{}
	x := open(t, s3.Options{URL: f.url, Keys: aws.Keep(source)})
	f.misbehave(func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool {
		if strings.Contains(r.Header.Get("Authorization"), "Credential=key1/") {
			return status(400, "ExpiredToken")(w, r, normal)
		}
		if r.Header.Get("X-Amz-Security-Token") != "session2" {
			t.Errorf("%v", r.Header)
		}
		return false
	})
	b, meta := tiertest.Object(1, 100)
	write(t, x, tiertest.Key(1), meta, b)
}

// changing is a source of credentials that returns other ones each time.
type changing struct {
	mu sync.Mutex
	n  int
}

func (c *changing) Find(context.Context) (aws.Credentials, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
	return aws.Credentials{ID: fmt.Sprint("key", c.n), Secret: "s", Token: fmt.Sprint("session", c.n), Expires: time.Now().Add(time.Hour)}, nil
}

func (*changing) Name() string { return "a test" }

// In a bucket with versions a deleted object is a miss, and is there once it is written again. The tier neither reads
// nor deletes older versions.
func TestVersionedBucket(t *testing.T) {
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url})
	f.misbehave(func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool {
		w.Header().Set("X-Amz-Version-Id", "v"+r.Method)
		if r.Method == http.MethodDelete || normal.Code == http.StatusNotFound {
			w.Header().Set("X-Amz-Delete-Marker", "true")
		}
		return false
	})
	k := tiertest.Key(1)
	for seed := range 3 {
		b, meta := tiertest.Object(seed, 100+seed)
		write(t, x, k, meta, b)
		dst := make([]byte, len(b))
		if m, err := x.Read(t.Context(), k, dst); err != nil || m != meta || !bytes.Equal(dst, b) {
			t.Errorf("version %d: %+v, %v", seed, m, err)
		}
		if err := x.Delete(t.Context(), []kv.Key{k}); err != nil {
			t.Error(err)
		}
		if m := stat(t, x, k); m != (tier.Meta{}) {
			t.Errorf("version %d is there after its end: %+v", seed, m)
		}
		if _, err := x.Read(t.Context(), k, dst); !errors.Is(err, tier.ErrMissing) {
			t.Errorf("version %d: Read after its end: %v", seed, err)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, call := range f.calls {
		if strings.Contains(strings.ToLower(call), "version") {
			t.Errorf("%s names a version", call)
		}
	}
}

// A bucket with object lock takes no object without a checksum, and deletes none. The tier serves its
// objects, and logs this once.
func TestLockedBucket(t *testing.T) {
	f := newFake(t)
	b, meta := tiertest.Object(1, 100)
	write(t, open(t, s3.Options{URL: f.url}), tiertest.Key(1), meta, b)
	kept := f.get(f.names()[0])
	var log lines
	x := open(t, s3.Options{URL: f.url, Log: slog.New(slog.NewTextHandler(&log, nil))})
	f.misbehave(func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool {
		name := strings.TrimPrefix(r.URL.Path, "/bucket/")
		switch r.Method {
		case http.MethodPut:
			f.drop(name)
			return status(400, "InvalidRequest")(w, r, normal)
		case http.MethodDelete:
			f.set(name, kept)
			return status(403, "AccessDenied")(w, r, normal)
		}
		return false
	})
	for range 3 {
		if err := x.Write(t.Context(), tiertest.Key(2), meta, b); !errors.Is(err, tier.ErrNotKept) {
			t.Errorf("Write: %v", err)
		}
		if m, err := x.Read(t.Context(), tiertest.Key(1), make([]byte, len(b))); err != nil || m != meta {
			t.Errorf("Read: %+v, %v", m, err)
		}
		if err := x.Delete(t.Context(), []kv.Key{tiertest.Key(1)}); err == nil {
			t.Error("a delete that was refused succeeds")
		}
	}
	if log.with("does not take an object") != 1 || log.with("") != 1 {
		t.Errorf("%q", log.all)
	}
}
