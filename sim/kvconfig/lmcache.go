// SPDX-License-Identifier: Apache-2.0

package kvconfig

import (
	"encoding/json"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// LMCache is the configuration of an LMCacheMPConnector.
type LMCache struct {
	Role     wire.Role
	EngineID string
	Servers  []string // tcp://host:port or ipc://path, at least one; default tcp://localhost:5555

	// Mode is lmcache.mp.mp_transfer_mode: auto, engine_driven or lmcache_driven.
	Mode      string
	Timeout   time.Duration // lmcache.mp.mq_timeout; 0: the client's default
	Heartbeat time.Duration // lmcache.mp.heartbeat_interval; 0: the client's default

	SaveDecode bool // lmcache.mp.save_decode_cache: chunks with generated tokens are stored, too
	Eager      bool // lmcache.mp.eager_prefetch: the lookup begins when the request begins to wait
}

// The keys of LMCacheMPConnector 0.4.6 to 0.5.6 that are supported, and the keys that are known but not supported.
var (
	lmcacheKeys = []string{
		"lmcache.mp.server_urls", "lmcache.mp.host", "lmcache.mp.port", "lmcache.mp.mp_transfer_mode", "lmcache.mp.mq_timeout",
		"lmcache.mp.heartbeat_interval", "lmcache.mp.save_decode_cache", "lmcache.mp.eager_prefetch",
	}
	lmcacheOther = []string{
		"lmcache.mp.autostart", "lmcache.mp.lazy_offload", "lmcache.mp.lazy_offload_policy", "lmcache.mp.lazy_offload_threshold",
		"lmcache.mp.lazy_offload_select_count", "lmcache.mp.transfer_intermediate_tensors", "lmcache.mp.nonblocking_lookup_status",
	}
	lmcacheModes = map[string]string{
		"auto": "auto", "engine_driven": "engine_driven", "lmcache_driven": "lmcache_driven",
		"data": "engine_driven", "handle": "lmcache_driven", // their names in 0.4.7
	}
)

// LMCache returns the configuration of an LMCacheMPConnector. The error lists everything that is wrong.
func (c *Config) LMCache() (*LMCache, error) {
	var p problems
	if c.Connector != LMCacheMPConnector {
		p.add("kv_connector is %s, which is not LMCacheMPConnector", c.Connector)
	}
	p.unknown(c.extra, "", slices.Concat(lmcacheKeys, lmcacheOther))
	for _, key := range lmcacheOther {
		if raw, ok := c.extra[key]; ok && string(raw) != "false" && string(raw) != "null" {
			p.add("%s is not supported", key)
		}
	}
	out := &LMCache{Role: c.Role, EngineID: c.EngineID}
	var timeout, heartbeat float64
	p.number(c.extra, "lmcache.mp.mq_timeout", 0.001, 1e6, &timeout)
	p.number(c.extra, "lmcache.mp.heartbeat_interval", 0.001, 1e6, &heartbeat)
	out.Timeout, out.Heartbeat = seconds(timeout), seconds(heartbeat)
	p.flag(c.extra, "lmcache.mp.save_decode_cache", &out.SaveDecode)
	p.flag(c.extra, "lmcache.mp.eager_prefetch", &out.Eager)
	mode := "auto"
	p.text(c.extra, "", "lmcache.mp.mp_transfer_mode", &mode)
	if out.Mode = lmcacheModes[mode]; out.Mode == "" {
		known := []string{"auto", "engine_driven", "lmcache_driven"}
		p.add("lmcache.mp.mp_transfer_mode %.64q%s: one of %s", mode, options.NearestHint(mode, known), strings.Join(known, ", "))
	}
	out.Servers = p.servers(c.extra)
	if err := p.err(LMCacheMPConnector); err != nil {
		return nil, err
	}
	return out, nil
}

// servers reads the addresses of the servers from a list, from a text with commas, or from the keys for host and port.
func (p *problems) servers(m map[string]json.RawMessage) (list []string) {
	const key = "lmcache.mp.server_urls"
	if raw, ok := m[key]; ok && string(raw) != "null" {
		text := ""
		if json.Unmarshal(raw, &list) != nil && json.Unmarshal(raw, &text) != nil {
			p.add("%s must be a list of addresses, not %.64s", key, raw)
			return nil
		}
		if list == nil {
			list = strings.Split(text, ",")
		}
	} else {
		host, port := "tcp://localhost", 5555.0
		p.text(m, "", "lmcache.mp.host", &host)
		if raw := m["lmcache.mp.port"]; len(raw) > 1 && raw[0] == '"' { // a text is accepted, too
			m["lmcache.mp.port"] = raw[1 : len(raw)-1]
		}
		p.number(m, "lmcache.mp.port", 1, 65535, &port)
		list = []string{host + ":" + strconv.Itoa(int(port))}
	}
	var out []string
	for _, s := range list {
		if s = strings.TrimSpace(s); s == "" {
			continue
		}
		if !strings.Contains(s, "://") {
			s = "tcp://" + s
		}
		kind, rest, _ := strings.Cut(s, "://")
		host, port, err := net.SplitHostPort(rest)
		n, bad := strconv.ParseUint(port, 10, 16)
		if kind == "tcp" && (err != nil || host == "" || bad != nil || n == 0) || kind != "tcp" && kind != "ipc" || rest == "" {
			p.add("server %.128q: tcp://host:port or ipc://path is wanted", s)
		}
		out = append(out, s)
	}
	if len(out) == 0 {
		p.add("%s names no server", key)
	}
	return out
}
