// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/internal/openai"
	"github.com/kvasir-kv/kvasir/proxy/blocks"
	"github.com/kvasir-kv/kvasir/proxy/prefix"
)

// Limits of the requests to /tokenize. The proxy needs the tokens of a prompt to use KV events.
const (
	maxTokenizing = 4        // most prompts that engines tokenize at a time; prompts that come meanwhile are not tokenized
	maxTokenized  = 32 << 20 // most bytes of an answer; a longer one is dropped
	tokenizeTime  = 30 * time.Second
)

// followEvents begins to follow the KV events of an engine, from one publisher for each of its data-parallel ranks.
func (p *Proxy) followEvents(b *backend) error {
	if p.o.EventsPort == 0 {
		return nil
	}
	at := func(port, rank int) string {
		return "tcp://" + net.JoinHostPort(b.host, strconv.Itoa(port+rank))
	}
	for rank := range max(1, p.o.DPSize) {
		o := blocks.Options{Endpoint: at(p.o.EventsPort, rank), MaxBlocks: p.o.IndexEntries, Log: p.o.Log}
		if p.o.ReplayPort != 0 {
			o.Replay = at(p.o.ReplayPort, rank)
		}
		f, err := blocks.Follow(o)
		if err != nil {
			return err
		}
		b.events = append(b.events, f)
	}
	return nil
}

// blockTokens returns how many tokens a block of the engine has; 0: no event has reported it yet.
func (b *backend) blockTokens() (tokens int) {
	for _, f := range b.events {
		if _, n, _ := f.Blocks(); n > 0 {
			tokens = n
		}
	}
	return tokens
}

// holds returns how many leading bytes of a prompt the engine has according to its KV events: n is the number for the data-parallel rank
// that has the most. The events say nothing about bytes after reach. all means that of the first reach bytes the engine has no more
// than n.
func (b *backend) holds(marks []prefix.Mark, known []blocks.Known) (n, reach int, all bool) {
	all = true
	for _, f := range b.events {
		one, end, complete := f.Longest(marks, known)
		n, reach, all = max(n, one), max(reach, end), all && complete
	}
	return n, reach, all
}

// byEvents corrects, by the engines' KV events, which engines have seen how much of a prompt. About the prompt after the last mark
// whose block is known, events say nothing.
func (p *Proxy) byEvents(seen []prefix.Seen, marks []prefix.Mark) []prefix.Seen {
	known := p.known.Find(make([]blocks.Known, 0, len(marks)), marks)
	if !slices.ContainsFunc(known, func(k blocks.Known) bool { return k.Key != 0 }) {
		return seen
	}
	for _, b := range p.fleet.engines() {
		if len(b.events) == 0 {
			continue
		}
		id, at := b.id.Load(), 0
		for at < len(seen) && seen[at].Engine != id {
			at++
		}
		if at == len(seen) {
			seen = append(seen, prefix.Seen{Engine: id})
		}
		if n, reach, all := b.holds(marks, known); n > seen[at].Bytes || all && seen[at].Bytes <= reach {
			seen[at].Bytes = n
		}
		if seen[at].Bytes == 0 {
			seen = append(seen[:at], seen[at+1:]...)
		}
	}
	return seen
}

// base returns the engine's own name of a model; "": the name is unknown, or the model is an adapter.
func (b *backend) base(name string) string {
	if list := b.models.Load(); list != nil {
		for _, m := range *list {
			if m.id == name {
				return m.base
			}
		}
	}
	return ""
}

// learn asks the engine that answers to tokenize the prompt, in an extra request beside the client's, and records the prompt's blocks. It
// does nothing if the blocks are known already, if the prompt is no text, or while maxTokenizing other prompts are tokenized.
func (e *exchange) learn(b *backend) {
	p, store, marks := e.p, &e.p.fleet.store, e.want.marks
	if len(marks) == 0 {
		return
	}
	size, chunk := b.blockTokens(), store.chunkTokens()
	last := marks[len(marks)-1:]
	if size != 0 && p.known.Find(nil, last)[0].Tokens == size {
		size = 0
	}
	if chunk != 0 && store.known.Find(nil, last)[0].Tokens == chunk {
		chunk = 0
	}
	base := b.base(e.want.model)
	if base == "" {
		chunk = 0
	}
	if size == 0 && chunk == 0 || !isText(e.q) {
		return
	}
	select {
	case p.tokenizing <- struct{}{}:
	default:
		return
	}
	held, salt, key := e.body, e.saltText, p.keyFor(b)
	if auth := e.r.Header.Get("Authorization"); p.o.EngineKey == "" && p.o.Keys == nil {
		key = strings.TrimPrefix(auth, "Bearer ")
	}
	held.hold()
	started := p.goBackground(func() {
		defer func() { <-p.tokenizing }()
		defer held.release()
		if tokens := p.tokenize(b, held.b, key); len(tokens) > 0 {
			if size != 0 {
				p.known.Learn(marks, salt, size, tokens)
			}
			if chunk != 0 {
				store.known.Learn(marks, blocks.Scope(base, p.tenantOf(salt)), chunk, tokens)
			}
			p.n.tokenized.Add(1)
		}
	})
	if !started {
		held.release()
		<-p.tokenizing
	}
}

// isText reports whether an engine can tokenize the prompt of a request: the prompt is one text, or a list of messages.
func isText(q *openai.Request) bool {
	return !q.Prompt.Has() && q.Messages.Has() || q.Prompt.Has() && q.Body[q.Prompt.From] == '"'
}

func (p *Proxy) tokenize(b *backend, body []byte, key string) []int64 {
	ctx, cancel := context.WithTimeout(p.ctx, tokenizeTime)
	defer cancel()
	n, err := b.client.Conn(ctx)
	if err != nil {
		return nil
	}
	fields := "Content-Type: application/json\r\n"
	if key != "" {
		fields += "Authorization: Bearer " + key + "\r\n"
	}
	// net/http would read on in the body after it has returned, when other requests use that memory.
	resp, err := n.Do(ctx, &http1.Request{Method: http.MethodPost, Target: "/tokenize", Fields: []byte(fields), Body: [][]byte{body}}, time.Time{})
	if err != nil {
		return nil
	}
	defer resp.Close()
	text, err := resp.ReadAll(maxTokenized)
	var got struct {
		Tokens []int64 `json:"tokens"`
	}
	if err != nil || resp.Status != http.StatusOK || json.Unmarshal(text, &got) != nil {
		return nil
	}
	return got.Tokens
}
