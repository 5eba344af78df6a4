// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"go/ast"
	"go/parser"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	module = "github.com/kvasir-kv/kvasir/"
	root   = "../.."
)

// rooms says which rooms each room may import. Inside a room any order is fine: the compiler refuses circles.
var rooms = map[string][]string{
	"internal": {},
	"kv":       {},
	"zmtp":     {"internal"},
	"bench":    {"internal"},
	"lmcache":  {"internal", "kv", "zmtp"},
	"mooncake": {"internal", "kv", "zmtp"},
	"tier":     {"internal", "kv", "mooncake"},
	"store":    {"internal", "kv", "tier"},
	"server":   {"internal", "kv", "zmtp", "lmcache", "mooncake", "tier", "store"},
	"proxy":    {"internal", "kv", "zmtp", "mooncake"},
	"sim":      {"internal", "kv", "bench", "lmcache", "mooncake", "store"},
	"cmd":      {"internal", "kv", "zmtp", "bench", "lmcache", "mooncake", "tier", "store", "server", "proxy", "sim"},
	"docs":     {"kv", "zmtp", "bench", "lmcache", "mooncake", "tier", "store", "server", "proxy", "sim"}, // examples
	"interop":  {"internal", "kv", "zmtp", "bench", "lmcache", "mooncake", "sim"},
}

// siblings are packages of one kind: none imports another one.
var siblings = []string{"tier/disk", "tier/fs", "tier/mooncakestore", "tier/redis", "tier/s3"}

// thirdParty says which rooms or packages may import a third-party module, tests aside. A module that is not here may not be
// imported: a new dependency is a decision.
var thirdParty = map[string][]string{
	"github.com/alecthomas/kong":          {"cmd"},
	"github.com/prometheus/client_golang": {"internal/metrics"},
	"github.com/prometheus/common":        {"internal/metrics"},
	"github.com/tinylib/msgp":             {"kv/event", "lmcache", "mooncake/wire"},
	"github.com/zeebo/blake3":             {"kv"},
	"github.com/zeebo/xxh3":               {"cmd", "kv", "lmcache", "mooncake", "proxy", "sim", "store", "tier"},
	"go.uber.org/goleak":                  {"internal/testkit"},
	"go.yaml.in/yaml/v3":                  {"cmd"},
	"golang.org/x/crypto":                 {"zmtp"}, // boxes of NaCl, for CURVE
	"golang.org/x/sys":                    {"cmd", "internal", "interop", "mooncake/transfer/bench", "server", "store", "tier"},
}

// unsafePackages may import unsafe: one maps memory, one reads and writes files past the page cache.
var unsafePackages = []string{"internal/shm", "internal/rawio"}

// A package of its own has two importers, or this many lines of code, or is a command or a test helper.
const (
	minImporters = 2
	minCodeLines = 300
)

// small packages that stand alone although they have one importer.
var small = map[string]string{
	"internal/tools/pages": "the check of internal/tools/docs and the test that types pages read the same marks",
	"sim/sweep":            "a subject beside sim/fleet, with a result of its own; internal/plot draws what it drew itself",
}

const maxFileLines = 600

// goPackage is one package of the repository, as its files show it.
type goPackage struct {
	files, tests []*goFile
	codeLines    int
}

type goFile struct {
	path string // from the root, with slashes
	text []byte
	tree *ast.File
}

// imports returns the paths that a file imports.
func (f *goFile) imports() []string {
	var out []string
	for _, i := range f.tree.Imports {
		p, _ := strconv.Unquote(i.Path.Value)
		out = append(out, p)
	}
	return out
}

// read returns all packages of the repository by folder. Another module inside it (interop/s3) is left out.
func read(t *testing.T) map[string]*goPackage {
	t.Helper()
	packages := map[string]*goPackage{}
	err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if n := d.Name(); name != root && (strings.HasPrefix(n, ".") || n == "testdata" || n == "bin") {
				return filepath.SkipDir
			}
			if _, err := os.Stat(filepath.Join(name, "go.mod")); err == nil && name != root {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") {
			return nil
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		tree, err := parser.ParseFile(token.NewFileSet(), name, text, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		f := &goFile{filepath.ToSlash(rel), text, tree}
		p := packages[path.Dir(f.path)]
		if p == nil {
			p = &goPackage{}
			packages[path.Dir(f.path)] = p
		}
		if strings.HasSuffix(name, "_test.go") {
			p.tests = append(p.tests, f)
		} else {
			p.files = append(p.files, f)
			p.codeLines += codeLines(text)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(packages) < 60 {
		t.Fatalf("only %d packages found: the walk is broken", len(packages))
	}
	return packages
}

func room(folder string) string {
	r, _, _ := strings.Cut(folder, "/")
	return r
}

// Each room imports the rooms that its row names and no others.
func TestRooms(t *testing.T) {
	for folder, p := range read(t) {
		may, known := rooms[room(folder)]
		if !known {
			t.Errorf("%s: no such room; the root shows the product", folder)
			continue
		}
		for _, f := range p.files {
			for _, i := range f.imports() {
				to, ours := strings.CutPrefix(i, module)
				if r := room(to); ours && r != room(folder) && !slices.Contains(may, r) {
					t.Errorf("%s: room %s may not import %s", f.path, room(folder), r)
				}
			}
		}
	}
}

// A tier never imports another tier.
func TestSiblings(t *testing.T) {
	packages := read(t)
	for _, from := range siblings {
		if packages[from] == nil {
			t.Errorf("there is no package %s", from)
			continue
		}
		for _, f := range packages[from].files {
			for _, i := range f.imports() {
				to, ours := strings.CutPrefix(i, module)
				if ours && to != from && slices.Contains(siblings, to) {
					t.Errorf("%s imports its sibling %s", f.path, to)
				}
			}
		}
	}
}

// Third-party modules, and unsafe, are imported only where the tables say so.
func TestThirdParty(t *testing.T) {
	used := map[string]bool{}
	for folder, p := range read(t) {
		for _, f := range slices.Concat(p.files, p.tests) {
			for _, i := range f.imports() {
				if i == "unsafe" && !slices.Contains(unsafePackages, folder) {
					t.Errorf("%s imports unsafe; only %v may", f.path, unsafePackages)
				}
				if strings.HasPrefix(i, module) || !strings.Contains(room(i), ".") || strings.HasSuffix(f.path, "_test.go") {
					continue
				}
				if !mayImport(folder, i, used) {
					t.Errorf("%s imports %s, which the table thirdParty does not allow", f.path, i)
				}
			}
		}
	}
	for m, by := range thirdParty {
		for _, where := range by {
			if !used[m+" "+where] {
				t.Errorf("nothing in %s imports %s: take it out of the table", where, m)
			}
		}
	}
}

// mayImport reports whether a folder may import a path of another module, and records the row that allows it.
func mayImport(folder, path string, used map[string]bool) bool {
	for m, by := range thirdParty {
		if path != m && !strings.HasPrefix(path, m+"/") {
			continue
		}
		for _, where := range by {
			if folder == where || strings.HasPrefix(folder, where+"/") {
				used[m+" "+where] = true
				return true
			}
		}
	}
	return false
}

// A package stands alone when two others need it, or when it has 300 lines of code. Commands, test helpers and the drivers
// of interop stand alone, too.
func TestPackagesAreNeeded(t *testing.T) {
	packages := read(t)
	importers := map[string]map[string]bool{} // of packages, by packages; tests aside
	for folder, p := range packages {
		for _, f := range p.files {
			for _, i := range f.imports() {
				if to, ours := strings.CutPrefix(i, module); ours {
					if importers[to] == nil {
						importers[to] = map[string]bool{}
					}
					importers[to][folder] = true
				}
			}
		}
	}
	for folder, p := range packages {
		if len(p.files) == 0 || p.files[0].tree.Name.Name == "main" || folder == "internal/arch" || room(folder) == "interop" {
			continue
		}
		n := len(importers[folder])
		helper := n == 0 && p.importsTesting() || strings.HasPrefix(folder, "internal/testkit")
		helper = helper || path.Dir(folder) == "cmd/kvasir/internal" // a command
		needed := n >= minImporters || p.codeLines >= minCodeLines || helper
		switch _, listed := small[folder]; {
		case !needed && !listed:
			t.Errorf("package %s has %d importers and %d lines of code: it belongs into the package that needs it", folder, n, p.codeLines)
		case needed && listed:
			t.Errorf("package %s has %d importers and %d lines of code: take it out of the table small", folder, n, p.codeLines)
		}
	}
	for folder := range small {
		if packages[folder] == nil {
			t.Errorf("there is no package %s: take it out of the table small", folder)
		}
	}
}

// The binary links no test helper: only tests, and helpers that import testing themselves, import internal/testkit.
func TestTestkit(t *testing.T) {
	for folder, p := range read(t) {
		for _, f := range p.files {
			if slices.Contains(f.imports(), module+"internal/testkit") && !p.importsTesting() {
				t.Errorf("%s imports internal/testkit, and %s is no test helper", f.path, folder)
			}
		}
	}
}

// importsTesting reports whether a file that is no test imports the package testing.
func (p *goPackage) importsTesting() bool {
	return slices.ContainsFunc(p.files, func(f *goFile) bool { return slices.Contains(f.imports(), "testing") })
}

// A package has the name of its folder, and a comment that says what it is.
func TestPackageClauses(t *testing.T) {
	for folder, p := range read(t) {
		commented := false
		for _, f := range slices.Concat(p.files, p.tests) {
			name := strings.TrimSuffix(f.tree.Name.Name, "_test")
			if name != path.Base(folder) && name != "main" {
				t.Errorf("%s: package %s stands in the folder %s", f.path, name, path.Base(folder))
			}
			if doc := f.tree.Doc.Text(); strings.HasPrefix(doc, "Package "+name+" ") || name == "main" && strings.HasPrefix(doc, "Command ") {
				commented = true
			}
		}
		if !commented && len(p.files) > 0 {
			t.Errorf("package %s has no package comment", folder)
		}
	}
}

// A file can be read in one sitting. Packages have no such limit: a package is as large as its subject.
func TestFiles(t *testing.T) {
	for _, p := range read(t) {
		for _, f := range slices.Concat(p.files, p.tests) {
			if n := strings.Count(string(f.text), "\n"); n > maxFileLines {
				t.Errorf("%s has %d lines, more than %d", f.path, n, maxFileLines)
			}
		}
	}
}

// codeLines counts the lines that hold a token, or a part of one: comments and blank lines do not count.
func codeLines(text []byte) (n int) {
	fset := token.NewFileSet()
	file := fset.AddFile("", -1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, 0)
	last := 0
	for {
		pos, tok, lit := s.Scan()
		if tok == token.EOF {
			return n
		}
		if tok == token.SEMICOLON && lit == "\n" {
			continue // the scanner adds it
		}
		line := file.Line(pos)
		for end := line + strings.Count(lit, "\n"); line <= end; line++ {
			if line > last {
				n, last = n+1, line
			}
		}
	}
}

func TestCodeLines(t *testing.T) {
	if n := codeLines([]byte("// a\npackage x\n\n/* b\nc */\nvar s = `1\n2`\n\nfunc f() { // d\n}\n")); n != 5 {
		t.Error(n)
	}
}

// go install MODULE/cmd/kvasir@VERSION refuses a module that replaces or excludes others, and the root of the repository shows the product.
func TestModuleCanBeInstalled(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if words := strings.Fields(line); len(words) > 0 && (words[0] == "replace" || words[0] == "exclude") {
			t.Errorf("go.mod: %s", line)
		}
	}
	const maxFolders, maxEntries = 14, 22
	entries, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	folders, shown := 0, 0
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") || e.Name() == "bin" || e.Name() == "dist" {
			continue
		}
		if shown++; e.IsDir() {
			folders++
		}
	}
	if folders > maxFolders || shown > maxEntries {
		t.Errorf("the root has %d folders and %d entries, more than %d and %d", folders, shown, maxFolders, maxEntries)
	}
}
