// SPDX-License-Identifier: Apache-2.0

package kvconfig

import (
	"strings"
)

// Events is the configuration of the KV events that an engine publishes.
type Events struct {
	Endpoint string // tcp://host:port or ipc://path; the hosts "*" and "0.0.0.0" mean all interfaces; default tcp://*:5557
	Replay   string // address of the socket that repeats messages; empty: none
	Topic    string
	Buffer   int // number of messages kept for Replay; default 10,000
}

var (
	eventKeys = []string{"enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "topic", "buffer_steps"}
	eventMoot = []string{"hwm", "max_queue_size"} // they concern vLLM's queues
)

// ParseEvents parses the JSON of vLLM's --kv-events-config. It returns nil if no events are to be published. The error lists everything
// that is wrong.
func ParseEvents(text []byte) (*Events, error) {
	const at = "kv-events-config"
	var p problems
	if len(text) > maxBytes {
		p.add("it has %d bytes, at most %d are possible", len(text), maxBytes)
		return nil, p.err(at)
	}
	m := p.object(text, "")
	if m == nil {
		return nil, p.err(at)
	}
	p.unknown(m, "", append(eventKeys, eventMoot...))
	enabled, publisher, buffer := false, "", 10000.0
	e := &Events{Endpoint: "tcp://*:5557"}
	p.flag(m, "enable_kv_cache_events", &enabled)
	p.text(m, "", "publisher", &publisher)
	p.text(m, "", "endpoint", &e.Endpoint)
	p.text(m, "", "replay_endpoint", &e.Replay)
	p.text(m, "", "topic", &e.Topic)
	p.number(m, "buffer_steps", 1, 1<<24, &buffer)
	e.Buffer = int(buffer)
	if publisher == "" && enabled {
		publisher = "zmq"
	}
	if publisher != "" && publisher != "zmq" && publisher != "null" {
		p.add("publisher %.64q: one of zmq, null", publisher)
	}
	e.Endpoint, e.Replay = p.listenURL("endpoint", e.Endpoint), p.listenURL("replay_endpoint", e.Replay)
	if err := p.err(at); err != nil {
		return nil, err
	}
	if !enabled || publisher != "zmq" {
		return nil, nil
	}
	return e, nil
}

// listenURL checks the address of a listener. vLLM's "*" means all interfaces. The engine also listens if the address names a host;
// vLLM would connect to a subscriber there.
func (p *problems) listenURL(key, s string) string {
	kind, rest, found := strings.Cut(s, "://")
	if s != "" && (!found || kind != "tcp" && kind != "ipc" || rest == "") {
		p.add("%s %.128q: tcp://host:port or ipc://path is wanted", key, s)
	}
	return s
}
