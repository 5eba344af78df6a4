// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// The file is an internal/statefile with a document of JSON:
//
//	{"terms": [{"cache_salt": "team-a", "field": "ttl_seconds", "value": 1800, "over": null, "set_at": "2026-11-20T09:12:44Z"}]}
//
// value is null for a term that was taken away. over is the flag's value at that time, null for no flag.
const (
	termsMagic   = "kvasir-tenants 1"
	maxTermsFile = 4 << 20 // MaxTerms of the longest salts take less than half of it
)

type termsDocument struct {
	Terms []savedTerm `json:"terms"`
}

type savedTerm struct {
	Salt  string    `json:"cache_salt"`
	Field Field     `json:"field"`
	Value *float64  `json:"value"`
	Over  *float64  `json:"over"`
	At    time.Time `json:"set_at"`
}

func (s *savedTerm) value() Value { return valueOf(s.Value) }
func (s *savedTerm) over() Value  { return valueOf(s.Over) }

func valueOf(v *float64) Value {
	if v == nil {
		return Value{}
	}
	return Value{true, *v}
}

func (v Value) saved() *float64 {
	if !v.Set {
		return nil
	}
	return &v.N
}

func encodeTerms(set map[termKey]setTerm) []byte {
	doc := termsDocument{Terms: []savedTerm{}}
	for _, k := range sortedTerms(set) {
		e := set[k]
		doc.Terms = append(doc.Terms, savedTerm{k.salt, k.field, e.value.saved(), e.over.saved(), e.at.UTC()})
	}
	b, err := json.Marshal(&doc)
	if err != nil {
		panic("BUG: terms: " + err.Error()) // numbers and texts
	}
	return b
}

// decodeTerms reads a document. It refuses every document that encodeTerms cannot write. A nil document has no terms.
func decodeTerms(doc []byte) ([]savedTerm, error) {
	if doc == nil {
		return nil, nil
	}
	var d termsDocument
	in := json.NewDecoder(bytes.NewReader(doc))
	in.DisallowUnknownFields()
	if err := in.Decode(&d); err != nil {
		return nil, err
	}
	if _, err := in.Token(); err != io.EOF {
		return nil, errors.New("text follows its JSON object")
	}
	if len(d.Terms) > MaxTerms {
		return nil, fmt.Errorf("it has %d settings, at most %d are possible", len(d.Terms), MaxTerms)
	}
	seen := make(map[termKey]bool)
	for _, t := range d.Terms {
		k := termKey{t.Salt, t.Field}
		if seen[k] {
			return nil, fmt.Errorf("%s of tenant %q is set twice", t.Field, t.Salt)
		}
		seen[k] = true
		for _, v := range []*float64{t.Value, t.Over} {
			if v != nil && !t.Field.isPossible(*v) {
				return nil, fmt.Errorf("%s of tenant %q cannot be %g", t.Field, t.Salt, *v)
			}
		}
		if t.Field != Quota && t.Field != TTL && t.Field != PinLimit {
			return nil, fmt.Errorf("%q is no setting of a tenant", t.Field)
		}
		if y := t.At.UTC().Year(); y < 0 || y > 9999 {
			return nil, fmt.Errorf("%s of tenant %q: it cannot have been set in the year %d", t.Field, t.Salt, y)
		}
	}
	return d.Terms, nil
}

// isPossible reports whether v can be the value of the field, in a pool of any size.
func (f Field) isPossible(v float64) bool {
	if f == TTL {
		return v == -1 || v >= 1 && v <= MaxTTL.Seconds()
	}
	return v >= 0 && v < 1<<62
}
