// SPDX-License-Identifier: Apache-2.0

// Command site makes a static web site of the repository's pages. It must run in the root of the repository. The site needs no server
// and loads nothing from other hosts: a browser can open its index.html from a disk. Two runs over equal pages write equal bytes. A
// broken link is an error.
package main

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"html/template"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

func main() {
	out := flag.String("out", "bin/site", "directory to write to; an earlier site in it is replaced")
	flag.Parse()
	if err := build(".", *out); err != nil {
		fmt.Fprintln(os.Stderr, "site:", err)
		os.Exit(1)
	}
}

//go:embed assets
var assets embed.FS

// site is the web site of a repository.
type site struct {
	root     string
	pages    map[string]*page // by the path of the Markdown file
	order    []*page          // in the order of the index
	sections []section        // sections of the index
	files    map[string]bool  // other files to which pages link, by path
	version  string
}

// section is a heading of the index with its pages.
type section struct {
	Name  string
	Pages []*page
}

const index = "docs/README.md"

// top are the pages outside of docs.
var top = []string{"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", ".github/SECURITY.md", ".github/GOVERNANCE.md", ".github/CODE_OF_CONDUCT.md"}

// build makes the site of the repository at root and writes it to out.
func build(root, out string) error {
	s := &site{root: root, pages: map[string]*page{}, files: map[string]bool{}}
	if err := s.read(); err != nil {
		return err
	}
	s.arrange()
	var faults []error
	for _, name := range slices.Sorted(maps.Keys(s.pages)) {
		faults = append(faults, s.render(s.pages[name])...)
	}
	if err := errors.Join(append(faults, s.checkAnchors()...)...); err != nil {
		return err
	}
	return s.write(out)
}

// read reads and parses all pages.
func (s *site) read() error {
	names := slices.Clone(top)
	err := fs.WalkDir(os.DirFS(s.root), "docs", func(name string, _ fs.DirEntry, err error) error {
		if strings.HasSuffix(name, ".md") {
			names = append(names, name)
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, name := range names {
		text, err := os.ReadFile(filepath.Join(s.root, name))
		if errors.Is(err, fs.ErrNotExist) && name != "README.md" {
			continue
		}
		if err != nil {
			return err
		}
		s.pages[name] = parse(name, text)
	}
	help, _ := os.ReadFile(filepath.Join(s.root, "cmd/kvasir/internal/cli/help.go"))
	if m := regexp.MustCompile(`const release = "(.*)"`).FindSubmatch(help); m != nil {
		s.version = string(m[1])
	}
	if s.pages[index] == nil {
		return fmt.Errorf("there is no %s: run it in the root of the repository", index)
	}
	return nil
}

// target returns the path on the site of a page of the repository.
func target(name string) string {
	name = strings.TrimPrefix(strings.TrimPrefix(name, "docs/"), ".github/")
	switch {
	case name == "README.md":
		return "index.html" // the README of the repository; the README of docs becomes contents.html
	case path.Base(name) == "README.md":
		return path.Join(path.Dir(name), "index.html")
	case strings.ToUpper(name) == name || !strings.Contains(name, "/"):
		name = strings.ToLower(name)
	}
	return strings.TrimSuffix(strings.TrimSuffix(name, ".md"), ".MD") + ".html"
}

// arrange puts the pages into the order of the index. Pages that the index does not name come last, sorted by name.
func (s *site) arrange() {
	s.pages[index].URL = "contents.html"
	seen := map[*page]bool{}
	add := func(to *section, p *page) {
		if p != nil && !seen[p] {
			seen[p] = true
			to.Pages = append(to.Pages, p)
		}
	}
	first := section{Name: "Kvasir"}
	add(&first, s.pages["README.md"])
	add(&first, s.pages[index])
	s.sections = append(s.sections, first)
	for _, part := range s.pages[index].parts {
		if part.heading == "" { // above the first heading
			for _, link := range part.links {
				add(&s.sections[0], s.pages[path.Join("docs", link)])
			}
			continue
		}
		here := section{Name: part.heading}
		for _, link := range part.links {
			p := s.pages[path.Join("docs", link)]
			if p == nil {
				continue
			}
			if path.Dir(p.name) == "docs/reference/commands" {
				commands := section{Name: "Commands"}
				add(&commands, p)
				for _, name := range slices.Sorted(maps.Keys(s.pages)) {
					if path.Dir(name) == path.Dir(p.name) {
						add(&commands, s.pages[name])
					}
				}
				s.sections = append(s.sections, commands)
				continue
			}
			add(&here, p)
		}
		if len(here.Pages) > 0 {
			s.sections = append(s.sections, here)
		}
	}
	rest := section{Name: "The project"}
	for _, name := range slices.Sorted(maps.Keys(s.pages)) {
		add(&rest, s.pages[name])
	}
	s.sections = append(s.sections, rest)
	names := map[string]int{}
	for _, c := range s.sections {
		for _, p := range c.Pages {
			p.Short = short(p.Title)
			names[p.Short]++
		}
		s.order = append(s.order, c.Pages...)
	}
	for _, p := range s.order {
		if names[p.Short] > 1 && !strings.HasPrefix(p.name, "docs/reference/commands/") {
			p.Short = p.Title
		}
	}
}

// relative returns the address of `to` for a link on the page `from`.
func relative(from, to string) string {
	up := strings.Repeat("../", strings.Count(from, "/"))
	return up + to
}

// link returns the address, on the site, for the link `to` of the page p; "" for a folder, whose link is shown as text only. A link that
// leads nowhere is an error.
func (s *site) link(p *page, to string) (string, error) {
	if strings.Contains(to, "://") || strings.HasPrefix(to, "mailto:") {
		return to, nil
	}
	file, anchor, _ := strings.Cut(to, "#")
	name := p.name
	if file != "" {
		name = path.Join(path.Dir(p.name), file)
	}
	if anchor != "" {
		anchor = "#" + anchor
	}
	if q := s.pages[name]; q != nil {
		if anchor != "" {
			p.wants = append(p.wants, want{q, anchor[1:]})
		}
		if q == p && anchor != "" {
			return anchor, nil
		}
		return relative(p.URL, q.URL) + anchor, nil
	}
	info, err := os.Stat(filepath.Join(s.root, name))
	if err != nil || strings.HasPrefix(name, "../") {
		return "", fmt.Errorf("%s: the link %s leads nowhere", p.name, to)
	}
	if info.IsDir() {
		return "", nil // the link is shown as text only
	}
	s.files[name] = true
	return relative(p.URL, fileTarget(name)), nil
}

// fileTarget returns the path on the site of a file that is not a page.
func fileTarget(name string) string { return "files/" + strings.TrimPrefix(name, "docs/") }

// checkAnchors returns an error for each link to a heading that its page does not have.
func (s *site) checkAnchors() (faults []error) {
	for _, p := range s.order {
		for _, w := range p.wants {
			if !w.page.anchors[w.anchor] {
				faults = append(faults, fmt.Errorf("%s: %s has no heading %q", p.name, w.page.name, w.anchor))
			}
		}
	}
	return faults
}

// write writes the site to the folder out.
func (s *site) write(out string) error {
	if entries, err := os.ReadDir(out); err == nil && len(entries) > 0 {
		if _, err := os.Stat(filepath.Join(out, "site.js")); err != nil {
			return fmt.Errorf("%s has files and is no site: name another directory", out)
		}
		if err := os.RemoveAll(out); err != nil {
			return err
		}
	}
	put := func(name string, text []byte) error {
		name = filepath.Join(out, filepath.FromSlash(name))
		return errors.Join(os.MkdirAll(filepath.Dir(name), 0o755), os.WriteFile(name, text, 0o644))
	}
	layout, err := template.ParseFS(assets, "assets/page.html")
	if err != nil {
		return err
	}
	written := map[string]string{}
	for i, p := range s.order {
		if before, ok := written[p.URL]; ok {
			return fmt.Errorf("%s and %s would both be %s", before, p.name, p.URL)
		}
		written[p.URL] = p.name
		v := view{Page: p, Sections: s.sections, Version: s.version, Root: strings.Repeat("../", strings.Count(p.URL, "/"))}
		if i > 0 {
			v.Previous = s.order[i-1]
		}
		if i+1 < len(s.order) {
			v.Next = s.order[i+1]
		}
		var b bytes.Buffer
		if err := layout.Execute(&b, v); err != nil {
			return err
		}
		if err := put(p.URL, b.Bytes()); err != nil {
			return err
		}
	}
	for name := range s.files {
		text, err := os.ReadFile(filepath.Join(s.root, name))
		if err := errors.Join(err, put(fileTarget(name), text)); err != nil {
			return err
		}
	}
	style, err1 := assets.ReadFile("assets/style.css")
	script, err2 := assets.ReadFile("assets/site.js")
	entries, err3 := json.Marshal(s.entries())
	return errors.Join(err1, err2, err3, put("style.css", style), put("site.js", slices.Concat([]byte("const INDEX = "), entries, []byte(";\n"), script)))
}

// view is the data of the layout template.
type view struct {
	Page           *page
	Sections       []section
	Previous, Next *page
	Root           string // relative path to the root of the site
	Version        string
}

// Open reports whether a section of the navigation is unfolded.
func (v view) Open(c section) bool { return slices.Contains(c.Pages, v.Page) }

// entry is a part of a page in the index for searching.
type entry struct {
	Title   string `json:"t"`
	Heading string `json:"h,omitempty"`
	URL     string `json:"u"`
	Text    string `json:"x"`
}

func (s *site) entries() (all []entry) {
	for _, p := range s.order {
		for _, part := range p.parts {
			e := entry{Title: p.Title, URL: p.URL, Text: part.text.String()}
			if part.anchor != "" {
				e.Heading, e.URL = part.heading, p.URL+"#"+part.anchor
			}
			all = append(all, e)
		}
	}
	return all
}
