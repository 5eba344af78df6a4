// SPDX-License-Identifier: Apache-2.0

// Package otlp sends spans to an OpenTelemetry collector by OTLP over HTTP, as JSON.
//
// The official exporter depends on gRPC and protobuf even if only HTTP is used, while a span of this package
// is a few texts and times. Sources: OTLP 1.x, W3C Trace Context.
package otlp

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Limits of the spans that wait to be sent, and of sending.
const (
	maxQueue = 4096             // spans that wait; further ones are dropped and counted
	maxBatch = 512              // spans of one request to the collector; the others wait for the next
	every    = 2 * time.Second  // interval of the requests
	timeout  = 10 * time.Second // of one request; its spans are then dropped and counted
)

// Context identifies a span across processes.
type Context struct {
	Trace   [16]byte
	Span    [8]byte
	Sampled bool
}

// New returns the Context of a new child span of parent. A zero parent means that the span has none.
func New(parent Context) Context {
	c := Context{Trace: parent.Trace, Sampled: parent.Sampled}
	if parent.Trace == ([16]byte{}) {
		_, _ = rand.Read(c.Trace[:]) // never fails
		c.Sampled = true
	}
	_, _ = rand.Read(c.Span[:])
	return c
}

// Parse parses a traceparent header. It returns false for any other text.
func Parse(s string) (c Context, ok bool) {
	parts := strings.Split(s, "-")
	if len(parts) < 4 || len(parts[0]) != 2 || parts[0] == "ff" || parts[0] == "00" && len(parts) != 4 || len(parts[3]) != 2 {
		return c, false
	}
	var version, flags [1]byte
	for _, p := range []struct {
		to   []byte
		text string
	}{{version[:], parts[0]}, {c.Trace[:], parts[1]}, {c.Span[:], parts[2]}, {flags[:], parts[3]}} {
		if n, err := hex.Decode(p.to, []byte(p.text[:min(len(p.text), 2*len(p.to))])); err != nil || n != len(p.to) || len(p.text) != 2*len(p.to) || strings.ToLower(p.text) != p.text {
			return Context{}, false
		}
	}
	c.Sampled = flags[0]&1 == 1
	return c, c.Trace != [16]byte{} && c.Span != [8]byte{}
}

// String returns the traceparent header.
func (c Context) String() string {
	flags := "00"
	if c.Sampled {
		flags = "01"
	}
	return "00-" + hex.EncodeToString(c.Trace[:]) + "-" + hex.EncodeToString(c.Span[:]) + "-" + flags
}

// Kind says which side of a call a span describes.
type Kind int

// The kinds of spans.
const (
	Server Kind = 2
	Client Kind = 3
)

// Span is one piece of work.
type Span struct {
	Context
	Parent     [8]byte // id of the parent span; zero: none
	Name       string
	Kind       Kind
	Start, End time.Time
	Attributes map[string]string
	Err        string // "": no error
}

// Exporter sends spans in the background. Its methods are safe for concurrent use.
type Exporter struct {
	url     string
	service string
	log     *slog.Logger
	client  *http.Client
	queue   chan Span
	stop    context.CancelFunc
	wg      sync.WaitGroup

	sent, dropped atomic.Int64
}

// Open returns an Exporter that sends to a collector, for instance http://host:4318. If the endpoint has no path, or /, Open adds
// /v1/traces.
func Open(endpoint, service string, log *slog.Logger) (*Exporter, error) {
	u, err := url.Parse(endpoint)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("otlp: endpoint %.200q is not http://host:port", endpoint)
	}
	if u.Path == "" || u.Path == "/" {
		u.Path = "/v1/traces"
	}
	x := &Exporter{url: u.String(), service: service, log: log, client: &http.Client{Timeout: timeout, Transport: &http.Transport{}}, queue: make(chan Span, maxQueue)}
	var ctx context.Context
	ctx, x.stop = context.WithCancel(context.Background())
	x.wg.Go(func() { x.run(ctx) })
	return x, nil
}

// Close sends the spans that wait and ends the Exporter.
func (x *Exporter) Close() {
	x.stop()
	x.wg.Wait()
	x.client.CloseIdleConnections()
}

// Add queues a span. It drops spans that are not sampled, and spans beyond maxQueue.
func (x *Exporter) Add(s Span) {
	if !s.Sampled {
		return
	}
	select {
	case x.queue <- s:
	default:
		x.dropped.Add(1)
	}
}

// Stats are the counters of an Exporter.
type Stats struct {
	Sent    int64 `counter:"kvasir_proxy_spans_sent_total" help:"Spans that the collector took."`
	Dropped int64 `counter:"kvasir_proxy_spans_dropped_total" help:"Spans that were not sent: too many, or the collector did not take them."`
}

// Stats returns the counters; those of a nil Exporter are 0.
func (x *Exporter) Stats() Stats {
	if x == nil {
		return Stats{}
	}
	return Stats{x.sent.Load(), x.dropped.Load()}
}

func (x *Exporter) run(ctx context.Context) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	failing := false
	for {
		done := false
		select {
		case <-tick.C:
		case <-ctx.Done():
			done = true
		}
		for batch := x.batch(); len(batch) > 0; batch = x.batch() {
			err := x.send(batch)
			if err != nil {
				x.dropped.Add(int64(len(batch)))
				if !failing {
					x.log.Warn("spans are dropped: the collector does not take them", "err", err)
				}
			} else {
				x.sent.Add(int64(len(batch)))
			}
			if failing = err != nil; failing {
				break
			}
		}
		if done {
			return
		}
	}
}

func (x *Exporter) batch() (b []Span) {
	for len(b) < maxBatch {
		select {
		case s := <-x.queue:
			b = append(b, s)
		default:
			return b
		}
	}
	return b
}

type attribute struct {
	Key   string `json:"key"`
	Value struct {
		Text string `json:"stringValue"`
	} `json:"value"`
}

func attributes(m map[string]string) []attribute {
	out := []attribute{}
	for k, v := range m {
		a := attribute{Key: k}
		a.Value.Text = v
		out = append(out, a)
	}
	return out
}

// encode returns an ExportTraceServiceRequest in JSON, with ids as hexadecimal digits and times as texts.
func (x *Exporter) encode(batch []Span) []byte {
	type object = map[string]any
	var spans []object
	for _, s := range batch {
		o := object{
			"traceId": hex.EncodeToString(s.Trace[:]), "spanId": hex.EncodeToString(s.Span[:]), "name": s.Name, "kind": s.Kind,
			"startTimeUnixNano": strconv.FormatInt(s.Start.UnixNano(), 10), "endTimeUnixNano": strconv.FormatInt(s.End.UnixNano(), 10),
			"attributes": attributes(s.Attributes),
		}
		if s.Parent != [8]byte{} {
			o["parentSpanId"] = hex.EncodeToString(s.Parent[:])
		}
		if s.Err != "" {
			o["status"] = object{"code": 2, "message": s.Err}
		}
		spans = append(spans, o)
	}
	b, _ := json.Marshal(object{"resourceSpans": []object{{
		"resource":   object{"attributes": attributes(map[string]string{"service.name": x.service})},
		"scopeSpans": []object{{"scope": object{"name": "kvasir"}, "spans": spans}},
	}}}) // plain values
	return b
}

func (x *Exporter) send(batch []Span) error {
	resp, err := x.client.Post(x.url, "application/json", bytes.NewReader(x.encode(batch)))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, _ = io.CopyN(io.Discard, resp.Body, 64<<10) // so that the connection can be used again
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("otlp: %s answered %s", x.url, resp.Status)
	}
	return nil
}
