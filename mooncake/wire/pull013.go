// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// Pull013 is D's request to one P in vLLM 0.13 (MooncakeAgentMetadata). It names all requests that one engine step wants from that P.
type Pull013 struct {
	Host     string // of D's transfer engine
	Port     int
	Requests []string // P and D use the same request ids
	Bases    []uint64 // base addresses of D's regions, in the order of their registration
	Blocks   [][]int  // D's block ids, parallel to Requests
}

// The replies to a Pull013. vLLM's P answers Done even when it knew none of the requests.
const (
	Reply013Done   = "trans_done"
	Reply013Failed = "trans_error"
)

// AppendPull013 appends the pull as one msgpack map.
func AppendPull013(b []byte, p *Pull013) []byte {
	b = msgp.AppendMapHeader(b, 5)
	b = msgp.AppendString(msgp.AppendString(b, "remote_hostname"), p.Host)
	b = appendInt(msgp.AppendString(b, "remote_port"), p.Port)
	b = appendStrings(msgp.AppendString(b, "request_ids"), p.Requests)
	b = msgp.AppendString(b, "kv_caches_base_addr")
	b = msgp.AppendArrayHeader(b, uint32(len(p.Bases)))
	for _, a := range p.Bases {
		b = msgp.AppendUint64(b, a)
	}
	b = msgp.AppendString(b, "block_ids")
	b = msgp.AppendArrayHeader(b, uint32(len(p.Blocks)))
	for _, ids := range p.Blocks {
		b = appendInts(b, ids)
	}
	return b
}

// DecodePull013 decodes a pull of vLLM 0.13. The error wraps ErrMessage and names the field.
func DecodePull013(b []byte) (*Pull013, error) {
	d := decoder{ids: maxMessageIDs}
	var p Pull013
	missing := []string{"remote_hostname", "remote_port", "request_ids", "kv_caches_base_addr", "block_ids"}
	err := d.message(b, func(name string, v []byte) (rest []byte, err error) {
		missing = slices.DeleteFunc(missing, func(m string) bool { return m == name })
		switch name {
		case "remote_hostname":
			p.Host, rest, err = d.text(v)
		case "remote_port":
			p.Port, rest, err = d.integer(v, 0, 65535)
		case "request_ids":
			p.Requests, rest, err = list(v, maxMessageTransfers, d.text)
		case "kv_caches_base_addr":
			p.Bases, rest, err = list(v, maxMessageRegions, d.unsigned)
		case "block_ids":
			p.Blocks, rest, err = list(v, maxMessageTransfers, func(b []byte) ([]int, []byte, error) {
				return list(b, maxMessageIDs, d.blockID)
			})
		default:
			return d.skip(v)
		}
		return rest, err
	})
	switch {
	case err != nil:
		return nil, err
	case len(missing) != 0:
		return nil, fmt.Errorf("%w `%s`", errMissing, missing[0])
	}
	return &p, nil
}
