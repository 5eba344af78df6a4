package mooncake

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
)

// Dialect selects a generation of the connector.
type Dialect uint8

// The dialects.
const (
	V2 Dialect = iota // vLLM 0.16 to 0.33: transfer ids, bootstrap server
	V1                // vLLM 0.13 to 0.15: P and D share the request id
)

func (d Dialect) String() string {
	if d == V1 {
		return "V1"
	}
	return "V2"
}

// Role is what an engine does in transfers: vLLM's kv_role.
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

// ParseRole reads a kv_role.
func ParseRole(s string) (Role, error) {
	for i, name := range roleNames {
		if s == name {
			return Role(i), nil
		}
	}
	return 0, refusef(CodeOptions, "kv_role %q: it is one of kv_producer, kv_consumer, kv_both", s)
}

// The keys of kv_transfer_params that the connector reads or writes.
const (
	keyPrefill   = "do_remote_prefill"
	keyDecode    = "do_remote_decode"
	keyTransfer  = "transfer_id"           // V2
	keyEngine    = "remote_engine_id"      // V2
	keyBootstrap = "remote_bootstrap_addr" // V2: http://host:port
	keyHost      = "remote_host"           // V1
	keyPort      = "remote_port"           // V1: P's base port, without its TP rank
	keyTruncated = "_p_side_truncated"     // V2 from 0.25
)

// Limits of kv_transfer_params.
const (
	maxParamsBytes = 64 << 10
	maxParamsKeys  = 256
	maxParamsDepth = 32
)

// KVTransferParams is the JSON object kv_transfer_params of a request or a
// response, in both dialects. It keeps keys it does not know, and the order of all
// keys, from decoding to encoding. A nil one is JSON's null. It is not safe for
// concurrent use.
type KVTransferParams struct {
	fields []param
}

type param struct {
	key   string
	value json.RawMessage
}

// ParseKVTransferParams reads a JSON object of at most 64 KiB, 256 keys and 32
// levels, or null, which is a nil result. A key that comes twice has its first
// place and its last value. It keeps no part of b.
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

func badParams(err error) *Error { return refusef(CodeParams, "kv_transfer_params: %v", err) }

// checkDepth bounds nesting before anything is parsed.
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
		p.set(key.(string), v) // a decoder yields no other token here
		if len(p.fields) > maxParamsKeys {
			return nil, fmt.Errorf("more than %d keys", maxParamsKeys)
		}
	}
	_, err = dec.Token()
	return p, err
}

// UnmarshalJSON implements json.Unmarshaler; null leaves an empty object.
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

// RemotePrefill returns the params with which D pulls the prefix that P holds
// under a transfer id. bootstrap is P's registry, http://host:port.
func RemotePrefill(bootstrap, engineID, transferID string) *KVTransferParams {
	p := new(KVTransferParams)
	p.Set(keyPrefill, true)
	p.Set(keyDecode, false)
	p.Set(keyBootstrap, bootstrap)
	p.Set(keyEngine, engineID)
	p.Set(keyTransfer, transferID)
	return p
}

// RemotePrefillV1 is RemotePrefill in the V1 dialect: what P returns and D gets.
// port is P's side-channel base port, without its TP rank.
func RemotePrefillV1(host string, port int) *KVTransferParams {
	p := new(KVTransferParams)
	p.Set(keyPrefill, true)
	p.Set(keyDecode, false)
	p.Set(keyHost, host)
	p.Set(keyPort, port)
	return p
}

// RemoteDecode returns the params with which P prefills for a D. V1 has no
// transfer id: leave it empty.
func RemoteDecode(transferID string) *KVTransferParams {
	p := new(KVTransferParams)
	p.Set(keyDecode, true)
	p.Set(keyPrefill, false)
	if transferID != "" {
		p.Set(keyTransfer, transferID)
	}
	return p
}

// Len returns the number of keys. Without any, as with a nil one, a request has
// nothing to do with the connector.
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

// Has reports whether key is present, whatever its value: null is.
func (p *KVTransferParams) Has(key string) bool {
	_, ok := p.get(key)
	return ok
}

// Truthy reports whether key is present with a value that Python holds true: not
// null, false, 0, "", [] or {}.
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
	return n != 0 || err != nil // beyond the range of floats is not zero
}

// Text returns the string at key; ok is false for anything else.
func (p *KVTransferParams) Text(key string) (s string, ok bool) {
	v, _ := p.get(key)
	if len(v) == 0 || v[0] != '"' {
		return "", false
	}
	return s, json.Unmarshal(v, &s) == nil
}

// port returns a port number at key.
func (p *KVTransferParams) port(key string) (int, bool) {
	v, _ := p.get(key)
	n, err := strconv.ParseUint(string(v), 10, 16)
	return int(n), err == nil && n > 0
}

// Set gives key a value, in its place if it has one, else at the end.
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

// DoRemotePrefill reports whether D is still to pull the prompt's KV.
func (p *KVTransferParams) DoRemotePrefill() bool { return p.Truthy(keyPrefill) }

// DoRemoteDecode reports whether P prefills for a D.
func (p *KVTransferParams) DoRemoteDecode() bool { return p.Truthy(keyDecode) }

// TransferID returns the transfer id; ok is false if there is none.
func (p *KVTransferParams) TransferID() (id string, ok bool) {
	id, ok = p.Text(keyTransfer)
	return id, ok && id != ""
}

// required lists what D needs for a pull, in the order the original reads it.
func (d Dialect) required() []string {
	if d == V1 {
		return []string{keyHost, keyPort}
	}
	return []string{keyTransfer, keyEngine, keyBootstrap}
}

// missing returns the first key that a pull needs and p lacks.
func (p *KVTransferParams) missing(d Dialect) string {
	for _, key := range d.required() {
		if !p.Has(key) {
			return key
		}
	}
	return ""
}

// checkSource says why p cannot be pulled with: a key is missing or has a value
// that names nobody.
func (p *KVTransferParams) checkSource(d Dialect) error {
	for _, key := range d.required() {
		switch v, ok := p.get(key); {
		case !ok:
			return fmt.Errorf("%s is missing", key)
		case key == keyPort:
			if _, ok := p.port(key); !ok {
				return fmt.Errorf("%s is %s, not a port", key, short(v))
			}
		default:
			if s, ok := p.Text(key); !ok || s == "" {
				return fmt.Errorf("%s is %s, not a text", key, short(v))
			}
		}
	}
	return nil
}

// short bounds what an error message quotes.
func short(v []byte) string {
	const most = 64
	if len(v) > most {
		return fmt.Sprintf("%q…", v[:most])
	}
	return fmt.Sprintf("%q", v)
}
