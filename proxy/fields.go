// SPDX-License-Identifier: Apache-2.0

package proxy

// Which HTTP header fields engines get: those of the client that may pass, the engine's API key, and its rank.

import (
	"bytes"
	"strconv"
	"strings"
)

// hop are header fields that concern one connection only. The proxy does not pass them on.
var hop = map[string]bool{
	"Connection": true, "Keep-Alive": true, "Proxy-Connection": true, "Transfer-Encoding": true, "Te": true, "Trailer": true, "Upgrade": true,
	"Content-Length": true, "Accept-Encoding": true, "Proxy-Authenticate": true, "Proxy-Authorization": true, "Expect": true,
	"Host":   true,                                                                                // HTTP/2 clients can send it as a field
	"Origin": true, "Access-Control-Request-Method": true, "Access-Control-Request-Headers": true, // the proxy itself answers CORS
}

// ofEngines are fields of an engine's answer that contain the address of the engine, or of a server in front of it. Clients must not
// see them.
var ofEngines = map[string]bool{"Location": true, "Content-Location": true, "Alt-Svc": true, "Refresh": true}

// proxyFields are header fields with which the proxy directs engines. A client's field of such a name never passes beside the proxy's,
// because engines read the first one. Only X-Data-Parallel-Rank passes, to an engine that computes and answers alone; see rankFields.
var proxyFields = map[string]bool{
	"X-Request-Id": true, "X-Data-Parallel-Rank": true,
	"X-Prefiller-Host-Port": true, "X-Encoder-Hosts-Ports": true, // of a llm-d sidecar: they say where it gets KV from
	// SGLang reads these instead of the body's fields if SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES is set (0.5.23):
	"X-Override-Bootstrap-Host": true, "X-Override-Bootstrap-Port": true, "X-Override-Bootstrap-Room": true, "X-Override-Rid": true,
	"X-Override-Routed-Dp-Rank": true, "X-Override-Disagg-Prefill-Dp-Rank": true,
}

// credentials are fields in which clients send secrets. They are not passed on if the proxy has keys, or the engines have a key of
// their own. Engines that registered themselves never get them, unless the operator allows it: clients may send the engines' own key.
var credentials = map[string]bool{"Authorization": true, "X-Api-Key": true, "Api-Key": true, "Cookie": true}

// passed are the fields that engines get from clients with API keys. Options.PassHeaders adds others.
var passed = map[string]bool{
	"Accept": true, "Accept-Language": true, "Content-Type": true, "Content-Encoding": true, "User-Agent": true, "Traceparent": true, "Tracestate": true,
	"Baggage": true, "X-Session-Id": true, "Anthropic-Version": true, "Anthropic-Beta": true,
}

// engineFields returns those header fields of the client's request that engines get.
func (e *exchange) engineFields() []byte {
	h, key := e.r.Header, e.p.o.EngineKey
	b := make([]byte, 0, 512)
	named := h["Connection"] // fields that the client's Connection field names are not passed on
	for k, values := range h {
		switch {
		case e.p.o.Keys != nil && !passed[k] && !e.p.passes[k]:
			continue
		case hop[k], proxyFields[k], credentials[k] && (key != "" || e.p.o.Keys != nil), k == "Traceparent" && e.p.o.Spans != nil:
			continue
		case named != nil && connectionNames(named, k):
			continue
		}
		for _, v := range values {
			b = append(append(append(append(b, k...), ": "...), v...), "\r\n"...)
		}
	}
	if h["Content-Type"] == nil {
		b = append(b, "Content-Type: application/json\r\n"...)
	}
	return b
}

func connectionNames(values []string, name string) bool {
	for _, v := range values {
		for token := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.TrimSpace(token), name) {
				return true
			}
		}
	}
	return false
}

// legFields returns the header fields of one leg: those of all legs, the engine's API key and its rank.
func (e *exchange) legFields(b *backend, who rank) []byte {
	fields := e.fields[:len(e.fields):len(e.fields)]
	if b.found && !e.p.o.EngineKeyToFound {
		fields = withoutCredentials(fields)
	}
	if key := e.p.keyFor(b); key != "" {
		fields = append(append(append(fields, "Authorization: Bearer "...), key...), "\r\n"...)
	}
	return e.rankFields(fields, b, who)
}

// onlyCredentials returns those lines of fields that carry clients' secrets; nil: there are none.
func onlyCredentials(fields []byte) (out []byte) {
	for line := range bytes.Lines(fields) {
		if name, _, _ := bytes.Cut(line, []byte(":")); credentials[string(name)] {
			out = append(out, line...)
		}
	}
	return out
}

// withoutCredentials returns fields without the lines that carry clients' secrets.
func withoutCredentials(fields []byte) []byte {
	out := make([]byte, 0, len(fields))
	for line := range bytes.Lines(fields) {
		if name, _, _ := bytes.Cut(line, []byte(":")); !credentials[string(name)] {
			out = append(out, line...)
		}
	}
	return out
}

// keyFor returns the API key that the proxy sends to an engine; "": none. Engines that registered themselves must not learn it.
func (p *Proxy) keyFor(b *backend) string {
	if b.found && !p.o.EngineKeyToFound {
		return ""
	}
	return p.o.EngineKey
}

// rankFields appends the field with the leg's data-parallel rank. If the proxy does not choose a rank, a client without an API key may
// choose it for an engine that computes the whole request.
func (e *exchange) rankFields(fields []byte, b *backend, who rank) []byte {
	value := ""
	if dp, ok := e.rankOf(b, who); ok {
		value = strconv.Itoa(dp)
	} else if b.role == both && e.p.o.Keys == nil {
		value = e.r.Header.Get("X-Data-Parallel-Rank")
	}
	if value == "" {
		return fields
	}
	return append(append(append(fields, "X-Data-Parallel-Rank: "...), value...), "\r\n"...)
}

// rankOf returns the data-parallel rank that the request to the engine b names; `who` is P's rank as its registry lists it. ok is false if
// the request names none, and the engine chooses.
func (e *exchange) rankOf(b *backend, who rank) (dp int, ok bool) {
	switch {
	case e.boot != nil && b.role != both: // the room selects the rank
	case b.registered():
		return who.dp, b.hasRanks()
	case e.p.o.DPSize > 1:
		return int(b.rankTurn.Add(1) % uint64(e.p.o.DPSize)), true
	}
	return 0, false
}
