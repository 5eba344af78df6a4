// SPDX-License-Identifier: Apache-2.0

package s3_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/xml"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// stored is an object of a fake.
type stored struct {
	data []byte
	meta string // of kvasir
}

func (s stored) tag() string {
	return fmt.Sprintf("%q", fmt.Sprint(crc32.ChecksumIEEE(s.data), s.meta))
}

// fake is an object store in this process, with one bucket, that can be made to misbehave.
// It checks no signatures: these are tested by their vectors, and against real servers.
type fake struct {
	t   testing.TB
	url string // of the bucket
	*httptest.Server

	mu        sync.Mutex
	objects   map[string]stored
	uploads   map[string]map[int][]byte
	metas     map[string]string // of uploads
	calls     []string          // method, name and special options
	heads     []http.Header
	unchanged int // answers that an object is as it was

	pages int     // objects of a page; 0 for 1,000
	rate  float64 // of bodies, bytes/s; 0: no limit

	modified map[string]time.Time // of objects, where a test says so

	// answer replaces the answer to a request where it returns true. It is called without
	// the lock, with what the store would answer.
	answer func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool
	life   context.Context // of requests, until misbehave is called again
	end    context.CancelFunc
}

func newFake(t *testing.T) *fake { return startFake(t, httptest.NewServer, "/bucket") }

func startFake(t testing.TB, start func(http.Handler) *httptest.Server, root string) *fake {
	f := &fake{t: t, objects: map[string]stored{}, uploads: map[string]map[int][]byte{}, metas: map[string]string{}, modified: map[string]time.Time{}}
	f.Server = start(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { f.serve(w, r, root) }))
	f.url = f.URL + root
	t.Cleanup(func() {
		f.misbehave(nil)
		f.end()
		f.CloseClientConnections()
		f.Close()
	})
	return f
}

// misbehave sets answer, and ends answers that wait for the end of their request.
func (f *fake) misbehave(answer func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answer = answer
	if f.end != nil {
		f.end()
	}
	f.life, f.end = context.WithCancel(context.Background())
}

// called returns how often requests came whose call begins so.
func (f *fake) called(prefix string) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.calls {
		if strings.HasPrefix(c, prefix) {
			n++
		}
	}
	return n
}

func (f *fake) names() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Sorted(maps.Keys(f.objects))
}

func (f *fake) get(name string) stored {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.objects[name]
}

func (f *fake) set(name string, s stored) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.objects[name] = s
}

func (f *fake) drop(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.objects, name)
}

func (f *fake) change(how func(stored) stored) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, s := range f.objects {
		f.objects[name] = how(s)
	}
}

func (f *fake) serve(w http.ResponseWriter, r *http.Request, root string) {
	var all bytes.Buffer
	all.Grow(int(max(0, r.ContentLength)) + bytes.MinRead)
	if _, err := io.Copy(f.paced(&all), r.Body); err != nil {
		return
	}
	body := all.Bytes()
	path, ok := strings.CutPrefix(r.URL.Path, root+"/")
	normal := httptest.NewRecorder()
	if !ok {
		refuse(normal, http.StatusNotFound, "NoSuchBucket")
	} else {
		f.reply(normal, r, path, body)
	}
	f.mu.Lock()
	answer, life := f.answer, f.life
	f.mu.Unlock()
	if answer != nil {
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		defer context.AfterFunc(life, cancel)()
		if answer(w, r.WithContext(ctx), normal) {
			return
		}
	}
	maps.Copy(w.Header(), normal.Header())
	w.WriteHeader(normal.Code)
	_, _ = f.paced(w).Write(normal.Body.Bytes())
}

// paced returns a writer that passes a body on at the store's rate.
func (f *fake) paced(w io.Writer) io.Writer {
	if f.rate == 0 {
		return w
	}
	return &paced{to: w, rate: f.rate}
}

func send(w http.ResponseWriter, a *httptest.ResponseRecorder) {
	maps.Copy(w.Header(), a.Header())
	w.WriteHeader(a.Code)
	_, _ = w.Write(a.Body.Bytes())
}

func refuse(w http.ResponseWriter, status int, code string) {
	w.WriteHeader(status)
	fmt.Fprintf(w, "<?xml version=\"1.0\"?>\n<Error><Code>%s</Code><Message>no</Message><Region>elsewhere-1</Region></Error>", code)
}

// reply does what S3 does.
func (f *fake) reply(w *httptest.ResponseRecorder, r *http.Request, name string, body []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, strings.TrimSpace(r.Method+" "+name+" "+r.Header.Get("Range")+" "+r.URL.RawQuery))
	f.heads = append(f.heads, r.Header)
	q := r.URL.Query()
	o, there := f.objects[name]
	switch {
	case name == "" && r.Method == http.MethodGet:
		f.list(w, q)
	case r.Method == http.MethodPost:
		f.post(w, r, name, q, body)
	case r.Method == http.MethodPut && q.Has("uploadId") && f.uploads[q.Get("uploadId")] == nil:
		refuse(w, http.StatusNotFound, "NoSuchUpload")
	case r.Method == http.MethodPut && q.Has("uploadId"):
		n, _ := strconv.Atoi(q.Get("partNumber"))
		f.uploads[q.Get("uploadId")][n] = body
		w.Header().Set("Etag", fmt.Sprintf("%q", fmt.Sprint("part", n)))
	case r.Method == http.MethodPut:
		if r.Header.Get("If-None-Match") == "*" && there {
			refuse(w, http.StatusPreconditionFailed, "PreconditionFailed")
			return
		}
		f.objects[name] = stored{body, r.Header.Get("X-Amz-Meta-Kvasir")}
	case r.Method == http.MethodDelete && q.Has("uploadId"):
		delete(f.uploads, q.Get("uploadId"))
		w.WriteHeader(http.StatusNoContent)
	case r.Method == http.MethodDelete:
		delete(f.objects, name)
		w.WriteHeader(http.StatusNoContent)
	case !there && r.Method == http.MethodHead:
		w.WriteHeader(http.StatusNotFound)
	case !there:
		refuse(w, http.StatusNotFound, "NoSuchKey")
	default:
		data, status := o.data, http.StatusOK
		if from, to, ok := rangeOf(r); ok && r.Method == http.MethodGet {
			if from >= len(data) {
				refuse(w, http.StatusRequestedRangeNotSatisfiable, "InvalidRange")
				return
			}
			to = min(to, len(data)-1)
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, to, len(data)))
			data, status = data[from:to+1], http.StatusPartialContent
		}
		if tag := r.Header.Get("If-None-Match"); tag != "" && tag == o.tag() {
			f.unchanged++
			w.WriteHeader(http.StatusNotModified)
			return
		}
		if o.meta != "" {
			w.Header().Set("X-Amz-Meta-Kvasir", o.meta)
		}
		w.Header().Set("Etag", o.tag())
		w.Header().Set("Content-Length", fmt.Sprint(len(data)))
		w.WriteHeader(status)
		if r.Method == http.MethodGet {
			_, _ = w.Write(data)
		}
	}
}

func rangeOf(r *http.Request) (from, to int, ok bool) {
	n, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &from, &to)
	return from, to, err == nil && n == 2
}

func (f *fake) list(w http.ResponseWriter, q url.Values) {
	type content struct {
		Key          string
		Size         int
		LastModified string
	}
	page := struct {
		XMLName               xml.Name `xml:"ListBucketResult"`
		IsTruncated           bool
		NextContinuationToken string
		Contents              []content
	}{}
	for _, name := range slices.Sorted(maps.Keys(f.objects)) {
		if !strings.HasPrefix(name, q.Get("prefix")) || name <= q.Get("continuation-token") {
			continue
		}
		if len(page.Contents) == cmp.Or(f.pages, 1000) {
			page.IsTruncated, page.NextContinuationToken = true, page.Contents[len(page.Contents)-1].Key
			break
		}
		page.Contents = append(page.Contents, content{name, len(f.objects[name].data), f.modified[name].UTC().Format("2006-01-02T15:04:05.000Z")})
	}
	text, _ := xml.Marshal(page)
	_, _ = w.Write(text)
}

func (f *fake) post(w http.ResponseWriter, r *http.Request, name string, q url.Values, body []byte) {
	if q.Has("uploads") {
		id := fmt.Sprintf("upload/%d+", len(f.metas))
		f.uploads[id], f.metas[id] = map[int][]byte{}, r.Header.Get("X-Amz-Meta-Kvasir")
		fmt.Fprintf(w, "<InitiateMultipartUploadResult><UploadId>%s</UploadId></InitiateMultipartUploadResult>", id)
		return
	}
	id := q.Get("uploadId")
	parts := f.uploads[id]
	if parts == nil {
		refuse(w, http.StatusNotFound, "NoSuchUpload")
		return
	}
	if _, there := f.objects[name]; there && r.Header.Get("If-None-Match") == "*" {
		refuse(w, http.StatusPreconditionFailed, "PreconditionFailed")
		return
	}
	var all []byte
	for i := range len(parts) {
		if !bytes.Contains(body, fmt.Appendf(nil, "<PartNumber>%d</PartNumber><ETag>&#34;part%d&#34;</ETag>", i+1, i+1)) {
			refuse(w, http.StatusBadRequest, "InvalidPart")
			return
		}
		all = append(all, parts[i+1]...)
	}
	f.objects[name] = stored{all, f.metas[id]}
	delete(f.uploads, id)
	_, _ = io.WriteString(w, "<?xml version=\"1.0\"?>\n\n<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")
}

// hijack takes the connection of a request.
func hijack(w http.ResponseWriter) net.Conn {
	c, _, err := w.(http.Hijacker).Hijack()
	if err != nil {
		panic(err)
	}
	return c
}
