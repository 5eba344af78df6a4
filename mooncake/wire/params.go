// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// Role says whether an engine sends KV, receives it, or both: vLLM's kv_role.
type Role uint8

// The roles.
const (
	Both     Role = iota // kv_both
	Producer             // kv_producer, P: prefills and sends
	Consumer             // kv_consumer, D: receives and decodes
)

var roleNames = [...]string{"kv_both", "kv_producer", "kv_consumer"}

func (r Role) String() string {
	if int(r) < len(roleNames) {
		return roleNames[r]
	}
	return fmt.Sprintf("role %d", uint8(r))
}

// ParseRole returns the role with that kv_role text.
func ParseRole(s string) (Role, error) {
	for i, name := range roleNames {
		if s == name {
			return Role(i), nil
		}
	}
	return 0, Refusef(CodeOptions, "kv_role %q: it is one of kv_producer, kv_consumer, kv_both", s)
}

// The keys of kv_transfer_params that the connector reads or writes.
const (
	KeyPrefill   = "do_remote_prefill"
	KeyDecode    = "do_remote_decode"
	KeyTransfer  = "transfer_id"
	KeyEngine    = "remote_engine_id"
	KeyBootstrap = "remote_bootstrap_addr" // http://host:port
	KeyHost      = "remote_host"           // 0.13
	KeyPort      = "remote_port"           // 0.13: port of P's TP rank 0
	KeyTruncated = "_p_side_truncated"     // from 0.25
)

// Limits of kv_transfer_params. Params beyond one of them are refused.
const (
	maxParamsBytes = 64 << 10
	maxParamsKeys  = 256
	maxParamsDepth = 32
)

// KVTransferParams is the JSON object kv_transfer_params of a request or a response. From decoding to encoding, it keeps unknown keys
// and the order of all keys. A nil pointer stands for JSON's null. It is not safe for concurrent use.
type KVTransferParams struct {
	fields []param
}

type param struct {
	key   string
	value json.RawMessage
}

// ParseKVTransferParams parses a JSON object of at most 64 KiB, 256 keys and 32 levels, or null, for which it returns nil. A key that
// occurs twice keeps its first place and its last value. The result shares no memory with b.
func ParseKVTransferParams(b []byte) (*KVTransferParams, error) {
	if len(b) > maxParamsBytes {
		return nil, badParams(fmt.Errorf("%d bytes; %d at most", len(b), maxParamsBytes))
	}
	if err := checkDepth(b); err != nil {
		return nil, badParams(err)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	p, err := decodeParams(dec)
	if err != nil {
		return nil, badParams(err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, badParams(errors.New("more than one JSON value"))
	}
	return p, nil
}

func badParams(err error) *Error { return Refusef(CodeInvalid, "kv_transfer_params: %v", err) }

// checkDepth returns an error if b is nested too deeply. It runs before b is parsed.
func checkDepth(b []byte) error {
	depth, inString := 0, false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			if depth++; depth > maxParamsDepth {
				return fmt.Errorf("nested deeper than %d", maxParamsDepth)
			}
		case c == '}' || c == ']':
			depth--
		}
	}
	return nil
}

func decodeParams(dec *json.Decoder) (*KVTransferParams, error) {
	tok, err := dec.Token()
	if err != nil || tok == nil {
		return nil, err
	}
	if tok != json.Delim('{') {
		return nil, fmt.Errorf("a JSON object is wanted, not %v", tok)
	}
	p := new(KVTransferParams)
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return nil, err
		}
		var v json.RawMessage
		if err := dec.Decode(&v); err != nil {
			return nil, err
		}
		p.set(key.(string), v) // the decoder gives only strings here
		if len(p.fields) > maxParamsKeys {
			return nil, fmt.Errorf("more than %d keys", maxParamsKeys)
		}
	}
	_, err = dec.Token()
	return p, err
}

// UnmarshalJSON implements json.Unmarshaler. null makes p an empty object.
func (p *KVTransferParams) UnmarshalJSON(b []byte) error {
	q, err := ParseKVTransferParams(b)
	if err != nil {
		return err
	}
	p.fields = nil
	if q != nil {
		p.fields = q.fields
	}
	return nil
}

// MarshalJSON implements json.Marshaler.
func (p *KVTransferParams) MarshalJSON() ([]byte, error) {
	if p == nil {
		return []byte("null"), nil
	}
	out := []byte{'{'}
	for i, f := range p.fields {
		if i > 0 {
			out = append(out, ',')
		}
		key, err := json.Marshal(f.key)
		if err != nil {
			return nil, err
		}
		out = append(append(append(out, key...), ':'), f.value...)
	}
	return append(out, '}'), nil
}

// RemotePrefill returns the params that make D pull the prefix that P holds under a transfer id. bootstrap is P's registry,
// http://host:port.
func RemotePrefill(bootstrap, engineID, transferID string) *KVTransferParams {
	p := new(KVTransferParams)
	p.Set(KeyPrefill, true)
	p.Set(KeyDecode, false)
	p.Set(KeyBootstrap, bootstrap)
	p.Set(KeyEngine, engineID)
	p.Set(KeyTransfer, transferID)
	return p
}

// RemotePrefillAt returns the params of vLLM 0.13 that make D pull from P. P returns them, and the proxy hands them to D, which asks P
// for the request by its id. port is that of the side channel of P's TP rank 0.
func RemotePrefillAt(host string, port int) *KVTransferParams {
	p := new(KVTransferParams)
	p.Set(KeyPrefill, true)
	p.Set(KeyDecode, false)
	p.Set(KeyHost, host)
	p.Set(KeyPort, port)
	return p
}

// RemoteDecode returns the params that make P prefill a request for a D. For 0.13, which has no transfer ids, transferID must be empty.
func RemoteDecode(transferID string) *KVTransferParams {
	p := new(KVTransferParams)
	p.Set(KeyDecode, true)
	p.Set(KeyPrefill, false)
	if transferID != "" {
		p.Set(KeyTransfer, transferID)
	}
	return p
}

// Len returns the number of keys. A request whose params are nil or have no key does not concern the connector.
func (p *KVTransferParams) Len() int {
	if p == nil {
		return 0
	}
	return len(p.fields)
}

func (p *KVTransferParams) get(key string) (json.RawMessage, bool) {
	if p == nil {
		return nil, false
	}
	for i := range p.fields {
		if p.fields[i].key == key {
			return p.fields[i].value, true
		}
	}
	return nil, false
}

// Has reports whether key is present, with any value; null counts, too.
func (p *KVTransferParams) Has(key string) bool {
	_, ok := p.get(key)
	return ok
}

// Truthy reports whether key is present with a value that is true in Python: not null, false, 0, "", [] or {}.
func (p *KVTransferParams) Truthy(key string) bool {
	v, ok := p.get(key)
	if !ok || len(v) == 0 {
		return false
	}
	switch v[0] {
	case 'n', 'f':
		return false
	case 't':
		return true
	case '"':
		return len(v) > 2
	case '[', '{':
		return len(bytes.TrimSpace(v[1:len(v)-1])) > 0
	}
	n, err := strconv.ParseFloat(string(v), 64)
	return n != 0 || err != nil // a number beyond the range of floats is not zero
}

// Text returns the string at key. ok is false if the value is no string or is missing.
func (p *KVTransferParams) Text(key string) (s string, ok bool) {
	v, _ := p.get(key)
	if len(v) == 0 || v[0] != '"' {
		return "", false
	}
	return s, json.Unmarshal(v, &s) == nil
}

// Set gives key a value. An existing key keeps its place; a new one comes last.
func (p *KVTransferParams) Set(key string, value any) {
	raw, err := json.Marshal(value)
	if err != nil {
		panic("BUG: kv_transfer_params " + key + ": " + err.Error())
	}
	p.set(key, raw)
}

func (p *KVTransferParams) set(key string, raw json.RawMessage) {
	for i := range p.fields {
		if p.fields[i].key == key {
			p.fields[i].value = raw
			return
		}
	}
	p.fields = append(p.fields, param{key, raw})
}

// DoRemotePrefill reports whether D shall pull the prompt's KV from P and has not done so yet.
func (p *KVTransferParams) DoRemotePrefill() bool { return p.Truthy(KeyPrefill) }

// DoRemoteDecode reports whether P shall prefill the request for a D.
func (p *KVTransferParams) DoRemoteDecode() bool { return p.Truthy(KeyDecode) }

// TransferID returns the transfer id; ok is false if there is none.
func (p *KVTransferParams) TransferID() (id string, ok bool) {
	id, ok = p.Text(KeyTransfer)
	return id, ok && id != ""
}

// Name returns the string at key. If it is missing, empty or no string, the error quotes the value.
func (p *KVTransferParams) Name(key string) (string, error) {
	if s, ok := p.Text(key); ok && s != "" {
		return s, nil
	}
	v, _ := p.get(key)
	return "", fmt.Errorf("%s is %s, not a text", key, short(v))
}

// Port returns the port number, 1 to 65535, at key. If the value is no such number, the error quotes it.
func (p *KVTransferParams) Port(key string) (int, error) {
	v, _ := p.get(key)
	n, err := strconv.ParseUint(string(v), 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%s is %s, not a port", key, short(v))
	}
	return int(n), nil
}

// short returns v for an error message, cut after 64 bytes.
func short(v []byte) string {
	const most = 64
	if len(v) > most {
		return fmt.Sprintf("%q…", v[:most])
	}
	return fmt.Sprintf("%q", v)
}
