// SPDX-License-Identifier: Apache-2.0

package load_test

import (
	"errors"
	"io"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/bench/load"
	"github.com/kvasir-kv/kvasir/bench/workload"
)

// brief answers each request with one token after a millisecond.
type brief struct{}

func (brief) RoundTrip(r *http.Request) (*http.Response, error) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return nil, err
	}
	time.Sleep(time.Millisecond) // in a bubble it costs nothing
	const body = `data: {"choices":[{"text":"a","finish_reason":"length"}]}` + "\n\ndata: [DONE]\n\n"
	return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(body)), Header: http.Header{}, Request: r}, nil
}

func briefly(t *testing.T, o load.Options) *load.Generator {
	t.Helper()
	o.BaseURL, o.Model, o.Client = "http://engine.test", "m", &http.Client{Transport: brief{}}
	g, err := load.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// The memory of a run does not grow with the prompts of its requests: here 6,000 whose names of blocks would take 5 MB. A run keeps
// only the sample of each request.
func TestStreamTakesBoundedMemory(t *testing.T) {
	const n, length = 6000, 100
	for _, o := range []load.Options{{MaxConcurrency: 4}, {}, {Turns: true, MaxConcurrency: 4}} {
		synctest.Test(t, func(t *testing.T) {
			heap := func() int64 {
				runtime.GC()
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				return int64(m.HeapAlloc)
			}
			before, most := int64(0), int64(0)
			run := briefly(t, o).Stream(t.Context(), func(yield func(workload.Request, error) bool) {
				for i := range n {
					q := workload.Request{Arrival: time.Duration(i) * time.Millisecond, Input: length, Output: 1, BlockTokens: 1, Blocks: make([]int64, length), Conversation: i % 2000}
					switch {
					case i == n/10:
						before = heap()
					case i > n/10 && i%1000 == 0:
						most = max(most, heap()-before)
					}
					if !yield(q, nil) {
						return
					}
				}
			}, n)
			if len(run.Samples) != n || run.Unfinished != 0 || run.Err != nil || run.Samples[n-1].Failed() || run.Requests[n-1] != n-1 {
				t.Errorf("%+v: %d samples, %d unfinished, %v", o, len(run.Samples), run.Unfinished, run.Err)
			}
			if most > 1<<20 {
				t.Errorf("%+v: %d bytes of heap more than at the tenth part, 1 MiB is allowed", o, most)
			}
		})
	}
}

// When the requests end with an error, or are fewer or more than announced, the run ends with an error and the samples of the requests that
// were sent.
func TestStreamOfBadRequests(t *testing.T) {
	broken := errors.New("line 7 is bad")
	f := func(want string, list, n int, end error) {
		t.Helper()
		synctest.Test(t, func(t *testing.T) {
			run := briefly(t, load.Options{}).Stream(t.Context(), func(yield func(workload.Request, error) bool) {
				for q := range workload.Each(workload.Chats(list, workload.ChatOptions{})) {
					if !yield(q, nil) {
						return
					}
				}
				if end != nil {
					yield(workload.Request{}, end)
				}
			}, n)
			if sent := min(list, n); len(run.Samples) != sent || run.Unfinished != n-sent || run.Err == nil || run.Err.Error() != want {
				t.Errorf("%d samples, %d unfinished, %v, want %q", len(run.Samples), run.Unfinished, run.Err, want)
			}
		})
	}
	f("line 7 is bad", 6, 9, broken)
	f("load: the workload has 6 requests, and 9 were to come", 6, 9, nil)
	f("load: the workload has more than the 4 requests that were to come", 6, 4, nil)
}
