// SPDX-License-Identifier: Apache-2.0

package wire_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

func mustParams(t testing.TB, s string) *wire.KVTransferParams {
	t.Helper()
	p, err := wire.ParseKVTransferParams([]byte(s))
	if err != nil {
		t.Fatalf("%s: %v", s, err)
	}
	return p
}

// Unknown keys, the order of keys and the text of values survive.
func TestParamsRoundTrip(t *testing.T) {
	f := func(in, want string) {
		t.Helper()
		got, err := json.Marshal(mustParams(t, in))
		if err != nil || string(got) != want {
			t.Errorf("%s: %s, %v; want %s", in, got, err, want)
		}
	}
	f(`null`, `null`)
	f(` { } `, `{}`)
	f(`{"z":1e2,"do_remote_prefill":true,"a":{"b":[1, 2]},"big":123456789012345678901}`,
		`{"z":1e2,"do_remote_prefill":true,"a":{"b":[1,2]},"big":123456789012345678901}`)
	f(`{"a":1,"b":2,"a":3}`, `{"a":3,"b":2}`) // as Python reads it
	f(`{"k\u00e9\"y":"v"}`, `{"ké\"y":"v"}`)

	var holder struct {
		P *wire.KVTransferParams `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal([]byte(`{"kv_transfer_params":null}`), &holder); err != nil || holder.P != nil {
		t.Errorf("null: %v, %v", holder.P, err)
	}
	if err := json.Unmarshal([]byte(`{"kv_transfer_params":{"x":1}}`), &holder); err != nil || !holder.P.Has("x") {
		t.Errorf("in an object: %v", err)
	}
}

// What Python holds true.
func TestParamsTruth(t *testing.T) {
	f := func(value string, want bool) {
		t.Helper()
		if got := mustParams(t, `{"k":`+value+`}`).Truthy("k"); got != want {
			t.Errorf("%s: %v, want %v", value, got, want)
		}
	}
	for _, v := range []string{`null`, `false`, `0`, `-0`, `0.0`, `0e7`, `1e-999`, `""`, `[]`, `[ ]`, "{\n}"} {
		f(v, false)
	}
	for _, v := range []string{`true`, `1`, `-1`, `0.5`, `1e999`, `"0"`, `" "`, `[0]`, `{"a":null}`} {
		f(v, true)
	}
	p := mustParams(t, `{"k":null}`)
	if !p.Has("k") || p.Has("other") || p.Truthy("other") {
		t.Error("null is present, another key is not")
	}
	var none *wire.KVTransferParams
	if none.Len() != 0 || none.Has("k") || none.DoRemotePrefill() {
		t.Error("no params at all")
	}
	if id, ok := mustParams(t, `{"transfer_id":""}`).TransferID(); ok {
		t.Errorf("an empty transfer id %q", id)
	}
	for _, v := range []string{`""`, `null`, `1`, `[]`} {
		if name, err := mustParams(t, `{"k":`+v+`}`).Name("k"); err == nil || !strings.Contains(err.Error(), v) {
			t.Errorf("%s is the name %q: %v", v, name, err)
		}
	}
	if name, err := mustParams(t, `{"k":"x"}`).Name("k"); err != nil || name != "x" {
		t.Errorf("%q, %v", name, err)
	}
}

// The constructors write what the proxies of both dialects write.
func TestParamsConstructors(t *testing.T) {
	f := func(p *wire.KVTransferParams, want string) {
		t.Helper()
		if got, err := json.Marshal(p); err != nil || string(got) != want {
			t.Errorf("%s, %v; want %s", got, err, want)
		}
	}
	f(wire.RemotePrefill("http://10.0.0.2:8998", "e", "x"), `{"do_remote_prefill":true,"do_remote_decode":false,"remote_bootstrap_addr":"http://10.0.0.2:8998","remote_engine_id":"e","transfer_id":"x"}`)
	f(wire.RemotePrefillAt("10.0.0.2", 9002), `{"do_remote_prefill":true,"do_remote_decode":false,"remote_host":"10.0.0.2","remote_port":9002}`)
	f(wire.RemoteDecode("x"), `{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"x"}`)
	f(wire.RemoteDecode(""), `{"do_remote_decode":true,"do_remote_prefill":false}`)
}

func TestParamsRefused(t *testing.T) {
	f := func(in string) {
		t.Helper()
		if p, err := wire.ParseKVTransferParams([]byte(in)); !errors.Is(err, wire.ErrInvalid) || p != nil {
			t.Errorf("%.40s: %v, %v", in, p, err)
		}
	}
	for _, s := range []string{``, `[]`, `1`, `"x"`, `true`, `{`, `{"a"}`, `{"a":}`, `{"a":1,}`, `{"a":1}x`, `{} {}`, `{"a":NaN}`, `nul`, `{1:2}`, `}`} {
		f(s)
	}
	f(`{"a":` + strings.Repeat("[", 40) + strings.Repeat("]", 40) + `}`)
	f(`{"a":"` + strings.Repeat("x", 64<<10) + `"}`)
	var many strings.Builder
	for i := range 300 {
		many.WriteString(`,"` + strings.Repeat("k", i+1) + `":1`)
	}
	f(`{` + many.String()[1:] + `}`)
}

// Whatever parses is written again so that it parses to the same, and agrees with
// encoding/json about what is there.
func FuzzParams(f *testing.F) {
	f.Add([]byte(`null`))
	f.Add([]byte(`{"do_remote_prefill":true,"do_remote_decode":false,"transfer_id":"x","remote_bootstrap_addr":"http://h:1","remote_engine_id":"e"}`))
	f.Add([]byte(`{"do_remote_prefill":1e-999,"remote_port":9002,"remote_host":null,"a":{"b":[1, 2]},"a":"\u00e9"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := wire.ParseKVTransferParams(b)
		if err != nil {
			return
		}
		out, err := json.Marshal(p)
		if err != nil {
			t.Fatalf("%q is not written again: %v", b, err)
		}
		q, err := wire.ParseKVTransferParams(out)
		if err != nil && len(out) <= 64<<10 {
			t.Fatalf("%q, written as %q: %v", b, out, err)
		}
		if again, _ := json.Marshal(q); err == nil && !bytes.Equal(out, again) {
			t.Fatalf("%q becomes %q", out, again)
		}
		var m map[string]any
		if err := json.Unmarshal(b, &m); err != nil && !strings.Contains(err.Error(), "cannot unmarshal number") {
			t.Fatalf("%q: encoding/json: %v", b, err)
		}
		for key := range m {
			if !p.Has(key) {
				t.Fatalf("%q has no %q", b, key)
			}
			p.Truthy(key)
			p.Text(key)
		}
		if len(m) > 0 && len(m) != p.Len() {
			t.Fatalf("%q: %d keys, want %d", b, p.Len(), len(m))
		}
	})
}
