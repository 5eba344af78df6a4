// Package kvasir holds the repository's own tests: the layer test.
package kvasir

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/kvasir-kv/kvasir"

// layers places each package. A package imports packages of lower layers only;
// ARCHITECTURE.md describes them. A package without an entry fails the test.
var layers = map[string]int{
	"internal/filelock":            -2, // below everything
	"internal/rawio":               -1,
	"internal/resp":                -1,
	"internal/nearest":             -1,
	"internal/size":                -1,
	"internal/jsonfault":           -1,
	"internal/safelog":             -1,
	"internal/httpguard":           -1,
	"internal/hostmem":             -1,
	"internal/histogram":           -1,
	"internal/options":             -1,
	"internal/options/optionstest": 0,
	"internal/metrics":             0,
	"internal/vectors":             0,
	"internal/pickle":              0,
	"internal/pydantic":            -1,
	"internal/peercred":            -1,
	"internal/leaks":               2,
	"internal/statefile":           -1,
	"internal/listen":              -1,
	"internal/settings":            1,
	"internal/together":            -1,
	"internal/slowlog":             -1,
	"internal/transferlog":         -1,
	"internal/topview":             8,
	"internal/upstream":            0,
	"internal/otlp":                -1,
	"internal/certfile":            -1,
	"internal/growing":             -1,
	"internal/held":                -1,
	"internal/numbered":            -1,
	"internal/paced":               -1,
	"internal/share":               -1,
	"internal/aws":                 -1,
	"internal/turns":               -1,
	"internal/crew":                -1,
	"internal/origin":              0,
	"internal/smallfs":             0,
	"internal/ports":               -1,
	"internal/goroutines":          -1,
	"kv":                           0,
	"openai":                       0,
	"benchmark":                    0,
	"benchmark/load":               2,
	"benchmark/report":             1,
	"internal/benchtool":           3,
	"internal/completion":          0,
	"workload":                     0,
	"zmtp":                         0,
	"internal/invariant":           -1,
	"shm":                          1,
	"arena":                        1,
	"evict":                        1,
	"lease":                        1,
	"coordinator":                  0,
	"check":                        0,
	"counters":                     0,
	"miss":                         1,
	"objects":                      1,
	"tier":                         1,
	"tier/tiertest":                2,
	"tier/guarded":                 2,
	"tier/fs":                      2,
	"tier/disk":                    2,
	"tier/disk/touch":              -1,
	"tier/redis":                   2,
	"tier/mooncakestore":           3,
	"tier/s3":                      2,
	"probe":                        2,
	"warming":                      2,
	"recheck":                      2,
	"internal/tiers":               4,
	"internal/tiertool":            5,
	"outbox":                       2,
	"estimate":                     0,
	"lmcache":                      1,
	"mooncake/bootstrap":           1,
	"paged":                        1,
	"transfer":                     1,
	"hold":                         2,
	"backing":                      2,
	"pool":                         2,
	"interop/transfer":             8,
	"interop/mooncake/both":        8,
	"interop/proxy/load":           8,
	"interop/proxy/forward":        8,
	"interop/store/bench":          8,
	"interop/bench/plain":          8,
	"interop/fleet":                8,
	"interop/proxy/mockengine":     8,
	"internal/transfertool":        2,
	"mooncake/wire":                1,
	"internal/structpack":          -1,
	"mooncake/store/storetest":     1,
	"mooncake/store":               2,
	"mooncake/store/connector":     3,
	"mooncake/scheduler":           2,
	"kvconfig":                     2,
	"sim/sched":                    1,
	"sim/kvmem":                    1,
	"sim/clock":                    0,
	"sim/replay":                   1,
	"sim/policies":                 2,
	"sim/virtual":                  4,
	"sim/sweep":                    5,
	"sim/fleet":                    5,
	"internal/simcmd":              6,
	"sim/tables":                   5,
	"sim/engine":                   6,
	"sim/api":                      7,
	"proxy":                        7,
	"internal/proxytool":           8,
	"proxy/prefix":                 1,
	"proxy/relayed":                1,
	"proxy/keys":                   1,
	"proxy/limits":                 1,
	"kvevent":                      1,
	"proxy/blocks":                 2,
	"proxy/blocks/blockstest":      2,
	"proxy/limits/limitstest":      0,
	"sim/demo":                     7,
	"mooncake":                     2,
	"mooncake/v013":                3,
	"relay":                        4,
	"lmcache/connector":            2,
	"store":                        3,
	"access":                       2,
	"lent":                         4,
	"events":                       4,
	"p2p":                          4,
	"explain":                      4,
	"tenants":                      2,
	"tenants/terms":                3,
	"lifetime":                     2,
	"tally":                        4,
	"workers":                      5,
	"server":                       6,
	"admin":                        7,
	"sim":                          4,
	"internal/cli":                 9,
	"scripts/mutate":               11,
	"cmd/kvasir":                   10,
}

// thirdParty lists which packages import which modules of others, tests aside. What
// is not here may not be imported: a new dependency is a decision.
var thirdParty = map[string][]string{
	"github.com/alecthomas/kong":          {"internal/cli", "internal/completion", "internal/settings"},
	"github.com/prometheus/client_golang": {"internal/metrics"},
	"github.com/prometheus/common":        {"internal/metrics"},
	"github.com/tinylib/msgp":             {"kvevent", "lmcache", "mooncake/wire"},
	"github.com/zeebo/blake3":             {"kv"},
	"github.com/zeebo/xxh3":               {"hold", "internal/tiertool", "lmcache", "mooncake", "pool", "proxy/blocks", "proxy/prefix", "relay", "sim/engine", "tier", "tier/disk", "tier/fs", "tier/guarded", "tier/redis", "tier/tiertest"},
	"go.yaml.in/yaml/v3":                  {"internal/settings"},
	"go.uber.org/goleak":                  {"internal/goroutines"},
	"golang.org/x/sys":                    {"access", "internal/peercred", "internal/rawio", "internal/topview", "internal/transfertool", "pool", "server", "shm", "tier/disk", "tier/fs"},
}

// mayImportUnsafe lists the only packages that may convert between bytes and
// words or map memory.
var mayImportUnsafe = map[string]bool{"shm": true, "internal/rawio": true}

func TestLayers(t *testing.T) {
	files, commented, used := 0, map[string]bool{}, map[string]bool{}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); path != "." && (strings.HasPrefix(name, ".") || name == "testdata" || name == "bin") {
				return filepath.SkipDir
			}
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil && path != "." {
				return filepath.SkipDir // another module, of peers to test against
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || !strings.Contains(path, "/") {
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
			if !ours && !test && strings.Contains(to, ".") && !mayImport(pkg, to, used) {
				t.Errorf("%s imports %s, which layers_test.go does not allow it", path, to)
			}
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
	for m, by := range thirdParty {
		for _, pkg := range by {
			if !used[m+" by "+pkg] {
				t.Errorf("%s does not import %s any more: take it out of the table", pkg, m)
			}
		}
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

// mayImport reports whether a package may import a path of somebody else's module,
// and notes that it does.
func mayImport(pkg, path string, used map[string]bool) bool {
	for m, by := range thirdParty {
		if path == m || strings.HasPrefix(path, m+"/") {
			used[m+" by "+pkg] = true
			return slices.Contains(by, pkg)
		}
	}
	return false
}

func isPackageComment(doc *ast.CommentGroup) bool {
	return doc != nil && (strings.HasPrefix(doc.Text(), "Package ") || strings.HasPrefix(doc.Text(), "Command "))
}
