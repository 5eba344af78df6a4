// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// The manual has a page for each command, with its flags and examples, and troff reports no warning.
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
		for line := range strings.Lines(string(text)) { // troff drops a line that begins with an unknown request
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

// The generated reference has every series that a server shows.
func TestReferenceHasTheMetricsOfARunningServer(t *testing.T) {
	s := serve(t, "--disk", t.TempDir(), "--disk-gb", "1", "--l2-adapter", `{"type":"fs","base_path":"`+t.TempDir()+`"}`, "--kv-events", fmt.Sprintf("tcp://127.0.0.1:%d", testkit.FreePort(t)))
	res, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", s.http))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../../../docs/reference/commands/server.md")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) != 4 || words[1] != "TYPE" || strings.HasPrefix(words[2], "go_") || strings.HasPrefix(words[2], "process_") || words[2] == "kvasir_build_info" {
			continue
		}
		if found++; !strings.Contains(string(page), "| `"+words[2]+"` ("+words[3]+")") {
			t.Errorf("docs/reference/commands/server.md lacks the %s %s", words[3], words[2])
		}
	}
	if found < 100 {
		t.Errorf("only %d series found", found)
	}
}

// The manual as Markdown has a page for each command of the first level, and a list of all.
func TestManualAsMarkdown(t *testing.T) {
	dir := t.TempDir()
	if code, _, stderr := run(t, "man", "--markdown", dir); code != 0 {
		t.Fatal(code, stderr)
	}
	for page, want := range map[string][]string{
		"README.md":   {"| [`kvasir server`](server.md) |", "| [`kvasir tier ls`](tier.md#kvasir-tier-ls) |", "`KVASIR_LOG_LEVEL`"},
		"server.md":   {"# kvasir server\n", "| `--http-port=8080` | `KVASIR_SERVER_HTTP_PORT` |", "| `--check-config` |  |", "**Pool**"},
		"transfer.md": {"## kvasir transfer serve\n"},
		"explain.md":  {"| argument | meaning |"},
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
}
