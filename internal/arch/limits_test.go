// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// peerFacing are the directories whose bounds docs/limits.md has: peers fill their tables.
var peerFacing = []string{
	"internal/httpserver", "internal/resp", "internal/safelog", "lmcache", "mooncake/bootstrap", "proxy", "proxy/blocks", "proxy/limits", "proxy/prefix",
	"server", "server/admin", "server/events", "server/explain", "server/lent", "server/offload", "server/usage", "server/workers",
	"store", "store/hold", "store/lease", "store/miss", "store/pool", "store/tenant", "store/tiering",
	"tier", "tier/disk", "tier/fs", "tier/generation", "tier/keeper", "tier/mooncakestore", "tier/redis", "tier/s3", "tier/vllm", "zmtp",
}

var boundName = regexp.MustCompile(`^(max|Max|most)[A-Z0-9]|^[Mm]ax$`)

// units of package time, for the evaluation of constants.
var units = map[string]time.Duration{"Nanosecond": 1, "Millisecond": time.Millisecond, "Second": time.Second, "Minute": time.Minute, "Hour": time.Hour}

// A bound is a number of the code, and whether it is a time.
type bound struct {
	value float64
	time  bool
	at    string // file and line
}

// bounds are the constants of the peer-facing packages with a bound's name, as DIRECTORY.NAME, and the defaults of their
// options, as DIRECTORY.o.FIELD: cmp.Or(o.FIELD, 4096). Of the latter those called Max must be listed.
func bounds(t *testing.T) map[string]bound {
	t.Helper()
	all := map[string]bound{}
	for _, dir := range peerFacing {
		names, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
		if err != nil || len(names) == 0 {
			t.Fatalf("%s has no Go files: %v", dir, err)
		}
		files, set := []*ast.File{}, token.NewFileSet()
		consts := map[string]ast.Expr{}
		for _, name := range names {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			f, err := parser.ParseFile(set, name, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, f)
			ast.Inspect(f, func(n ast.Node) bool {
				d, ok := n.(*ast.GenDecl)
				for i := 0; ok && d.Tok == token.CONST && i < len(d.Specs); i++ {
					s := d.Specs[i].(*ast.ValueSpec)
					for j, id := range s.Names {
						if j < len(s.Values) {
							consts[id.Name] = s.Values[j]
						}
					}
				}
				return true
			})
		}
		add := func(name string, at token.Pos, e ast.Expr) {
			if v, isTime, ok := evaluate(consts, e, 0); ok {
				all[dir+"."+name] = bound{v, isTime, set.Position(at).String()}
			}
		}
		for name, e := range consts {
			if boundName.MatchString(name) {
				add(name, e.Pos(), e)
			}
		}
		for _, f := range files {
			ast.Inspect(f, func(n ast.Node) bool {
				if c, ok := n.(*ast.CallExpr); ok && len(c.Args) == 2 && isCmpOr(c) {
					if s, ok := c.Args[0].(*ast.SelectorExpr); ok {
						if _, lit := evaluateLiteral(c.Args[1]); lit {
							add("o."+s.Sel.Name, c.Pos(), c.Args[1])
						}
					}
				}
				return true
			})
		}
	}
	return all
}

func isCmpOr(c *ast.CallExpr) bool {
	s, ok := c.Fun.(*ast.SelectorExpr)
	if !ok || s.Sel.Name != "Or" {
		return false
	}
	p, ok := s.X.(*ast.Ident)
	return ok && p.Name == "cmp"
}

func evaluateLiteral(e ast.Expr) (float64, bool) {
	v, _, ok := evaluate(nil, e, 0)
	return v, ok
}

// evaluate computes a constant expression of numbers, other constants of the package and units of package time.
func evaluate(consts map[string]ast.Expr, e ast.Expr, depth int) (v float64, isTime, ok bool) {
	if depth > 10 {
		return 0, false, false
	}
	switch e := e.(type) {
	case *ast.ParenExpr:
		return evaluate(consts, e.X, depth+1)
	case *ast.BasicLit:
		c := constant.MakeFromLiteral(e.Value, e.Kind, 0)
		if c.Kind() != constant.Int && c.Kind() != constant.Float {
			return 0, false, false
		}
		v, _ = constant.Float64Val(constant.ToFloat(c))
		return v, false, true
	case *ast.Ident:
		if of, known := consts[e.Name]; known {
			return evaluate(consts, of, depth+1)
		}
	case *ast.SelectorExpr:
		if p, isPackage := e.X.(*ast.Ident); isPackage && p.Name == "time" && units[e.Sel.Name] > 0 {
			return float64(units[e.Sel.Name]), true, true
		}
	case *ast.BinaryExpr:
		x, xt, okX := evaluate(consts, e.X, depth+1)
		y, yt, okY := evaluate(consts, e.Y, depth+1)
		if !okX || !okY {
			return 0, false, false
		}
		switch e.Op {
		case token.MUL:
			v = x * y
		case token.QUO:
			v = x / y
		case token.ADD:
			v = x + y
		case token.SUB:
			v = x - y
		case token.SHL:
			v = x * float64(uint64(1)<<uint(y))
		default:
			return 0, false, false
		}
		return v, xt || yt, true
	}
	return 0, false, false
}

// shown returns the ways in which the page writes a bound.
func (b bound) shown() (ways []string) {
	grouped := func(v float64) string {
		s := fmt.Sprintf("%.0f", v)
		for i := len(s) - 3; i > 0; i -= 3 {
			s = s[:i] + "," + s[i:]
		}
		return s
	}
	if b.time {
		d := time.Duration(b.value)
		for unit, name := range map[time.Duration]string{time.Millisecond: "ms", time.Second: "s", time.Minute: "minutes", time.Hour: "hours", 24 * time.Hour: "days", 365 * 24 * time.Hour: "years"} {
			if d%unit == 0 {
				ways = append(ways, grouped(float64(d/unit))+" "+name)
			}
		}
		return ways
	}
	ways = append(ways, grouped(b.value))
	for shift := 10; shift < 50; shift++ {
		if b.value == float64(uint64(1)<<shift) {
			ways = append(ways, fmt.Sprintf("2^%d", shift))
		}
	}
	for i, unit := range []string{"B", "KiB", "MiB", "GiB"} {
		if v := b.value / float64(uint64(1)<<(10*i)); v >= 1 && v == float64(int64(v)) {
			ways = append(ways, grouped(v)+" "+unit)
		}
	}
	return ways
}

// rowsOf returns the rows of docs/limits.md, without their first cell's spaces.
func rowsOf(t *testing.T) (rows []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "docs/limits.md"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if cells := strings.Split(line, "|"); len(cells) == 5 && !strings.HasPrefix(cells[1], " ---") && cells[1] != " what " {
			rows = append(rows, strings.TrimSpace(strings.Trim(strings.TrimSpace(line), "|")))
		}
	}
	return rows
}

// hasNumber reports whether a row shows one of the ways, as a number of its own.
func hasNumber(row string, ways []string) bool {
	for _, way := range ways {
		for from := 0; ; {
			i := strings.Index(row[from:], way)
			if i < 0 {
				break
			}
			i += from
			end := i + len(way)
			if (i == 0 || !strings.ContainsRune("0123456789,.^", rune(row[i-1]))) && (end == len(row) || !strings.ContainsRune("0123456789^", rune(row[end]))) &&
				!(end+1 < len(row) && row[end] == ',' && row[end+1] >= '0' && row[end+1] <= '9') {
				return true
			}
			from = end
		}
	}
	return false
}

// Each bound of a table that a peer can fill has its number in a row of docs/limits.md, or stands in elsewhere with the
// reason why it has none. A new bound and a changed number fail.
func TestLimitsPageHasTheBoundsOfTheCode(t *testing.T) {
	rows, all := rowsOf(t), bounds(t)
	if len(rows) < 80 || len(all) < 150 {
		t.Fatalf("%d rows, %d bounds: the walk is broken", len(rows), len(all))
	}
	listed := map[string]string{}
	for begin, names := range limitRows {
		at := slices.IndexFunc(rows, func(r string) bool { return strings.HasPrefix(r, begin) })
		if at < 0 {
			t.Errorf("docs/limits.md has no row that begins with %q", begin)
			continue
		}
		for _, name := range strings.Fields(names) {
			listed[name] = begin
			b, ok := all[name]
			switch {
			case !ok:
				t.Errorf("%s: the code has no bound %s", begin, name)
			case !hasNumber(rows[at], b.shown()):
				t.Errorf("docs/limits.md: %q shows none of %q, which %s of %s is", begin, b.shown(), name, b.at)
			}
		}
	}
	for why, names := range elsewhere {
		for _, name := range strings.Fields(names) {
			if _, ok := all[name]; !ok {
				t.Errorf("%s: the code has no bound %s", why, name)
			}
			if begin, twice := listed[name]; twice {
				t.Errorf("%s is in the row %q and elsewhere", name, begin)
			}
			listed[name] = why
		}
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		_, option, isOption := strings.Cut(name, ".o.")
		if listed[name] == "" && (!isOption || strings.HasPrefix(option, "Max")) {
			t.Errorf("%s of %s (%s) has no row of docs/limits.md: add it to one and to limitRows, or to elsewhere", name, all[name].at, strings.Join(all[name].shown(), ", "))
		}
	}
}
