// SPDX-License-Identifier: Apache-2.0

// Command docs writes the generated part of the reference, docs/reference/commands: flags from the command line itself; HTTP routes,
// metrics and environment variables from the code; and the sample trace in docs/examples. With -check it writes nothing, but reports
// what is missing or wrong, including shell blocks with a wrong mark. With -v it also reports which shell blocks no test types, and
// why.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/tools/pages"
)

// out is the folder of the generated pages.
const out = pages.Generated

func main() {
	check := flag.Bool("check", false, "write nothing; report pages that are not current, and what no page or test names")
	kvasir := flag.String("kvasir", "", "the kvasir to ask for its flags; without it, one is built")
	verbose := flag.Bool("v", false, "with -check, list the shell blocks that no test types, each with its reason")
	flag.Parse()
	notTyped := io.Discard
	if *verbose {
		notTyped = os.Stdout
	}
	faults, err := run(*check, *kvasir, notTyped)
	if err != nil {
		fmt.Fprintln(os.Stderr, "docs:", err)
		os.Exit(1)
	}
	for _, f := range faults {
		fmt.Fprintln(os.Stderr, "docs:", f)
	}
	if len(faults) > 0 {
		os.Exit(1)
	}
}

// run writes the pages; with check, it only returns the faults. It writes to notTyped which shell blocks no test types.
func run(check bool, kvasir string, notTyped io.Writer) (faults []string, err error) {
	if _, err := os.Stat("go.mod"); err != nil {
		return nil, errors.New("run it in the root of the repository")
	}
	commands, err := commandPages(kvasir)
	if err != nil {
		return nil, err
	}
	c, err := scan(".")
	if err != nil {
		return nil, err
	}
	hand, err := pages.All(".")
	if err != nil {
		return nil, err
	}
	written, faults := reference(commands, c, hand)
	if !check {
		return faults, errors.Join(write(written), os.WriteFile(tracePath, trace(), 0o644))
	}
	faults = append(faults, blocks(hand, notTyped)...)
	for _, name := range untested(leaves(commands), c.tests) {
		faults = append(faults, name+": no test runs this command")
	}
	if text, err := os.ReadFile(tracePath); err != nil || !bytes.Equal(text, trace()) {
		faults = append(faults, tracePath+" is not current: run go run ./internal/tools/docs")
	}
	return append(faults, stale(written)...), nil
}

// commandPages returns the pages about flags, which the kvasir binary itself writes.
func commandPages(kvasir string) (map[string]string, error) {
	dir, err := os.MkdirTemp("", "kvasir-docs-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	ask := exec.Command("go", "run", "./cmd/kvasir", "man", "--markdown", dir)
	if kvasir != "" {
		ask = exec.Command(kvasir, "man", "--markdown", dir)
	}
	if text, err := ask.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%s: %w: %s", strings.Join(ask.Args, " "), err, text)
	}
	names, err := filepath.Glob(filepath.Join(dir, "*.md"))
	if err != nil || len(names) == 0 {
		return nil, fmt.Errorf("%s wrote no page (%v)", strings.Join(ask.Args, " "), err)
	}
	pages := map[string]string{}
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		pages[filepath.Base(name)] = string(text)
	}
	return pages, nil
}

// blocks returns what is wrong with the blocks of hand-written pages and with the marks before them. TestPagesAsTyped in
// cmd/kvasir/internal/cli types each shell block without the mark "not typed"; blocks lists the others in notTyped.
func blocks(hand map[string]string, notTyped io.Writer) (faults []string) {
	typed, all := 0, 0
	for _, name := range slices.Sorted(maps.Keys(hand)) {
		page, wrong := pages.Read(hand[name])
		for _, w := range wrong {
			faults = append(faults, name+": "+w)
		}
		for _, s := range page.Steps {
			switch {
			case s.Text == "":
				continue
			case s.NotTyped == "":
				typed++
			default:
				first, _, _ := strings.Cut(s.Text, "\n")
				fmt.Fprintf(notTyped, "%s:%d: not typed (%s): %s\n", name, s.Line, s.NotTyped, first)
			}
			all++
		}
	}
	fmt.Fprintf(notTyped, "%d of %d shell blocks are typed\n", typed, all)
	return faults
}

// leaves returns the commands that have no subcommands.
func leaves(pages map[string]string) (commands []string) {
	for name, text := range pages {
		if name == "README.md" {
			continue
		}
		var own []string
		for line := range strings.Lines(text) {
			if heading := strings.TrimLeft(strings.TrimSpace(line), "#"); strings.HasPrefix(line, "#") && strings.HasPrefix(heading, " kvasir ") {
				own = append(own, strings.TrimPrefix(heading, " kvasir "))
			}
		}
		for _, c := range own {
			if !slices.ContainsFunc(own, func(o string) bool { return strings.HasPrefix(o, c+" ") }) {
				commands = append(commands, c)
			}
		}
	}
	slices.Sort(commands)
	return commands
}

func write(pages map[string]string) error {
	if err := os.RemoveAll(out); err != nil {
		return err
	}
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	for name, text := range pages {
		if err := os.WriteFile(filepath.Join(out, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// stale returns a fault for each page whose file differs from its new text.
func stale(pages map[string]string) (faults []string) {
	const remedy = ": run go run ./internal/tools/docs"
	for _, name := range slices.Sorted(maps.Keys(pages)) {
		text, err := os.ReadFile(filepath.Join(out, name))
		if err != nil || string(text) != pages[name] {
			faults = append(faults, filepath.Join(out, name)+" is not current"+remedy)
		}
	}
	there, _ := filepath.Glob(filepath.Join(out, "*"))
	for _, name := range there {
		if _, ok := pages[filepath.Base(name)]; !ok {
			faults = append(faults, name+" is not generated"+remedy)
		}
	}
	return faults
}
