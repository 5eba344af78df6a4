// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"errors"
	"strings"
	"testing"
)

// A pull is taken for a release that writes it with the same bytes: a relay asks P in the form that D speaks.
func TestPullIsTakenForAReleaseOfItsForm(t *testing.T) {
	p := &Pull{Host: "d", Port: 9000, TPSize: 1, PPSize: 1, Wanted: map[string]Wanted{"r": {"x", [][]int{{1, 2}}}}}
	for i := range 2 {
		p.Regions = append(p.Regions, Region{Layer: "layer", Index: i, Base: uint64(4096 * (i + 1)), Stride: 64, Payload: 64, RowOffset: NoRow})
	}
	for r := releaseFirst; r <= latest; r++ {
		b := AppendPull(nil, p, r)
		got, err := DecodePull(b, r)
		if err != nil {
			t.Fatalf("release %d: %v", r, err)
		}
		if same := AppendPull(nil, got, got.Release); !bytes.Equal(same, b) {
			t.Errorf("release %d is taken for %d, which writes\n%q, not\n%q", r, got.Release, same, b)
		}
	}
}

// Names of requests, transfers and hosts have at most 1,024 bytes.
func TestNamesAreBounded(t *testing.T) {
	f := func(n int, right bool) {
		t.Helper()
		name := strings.Repeat("n", n)
		for what, p := range map[string]*Pull{
			"host":     {Host: name, Port: 1, TPSize: 1, PPSize: 1},
			"request":  {Host: "d", Port: 1, TPSize: 1, PPSize: 1, Wanted: map[string]Wanted{name: {"x", [][]int{{}}}}},
			"transfer": {Host: "d", Port: 1, TPSize: 1, PPSize: 1, Wanted: map[string]Wanted{"r": {name, [][]int{{}}}}},
		} {
			if _, err := DecodePull(AppendPull(nil, p, 0), 0); (err == nil) != right || !right && !errors.Is(err, ErrMessage) {
				t.Errorf("a %s of %d bytes: %v", what, n, err)
			}
		}
	}
	f(maxName, true)
	f(maxName+1, false)
	f(100_000, false)
}

// The roles are vLLM's kv_role, and nothing else is one.
func TestRolesAreVLLMs(t *testing.T) {
	for name, want := range map[string]Role{"kv_producer": Producer, "kv_consumer": Consumer, "kv_both": Both} {
		if got, err := ParseRole(name); err != nil || got != want || got.String() != name {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	for _, name := range []string{"", "both", "KV_BOTH", "kv_both "} {
		if r, err := ParseRole(name); err == nil || !strings.Contains(err.Error(), "kv_producer") {
			t.Errorf("%q is role %v: %v", name, r, err)
		}
	}
	if got := Role(9).String(); got != "role 9" {
		t.Error(got)
	}
}

// A refusal reads as its text, its detail, or both.
func TestRefusalsRead(t *testing.T) {
	for want, e := range map[string]*Error{"mooncake: a": {Text: "a"}, "mooncake: b": {Detail: "b"}, "mooncake: a (b)": {Text: "a", Detail: "b"}} {
		if got := e.Error(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
