// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"bytes"
	"testing"
	"time"
)

// FuzzDecode reads documents: what is taken is written again so that it reads the same, and fits into the file.
func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"terms":[]}`))
	f.Add([]byte(`{"terms":[{"cache_salt":"a","field":"ttl_seconds","value":-1,"over":1.5,"set_at":"2026-01-01T00:00:00Z"},{"cache_salt":"","field":"quota_bytes","value":null,"over":7,"set_at":"2026-01-01T00:00:00+02:00"}]}`))
	f.Add([]byte(`{"terms":[{"cache_salt":"\u0000\ud800","field":"pin_limit_bytes","value":1e17,"over":null,"set_at":"9999-12-31T23:59:59.999999999-23:59"}]}`))
	f.Fuzz(func(t *testing.T, doc []byte) {
		list, err := decodeTerms(doc)
		if err != nil {
			return
		}
		set := make(map[termKey]setTerm)
		for _, s := range list {
			set[termKey{s.Salt, s.Field}] = setTerm{value: s.value(), over: s.over(), at: s.At}
		}
		text := encodeTerms(set)
		again, err := decodeTerms(text)
		if err != nil || len(again) != len(list) {
			t.Fatalf("%v: %d of %d: %s", err, len(again), len(list), text)
		}
		for _, s := range again {
			if was := set[termKey{s.Salt, s.Field}]; was.value != s.value() || was.over != s.over() || !was.at.Equal(s.At) {
				t.Fatalf("%+v was %+v", s, was)
			}
		}
		if !bytes.Equal(encodeTerms(set), text) {
			t.Fatal("two texts of one document")
		}
	})
}

// As many terms as there may be, with the longest names, fit into the file.
func TestTheFullestFileFits(t *testing.T) {
	set := make(map[termKey]setTerm)
	for i := range MaxTerms {
		name := bytes.Repeat([]byte{1}, 122) // six bytes each in JSON
		name = append(name, byte('a'+i%26), byte('a'+i/26%26), byte('a'+i/676))
		set[termKey{string(name), PinLimit}] = setTerm{value: BytesValue(1<<62 - 1<<10), over: BytesValue(1<<62 - 1<<10), at: time.Now()}
	}
	if n := len(encodeTerms(set)); len(set) != MaxTerms || n > maxTermsFile/2 {
		t.Errorf("%d terms take %d bytes of %d", len(set), n, maxTermsFile)
	}
}
