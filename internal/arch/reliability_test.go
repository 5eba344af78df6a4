// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"go/ast"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var promisedTest = regexp.MustCompile("`([a-z0-9/]+)\\.(Test\\w+)`")

// promises returns the rows of the tables of faults in a page: the cells of each.
func promises(page string) (rows [][]string) {
	inTable := false
	for line := range strings.Lines(page) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "| fault |"):
			inTable = true
		case !strings.HasPrefix(line, "|"):
			inTable = false
		case inTable && !strings.HasPrefix(line, "| ---"):
			cells := strings.Split(strings.Trim(line, "|"), "|")
			for i := range cells {
				cells[i] = strings.TrimSpace(cells[i])
			}
			rows = append(rows, cells)
		}
	}
	return rows
}

// missingTests returns the tests that a cell names and packages do not have, and how many it names.
func missingTests(packages map[string]*goPackage, cell string) (missing []string, named int) {
	for _, m := range promisedTest.FindAllStringSubmatch(cell, -1) {
		named++
		if !hasTest(packages[m[1]], m[2]) {
			missing = append(missing, m[1]+"."+m[2])
		}
	}
	return missing, named
}

func hasTest(p *goPackage, name string) bool {
	if p == nil {
		return false
	}
	for _, f := range p.tests {
		for _, d := range f.tree.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == name {
				return true
			}
		}
	}
	return false
}

// Each promise of the pages about reliability has all its cells, and names tests that exist.
func TestPromisesHaveTests(t *testing.T) {
	packages := read(t)
	f := func(page string, least int) {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(root, page))
		if err != nil {
			t.Fatal(err)
		}
		rows := promises(string(text))
		if len(rows) < least {
			t.Fatalf("%s: only %d promises found: the reader of the page is broken", page, len(rows))
		}
		for _, row := range rows {
			if len(row) != 5 {
				t.Errorf("%q has %d cells", row[0], len(row))
				continue
			}
			missing, named := missingTests(packages, row[4])
			if named == 0 {
				t.Errorf("%q names no test", row[0])
			}
			for _, m := range missing {
				t.Errorf("%q names the test %s, which does not exist", row[0], m)
			}
		}
	}
	f("docs/reliability.md", 40)
	f("docs/reliability-parts.md", 25)
}

func TestMissingTestsAreFound(t *testing.T) {
	packages := read(t)
	f := func(cell string, wantMissing, wantNamed int) {
		t.Helper()
		missing, named := missingTests(packages, cell)
		if len(missing) != wantMissing || named != wantNamed {
			t.Errorf("%s: %v missing, %d named", cell, missing, named)
		}
	}
	f("`internal/arch.TestMissingTestsAreFound`", 0, 1)
	f("`internal/arch.TestNone`, `internal/arch.TestMissingTestsAreFound`", 1, 2)
	f("`internal/none.TestMissingTestsAreFound`", 1, 1)
	f("`internal/arch.hasTest` TestNone", 0, 0)
}

// Each format of docs/formats/versions.md says what a build does with a later version, and names tests that exist.
func TestFormatsHaveTests(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "docs/formats/versions.md"))
	if err != nil {
		t.Fatal(err)
	}
	packages := read(t)
	rows := 0
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "| ---") || strings.HasPrefix(line, "| format |") {
			continue
		}
		rows++
		if len(cells) != 4 {
			t.Errorf("%q has %d cells", cells[0], len(cells))
			continue
		}
		if missing, named := missingTests(packages, cells[3]); len(missing) > 0 || named == 0 {
			t.Errorf("%q names %d tests; missing: %v", cells[0], named, missing)
		}
	}
	if rows < 13 {
		t.Errorf("only %d formats found: the reader of the page is broken", rows)
	}
}
