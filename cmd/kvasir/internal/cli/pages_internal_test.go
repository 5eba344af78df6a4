// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/proxy"
	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/sim"
	"github.com/kvasir-kv/kvasir/internal/testkit"
)

var (
	shellBlock = regexp.MustCompile("(?ms)^```(?:sh|bash)\n(.*?)^```")
	oneCommand = regexp.MustCompile(`^(?:[A-Z_]+=\S* )*(?:(?:do|then|if|time|source|sudo|exec|watch|nohup|docker run .* kvasir:[\d.]+|systemd-run \S+) )*(?:\./|bin/)?(kvasir )`)
)

// Every command of kvasir in a shell block of every page has flags that exist, with values that they take.
func TestCommandsOfPages(t *testing.T) {
	testkit.LongAlone(t)
	var pages []string
	for _, root := range []string{"README.md", "CONTRIBUTING.md", "docs"} {
		err := filepath.WalkDir(filepath.Join("../../../..", root), func(name string, _ fs.DirEntry, err error) error {
			if strings.HasSuffix(name, ".md") {
				pages = append(pages, name)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	found := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, block := range shellBlock.FindAllStringSubmatch(string(text), -1) {
			for _, line := range commandsOfBlock(t, block[1]) {
				found++
				if fault := refusal(t, line); fault != "" {
					t.Errorf("%s: %q: %s", page, line, fault)
				}
			}
		}
	}
	if found < 70 {
		t.Errorf("only %d commands found: the search is broken", found)
	}
	if refusal(t, []string{"server", "--no-such-flag"}) == "" || refusal(t, []string{"no-such-command"}) == "" || refusal(t, []string{"server", "--port", "x"}) == "" {
		t.Error("a wrong command line is not found")
	}
}

// refusal returns why a command line is refused, "" if it is not.
func refusal(t *testing.T, args []string) string {
	t.Helper()
	args, _ = dropLMCacheFlags(proxy.Args(asHelp(sim.Aliases(args)))) // as Main
	line, err := readLine(args, io.Discard, io.Discard)
	if line.exit >= 0 || err == nil {
		return ""
	}
	if file := parseText(err); strings.Contains(file, "no such file") { // of the reader, who has it
		return ""
	}
	return parseText(err)
}

// commandsOfBlock returns the words of each command of kvasir, as a shell divides them.
func commandsOfBlock(t *testing.T, block string) (out [][]string) {
	t.Helper()
	dir := t.TempDir()
	note := filepath.Join(dir, "words")
	for _, text := range splitCommands(block) {
		m := oneCommand.FindStringSubmatchIndex(text)
		if m == nil {
			continue
		}
		// kvasir is a function that notes its words; there are no other commands.
		script := `kvasir() { for w; do printf '%s\0' "$w"; done >"$NOTE"; }; ` + text[m[2]:]
		c := exec.Command("bash", "-c", script)
		c.Dir, c.Env = dir, append(os.Environ(), "NOTE="+note, "PATH=/nonexistent")
		c.Stdin = strings.NewReader("")
		_ = c.Run()
		words, err := os.ReadFile(note)
		if err != nil {
			t.Errorf("bash does not read %q: %v", text, err)
			continue
		}
		if err := os.Remove(note); err != nil {
			t.Fatal(err)
		}
		out = append(out, strings.Split(strings.TrimSuffix(string(words), "\x00"), "\x00"))
	}
	return out
}

// splitCommands divides a block at its lines and at separators, outside quotes, without comments.
func splitCommands(block string) (out []string) {
	var b strings.Builder
	end := func() {
		if s := strings.TrimSpace(b.String()); s != "" {
			out = append(out, s)
		}
		b.Reset()
	}
	var quote rune
	escaped, comment, last := false, false, ' '
	for _, r := range block {
		switch {
		case comment:
			if comment = r != '\n'; comment {
				continue
			}
			end()
		case escaped:
			escaped = false
			b.WriteRune(r)
		case quote != 0:
			if escaped = quote == '"' && r == '\\'; r == quote {
				quote = 0
			}
			b.WriteRune(r)
		case r == '\\':
			escaped = true
			b.WriteRune(r)
		case r == '\'' || r == '"':
			quote = r
			b.WriteRune(r)
		case r == '#' && (last == ' ' || last == '\n' || last == '\t'):
			comment = true
		case strings.ContainsRune("\n;&|<>", r):
			end()
		case (r == '(' || r == ')') && last != '$':
			end()
		default:
			b.WriteRune(r)
		}
		last = r
	}
	end()
	return out
}
