// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/transferlog"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/proxy/prefix"
)

// relayPrefix is how the engine ids of a relay (package relay) begin.
const relayPrefix = "relay-"

// askRelay limits the request that asks a relay whether it still has a prompt's KV; a relay that is silent for longer counts as having
// none.
const askRelay = time.Second

// outputOnly are the keys of a request that do not change the KV of its prompt.
var outputOnly = map[string]bool{
	"stream": true, "stream_options": true, "max_tokens": true, "max_completion_tokens": true, "max_output_tokens": true, "store": true, "min_tokens": true, "temperature": true,
	"top_p": true, "top_k": true, "min_p": true, "seed": true, "stop": true, "user": true, "kv_transfer_params": true,
}

// promptKey returns a hash of the request without the fields that affect only the output. Two requests with the same key have the same
// prompt; requests with the same prompt may have different keys.
func (e *exchange) promptKey() (k prefix.RelayedKey) {
	h := sha256.New()
	salt := []byte(nil)
	if e.hasSalt() {
		salt = e.salt[0].Value
	}
	for _, s := range []string{e.r.URL.Path, e.r.URL.RawQuery, e.want.model, string(salt)} {
		fmt.Fprintf(h, "%d %s", len(s), s) // writing to a hash never fails
	}
	e.q.Each(func(name string, value []byte) {
		if !outputOnly[name] {
			fmt.Fprintf(h, "%d %s%d ", len(name), name, len(value))
			_, _ = h.Write(value)
		}
	})
	h.Sum(k[:0])
	return k
}

// relayedParams returns the params with which D gets the prompt's KV from a relay, without P; nil if no relay is known to have it. If
// there is a relay at all, relayedParams stores the prompt's key in e.prompt.
func (e *exchange) relayedParams() []byte {
	if e.want.alone || !e.p.relays.Load() {
		return nil
	}
	k := e.promptKey()
	e.prompt = &k
	r, id, ok := e.p.prompts.Find(k)
	if !ok {
		return nil
	}
	if !e.p.relayKeeps(e.r.Context(), r) {
		e.p.prompts.Forget(k)
		return nil
	}
	e.againID, e.againFrom = id, r.Engine
	return encode(wire.RemotePrefill(r.Registry, r.Engine, id))
}

// relayKeeps asks a relay whether it still has a transfer's KV.
func (p *Proxy) relayKeeps(ctx context.Context, r prefix.RelayedKV) bool {
	ctx, cancel := context.WithTimeout(ctx, askRelay+p.o.patience)
	defer cancel()
	text, status := readBy(ctx, p.relayClient, r.Registry+"/kept?"+url.Values{"engine": {r.Engine}, "transfer": {r.Transfer}}.Encode(), "")
	return status == http.StatusOK && string(text) == `{"kept":true}`
}

// fromRelay sends the request to D alone, which gets the prompt's KV from a relay.
func (e *exchange) fromRelay(ctx context.Context, c choice, params []byte) (outcome string, err error) {
	e.beginHandover(e.againID, e.againFrom, c, transferlog.Waiting, untilD)
	outcome, err = e.answer(ctx, c.engine, 0, params, nil)
	if err == nil {
		e.p.n.spared[byRelay].Add(1)
	} else if !errors.Is(err, errNotSent) {
		e.p.prompts.Forget(*e.prompt)
	}
	return outcome, err
}

// relayedBy records that the relay b now has the prompt's KV, under the transfer id.
func (e *exchange) relayedBy(b *backend, who rank, transfer string) {
	if e.prompt != nil && strings.HasPrefix(who.engine, relayPrefix) {
		e.p.prompts.Add(*e.prompt, prefix.RelayedKV{Registry: b.registry.Base(), Engine: who.engine, Transfer: transfer})
	}
}
