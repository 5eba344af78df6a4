// SPDX-License-Identifier: Apache-2.0

// Package pages reads from a Markdown page the commands that its reader should type: shell blocks, the marks before them, and the
// output that the reader should see after them. A mark is a comment on a line of its own:
//
//	<!-- not typed: REASON -->   the next shell block is not typed by a test
//	<!-- terminal: NAME -->      it is typed in a terminal of that name, where it goes on
//	<!-- host: NAME -->          it is typed on another host
//	<!-- soon -->                it is typed again until the reader sees what the page shows
//	<!-- each -->                its commands are typed each in a terminal of its own, one after the other; one that serves goes on
//	<!-- needs: PROGRAM -->      the page is typed where that program is installed
//	<!-- before: COMMAND -->     it is typed before the page, which takes it for granted, as one of an each block
//	<!-- ctrl-c: NAME -->        stands alone: Ctrl-C in that terminal
//
// Shell blocks without a mark are typed one after the other. A block of the language text after a shell block, under the same heading,
// is what the reader should see.
package pages

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Step is a shell block of a page, or a Ctrl-C.
type Step struct {
	Line      int    // line of the page, from 1
	Text      string // the commands
	NotTyped  string // reason why no test types them; "": a test does
	Terminal  string // terminal in which the commands keep running; "": they end
	Host      string // host on which they are typed; "": the first
	Soon      bool   // the commands are typed again until Shown is seen
	Each      bool   // each command has a terminal of its own, and keeps running if it serves
	Shown     string // what the reader should see; "…" stands for any text
	Interrupt string // terminal that gets Ctrl-C; then Text is empty
}

// Page has the steps that the reader of a page should carry out.
type Page struct {
	Steps  []Step
	Needs  []string // programs that must be installed
	Before []string // commands that must be running before the page is typed
}

// Typed reports whether a test types anything of the page.
func (p *Page) Typed() bool {
	return slices.ContainsFunc(p.Steps, func(s Step) bool { return s.Text != "" && s.NotTyped == "" })
}

// languages are the languages of blocks that are not typed. Blocks of "sh" are commands.
var languages = []string{"text", "go", "python", "yaml", "ini", "json"}

var mark = regexp.MustCompile(`^<!-- (not typed|terminal|host|soon|each|needs|before|ctrl-c)(?:: (.*))? -->$`)

var blanks = regexp.MustCompile(` +`)

// indented matches the first line of commands in an indented block. Such a block is a fault, because it cannot have marks.
var indented = regexp.MustCompile(`^ {4,}(?:\$ )?(?:[A-Z_]+=\S* )*(?:kvasir|vllm|curl|python|docker|helm|kubectl|sudo|make|go|bin/kvasir) `)

// Read returns the steps of a page, and texts that say what is wrong with its blocks and marks.
func Read(text string) (p Page, faults []string) {
	var next Step // what the marks say about the next shell block
	marked, language, begin, typed, blank := 0, "", 0, -1, true
	var block strings.Builder
	wrong := func(line int, format string, args ...any) {
		faults = append(faults, fmt.Sprintf("line %d: ", line)+fmt.Sprintf(format, args...))
	}
	n := 0
	for line := range strings.Lines(text) {
		n++
		line = strings.TrimRight(line, "\r\n")
		if begin > 0 { // inside a block
			if line != "```" {
				block.WriteString(line + "\n")
				continue
			}
			switch {
			case language == "sh":
				next.Line, next.Text = begin, block.String()
				p.Steps = append(p.Steps, next)
				typed, next, marked = len(p.Steps)-1, Step{}, 0
			case language == "text" && typed >= 0:
				p.Steps[typed].Shown += block.String()
			}
			begin = 0
			block.Reset()
			continue
		}
		if fence, ok := strings.CutPrefix(line, "```"); ok {
			language, begin = fence, n
			if language != "sh" && !slices.Contains(languages, language) {
				wrong(n, "a block of the language %q: want sh for what is typed, else %s", language, strings.Join(languages, ", "))
			}
			if marked > 0 && language != "sh" {
				wrong(marked, "a mark that no shell block follows")
				next, marked = Step{}, 0
			}
			continue
		}
		if strings.HasPrefix(line, "#") {
			typed = -1
		}
		if blank && indented.MatchString(line) {
			wrong(n, "commands in an indented block: want a block of the language sh")
		}
		blank = line == ""
		m := mark.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		value := strings.TrimSpace(m[2])
		if (value == "") != (m[1] == "soon" || m[1] == "each") {
			wrong(n, "the mark %q lacks a value, or has one too many", m[1])
		}
		if marked = n; p.note(&next, n, m[1], value) {
			marked = 0
		}
	}
	if begin > 0 {
		wrong(begin, "the block does not end")
	}
	if marked > 0 {
		wrong(marked, "a mark that no shell block follows")
	}
	return p, faults
}

// note records a mark with its value, in line n of the page: in `next`, for the next shell block, or in p, for the page. alone means that
// the mark belongs to no shell block.
func (p *Page) note(next *Step, n int, mark, value string) (alone bool) {
	switch mark {
	case "not typed":
		next.NotTyped = value
	case "terminal":
		next.Terminal = value
	case "host":
		next.Host = value
	case "soon":
		next.Soon = true
	case "each":
		next.Each = true
	case "needs":
		p.Needs = append(p.Needs, value)
		return true
	case "before":
		p.Before = append(p.Before, value)
		return true
	case "ctrl-c":
		p.Steps = append(p.Steps, Step{Line: n, Interrupt: value})
		return true
	}
	return false
}

// Missing returns the first line of shown that is missing in output, where lines must come in the order of shown; "": none is missing.
// "…" stands for any text within a line, and, alone in a line, for any lines. Blanks match any number of blanks, because the width of a
// table's columns depends on its other rows.
func Missing(shown, output string) string {
	lines := strings.Split(output, "\n")
	for want := range strings.Lines(shown) {
		want = strings.TrimSpace(want)
		if want == "" || want == "…" {
			continue
		}
		parts := strings.Split(want, "…")
		for i := range parts {
			parts[i] = blanks.ReplaceAllString(regexp.QuoteMeta(parts[i]), " +")
		}
		pattern := regexp.MustCompile("^" + strings.Join(parts, ".*") + "$")
		i := slices.IndexFunc(lines, func(line string) bool { return pattern.MatchString(strings.TrimSpace(line)) })
		if i < 0 {
			return want
		}
		lines = lines[i+1:]
	}
	return ""
}

// Generated is the folder of the pages that are generated from the code: they show the text of --help.
const Generated = "docs/reference/commands"

// All returns the text of the pages for users in the repository at root, without the generated ones, by their path from root.
func All(root string) (map[string]string, error) {
	out := map[string]string{}
	for _, top := range []string{"README.md", "docs"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(name string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			rel, err := filepath.Rel(root, name)
			if err != nil {
				return err
			}
			rel = filepath.ToSlash(rel)
			if rel == Generated {
				return fs.SkipDir
			}
			if d.IsDir() || !strings.HasSuffix(rel, ".md") {
				return nil
			}
			text, err := os.ReadFile(name)
			out[rel] = string(text)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}
