// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The manual has a page for each command, with its flags and examples, and troff has nothing to say about it.
func TestManual(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "man")
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	if code, stdout, stderr := run(t, "man", dir); code != 0 || !strings.Contains(stdout, " pages are in "+dir) {
		t.Fatal(code, stdout, stderr)
	}
	for page, want := range map[string][]string{
		"kvasir.1":                {".TH \"KVASIR\" 1 2023-11-14", `.BR kvasir\-server (1)`},
		"kvasir-server.1":         {`\fB\-\-l1\-size\-gb=`, ".SH DESCRIPTION", ".SS "},
		"kvasir-transfer-serve.1": {".SH OPTIONS"},
		"kvasir-explain.1":        {".SH ARGUMENTS"},
	} {
		text, err := os.ReadFile(filepath.Join(dir, page))
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range want {
			if !strings.Contains(string(text), w) {
				t.Errorf("%s lacks %s", page, w)
			}
		}
	}
	pages, err := filepath.Glob(filepath.Join(dir, "*.1"))
	if err != nil || len(pages) < 40 {
		t.Fatal(pages, err)
	}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) { // what is no request of ours would be lost
			if (line[0] == '.' || line[0] == '\'') && !strings.Contains(".TH .SH .SS .TP .B .BR .I .nf .fi", strings.Fields(line)[0]) {
				t.Errorf("%s: a line is taken for a request: %s", page, line)
			}
		}
	}
	if groff, err := exec.LookPath("groff"); err == nil {
		if out, err := exec.Command(groff, append([]string{"-ww", "-man", "-Tutf8", "-z"}, pages...)...).CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%v: %s", err, out)
		}
	}
	t.Setenv("SOURCE_DATE_EPOCH", "today")
	if code, _, stderr := run(t, "man", dir); code != 1 || !strings.Contains(stderr, "want seconds since 1970") {
		t.Error(code, stderr)
	}
}
