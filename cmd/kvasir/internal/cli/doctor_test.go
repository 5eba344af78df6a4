// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
)

// Each flag reaches its check, and the exit code is that of the worst finding.
func TestDoctorCommand(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "none")
	code, out, stderr := run(t, "doctor", "--l1-size-gb", "1000000", "--listen", "x,y", "--advertised", "0.0.0.0", "--python", missing, "--peer", "http://127.0.0.1:1",
		"--tier", "disk:"+missing, "--tier", `{"type":"nothing","a":"b,c"}`, "--json")
	if code != 2 || stderr != "" {
		t.Fatalf("exit %d: %s", code, stderr)
	}
	var got struct {
		Worst    string
		Findings []struct{ Level, Noun, Text, Mend string }
	}
	if err := json.Unmarshal([]byte(out), &got); err != nil || got.Worst != "error" {
		t.Fatal(err, out)
	}
	for noun, want := range map[string]string{
		"shared memory": "less than a pool of", "ports": "y is no HOST:PORT", "advertised addresses": "0.0.0.0", "releases": missing, "clocks": "127.0.0.1:1", "tiers": "disk:" + missing,
	} {
		found := false
		for _, f := range got.Findings {
			found = found || f.Noun == noun && (f.Level == "error" || f.Level == "warning") && strings.Contains(f.Text, want)
		}
		if !found {
			t.Errorf("no fault of %s with %q in %s", noun, want, out)
		}
	}
	if !strings.Contains(out, "nothing") {
		t.Errorf("the second tier is not tried: %s", out)
	}
}
