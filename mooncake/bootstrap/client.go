// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
)

var (
	// errUnreachable means that no attempt got an answer: each found no connection, a broken one, or a timeout. It wraps the last
	// attempt's error.
	errUnreachable = errors.New("bootstrap: server unreachable")
	errClosed      = errors.New("bootstrap: client closed")
)

// statusError is an answer of the server whose status is not 200.
type statusError struct {
	what   string // method and URL
	status int
	detail string // the detail field of the answer, or the start of its body
}

func (e *statusError) Error() string {
	return fmt.Sprintf("bootstrap: %s: status %d: %s", e.what, e.status, e.detail)
}

// ClientOptions configures a Client. A zero field means its default, the same as vLLM's.
type ClientOptions struct {
	Attempts     int           // of each call; default 3
	Timeout      time.Duration // of each attempt; default 30 s (VLLM_MOONCAKE_CONNECTOR_TIMEOUT)
	RegisterWait time.Duration // pause after a failed attempt to register, doubled each time up to 10 s; default 1 s
	QueryWait    time.Duration // pause after a failed attempt to query; default 0.1 s
	Token        string        // sent as a bearer token
	TLS          *tls.Config   // for https servers; nil: Go's default
}

// Client is a client of one bootstrap server. Its methods are safe for concurrent use.
type Client struct {
	base   string
	o      ClientOptions
	http   *http.Client
	ctx    context.Context // context of shared queries; ends at Close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu struct {
		sync.Mutex
		closed bool
		flight *flight // the query in progress; nil: none
	}
}

// flight is one query that several callers wait for.
type flight struct {
	done   chan struct{}
	cancel context.CancelFunc
	d      Directory // set when done is closed; shared, so read-only
	err    error
	waiter int // callers that wait; guarded by Client.mu
}

// NewClient returns a client of the server at base, for example http://10.0.0.7:8998. kv_transfer_params carry that address as
// remote_bootstrap_addr.
func NewClient(base string, o ClientOptions) (*Client, error) {
	u, err := url.Parse(base)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.RawQuery != "" || u.Fragment != "" || len(base) > maxAddrBytes {
		return nil, fmt.Errorf("bootstrap: address %.200q is not http://HOST:PORT", base)
	}
	c := &Client{base: strings.TrimRight(base, "/"), o: o}
	c.o.Attempts = cmp.Or(o.Attempts, 3)
	c.o.Timeout = cmp.Or(o.Timeout, 30*time.Second)
	c.o.RegisterWait = cmp.Or(o.RegisterWait, time.Second)
	c.o.QueryWait = cmp.Or(o.QueryWait, 100*time.Millisecond)
	c.http = &http.Client{
		Transport: &http.Transport{
			DialContext: (&net.Dialer{}).DialContext, MaxIdleConnsPerHost: 2, MaxResponseHeaderBytes: 64 << 10, TLSClientConfig: o.TLS,
			IdleConnTimeout: 4 * time.Second, // uvicorn closes idle connections after 5 s
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c, nil
}

// Close cancels the queries in progress and waits for their end.
func (c *Client) Close() error {
	c.mu.Lock()
	c.mu.closed = true
	c.mu.Unlock()
	c.cancel()
	c.wg.Wait()
	c.http.CloseIdleConnections()
	return nil
}

// Base returns the address given to NewClient, without slashes at its end.
func (c *Client) Base() string { return c.base }

// Register registers a worker. As vLLM does, it tries again after a failed dial and after a timeout, but not after the server has
// answered. The server accepts a repeated registration.
func (c *Client) Register(ctx context.Context, r Registration) error {
	body, err := r.body()
	if err != nil {
		return fmt.Errorf("bootstrap: encode registration: %w", err)
	}
	wait := c.o.RegisterWait
	_, err = c.retry(ctx, http.MethodPost, "/register", body, func(err error) (time.Duration, bool) {
		now := wait
		wait = min(wait*2, 10*time.Second)
		dial, ok := errors.AsType[*net.OpError](err)
		return now, errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errTimeout) || (ok && dial.Op == "dial")
	})
	return err
}

// Unregister removes a worker. A rank below 0 matches all ranks, so with all ranks below 0 it removes the whole engine. It reports
// whether a matching worker was registered. Only a Kvasir server knows this call; vLLM's server answers 405.
func (c *Client) Unregister(ctx context.Context, engineID string, dpRank, tpRank, ppRank int) (bool, error) {
	q := url.Values{"engine_id": {engineID}}
	for name, rank := range map[string]int{"dp_rank": dpRank, "tp_rank": tpRank, "pp_rank": ppRank} {
		if rank >= 0 {
			q.Set(name, strconv.Itoa(rank))
		}
	}
	_, err := c.tryOnce(ctx, http.MethodDelete, "/register?"+q.Encode(), nil)
	if se, ok := errors.AsType[*statusError](err); ok && se.status == http.StatusNotFound {
		return false, nil
	}
	return err == nil, err
}

// Query returns the directory. Concurrent calls share one request and its result; callers must not change the result. As vLLM does,
// Query tries again after any transport error. When ctx ends, only this call stops waiting, not the shared request.
func (c *Client) Query(ctx context.Context) (Directory, error) {
	f, err := c.join()
	if err != nil {
		return nil, err
	}
	select {
	case <-f.done:
		return f.d, f.err
	case <-ctx.Done():
	}
	c.mu.Lock()
	if f.waiter--; f.waiter == 0 {
		f.cancel() // no caller waits any more
		if c.mu.flight == f {
			c.mu.flight = nil
		}
	}
	c.mu.Unlock()
	return nil, fmt.Errorf("bootstrap: query %s: %w", c.base, context.Cause(ctx))
}

// join adds the caller to the query in progress, or starts a query.
func (c *Client) join() (*flight, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return nil, errClosed
	}
	if f := c.mu.flight; f != nil {
		f.waiter++
		return f, nil
	}
	ctx, cancel := context.WithCancel(c.ctx)
	f := &flight{done: make(chan struct{}), cancel: cancel, waiter: 1}
	c.mu.flight = f
	c.wg.Go(func() {
		defer cancel()
		f.d, f.err = c.query(ctx)
		if f.err != nil && c.ctx.Err() != nil {
			f.err = errClosed
		}
		c.mu.Lock()
		if c.mu.flight == f {
			c.mu.flight = nil
		}
		c.mu.Unlock()
		close(f.done)
	})
	return f, nil
}

func (c *Client) query(ctx context.Context) (Directory, error) {
	body, err := c.retry(ctx, http.MethodGet, "/query", nil, func(error) (time.Duration, bool) { return c.o.QueryWait, true })
	if err != nil {
		return nil, err
	}
	d, err := parseDirectory(body)
	if err != nil {
		return nil, fmt.Errorf("answer of %s/query: %w", c.base, err)
	}
	return d, nil
}

// retry makes attempts until the server answers one, at most o.Attempts. After an attempt without an answer it calls `again` with the
// error, which returns how long to wait before the next attempt, and false if there must be none.
func (c *Client) retry(ctx context.Context, method, path string, body []byte, again func(error) (time.Duration, bool)) ([]byte, error) {
	for attempt := 1; ; attempt++ {
		answer, err := c.tryOnce(ctx, method, path, body)
		if _, answered := errors.AsType[*statusError](err); err == nil || answered || errors.Is(err, errDirectory) {
			return answer, err
		}
		wait, ok := again(err)
		if !ok || attempt == c.o.Attempts || ctx.Err() != nil {
			return nil, fmt.Errorf("%w: attempt %d: %w", errUnreachable, attempt, err)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", errUnreachable, context.Cause(ctx))
		}
	}
}

var errTimeout = errors.New("no answer in time")

func (c *Client) tryOnce(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.o.Timeout, fmt.Errorf("%w: %v", errTimeout, c.o.Timeout))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	if c.o.Token != "" {
		req.Header.Set("Authorization", "Bearer "+c.o.Token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	limit := int64(maxDirectoryBytes)
	if resp.StatusCode != http.StatusOK {
		limit = 4 << 10
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return nil, fmt.Errorf("read the answer of %s %s: %w", method, c.base+path, err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, &statusError{method + " " + c.base + path, resp.StatusCode, detail(answer)}
	}
	if int64(len(answer)) > limit {
		return nil, fmt.Errorf("%w: the answer of %s is longer than %d bytes", errDirectory, c.base+path, limit)
	}
	return answer, nil
}

// detail returns the detail of FastAPI's {"detail": …} from the body of an error; without it, the start of the body.
func detail(body []byte) string {
	var v struct {
		Detail json.RawMessage `json:"detail"`
	}
	text := string(body)
	if json.Unmarshal(body, &v) == nil && len(v.Detail) > 0 {
		text = string(v.Detail)
		var s string
		if json.Unmarshal(v.Detail, &s) == nil {
			text = s
		}
	}
	return strings.ToValidUTF8(text[:min(len(text), 500)], "\uFFFD")
}
