// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// The list of commands has groups, in this order.
func TestCommandsAreGrouped(t *testing.T) {
	_, out, _ := run(t, "--help")
	at := -1
	for _, want := range []string{"\nServe\n", "  server ", "\nWatch\n", "  status ", "\nData\n", "  tier ls ", "\nTry\n", "  demo ", "\nHelp\n", "  completion "} {
		i := strings.Index(out, want)
		if i <= at {
			t.Errorf("%q is at %d of --help, after %d", want, i, at)
		}
		at = i
	}
}

// A flag is suggested only where it resembles what was given.
func TestSuggestionsResemble(t *testing.T) {
	testkit.LongAlone(t)
	f := func(want, refused string, args ...string) {
		t.Helper()
		code, _, errs := run(t, args...)
		if code != 2 || !strings.Contains(errs, want) || refused != "" && strings.Contains(errs, refused) {
			t.Errorf("%v: %d, %s", args, code, errs)
		}
	}
	f("unknown flag --port (see", "did you mean", "transfer", "serve", "--port", "1")
	f(`did you mean "--objects"?`, "", "tier", "ls", "fs:/tmp", "--object")
	f(`did you mean "--chunk-size"?`, "", "server", "--chunksize", "1")
}

// --plot writes pictures in each command that draws. The earlier names of that flag still work, and help does not show them.
func TestPlotHasOneName(t *testing.T) {
	testkit.LongAlone(t)
	for _, c := range []struct {
		command []string
		former  string
	}{{[]string{"sim", "evict"}, "--svg"}, {[]string{"sim", "table"}, "--report"}, {[]string{"bench"}, "--report"}, {[]string{"sim", "sweep"}, ""}, {[]string{"sim", "fleet"}, ""}, {[]string{"demo"}, ""}} {
		_, out, _ := run(t, append(c.command, "--help")...)
		if !strings.Contains(out, "--plot=") || c.former != "" && strings.Contains(out, c.former) {
			t.Errorf("%v: %s", c.command, out)
		}
		if c.former == "" {
			continue
		}
		if _, _, errs := run(t, append(c.command, c.former+"=x", "--no-such-flag")...); strings.Contains(errs, c.former) {
			t.Errorf("%v %s: %s", c.command, c.former, errs)
		}
	}
}

// config init names a file to write where a directory was given, with and without --force.
func TestConfigInitOfDirectory(t *testing.T) {
	dir := t.TempDir()
	for _, args := range [][]string{{dir}, {dir, "--force"}} {
		code, _, errs := run(t, append([]string{"config", "init"}, args...)...)
		if code != 1 || !strings.Contains(errs, "is no file") || strings.Contains(errs, "replaces it") {
			t.Errorf("%v: %d, %s", args, code, errs)
		}
	}
	file := filepath.Join(dir, "kvasir.yaml")
	if code, _, errs := run(t, "config", "init", file); code != 0 {
		t.Error(errs)
	}
	if code, _, errs := run(t, "config", "init", file); code != 1 || !strings.Contains(errs, "--force replaces it") {
		t.Errorf("%d, %s", code, errs)
	}
	if code, _, errs := run(t, "config", "init", file, "--force"); code != 0 {
		t.Error(errs)
	}
}

// Each command of tier and pool shows examples, and the tier commands print their findings as JSON, too.
func TestTierAndPoolCommands(t *testing.T) {
	for _, c := range []string{"tier ls", "tier verify", "tier drop", "tier copy", "tier check", "pool ls", "pool rm"} {
		if _, out, _ := run(t, append(strings.Fields(c), "--help")...); !strings.Contains(out, "Examples:") || !strings.Contains(out, "kvasir "+c+" ") {
			t.Errorf("%s has no examples:\n%s", c, out)
		}
	}
	dir := t.TempDir()
	file := filepath.Join(dir, "m@0x00000001@0@"+strings.Repeat("0", 64)+".data")
	if err := os.WriteFile(file, []byte("bytes"), 0o600); err != nil {
		t.Fatal(err)
	}
	f := func(want int, into any, args ...string) {
		t.Helper()
		code, out, errs := run(t, append([]string{"tier"}, args...)...)
		first, _, _ := strings.Cut(out, "\n")
		if code != want || json.Unmarshal([]byte(first), into) != nil {
			t.Errorf("%v: %d, %s, %s", args, code, out, errs)
		}
	}
	var listed struct {
		Total struct{ Objects int }
		Free  *int64 `json:"free_bytes"`
	}
	f(0, &listed, "ls", "fs:"+dir, "--json")
	if listed.Free == nil {
		t.Errorf("%+v", listed)
	}
	var verified map[string]int
	f(0, &verified, "verify", "fs:"+dir, "--json")
	if _, ok := verified["damaged"]; !ok {
		t.Errorf("%+v", verified)
	}
	var copied map[string]any
	f(0, &copied, "copy", "fs:"+dir, "fs:"+t.TempDir(), "--json")
	if copied["done"] != true || copied["torn_or_without_checksum"] != 1. {
		t.Errorf("%v", copied)
	}
	var dropped map[string]int
	f(0, &dropped, "drop", "fs:"+dir, "--model", "m", "--json")
	if dropped["removed"] != 1 || dropped["bytes"] != 5 {
		t.Errorf("%v", dropped)
	}
	var checked struct {
		Verdict   string
		Exit      int
		Sentences []string
	}
	f(0, &checked, "check", "fs:"+dir, "--json", "--size", "0.01", "--objects", "2")
	if checked.Verdict != "good" || checked.Exit != 0 || len(checked.Sentences) < 4 {
		t.Errorf("%+v", checked)
	}
	f(2, &checked, "check", "fs:"+filepath.Join(dir, "none"), "--json")
	if checked.Verdict != "useless" || checked.Exit != 2 {
		t.Errorf("%+v", checked)
	}
}

// keeper keep does the same as keeper with directories alone. keeper verify names a directory that no keeper with that state folder has noted.
func TestKeeperKeepAndVerify(t *testing.T) {
	dir, state := t.TempDir(), t.TempDir()
	if code, _, errs := run(t, "keeper", "keep", dir); code != 2 || !strings.Contains(errs, "say what to hold: --max-gb, --min-free-gb or --ttl") {
		t.Errorf("%d, %s", code, errs)
	}
	if code, out, errs := run(t, "keeper", "verify", dir, "--state-dir", state); code != 0 || !strings.Contains(out, "0 files (0 B) read, 0 of them for the first time, 0 faults") {
		t.Errorf("%d, %s%s", code, out, errs)
	}
	if code, _, errs := run(t, "keeper", "verify", filepath.Join(dir, "none"), "--state-dir", state); code != 1 || !strings.Contains(errs, "no such file") {
		t.Errorf("%d, %s", code, errs)
	}
}
