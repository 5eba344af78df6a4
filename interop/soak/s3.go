// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// bucketBytes is how much the bucket has: beyond it the oldest objects expire, as by a lifecycle rule.
const bucketBytes = 192 << 20

// forwarder stands between the nodes and the object store. It answers 503, or with what was there before, and expires objects.
type forwarder struct {
	to      *url.URL
	proxy   *httputil.ReverseProxy
	busy    atomic.Bool
	stale   atomic.Bool
	expires chan string // paths of objects
	client  http.Client

	mu      sync.Mutex
	before  map[string]*saved // objects as they were before the writes of a stale time; by path
	written []written         // oldest first
	bytes   int64
}

// saved is an answer to a GET.
type saved struct {
	status int
	header http.Header
	body   []byte
}

type written struct {
	path  string
	bytes int64
}

func newForwarder(to string) (*forwarder, error) {
	u, err := url.Parse(to)
	if err != nil {
		return nil, err
	}
	f := &forwarder{to: u, expires: make(chan string, 1024), client: http.Client{Timeout: 5 * time.Second}}
	f.proxy = &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(u)
			r.Out.Host = r.In.Host // it is signed
		},
		ModifyResponse: func(r *http.Response) error {
			if r.Request.Method == http.MethodPut && r.StatusCode == http.StatusOK {
				f.wrote(r.Request.URL.Path, max(0, r.Request.ContentLength))
			}
			return nil
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) }, // the store is down: the connection breaks
		ErrorLog:     log.New(io.Discard, "", 0),
	}
	return f, nil
}

// serve serves until ctx ends, on a host.
func (f *forwarder) serve(ctx context.Context, host string, port int) error {
	var l net.Listener
	err := inHost(host, func() (err error) {
		l, err = net.Listen("tcp", fmt.Sprintf("%s:%d", addrOf(host), port))
		return err
	})
	if err != nil {
		return err
	}
	s := &http.Server{Handler: f, ReadHeaderTimeout: 10 * time.Second, ErrorLog: log.New(io.Discard, "", 0)}
	go func() { _ = s.Serve(l) }()
	go func() {
		<-ctx.Done()
		_ = s.Close()
	}()
	go f.expire(ctx)
	return nil
}

// wrote notes an object, and which ones expire for it.
func (f *forwarder) wrote(path string, n int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.written = append(f.written, written{path, n})
	for f.bytes += n; f.bytes > bucketBytes && len(f.written) > 1; f.written = f.written[1:] {
		f.bytes -= f.written[0].bytes
		select {
		case f.expires <- f.written[0].path:
		default: // it stays until the store is killed
		}
	}
}

// expire deletes objects.
func (f *forwarder) expire(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case path := <-f.expires:
			if q, err := http.NewRequestWithContext(ctx, http.MethodDelete, f.to.JoinPath(path).String(), nil); err == nil {
				if r, err := f.client.Do(q); err == nil {
					_ = r.Body.Close()
				}
			}
		}
	}
}

// setStale begins or ends a time in which reads answer what was there at its begin.
func (f *forwarder) setStale(on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.before = nil
	if on {
		f.before = map[string]*saved{}
	}
	f.stale.Store(on)
}

func (f *forwarder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if f.busy.Load() {
		w.Header().Set("Content-Type", "application/xml")
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = io.WriteString(w, `<?xml version="1.0" encoding="UTF-8"?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>`)
		return
	}
	if f.stale.Load() && strings.Count(strings.Trim(r.URL.Path, "/"), "/") > 0 { // an object: /BUCKET/NAME
		switch r.Method {
		case http.MethodPut, http.MethodDelete:
			if err := f.remember(r.Context(), r.URL.Path); err != nil {
				panic(http.ErrAbortHandler)
			}
		case http.MethodGet, http.MethodHead:
			if old := f.lookup(r.URL.Path); old != nil {
				old.answer(w, r)
				return
			}
		}
	}
	f.proxy.ServeHTTP(w, r)
}

func (f *forwarder) lookup(path string) *saved {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.before[path]
}

// maxSaved is that of one object.
const maxSaved = 16 << 20

var errTooLong = errors.New("the object is too long")

// remember keeps an object as it is now, if the stale time has not changed it before.
func (f *forwarder) remember(ctx context.Context, path string) error {
	if f.lookup(path) != nil {
		return nil
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, f.to.JoinPath(path).String(), nil)
	if err != nil {
		return err
	}
	r, err := f.client.Do(q)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	body, err := io.ReadAll(io.LimitReader(r.Body, maxSaved+1))
	if err == nil && len(body) > maxSaved {
		err = errTooLong
	}
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.before != nil && f.before[path] == nil {
		f.before[path] = &saved{status: r.StatusCode, header: r.Header, body: body}
	}
	return nil
}

// answer answers a GET or HEAD with the object as it was.
func (o *saved) answer(w http.ResponseWriter, r *http.Request) {
	for k, v := range o.header {
		if k != "Content-Length" {
			w.Header()[k] = v
		}
	}
	if o.status == http.StatusOK {
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(o.body)) // ranges, too
		return
	}
	w.WriteHeader(o.status)
	if r.Method == http.MethodGet {
		_, _ = w.Write(o.body)
	}
}
