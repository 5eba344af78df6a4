// SPDX-License-Identifier: Apache-2.0

package tier_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	tiertool "github.com/kvasir-kv/kvasir/cmd/kvasir/internal/tier"
	"github.com/kvasir-kv/kvasir/tier"
)

// JSON has the figures that the texts have: for each group, each object, and each damaged object.
func TestJSON(t *testing.T) {
	d, _, _ := open(t)
	var out strings.Builder
	if err := tiertool.ListJSON(t.Context(), &out, d, false); err != nil {
		t.Fatal(err)
	}
	type figures struct {
		Model    string
		Objects  int
		Unsummed int `json:"without_checksum"`
		Torn     int
	}
	var all struct {
		Groups []figures
		Total  figures
	}
	if err := json.Unmarshal([]byte(out.String()), &all); err != nil || all.Total != (figures{Objects: 6, Unsummed: 1, Torn: 1}) {
		t.Errorf("%v: %+v", err, all.Total)
	}
	objects := 0
	for _, g := range all.Groups {
		if g.Model != "org/one" && g.Model != "org/two" {
			t.Errorf("%+v", g)
		}
		objects += g.Objects
	}
	if objects != 6 {
		t.Errorf("%d objects in groups", objects)
	}
	lines := func() (n int, last string) {
		text := strings.TrimSpace(out.String())
		all := strings.Split(text, "\n")
		for _, l := range all {
			if !json.Valid([]byte(l)) {
				t.Errorf("no JSON: %s", l)
			}
		}
		return len(all), all[len(all)-1]
	}
	out.Reset()
	if err := tiertool.ListJSON(t.Context(), &out, d, true); err != nil {
		t.Fatal(err)
	}
	if n, _ := lines(); n != 6 || strings.Count(out.String(), `"torn":true`) != 1 || strings.Count(out.String(), `"checksum"`) != 4 {
		t.Errorf("%d lines: %s", n, &out)
	}
	out.Reset()
	err := tiertool.VerifyJSON(t.Context(), &out, d, false)
	if n, last := lines(); !errors.Is(err, tiertool.ErrDamaged) || n != 3 || last != `{"good":3,"without_checksum":1,"damaged":2,"removed":0,"not_read":0}` {
		t.Errorf("%v, %d lines, %s", err, n, last)
	}
	out.Reset()
	err = tiertool.Copy(t.Context(), tiertool.CopyJSON(&out), d, tier.NewMemory(1<<20), tier.NewNames())
	if n, last := lines(); err != nil || n != 1 || last != `{"copied":3,"bytes":15000,"there":0,"torn_or_without_checksum":2,"damaged":1,"not_read":0,"not_taken":0,"done":true}` {
		t.Errorf("copy: %v, %d lines, %s", err, n, last)
	}
	out.Reset()
	err = tiertool.DropJSON(t.Context(), &out, d, tiertool.Filter{Model: "org/one"})
	if _, last := lines(); err != nil || last != `{"removed":3,"bytes":10100}` {
		t.Errorf("drop: %v, %s", err, last)
	}
}
