// Command mutate changes one place of the code at a time and reports which changes
// no test notices.
//
//	go run ./scripts/mutate -seed 1 -n 300 ./store ./pool ./lease ./lmcache ./server
//
// A mutant is judged by the tests of its package, then by those of the given
// packages that import it, directly or not. Sources stay as they are: the compiler
// gets the changed file as an overlay. Mutants that do not compile do not count.
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// mutant is one change: bytes [from, to) of a file become text.
type mutant struct {
	dir, path string
	src       []byte
	line      int
	from, to  int
	text      string
	what      string
}

func main() {
	seed := flag.Uint64("seed", 1, "of the sample")
	n := flag.Int("n", 300, "mutants that compile")
	limit := flag.Duration("timeout", 3*time.Minute, "for the tests of one package: longer is a mutant that is noticed")
	only := flag.String("only", "", "one mutant, as FILE:LINE:WHAT of a former run")
	flag.Parse()
	if err := run(*seed, *n, *limit, *only, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

func run(seed uint64, n int, limit time.Duration, only string, dirs []string) error {
	var all []mutant
	for _, dir := range dirs {
		found, err := mutants(dir)
		if err != nil {
			return err
		}
		all = append(all, found...)
	}
	judges, err := importers(dirs)
	if err != nil {
		return err
	}
	rnd := rand.New(rand.NewPCG(seed, 0))
	rnd.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	tmp, err := os.MkdirTemp("", "mutate")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	for _, dir := range dirs {
		if out, err := test("", dir, limit).CombinedOutput(); err != nil {
			return fmt.Errorf("the tests of %s fail without a change: %w\n%s", dir, err, out)
		}
	}
	tried, survived := 0, 0
	for i := range all {
		m := &all[i]
		name := fmt.Sprintf("%s:%d:%s", m.path, m.line, m.what)
		if only != "" && name != only {
			continue
		}
		if tried == n {
			break
		}
		verdict, err := judge(tmp, m, judges[m.dir], limit)
		if err != nil {
			return err
		}
		if verdict == "" {
			continue // it does not compile
		}
		tried++
		if verdict == "SURVIVED" {
			survived++
		}
		fmt.Printf("%-9s %s\n", verdict, name)
	}
	fmt.Printf("%d of %d mutants noticed (%.1f %%), of %d possible\n", tried-survived, tried, 100*float64(tried-survived)/float64(max(tried, 1)), len(all))
	return nil
}

// importers returns for each directory which of the directories' tests judge it: its
// own, then those of its importers.
func importers(dirs []string) (map[string][]string, error) {
	out := map[string][]string{}
	deps := map[string][]string{}
	paths := map[string]string{}
	for _, dir := range dirs {
		list, err := exec.Command("go", "list", "-f", "{{.ImportPath}} {{join .Deps \" \"}}", dir).Output()
		if err != nil {
			return nil, fmt.Errorf("go list %s: %w", dir, err)
		}
		f := strings.Fields(string(list))
		paths[dir], deps[dir] = f[0], f[1:]
	}
	for _, dir := range dirs {
		out[dir] = []string{dir}
		for _, other := range dirs {
			if other != dir && slices.Contains(deps[other], paths[dir]) {
				out[dir] = append(out[dir], other)
			}
		}
	}
	return out, nil
}

// judge returns KILLED, TIMEOUT or SURVIVED, or nothing for what does not compile.
func judge(tmp string, m *mutant, dirs []string, limit time.Duration) (string, error) {
	changed := filepath.Join(tmp, "mutant.go")
	text := slices.Concat(m.src[:m.from], []byte(m.text), m.src[m.to:])
	if err := os.WriteFile(changed, text, 0o600); err != nil {
		return "", err
	}
	abs, err := filepath.Abs(m.path)
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(tmp, "overlay.json")
	b, err := json.Marshal(map[string]map[string]string{"Replace": {abs: changed}})
	if err == nil {
		err = os.WriteFile(overlay, b, 0o600)
	}
	if err != nil {
		return "", err
	}
	if exec.Command("go", "build", "-overlay", overlay, m.dir).Run() != nil {
		return "", nil
	}
	for _, dir := range dirs {
		out, err := test(overlay, dir, limit).CombinedOutput()
		_ = os.RemoveAll(filepath.Join(dir, "testdata", "rapid")) // what failed would be played again for the next mutant
		if err == nil {
			continue
		}
		if bytes.Contains(out, []byte("panic: test timed out")) {
			return "TIMEOUT", nil
		}
		return "KILLED", nil
	}
	return "SURVIVED", nil
}

// test is the command that runs a package's tests.
func test(overlay, dir string, limit time.Duration) *exec.Cmd {
	args := []string{"test", "-vet=off", "-count=1", "-failfast", "-timeout", limit.String()}
	if overlay != "" {
		args = append(args, "-overlay", overlay)
	}
	return exec.Command("go", append(args, dir)...)
}

// mutants lists the changes that are possible in a directory's code.
func mutants(dir string) (out []mutant, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, err
	}
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") || strings.HasPrefix(filepath.Base(path), "crash_") {
			continue
		}
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, path, nil, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		src, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		add := func(from, to token.Pos, text, what string) {
			p := fset.Position(from)
			out = append(out, mutant{dir, path, src, p.Line, p.Offset, fset.Position(to).Offset, text, what})
		}
		ast.Inspect(f, func(n ast.Node) bool { return visit(n, src, fset, add) })
	}
	return out, nil
}

var swapped = map[token.Token]string{
	token.EQL: "!=", token.NEQ: "==", token.LSS: "<=", token.LEQ: "<", token.GTR: ">=", token.GEQ: ">",
	token.LAND: "||", token.LOR: "&&", token.ADD: "-", token.SUB: "+", token.MUL: "+", token.QUO: "*", token.AND: "|", token.OR: "&",
}

func visit(n ast.Node, src []byte, fset *token.FileSet, add func(from, to token.Pos, text, what string)) bool {
	code := func(n ast.Node) string {
		return string(src[fset.Position(n.Pos()).Offset:fset.Position(n.End()).Offset])
	}
	switch n := n.(type) {
	case *ast.GenDecl:
		return n.Tok != token.IMPORT && n.Tok != token.CONST
	case *ast.BinaryExpr:
		if to, ok := swapped[n.Op]; ok {
			add(n.OpPos, n.OpPos+token.Pos(len(n.Op.String())), to, n.Op.String()+" to "+to)
		}
	case *ast.IfStmt:
		add(n.Cond.Pos(), n.Cond.End(), "!("+code(n.Cond)+")", "if negated")
	case *ast.ExprStmt:
		if call, ok := n.X.(*ast.CallExpr); ok && !strings.HasPrefix(code(call.Fun), "s.log.") && code(call.Fun) != "panic" && !strings.HasSuffix(code(call.Fun), "lock") &&
			!strings.HasSuffix(code(call.Fun), "Lock") && !strings.HasPrefix(code(call.Fun), "crashPoint") && !strings.Contains(code(call.Fun), ".say") {
			add(n.Pos(), n.End(), "{ _ = 0 }", "call dropped")
		}
	case *ast.IncDecStmt:
		if n.Tok == token.INC {
			add(n.TokPos, n.TokPos+2, "--", "++ to --")
		}
	case *ast.AssignStmt:
		if n.Tok == token.ADD_ASSIGN {
			add(n.TokPos, n.TokPos+2, "-=", "+= to -=")
		} else if n.Tok == token.SUB_ASSIGN {
			add(n.TokPos, n.TokPos+2, "+=", "-= to +=")
		}
	case *ast.ReturnStmt:
		for _, r := range n.Results {
			if id, ok := r.(*ast.Ident); ok && (id.Name == "true" || id.Name == "false") {
				add(id.Pos(), id.End(), map[string]string{"true": "false", "false": "true"}[id.Name], "return not "+id.Name)
			}
		}
	case *ast.BranchStmt:
		if n.Label == nil && n.Tok == token.CONTINUE {
			add(n.Pos(), n.End(), "break", "continue to break")
		}
	}
	return true
}
