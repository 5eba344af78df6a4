// SPDX-License-Identifier: Apache-2.0

package adapter

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/mooncakestore"
)

const (
	mooncakeType   = "mooncake_store"
	defaultMaster  = "127.0.0.1:50051" // as in Mooncake
	peerToPeer     = "P2PHANDSHAKE"    // no metadata server: each node answers for itself
	transportOfUse = "tcp"
)

// takeText reads a key whose value LMCache passes to Mooncake as text, whatever its JSON type.
func (r *reader) takeText(key string, into *string) {
	r.seen[key] = true
	raw, ok := r.raw[key]
	if !ok || string(raw) == "null" || json.Unmarshal(raw, into) == nil {
		return
	}
	*into = string(raw)
}

// mooncake reads the keys of LMCache's mooncake_store adapter, most of which are Mooncake's own,
// and Kvasir's keys. The error wraps ErrNotServed for clusters that cannot be reached over TCP.
func (r *reader) mooncake(a *Adapter) error {
	o := &mooncakestore.Options{}
	a.Mooncake = o
	masters, protocol, metadata := defaultMaster, transportOfUse, peerToPeer
	r.takeText("master_server_addr", &masters)
	r.takeText("protocol", &protocol)
	r.takeText("metadata_server", &metadata)
	r.takeText("tenant_id", &o.Tenant)
	r.take("num_workers", &o.Conns)
	r.take("replica_num", &o.Put.Replicas)
	r.take("preferred_segment", &o.Put.Segment)
	r.take("soft_pin", &o.Put.SoftPin)
	r.transferSecrets(o)
	r.admission(a)
	r.absence(a)
	for m := range strings.SplitSeq(masters, ",") {
		o.Masters = append(o.Masters, strings.TrimSpace(m))
	}
	var not error
	switch {
	case protocol != transportOfUse:
		not = fmt.Errorf("\"protocol\": %q: only tcp is spoken here: %w", protocol, ErrNotServed)
	case metadata != peerToPeer && metadata != "":
		not = fmt.Errorf("\"metadata_server\": %q: only %s is spoken here: %w", metadata, peerToPeer, ErrNotServed)
	}
	if _, ok := r.raw["serde"]; ok {
		r.errs = append(r.errs, errSerde)
	}
	if len(r.errs) == 0 {
		options.Each(o.Validate(), func(e *options.Error) { r.errs = append(r.errs, fmt.Errorf("%q %s", mooncakeKeys[e.Field], e.Text)) })
	}
	r.ignore(a, "affinity_tag", "shared", "persist_enabled", "eviction", "serde", "max_capacity_gb", "per_op_workers", "local_hostname", "global_segment_size",
		"local_buffer_size", "rdma_devices", "ipc_socket_path", "enable_ssd_offload", "ssd_offload_path", "enable_client_http_server", "client_http_port")
	return not
}

// transferSecrets reads the keys that say how nodes and this client prove who they are. Only Kvasir has these keys.
func (r *reader) transferSecrets(o *mooncakestore.Options) {
	const file, stock = "transfer_secret_file", "transfer_stock"
	var networks []string
	r.take(file, &o.SecretFile)
	r.take(stock, &networks)
	for _, text := range networks {
		p, err := auth.ParseNetwork(text)
		if err != nil {
			r.errs = append(r.errs, fmt.Errorf("%q: %w", stock, err))
		}
		o.Stock = append(o.Stock, p)
	}
	if o.SecretFile != "" {
		if _, err := auth.OpenPeerSecrets(o.SecretFile, nil, nil); err != nil {
			r.errs = append(r.errs, fmt.Errorf("%q: %w", file, err))
		}
		return
	}
	if _, given := r.raw[file]; given {
		r.errs = append(r.errs, fmt.Errorf("%q is empty: leave it out where it is not wanted", file))
	}
	if len(networks) > 0 {
		r.errs = append(r.errs, fmt.Errorf("%q says who needs no secret of %q, which is missing", stock, file))
	}
}

// mooncakeKeys maps a field of the options to its JSON key.
var mooncakeKeys = map[string]string{"Masters": "master_server_addr", "Conns": "num_workers", "Put.Replicas": "replica_num"}

var errNoMooncakeSums = errors.New("objects in a Mooncake Store have no checksum, so with --l2-trust checksum none of them is served")

func openMooncake(a Adapter, o Options) (*mooncakestore.Tier, error) {
	if o.Trust == fs.TrustChecksum {
		return nil, errNoMooncakeSums
	}
	of := *a.Mooncake
	of.Names, of.Log = o.Names, o.Log
	return mooncakestore.Open(of)
}

// mooncakePlace identifies a cluster and the tenant in it.
func mooncakePlace(o *mooncakestore.Options) string {
	return strings.Join(o.Masters, ",") + "/" + o.Tenant
}
