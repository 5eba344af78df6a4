// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/kvasir-kv/kvasir/internal/safelog"
)

// Answer is an engine's answer to a prompt.
type Answer struct {
	Text     string               `json:"text"`
	Tokens   []string             `json:"tokens"`
	Logprobs []float64            `json:"logprobs"`
	Top      []map[string]float64 `json:"top,omitempty"` // for each place: log-probabilities of the tokens that the engine thought most likely
	Prompt   int                  `json:"prompt_tokens"`
	Cached   int                  `json:"cached_tokens"` // -1: the answer does not say; vLLM does not report 0
}

// engine is an engine that is asked through the OpenAI API.
type engine struct {
	url   string // without a slash at its end
	key   string
	model string
	max   int // most tokens of an answer
	wait  func(context.Context) error
	http  *http.Client

	reports bool // an answer has said how many tokens were cached
}

// The limits of an engine's answer: its size in bytes, and the time it may take. An answer beyond one of them is a failed request.
const (
	maxAnswer   = 16 << 20
	requestTime = 10 * time.Minute
)

func (e *engine) do(ctx context.Context, method, path string, body, into any) error {
	if err := e.wait(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	var content io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return err
		}
		content = bytes.NewReader(text)
	}
	r, err := http.NewRequestWithContext(ctx, method, e.url+path, content)
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	if e.key != "" {
		r.Header.Set("Authorization", "Bearer "+e.key)
	}
	answer, err := e.http.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	if err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s%s: status %d: %s", e.url, path, answer.StatusCode, safelog.Text(string(text), 300))
	}
	if err := json.Unmarshal(text, into); err != nil {
		return fmt.Errorf("%s%s: the answer is not what the OpenAI API has: %w", e.url, path, err)
	}
	return nil
}

// open checks the URL of the engine. If no model was named, it asks the engine for its model.
func (e *engine) open(ctx context.Context) error {
	u, err := url.Parse(e.url)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return fmt.Errorf("%q is not http://HOST:PORT", e.url)
	}
	if e.model != "" {
		return nil
	}
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := e.do(ctx, http.MethodGet, "/v1/models", nil, &list); err != nil {
		return err
	}
	if len(list.Data) == 0 {
		return fmt.Errorf("%s serves no model", e.url)
	}
	e.model = list.Data[0].ID
	return nil
}

// ask sends a prompt under a salt to the engine, and returns the greedy answer.
func (e *engine) ask(ctx context.Context, prompt, salt string) (a Answer, err error) {
	body := map[string]any{
		"model": e.model, "prompt": prompt, "max_tokens": e.max, "temperature": 0, "logprobs": 2, "cache_salt": salt, "ignore_eos": true,
	}
	var got struct {
		Choices []struct {
			Text     string `json:"text"`
			Logprobs *struct {
				Tokens []string             `json:"tokens"`
				Values []*float64           `json:"token_logprobs"`
				Top    []map[string]float64 `json:"top_logprobs"`
			} `json:"logprobs"`
		} `json:"choices"`
		Usage struct {
			Prompt  int `json:"prompt_tokens"`
			Details *struct {
				Cached *int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if err := e.do(ctx, http.MethodPost, "/v1/completions", body, &got); err != nil {
		return a, err
	}
	if len(got.Choices) != 1 || got.Choices[0].Logprobs == nil {
		return a, errors.New("the answer has no log-probabilities, or not one choice")
	}
	c := got.Choices[0]
	a = Answer{Text: c.Text, Tokens: c.Logprobs.Tokens, Top: c.Logprobs.Top, Prompt: got.Usage.Prompt, Cached: -1}
	for _, v := range c.Logprobs.Values {
		if v == nil {
			return a, errors.New("a token of the answer has no log-probability")
		}
		a.Logprobs = append(a.Logprobs, *v)
	}
	if len(a.Tokens) == 0 || len(a.Tokens) != len(a.Logprobs) {
		return a, fmt.Errorf("the answer has %d tokens and %d log-probabilities", len(a.Tokens), len(a.Logprobs))
	}
	if d := got.Usage.Details; d != nil && d.Cached != nil {
		a.Cached, e.reports = *d.Cached, true
	}
	return a, nil
}

// cached returns how many tokens of the prompts were cached, for all answers together. An answer that does not say counts as 0 if
// another answer of the engine ever said how many were cached. Otherwise cached returns -1: not known.
func (e *engine) cached(all []Answer) (sum int) {
	for _, a := range all {
		switch {
		case a.Cached >= 0:
			sum += a.Cached
		case !e.reports:
			return -1
		}
	}
	return sum
}
