// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

const (
	index        = "docs/README.md"
	maxPageBytes = 14_000
)

// generated pages are written by a command; their size has no limit.
var generated = []string{"docs/measured/accuracy-tables.md"}

// commandPages are generated, too, and have an index of their own.
const commandPages = "docs/reference/commands/"

var (
	mdLink    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	mdSpan    = regexp.MustCompile("`[^`]*`")
	mdHeading = regexp.MustCompile(`^#{1,6} +(.*)$`)
	mdAnchor  = regexp.MustCompile(`<a id="([^"]+)">`)
	codePath  = regexp.MustCompile("(?:^|[\\s`])\\./([a-z][\\w/.-]*)")
	goPath    = regexp.MustCompile("`([a-z][\\w/.-]*/[\\w.-]+\\.go)`")
	docPath   = regexp.MustCompile(`\bdocs/[\w/-]+\.(?:md|jsonl?|png)(?:#[\w-]+)?`)
)

// A page is one Markdown file of the repository.
type page struct {
	text    string
	links   []string
	anchors map[string]bool
}

// readPages returns all Markdown files by their path from the root.
func readPages(t *testing.T) map[string]*page {
	t.Helper()
	pages := map[string]*page{}
	err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if n := d.Name(); name != root && (strings.HasPrefix(n, ".") || n == "testdata" || n == "bin") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".md") {
			return nil
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		pages[filepath.ToSlash(rel)] = parsePage(string(text))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(pages) < 30 {
		t.Fatalf("only %d pages found: the walk is broken", len(pages))
	}
	return pages
}

func parsePage(text string) *page {
	p := &page{text: text, anchors: map[string]bool{}}
	fenced := false
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			fenced = !fenced
			continue
		}
		if fenced {
			continue
		}
		if m := mdHeading.FindStringSubmatch(line); m != nil {
			slug := slugOf(m[1])
			unique := slug
			for n := 1; p.anchors[unique]; n++ {
				unique = fmt.Sprintf("%s-%d", slug, n)
			}
			p.anchors[unique] = true
		}
		for _, m := range mdAnchor.FindAllStringSubmatch(line, -1) {
			p.anchors[m[1]] = true
		}
		for _, m := range mdLink.FindAllStringSubmatch(mdSpan.ReplaceAllString(line, ""), -1) {
			p.links = append(p.links, m[1])
		}
	}
	return p
}

// slugOf returns the anchor that GitHub gives a heading.
func slugOf(heading string) string {
	var b strings.Builder
	for _, r := range strings.ToLower(strings.TrimSpace(heading)) {
		switch {
		case r == ' ':
			b.WriteByte('-')
		case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
			b.WriteRune(r)
		}
	}
	return b.String()
}

// resolve returns why a link of the page at from leads nowhere.
func resolve(pages map[string]*page, from, link string) error {
	if strings.Contains(link, "://") || strings.HasPrefix(link, "mailto:") {
		return nil
	}
	file, anchor, _ := strings.Cut(link, "#")
	to := from
	if file != "" {
		to = path.Join(path.Dir(from), file)
	}
	if _, err := os.Stat(filepath.Join(root, to)); err != nil {
		return fmt.Errorf("%s: %s does not exist", link, to)
	}
	if anchor == "" {
		return nil
	}
	if p := pages[to]; p == nil || !p.anchors[anchor] {
		return fmt.Errorf("%s: %s has no such heading", link, to)
	}
	return nil
}

// Every link between pages leads to a file, and to a heading that the file has.
func TestLinks(t *testing.T) {
	pages := readPages(t)
	for name, p := range pages {
		for _, link := range p.links {
			if err := resolve(pages, name, link); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

func TestResolveFindsBrokenLinks(t *testing.T) {
	pages := map[string]*page{
		"README.md":         parsePage("[a](docs/limits.md#tiers)"),
		"docs/limits.md":    parsePage("# Limits\n## Two words: `code`\n## Two words: `code`\n<a id=\"here\"></a>\n```\n# none\n[x](none)\n```\n`[x](y)`"),
		"docs/decisions.md": parsePage("# Decisions"),
	}
	if n := len(pages["docs/limits.md"].links); n != 0 {
		t.Errorf("%d links found in code", n)
	}
	f := func(ok bool, from, link string) {
		t.Helper()
		if err := resolve(pages, from, link); (err == nil) != ok {
			t.Errorf("%s in %s: %v", link, from, err)
		}
	}
	f(true, "README.md", "docs/limits.md")
	f(true, "README.md", "docs/limits.md#two-words-code")
	f(true, "README.md", "docs/limits.md#two-words-code-1")
	f(true, "docs/decisions.md", "limits.md#here")
	f(true, "docs/decisions.md", "#decisions")
	f(true, "docs/decisions.md", "../README.md")
	f(true, "docs/decisions.md", "https://example.com/none#none")
	f(false, "README.md", "docs/limits.md#none")
	f(false, "README.md", "docs/limits.md#two-words-code-2")
	f(false, "README.md", "limits.md")
	f(false, "docs/decisions.md", "#limits")
}

// A page can be read in one sitting, and the index leads to it.
func TestPages(t *testing.T) {
	pages := readPages(t)
	var indexed []string
	for _, of := range []string{index, commandPages + "README.md"} {
		if pages[of] == nil {
			t.Fatalf("there is no %s", of)
		}
		for _, link := range pages[of].links {
			link, _, _ = strings.Cut(link, "#")
			indexed = append(indexed, path.Join(path.Dir(of), link))
		}
	}
	for name, p := range pages {
		if !strings.HasPrefix(name, "docs/") {
			continue
		}
		if n := len(p.text); n > maxPageBytes && !slices.Contains(generated, name) && !strings.HasPrefix(name, commandPages) {
			t.Errorf("%s has %d bytes, more than %d: split it by subject", name, n, maxPageBytes)
		}
		if name != index && !slices.Contains(indexed, name) {
			t.Errorf("%s has no line in %s", name, index)
		}
	}
	for _, name := range generated {
		if pages[name] == nil {
			t.Errorf("there is no %s: take it out of the table generated", name)
		}
	}
}

// Packages and Go files that a page names exist.
func TestPagesNameCodeThatExists(t *testing.T) {
	exists := func(name string) bool {
		_, err := os.Stat(filepath.Join(root, strings.TrimSuffix(name, "/...")))
		return err == nil || errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(name, "bin/")
	}
	for name, p := range readPages(t) {
		for line := range strings.Lines(p.text) {
			if !strings.Contains(line, "go ") && !strings.Contains(line, ".go") {
				continue
			}
			for _, m := range slices.Concat(codePath.FindAllStringSubmatch(line, -1), goPath.FindAllStringSubmatch(line, -1)) {
				if file := strings.TrimRight(m[1], ".,"); !exists(file) {
					t.Errorf("%s: there is no %s", name, file)
				}
			}
		}
	}
}

// Pages that Go code names, in help, advice or comments, exist.
func TestCodeNamesPagesThatExist(t *testing.T) {
	pages := readPages(t)
	found := 0
	for _, p := range read(t) {
		for _, f := range slices.Concat(p.files, p.tests) {
			if f.path == "internal/arch/docs_test.go" {
				continue
			}
			for _, link := range docPath.FindAllString(string(f.text), -1) {
				if strings.HasPrefix(link, "docs/source/") { // of Mooncake's repository
					continue
				}
				found++
				if err := resolve(pages, "README.md", link); err != nil {
					t.Errorf("%s: %v", f.path, err)
				}
			}
		}
	}
	if found < 20 {
		t.Errorf("only %d pages named: the search is broken", found)
	}
}
