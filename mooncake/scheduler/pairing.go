// SPDX-License-Identifier: Apache-2.0

package scheduler

import (
	"cmp"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// Pairing says how P and D name a transfer to each other, and how D finds P. It is immutable.
type Pairing struct {
	transferID func(r *Request) (id string, ok bool) // id under which D pulls r
	required   []string                              // keys of kv_transfer_params that a pull needs, in vLLM's order
	// source copies the required keys of p into m. Its error names the first key that cannot be used; m then has the other keys.
	source   func(p *wire.KVTransferParams, m *wire.PullMeta) error
	response func() *wire.KVTransferParams // params for D in P's answer to the proxy; nil: P's answer has none

	// Only for 0.13: the model has one group, whose windows are not clipped, P computes the last token, and P's answer must carry its
	// address.
	first      bool
	hasAddress bool
}

// transferIDs is the Pairing of vLLM 0.16 and later: the proxy chooses a transfer id, and D finds P through P's bootstrap server.
var transferIDs = &Pairing{
	transferID: func(r *Request) (string, bool) { return r.Params.TransferID() },
	required:   []string{wire.KeyTransfer, wire.KeyEngine, wire.KeyBootstrap},
	source: func(p *wire.KVTransferParams, m *wire.PullMeta) error {
		var transfer, engine, bootstrap error
		m.TransferID, transfer = p.Name(wire.KeyTransfer)
		m.EngineID, engine = p.Name(wire.KeyEngine)
		m.BootstrapAddr, bootstrap = p.Name(wire.KeyBootstrap)
		return cmp.Or(transfer, engine, bootstrap)
	},
}

// RequestIDs is the pairing of vLLM 0.13: both engines know a request by the same id,
// and P's answer carries P's address. host and port are the side channel of the engine's
// TP rank 0; an engine that only receives passes "" and 0.
func RequestIDs(host string, port int) *Pairing {
	return &Pairing{
		transferID: func(r *Request) (string, bool) { return r.ID, true },
		required:   []string{wire.KeyHost, wire.KeyPort},
		source: func(p *wire.KVTransferParams, m *wire.PullMeta) error {
			var noHost, noPort error
			m.Host, noHost = p.Name(wire.KeyHost)
			m.Port, noPort = p.Port(wire.KeyPort)
			return cmp.Or(noHost, noPort)
		},
		response:   func() *wire.KVTransferParams { return wire.RemotePrefillAt(host, port) },
		first:      true,
		hasAddress: host != "" && port > 0 && port <= 65535,
	}
}
