// SPDX-License-Identifier: Apache-2.0

package auth

import (
	"encoding/pem"
	"strings"
	"testing"
	"time"
)

// Files of tokens, secrets and authorities with any text: accepted entries are within their limits, and an error shows no secret.
func FuzzLines(f *testing.F) {
	_, line, err := NewToken("a", Read, time.Time{})
	if err != nil {
		f.Fatal(err)
	}
	f.Add("# tokens\n" + line + "\n")
	f.Add(line + "\n" + line)
	f.Add("b cert:CN=ops,O=Example%20Ltd admin until=2026-11-27\n")
	f.Add("c cert:%zz write until=never")
	f.Add(strings.Repeat("s", 64) + "\nshort\n")
	f.Add(string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("none")})))
	f.Add(string(pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: []byte{0x30, 0}})))
	f.Fuzz(func(t *testing.T, text string) {
		tokens := &Tokens{}
		tokens.all.Store(&[]*Token{})
		if c, err := tokens.parse([]byte(text)); err == nil {
			c.Take()
			names := map[string]bool{}
			for _, k := range *tokens.all.Load() {
				if names[k.Name] || len(k.Name) > maxName || !strings.Contains(text, k.Name) {
					t.Errorf("token %q", k.Name)
				}
				names[k.Name] = true
			}
			if len(names) != c.Entries || len(names) > maxTokens {
				t.Errorf("%d tokens, %d entries", len(names), c.Entries)
			}
		}
		secrets := &secretLines{}
		secrets.all.Store(&[][]byte{})
		if c, err := secrets.parse([]byte(text)); err == nil {
			c.Take()
			for _, s := range *secrets.all.Load() {
				if len(s) < minSecret || !strings.Contains(text, string(s)) {
					t.Errorf("a secret of %d bytes", len(s))
				}
			}
		} else {
			for line := range strings.Lines(text) {
				if line = strings.TrimSpace(line); len(line) >= minSecret && strings.Contains(err.Error(), line) {
					t.Errorf("an error shows a secret: %v", err)
				}
			}
		}
		authorities, none := &Authorities{}, authorities{}
		authorities.mu.now = &none
		if c, err := authorities.parse([]byte(text)); err == nil && c.Entries < 0 {
			t.Errorf("%d authorities", c.Entries)
		}
	})
}
