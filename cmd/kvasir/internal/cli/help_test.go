// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// Every way in which people ask for help or the version answers on standard output.
func TestHelpAndVersionInEveryForm(t *testing.T) {
	testkit.LongAlone(t)
	f := func(same string, args ...string) {
		t.Helper()
		_, want, _ := run(t, strings.Fields(same)...)
		code, stdout, stderr := run(t, args...)
		if code != 0 || stderr != "" || stdout != want || want == "" {
			t.Errorf("kvasir %v: exit %d, not the same as %q:\n%s%s", args, code, same, stdout, stderr)
		}
	}
	f("version", "--version")
	f("--help", "help")
	f("server --help", "help", "server")
	f("transfer serve --help", "help", "transfer", "serve")
	f("help --help", "help", "--help")
	if _, stdout, _ := run(t, "version"); !strings.HasPrefix(stdout, "kvasir ") || !strings.Contains(stdout, runtime.Version()) {
		t.Errorf("version: %q", stdout)
	}
}

// Each completion script runs in its own shell, where this machine has that shell.
func TestCompletion(t *testing.T) {
	testkit.LongAlone(t)
	dir := t.TempDir()
	if err := os.Symlink(os.Args[0], filepath.Join(dir, "kvasir")); err != nil {
		t.Fatal(err)
	}
	ask := map[string]string{
		"bash": `source "$1"; COMP_WORDS=($2 "$3"); COMP_CWORD=$((${#COMP_WORDS[@]}-1)); _kvasir; printf '%s\n' "${COMPREPLY[@]}"`,
		"zsh":  `compdef() { :; }; compadd() { shift; print -l -- ${(M)@:#$cur*}; }; source "$1"; cur=$3; words=(${=2} "$3"); CURRENT=${#words}; _kvasir`,
		"fish": `source $argv[1]; complete -C "$argv[2] $argv[3]" | cut -f1`,
	}
	for shell, script := range ask {
		code, text, stderr := run(t, "completion", shell)
		if code != 0 || stderr != "" {
			t.Fatalf("%s: exit %d, %s", shell, code, stderr)
		}
		bin, err := exec.LookPath(shell)
		if err != nil {
			t.Logf("%s is not installed: its script was not run", shell)
			continue
		}
		file := filepath.Join(dir, shell)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		f := func(line, word string, want ...string) {
			t.Helper()
			args := []string{"-c", script, shell, file, line, word}
			if shell == "fish" {
				args = []string{"-N", "-c", script, file, line, word}
			}
			c := exec.Command(bin, args...)
			c.Dir, c.Env = dir, append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "KVASIR_TEST_COMMAND=1")
			out, err := c.CombinedOutput()
			got := strings.Fields(string(out))
			slices.Sort(got)
			slices.Sort(want)
			if err != nil || strings.Join(got, " ") != strings.Join(want, " ") {
				t.Errorf("%s: %s %s: got %q, want %q (%v)", shell, line, word, got, want, err)
			}
		}
		f("kvasir", "ser", "server")
		f("kvasir transfer", "b", "bench")
		f("kvasir server", "--http-h", "--http-host")
		f("kvasir --log-level warn server --port 1", "--l1-s", "--l1-size-gb")
		f("kvasir completion", "f", "fish")
		f("kvasir server --pickle", "o", "on", "only", "off")
	}
}
