// SPDX-License-Identifier: Apache-2.0

package otlp_test

import (
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/otlp"
	"github.com/kvasir-kv/kvasir/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// A traceparent is read as W3C specifies, and other texts are refused.
func TestParse(t *testing.T) {
	const good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	c, ok := otlp.Parse(good)
	if !ok || !c.Sampled || c.String() != good {
		t.Errorf("%v %v", c, ok)
	}
	if c, ok := otlp.Parse("cc-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00-later"); !ok || c.Sampled {
		t.Errorf("%v %v", c, ok)
	}
	for _, bad := range []string{"", "00", good + "-x", "ff" + good[2:], strings.ToUpper(good), good[:54], "00-00000000000000000000000000000000-b7ad6b7169203331-01", "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01", "00-0af7651916cd43dd8448eb211c80319cff-b7ad6b7169203331-01", "00-xyf7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"} {
		if _, ok := otlp.Parse(bad); ok {
			t.Errorf("%q is taken", bad)
		}
	}
	child := otlp.New(c)
	if child.Trace != c.Trace || child.Span == c.Span || !child.Sampled {
		t.Errorf("%v", child)
	}
	if a, b := otlp.New(otlp.Context{}), otlp.New(otlp.Context{}); a.Trace == b.Trace || !a.Sampled {
		t.Errorf("%v %v", a, b)
	}
}

// Sampled spans arrive in the form that a collector reads, and spans that are not sampled are not sent. Spans that wait at the
// end are sent.
func TestExport(t *testing.T) {
	var mu sync.Mutex
	var got []map[string]any
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body)
		var all struct {
			ResourceSpans []struct {
				Resource   struct{ Attributes []map[string]any }
				ScopeSpans []struct{ Spans []map[string]any }
			}
		}
		if err := json.Unmarshal(text, &all); err != nil || r.URL.Path != "/v1/traces" || all.ResourceSpans[0].Resource.Attributes[0]["key"] != "service.name" {
			t.Errorf("%s %s %v", r.URL, text, err)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		got = append(got, all.ResourceSpans[0].ScopeSpans[0].Spans...)
	}))
	defer s.Close()
	x, err := otlp.Open(s.URL, "test", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	one := otlp.New(otlp.Context{})
	two := otlp.New(one)
	now := time.Unix(5, 6)
	x.Add(otlp.Span{Context: one, Name: "one", Kind: otlp.Server, Start: now, End: now.Add(time.Second), Attributes: map[string]string{"a": "b"}})
	x.Add(otlp.Span{Context: two, Parent: one.Span, Name: "two", Kind: otlp.Client, Start: now, End: now, Err: "broken"})
	x.Add(otlp.Span{Context: otlp.Context{Trace: one.Trace, Span: one.Span}, Name: "not sampled"})
	x.Close()
	if len(got) != 2 || got[0]["startTimeUnixNano"] != "5000000006" || got[0]["parentSpanId"] != nil || got[1]["parentSpanId"] != got[0]["spanId"] ||
		got[1]["traceId"] != got[0]["traceId"] || len(got[0]["traceId"].(string)) != 32 || got[1]["status"].(map[string]any)["message"] != "broken" || got[0]["kind"] != 2.0 {
		t.Errorf("%v", got)
	}
	if s := x.Stats(); s.Sent != 2 || s.Dropped != 0 {
		t.Errorf("%+v", s)
	}
}

// If a collector fails, only spans are lost.
func TestACollectorThatFails(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }))
	defer s.Close()
	x, err := otlp.Open(s.URL+"/other", "test", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	for range 10000 {
		x.Add(otlp.Span{Context: otlp.New(otlp.Context{})})
	}
	x.Close()
	if s := x.Stats(); s.Sent != 0 || s.Dropped < 10000-4096+1 {
		t.Errorf("%+v", s)
	}
	if _, err := otlp.Open("collector:4318", "", nil); err == nil {
		t.Error("no URL")
	}
}
