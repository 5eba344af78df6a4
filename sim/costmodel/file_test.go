// SPDX-License-Identifier: Apache-2.0

package costmodel_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/sim/costmodel"
)

// A profile that is written and read again is the same. A file that is no profile is refused with a reason.
func TestProfileFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "own.json")
	for _, name := range costmodel.Names {
		want := profile(t, name)
		text, err := json.Marshal(want)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := costmodel.Open(path); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		if got, err := costmodel.Open(name); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	for text, want := range map[string]string{
		"": "line 1: empty", "[]": "a list, an object is expected", `{"speed":1}`: `no key "speed"`, `{}`: "bandwidth", `{"tensor_parallel_size":"x"}`: "tensor_parallel_size is a string, a whole number is expected", strings.Repeat(" ", 2<<20): "longer",
	} {
		if _, err := costmodel.Read(strings.NewReader(text)); !errors.Is(err, costmodel.ErrProfile) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.20q: %v, want %q", text, err, want)
		}
	}
	if _, err := costmodel.Open("/nonexistent.json"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%v", err)
	}
}
