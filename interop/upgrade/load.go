// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/engine"
)

// load sends requests until ctx ends.
func (d *driver) load(ctx context.Context, wg *sync.WaitGroup, seed uint64) {
	chats := workload.Chats(60, workload.ChatOptions{Seed: seed, Open: 6, Systems: 2, Turns: 5}) // few: the pool never has to evict
	var next atomic.Int64
	for range clients {
		wg.Go(func() {
			for ctx.Err() == nil {
				i := int(next.Add(1) - 1)
				tokens := chats[i%len(chats)].Tokens()
				tokens = tokens[min(systemTokens, len(tokens)/2):] // most of the system prompt is left out: prompts differ
				d.one(ctx, d.proxies[i%len(d.proxies)], i, tokens[:min(len(tokens), longest)])
			}
		})
	}
}

func (d *driver) one(ctx context.Context, proxy string, i int, tokens []uint32) {
	const n = 6
	began := time.Now()
	body, err := json.Marshal(map[string]any{"model": "m", "prompt": tokens, "max_tokens": n})
	if err != nil {
		d.violation("%v", err)
		return
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, proxy+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		d.violation("%v", err)
		return
	}
	q.Header.Set("Content-Type", "application/json")
	var a struct {
		Choices []struct{ Text string }
		Usage   struct {
			Prompt  int64 `json:"prompt_tokens"`
			Details struct {
				Cached int64 `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
		Error *failure
	}
	r, err := d.client.Do(q)
	status := 0
	if err == nil {
		status = r.StatusCode
		err = json.NewDecoder(r.Body).Decode(&a)
		_ = r.Body.Close()
	}
	switch {
	case ctx.Err() != nil:
		return
	case err != nil || status != http.StatusOK || len(a.Choices) != 1:
		d.counts.Lock()
		d.counts.failed++
		if d.counts.why == nil {
			d.counts.why = map[string]int{}
		}
		d.counts.why[reason(status, err, a.Error)]++
		d.counts.Unlock()
		if began.UnixMilli() > d.swapped.Load()+grace.Milliseconds() {
			d.violation("request %d failed without a swap: status %d, %v, %+v", i, status, err, a.Error)
		}
		if time.Since(began) >= deadline {
			d.violation("request %d took %v", i, time.Since(began))
		}
		time.Sleep(200 * time.Millisecond)
		return
	}
	want, err := d.want(ctx, i, tokens, n)
	if err == nil && a.Choices[0].Text != want {
		d.violation("request %d: the answer is %q, want %q", i, a.Choices[0].Text, want)
	}
	d.counts.Lock()
	defer d.counts.Unlock()
	d.counts.ok++
	d.counts.prompt += a.Usage.Prompt
	d.counts.cached += a.Usage.Details.Cached
}

// failure is what an answer says instead of choices.
type failure struct{ Message string }

var numbers = regexp.MustCompile(`[0-9]+`)

// reason is why a request ended with an error, without what differs between two of a kind.
func reason(status int, err error, said *failure) string {
	switch {
	case said != nil:
		err = errors.New(said.Message)
	case err == nil:
		err = errors.New("no choice")
	}
	return fmt.Sprintf("status %d: %s", status, numbers.ReplaceAllString(err.Error(), "N"))
}

// want is the answer of an engine that has no peers.
func (d *driver) want(ctx context.Context, i int, tokens []uint32, n int) (string, error) {
	st, err := d.alone.Submit(ctx, engine.Request{ID: strconv.Itoa(i), Tokens: tokens, MaxTokens: n})
	if err != nil {
		return "", err
	}
	out, _, err := st.Wait(ctx)
	var b strings.Builder
	for _, t := range out {
		b.WriteString(" ~" + strconv.FormatUint(uint64(t), 36))
	}
	return b.String(), err
}
