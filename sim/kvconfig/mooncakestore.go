// SPDX-License-Identifier: Apache-2.0

package kvconfig

import (
	"encoding/json"
	"os"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// MooncakeStore is the configuration of a MooncakeStoreConnector.
type MooncakeStore struct {
	Role       wire.Role
	Masters    []string // addresses host:port of the masters, one of which leads
	Tenant     string   // empty: the default tenant
	Prefix     string   // cache_prefix of all keys
	Segment    string   // preferred_segment for puts, or else MOONCAKE_PREFERRED_SEGMENT
	Loads      int      // VLLM_MOONCAKE_LOAD_RECV_THREADS: loads at a time of one rank; default 1
	Lookup     bool     // enable_lookup; default true
	SaveDecode bool     // save_decode_cache: blocks with generated tokens are stored, too

	// Moot lists the environment variables that are set and that vLLM reads, but that have no effect here.
	Moot []string
}

// The keys of MooncakeStoreConnector 0.23 to 0.33: those that are supported, those that have no effect here, and those that are known
// but not supported.
var (
	storeKeys  = []string{"enable_lookup", "save_decode_cache", "cache_prefix", "preferred_segment"}
	storeMoot  = []string{"load_async", "lookup_async", "lookup_rpc_port", "enable_group_semantics", "custom_mem_pool"}
	storeOther = []string{"store_tp_size", "prefill_tp_sizes", "enable_store_tp_lcm", "enable_cross_layers_blocks"}

	// Variables for memory and disks; an engine here lends neither to the store.
	storeMootEnv = []string{"MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "VLLM_MOONCAKE_STORE_TIER_LOG", "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO"}

	// The keys of the file that MOONCAKE_CONFIG_PATH names.
	storeFileKeys = []string{
		"metadata_server", "master_server_address", "protocol", "tenant_id",
		"mode", "device_name", "global_segment_size", "local_buffer_size", "enable_offload",
	}
)

const peerToPeer = "P2PHANDSHAKE"

// MooncakeStore returns the configuration of a MooncakeStoreConnector, from its keys and from the file that MOONCAKE_CONFIG_PATH names;
// getenv works like os.LookupEnv. The error lists everything that is wrong.
func (c *Config) MooncakeStore(getenv func(string) (string, bool)) (*MooncakeStore, error) {
	var p problems
	if c.Connector != MooncakeStoreConnector {
		p.add("kv_connector is %s, which is not MooncakeStoreConnector", c.Connector)
	}
	p.unknown(c.extra, "", slices.Concat(storeKeys, storeMoot, storeOther))
	for _, key := range storeOther {
		if _, ok := c.extra[key]; ok {
			p.add("%s is not supported", key)
		}
	}
	m := &MooncakeStore{Role: c.Role, Lookup: true}
	p.flag(c.extra, "enable_lookup", &m.Lookup)
	p.flag(c.extra, "save_decode_cache", &m.SaveDecode)
	async := true
	if p.flag(c.extra, "load_async", &async); !async {
		p.add("load_async false is not supported: loads go beside the engine's steps")
	}
	p.text(c.extra, "", "cache_prefix", &m.Prefix)
	p.segment(c.extra, getenv, m)
	loads := p.env(getenv, "VLLM_MOONCAKE_LOAD_RECV_THREADS", 1, 1, 1024)
	if m.Loads = int(loads); loads != float64(m.Loads) {
		p.add("VLLM_MOONCAKE_LOAD_RECV_THREADS=%g: a whole number is wanted", loads)
	}
	for _, name := range storeMootEnv {
		if v, _ := getenv(name); v != "" {
			m.Moot = append(m.Moot, name)
		}
	}
	p.storeFile(getenv, m)
	if err := p.err(MooncakeStoreConnector); err != nil {
		return nil, err
	}
	return m, nil
}

// segment reads the preferred segment. The key takes precedence over the environment, and must not be blank.
func (p *problems) segment(extra map[string]json.RawMessage, getenv func(string) (string, bool), m *MooncakeStore) {
	const key = "preferred_segment"
	p.text(extra, "", key, &m.Segment)
	m.Segment = strings.TrimSpace(m.Segment)
	if raw, set := extra[key]; set && string(raw) != "null" {
		if m.Segment == "" {
			p.add("%s must be a text that is not empty", key)
		}
		return
	}
	v, _ := getenv("MOONCAKE_PREFERRED_SEGMENT")
	m.Segment = strings.TrimSpace(v)
}

// storeFile reads from the file where the cluster is.
func (p *problems) storeFile(getenv func(string) (string, bool), m *MooncakeStore) {
	path, _ := getenv("MOONCAKE_CONFIG_PATH")
	if path == "" {
		p.add("MOONCAKE_CONFIG_PATH is not set: a file like {\"metadata_server\":%q,\"master_server_address\":\"127.0.0.1:50051\",\"protocol\":\"tcp\"}", peerToPeer)
		return
	}
	text, err := os.ReadFile(path)
	if err != nil {
		p.add("MOONCAKE_CONFIG_PATH: %v", err)
		return
	}
	at := path + ": "
	file := p.object(text, at)
	if file == nil {
		return
	}
	p.unknown(file, at, storeFileKeys)
	masters, protocol, metadata := "", "rdma", ""
	p.text(file, at, "master_server_address", &masters)
	p.text(file, at, "protocol", &protocol)
	p.text(file, at, "metadata_server", &metadata)
	p.text(file, at, "tenant_id", &m.Tenant)
	if masters == "" {
		p.add("%smaster_server_address is missing: HOST:PORT", at)
	}
	if protocol != "tcp" {
		p.add("%sprotocol %.64q: only tcp is supported", at, protocol)
	}
	if metadata != "" && metadata != peerToPeer {
		p.add("%smetadata_server %.64q: only %s is supported", at, metadata, peerToPeer)
	}
	for address := range strings.SplitSeq(masters, ",") {
		m.Masters = append(m.Masters, strings.TrimSpace(address))
	}
}
