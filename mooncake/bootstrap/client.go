package bootstrap

import (
	"bytes"
	"cmp"
	"context"
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
	// ErrUnreachable means that every attempt ended without an answer: no
	// connection, a broken one, or a timeout. It wraps the last attempt's error.
	ErrUnreachable = errors.New("bootstrap: server unreachable")

	// ErrClosed means that the client was closed.
	ErrClosed = errors.New("bootstrap: client closed")
)

// StatusError is an answer other than 200.
type StatusError struct {
	Method, URL string
	Status      int
	Detail      string // the answer's detail, or the start of its body
}

func (e *StatusError) Error() string {
	return fmt.Sprintf("bootstrap: %s %s: status %d: %s", e.Method, e.URL, e.Status, e.Detail)
}

// ClientOptions configures a Client. A zero field means its default, which is vLLM's.
type ClientOptions struct {
	Attempts     int           // of each call; default 3
	Timeout      time.Duration // of each attempt; default 30 s (VLLM_MOONCAKE_CONNECTOR_TIMEOUT)
	RegisterWait time.Duration // after a failed Register, doubled each time up to 10 s; default 1 s
	QueryWait    time.Duration // after a failed Query; default 0.1 s
	Token        string        // sent as a bearer token
}

// Client speaks to one bootstrap server. Its methods are safe for concurrent use.
type Client struct {
	base   string
	o      ClientOptions
	http   *http.Client
	ctx    context.Context // of shared queries; ends at Close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu struct {
		sync.Mutex
		closed bool
		flight *flight // the query under way
	}
}

// flight is one query that several callers wait for.
type flight struct {
	done   chan struct{}
	cancel context.CancelFunc
	d      Directory // set when done is closed; shared, so read-only
	err    error
	waiter int // under Client.mu
}

// NewClient returns a client of the server at base, for example
// http://10.0.0.7:8998: what kv_transfer_params carry as remote_bootstrap_addr.
func NewClient(base string, o ClientOptions) (*Client, error) {
	u, err := url.Parse(base)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.RawQuery != "" || u.Fragment != "" || len(base) > MaxAddrBytes {
		return nil, fmt.Errorf("bootstrap: address %.200q is not http://HOST:PORT", base)
	}
	c := &Client{base: strings.TrimRight(base, "/"), o: o}
	c.o.Attempts = cmp.Or(o.Attempts, 3)
	c.o.Timeout = cmp.Or(o.Timeout, 30*time.Second)
	c.o.RegisterWait = cmp.Or(o.RegisterWait, time.Second)
	c.o.QueryWait = cmp.Or(o.QueryWait, 100*time.Millisecond)
	c.http = &http.Client{
		Transport: &http.Transport{
			DialContext: (&net.Dialer{}).DialContext, MaxIdleConnsPerHost: 2, MaxResponseHeaderBytes: 64 << 10,
			IdleConnTimeout: 4 * time.Second, // uvicorn closes idle connections after 5 s
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c, nil
}

// Close ends queries under way and waits for them.
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

// Register registers a worker. As vLLM does, it tries again after a connection
// that could not be made and after a timeout, not after an answer: a repeat of
// the same registration is answered 200. A refusal is a *StatusError.
func (c *Client) Register(ctx context.Context, r Registration) error {
	body, err := r.body()
	if err != nil {
		return fmt.Errorf("bootstrap: encode registration: %w", err)
	}
	wait := c.o.RegisterWait
	again := func(err error) (time.Duration, bool) {
		d := wait
		wait = min(wait*2, 10*time.Second)
		var dial *net.OpError
		timeout := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errTimeout)
		return d, timeout || (errors.As(err, &dial) && dial.Op == "dial")
	}
	_, _, err = c.retry(ctx, http.MethodPost, "/register", body, c.o.Timeout, again)
	return err
}

// Unregister takes a worker back, or with ranks below 0 the whole engine. It
// reports whether there was anything. Only a Kvasir server knows this call;
// vLLM's answers 405, a *StatusError.
func (c *Client) Unregister(ctx context.Context, engineID string, dpRank, tpRank, ppRank int) (bool, error) {
	q := url.Values{"engine_id": {engineID}}
	for name, rank := range map[string]int{"dp_rank": dpRank, "tp_rank": tpRank, "pp_rank": ppRank} {
		if rank >= 0 {
			q.Set(name, strconv.Itoa(rank))
		}
	}
	never := func(error) (time.Duration, bool) { return 0, false }
	_, _, err := c.retry(ctx, http.MethodDelete, "/register?"+q.Encode(), nil, c.o.Timeout, never)
	if se, ok := errors.AsType[*StatusError](err); ok && se.Status == http.StatusNotFound {
		return false, nil
	}
	return err == nil, err
}

// Query returns the directory. Calls that overlap share one request and its
// result, which they must not change. As vLLM does, it tries again after any
// transport error. A caller's ctx ends only its own wait.
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
		f.cancel() // nobody waits any more
		if c.mu.flight == f {
			c.mu.flight = nil
		}
	}
	c.mu.Unlock()
	return nil, fmt.Errorf("bootstrap: query %s: %w", c.base, context.Cause(ctx))
}

// join returns the query under way, or starts one.
func (c *Client) join() (*flight, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		return nil, ErrClosed
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
		f.d, _, f.err = c.query(ctx, "/query", c.o.Timeout)
		if f.err != nil && c.ctx.Err() != nil {
			f.err = ErrClosed
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

// Expect says what a directory must hold before WaitFor returns it; zero fields
// ask for nothing.
type Expect struct {
	EngineID string // this engine is there
	TP, PP   int    // TP ranks of that engine, or of every engine, and PP ranks of each
	DP       int    // engines
	After    uint64 // the generation is later than this
}

func (x Expect) query(wait time.Duration) string {
	q := url.Values{}
	q.Set("wait", strconv.FormatFloat(wait.Seconds(), 'f', 3, 64))
	for name, n := range map[string]int{"tp": x.TP, "pp": x.PP, "dp": x.DP} {
		if n > 0 {
			q.Set(name, strconv.Itoa(n))
		}
	}
	if x.EngineID != "" {
		q.Set("engine_id", x.EngineID)
	}
	if x.After > 0 {
		q.Set("after", strconv.FormatUint(x.After, 10))
	}
	return "/query?" + q.Encode()
}

// Missing says in words what d lacks of x, naming both sides' values, or "" when
// nothing is missing. After is not looked at.
func (x Expect) Missing(d Directory) string {
	if x.DP > 0 && len(d) != x.DP {
		return fmt.Sprintf("%d of %d engines (dp) are registered", len(d), x.DP)
	}
	if len(d) == 0 {
		return "no engine is registered"
	}
	found := x.EngineID == ""
	for dp, e := range d {
		if x.EngineID != "" && e.ID != x.EngineID {
			continue
		}
		found = true
		if x.TP > 0 && len(e.Workers) != x.TP {
			return fmt.Sprintf("engine %q of dp_rank %d has %d TP ranks, expected %d", e.ID, dp, len(e.Workers), x.TP)
		}
		for tp, pps := range e.Workers {
			if x.PP > 0 && len(pps) != x.PP {
				return fmt.Sprintf("engine %q of dp_rank %d has %d PP ranks at tp_rank %d, expected %d", e.ID, dp, len(pps), tp, x.PP)
			}
		}
	}
	if !found {
		return fmt.Sprintf("engine %q is not registered", x.EngineID)
	}
	return ""
}

// WaitFor returns the directory once it holds what x expects, and its generation
// (0 from a server without generations). A Kvasir server holds the request until
// then; vLLM's ignores the question and is asked again every QueryWait. When ctx
// ends first, the error says what is missing.
func (c *Client) WaitFor(ctx context.Context, x Expect) (Directory, uint64, error) {
	const step = 10 * time.Second // of one request; ctx decides about the whole
	missing := "no answer yet"
	for {
		d, gen, err := c.query(ctx, x.query(step), step+c.o.Timeout)
		se, status := errors.AsType[*StatusError](err)
		switch {
		case status && se.Status == http.StatusServiceUnavailable:
			missing = se.Detail
		case err != nil && ctx.Err() == nil:
			return nil, 0, err
		case err == nil:
			if missing = x.Missing(d); missing == "" && (gen == 0 || gen > x.After) {
				return d, gen, nil
			}
		}
		if err := sleep(ctx, c.o.QueryWait); err != nil {
			return nil, 0, fmt.Errorf("bootstrap: wait for %s: %s: %w", c.base, cmp.Or(missing, "no change"), err)
		}
	}
}

// GenerationHeader carries the directory's generation in answers to GET /query:
// a number that grows with every change and never goes back while the server's
// state file lives.
const GenerationHeader = "X-Kvasir-Generation"

func (c *Client) query(ctx context.Context, path string, timeout time.Duration) (Directory, uint64, error) {
	again := func(error) (time.Duration, bool) { return c.o.QueryWait, true }
	body, header, err := c.retry(ctx, http.MethodGet, path, nil, timeout, again)
	if err != nil {
		return nil, 0, err
	}
	d, err := ParseDirectory(body)
	if err != nil {
		return nil, 0, fmt.Errorf("answer of %s/query: %w", c.base, err)
	}
	gen, _ := strconv.ParseUint(header.Get(GenerationHeader), 10, 64) // absent: 0
	return d, gen, nil
}

// retry makes attempts until one is answered. again says how long to wait after
// an error and whether to try again at all.
func (c *Client) retry(ctx context.Context, method, path string, body []byte, timeout time.Duration, again func(error) (time.Duration, bool)) ([]byte, http.Header, error) {
	for attempt := 1; ; attempt++ {
		answer, header, err := c.once(ctx, method, path, body, timeout)
		if _, answered := errors.AsType[*StatusError](err); err == nil || answered || errors.Is(err, ErrDirectory) {
			return answer, header, err
		}
		wait, ok := again(err)
		if !ok || attempt == c.o.Attempts || ctx.Err() != nil {
			if attempt == 1 {
				return nil, nil, fmt.Errorf("%w: %w", ErrUnreachable, err)
			}
			return nil, nil, fmt.Errorf("%w after %d attempts: %w", ErrUnreachable, attempt, err)
		}
		if err := sleep(ctx, wait); err != nil {
			return nil, nil, fmt.Errorf("%w: %w", ErrUnreachable, err)
		}
	}
}

var errTimeout = errors.New("no answer in time")

func (c *Client) once(ctx context.Context, method, path string, body []byte, timeout time.Duration) ([]byte, http.Header, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("%w: %v", errTimeout, timeout))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return nil, nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if c.o.Token != "" {
		req.Header.Set("Authorization", "Bearer "+c.o.Token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	limit := int64(MaxDirectoryBytes)
	if resp.StatusCode != http.StatusOK {
		limit = 4 << 10
	}
	answer, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return nil, nil, fmt.Errorf("read the answer of %s %s: %w", method, c.base+path, err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, nil, &StatusError{method, c.base + path, resp.StatusCode, detail(answer)}
	}
	if int64(len(answer)) > limit {
		return nil, nil, fmt.Errorf("%w: the answer of %s is longer than %d bytes", ErrDirectory, c.base+path, limit)
	}
	return answer, resp.Header, nil
}

// detail picks FastAPI's {"detail": …} out of an error's body.
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

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
