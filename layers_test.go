// Package kvasir holds the repository's own tests: the layer test.
package kvasir

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/kvasir-kv/kvasir"

// layers places each package. A package imports packages of lower layers only;
// ARCHITECTURE.md describes them. A package without an entry fails the test.
var layers = map[string]int{
	"internal/rawio":        -1, // below everything
	"internal/loopback":     -1,
	"internal/safelog":      -1,
	"internal/httpguard":    -1,
	"internal/vectors":      0,
	"internal/pickle":       0,
	"internal/peercred":     0,
	"internal/leaks":        2,
	"internal/smallfs":      0,
	"kv":                    0,
	"zmtp":                  0,
	"internal/invariant":    -1,
	"shm":                   1,
	"arena":                 1,
	"evict":                 1,
	"lease":                 1,
	"coordinator":           1,
	"lmcache":               1,
	"mooncake/bootstrap":    1,
	"paged":                 1,
	"transfer":              1,
	"pool":                  2,
	"transfer/transfertool": 2,
	"interop/transfer":      6,
	"interop/mooncake/both": 6,
	"mooncake":              2,
	"relay":                 4,
	"lmcache/tracker":       2,
	"lmcache/worker":        2,
	"store":                 3,
	"server":                4,
	"sim":                   4,
	"internal/cli":          6,
	"scripts/mutate":        8,
	"cmd/kvasir":            7,
}

// mayImportUnsafe lists the only packages that may convert between bytes and
// words or map memory.
var mayImportUnsafe = map[string]bool{"shm": true, "internal/rawio": true}

func TestLayers(t *testing.T) {
	files, commented := 0, map[string]bool{}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); path != "." && (strings.HasPrefix(name, ".") || name == "testdata" || name == "bin") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || path == "layers_test.go" {
			return nil
		}
		files++
		pkg := filepath.ToSlash(filepath.Dir(path))
		layer, ok := layers[pkg]
		if !ok {
			t.Errorf("%s: package %s has no layer; add it to the table in layers_test.go", path, pkg)
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly|parser.ParseComments)
		if err != nil {
			return err
		}
		test := strings.HasSuffix(path, "_test.go")
		if !test {
			commented[pkg] = commented[pkg] || isPackageComment(f.Doc)
		}
		for _, imp := range f.Imports {
			to, err := strconv.Unquote(imp.Path.Value)
			if err != nil {
				return err
			}
			if to == "unsafe" && !mayImportUnsafe[pkg] {
				t.Errorf("%s imports unsafe; only shm and internal/rawio may", path)
			}
			dep, ours := strings.CutPrefix(to, module+"/")
			if !ours || dep == pkg {
				continue
			}
			below, ok := layers[dep]
			switch {
			case !ok:
				t.Errorf("%s imports %s, which has no layer", path, dep)
			case below >= layer && !test:
				t.Errorf("%s (layer %d) imports %s (layer %d): imports point down", path, layer, dep, below)
			case below > layer:
				t.Errorf("%s (a test of layer %d) imports %s (layer %d)", path, layer, dep, below)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for pkg, ok := range commented {
		if !ok {
			t.Errorf("package %s has no package comment", pkg)
		}
	}
	t.Logf("%d files in %d packages", files, len(commented))
	if files == 0 {
		t.Fatal("no Go file found: the walk is broken")
	}
}

func isPackageComment(doc *ast.CommentGroup) bool {
	return doc != nil && (strings.HasPrefix(doc.Text(), "Package ") || strings.HasPrefix(doc.Text(), "Command "))
}
