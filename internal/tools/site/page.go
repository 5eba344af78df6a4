// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"html/template"
	"regexp"
	"strings"
	"unicode"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/parser"
	"github.com/yuin/goldmark/renderer/html"
	"github.com/yuin/goldmark/text"
	"github.com/yuin/goldmark/util"
)

// page is one Markdown file.
type page struct {
	name    string // path from the root of the repository
	URL     string // path on the site
	Title   string
	Short   string // title in the navigation
	Body    template.HTML
	Heads   []head // headings in the page's own table of contents
	parts   []*part
	anchors map[string]bool
	wants   []want
	source  []byte
	tree    ast.Node
}

// head is a heading of a page.
type head struct {
	Level        int
	Text, Anchor string
}

// part is a heading with the text up to the next heading.
type part struct {
	heading, anchor string
	links           []string
	text            strings.Builder
}

// want is a link to a heading of a page.
type want struct {
	page   *page
	anchor string
}

// short returns the title of a page for the navigation.
func short(title string) string {
	if rest, ok := strings.CutPrefix(title, "Quick start: "); ok {
		return strings.ToUpper(rest[:1]) + rest[1:]
	}
	name, _, _ := strings.Cut(title, ": ")
	return name
}

var (
	markdown = goldmark.New(goldmark.WithExtensions(extension.GFM), goldmark.WithRendererOptions(html.WithUnsafe()), goldmark.WithParserOptions(parser.WithAutoHeadingID()))
	comment  = regexp.MustCompile(`(?m)^<!--.*-->\n`)
	anchor   = regexp.MustCompile(`<a id="([^"]+)">`)
)

// parse parses a page, and collects its headings and its text. It leaves out the marks for tests.
func parse(name string, source []byte) *page {
	p := &page{name: name, URL: target(name), anchors: map[string]bool{}, source: comment.ReplaceAll(source, nil)}
	p.tree = markdown.Parser().Parse(text.NewReader(p.source), parser.WithContext(parser.NewContext(parser.WithIDs(&slugs{p.anchors}))))
	p.parts = []*part{{}}
	_ = ast.Walk(p.tree, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			if n.Type() == ast.TypeBlock {
				p.last().text.WriteByte(' ')
			}
			return ast.WalkContinue, nil
		}
		switch n := n.(type) {
		case *ast.Heading:
			p.heading(n)
			return ast.WalkSkipChildren, nil
		case *ast.Link:
			p.last().links = append(p.last().links, string(n.Destination))
		case *ast.Text:
			p.last().text.Write(words(n, p.source))
			if n.SoftLineBreak() {
				p.last().text.WriteByte(' ')
			}
		case *ast.FencedCodeBlock:
			p.last().text.Write(n.Lines().Value(p.source))
		case *ast.RawHTML:
			for _, m := range anchor.FindAllSubmatch(n.Segments.Value(p.source), -1) {
				p.anchors[string(m[1])] = true
			}
		}
		return ast.WalkContinue, nil
	})
	return p
}

func (p *page) last() *part { return p.parts[len(p.parts)-1] }

// heading begins a new part of the page.
func (p *page) heading(n *ast.Heading) {
	title := plain(n, p.source)
	id, _ := n.AttributeString("id")
	slug, _ := id.([]byte)
	if n.Level == 1 && p.Title == "" {
		p.Title = title
		return
	}
	p.parts = append(p.parts, &part{heading: title, anchor: string(slug)})
	if n.Level <= 3 {
		p.Heads = append(p.Heads, head{n.Level, title, string(slug)})
	}
}

// words returns the text without the backslashes before punctuation.
func words(t *ast.Text, source []byte) []byte {
	if t.IsRaw() {
		return t.Value(source)
	}
	return util.UnescapePunctuations(t.Value(source))
}

// plain returns the text of a node.
func plain(n ast.Node, source []byte) string {
	var b strings.Builder
	_ = ast.Walk(n, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if t, ok := n.(*ast.Text); ok && entering {
			b.Write(words(t, source))
		}
		return ast.WalkContinue, nil
	})
	return b.String()
}

// slugs gives headings the same anchors as GitHub does.
type slugs struct{ used map[string]bool }

// Generate implements parser.IDs.
func (s *slugs) Generate(value []byte, _ ast.NodeKind) []byte {
	var b strings.Builder
	for _, r := range strings.ToLower(strings.TrimSpace(string(value))) {
		switch {
		case r == ' ':
			b.WriteByte('-')
		case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
			b.WriteRune(r)
		}
	}
	unique := b.String()
	for n := 1; s.used[unique]; n++ {
		unique = fmt.Sprintf("%s-%d", b.String(), n)
	}
	s.used[unique] = true
	return []byte(unique)
}

// Put implements parser.IDs.
func (s *slugs) Put(value []byte) { s.used[string(value)] = true }

// render makes the HTML body of a page. It returns an error for each broken link.
func (s *site) render(p *page) (faults []error) {
	_ = ast.Walk(p.tree, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		var err error
		switch n := n.(type) {
		case *ast.Link:
			var to string
			if to, err = s.link(p, string(n.Destination)); err == nil {
				n.Destination = []byte(to)
			}
		case *ast.Image:
			var to string
			if to, err = s.link(p, string(n.Destination)); err == nil {
				n.Destination = []byte(to)
			}
		}
		if err != nil {
			faults = append(faults, err)
		}
		return ast.WalkContinue, nil
	})
	var b bytes.Buffer
	if err := markdown.Renderer().Render(&b, p.source, p.tree); err != nil {
		return append(faults, fmt.Errorf("%s: %w", p.name, err))
	}
	body := strings.NewReplacer("<table>", `<div class="table"><table>`, "</table>", "</table></div>", `<a href="">`, "<a>").Replace(b.String())
	p.Body = template.HTML(body)
	return faults
}
