// SPDX-License-Identifier: Apache-2.0

// Command mutate changes one place of the code at a time and reports which changes
// no test notices.
//
//	go run ./internal/tools/mutate -seed 1 -n 300 -judges ./server/admin,./server/workers ./store ./store/pool ./server
//
// A mutant is judged by the tests of its package, and then by the tests of those packages, among the judges and the given packages,
// that import it, directly or not, or whose tests do. Tests that run much longer than without the change count as having noticed it.
// The source files stay unchanged: the compiler gets the changed file as an overlay. Mutants that do not compile do not count, nor do
// those that equivalent.txt lists with a reason why no test can notice them.
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
	"sync"
	"syscall"
	"time"
)

// mutant is one change: the bytes [from, to) of a file are replaced by text.
type mutant struct {
	dir, path string
	src       []byte
	line      int
	code      string // name of the function, and the line
	from, to  int
	text      string
	what      string // what changes, with " #2" for the second such change of a line
}

func (m *mutant) name() string { return fmt.Sprintf("%s:%d:%s", m.path, m.line, m.what) }

// key returns the name of the mutant in equivalent.txt.
func (m *mutant) key() string { return m.path + " " + m.code + ": " + m.what }

func main() {
	seed := flag.Uint64("seed", 1, "of the sample")
	n := flag.Int("n", 300, "mutants that compile")
	limit := flag.Duration("timeout", 3*time.Minute, "for the tests of one package: longer is a mutant that is noticed")
	least := flag.Int("least", 0, "mutants of each package at least, before the rest of the sample")
	only := flag.String("only", "", "one mutant, as FILE:LINE:WHAT of a former run, or all of a FILE: or FILE:LINE:")
	known := flag.String("equivalent", "internal/tools/mutate/equivalent.txt", "mutants that no test can notice, with reasons")
	workers := flag.Int("j", 1, "mutants that are judged at the same time")
	judges := flag.String("judges", "", "further packages whose tests judge what they import, with commas between")
	flag.Parse()
	// A mutant that allocates without end must not take all memory of the machine.
	_ = syscall.Setrlimit(syscall.RLIMIT_DATA, &syscall.Rlimit{Cur: maxData, Max: maxData})
	t := tool{limit: *limit, only: *only, left: *n, least: *least, workers: *workers}
	if *judges != "" {
		t.judges = strings.Split(*judges, ",")
	}
	err := t.readEquivalent(*known)
	if err == nil {
		err = t.run(*seed, flag.Args())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

// maxData is the largest memory of a process of the tests, in bytes. A process that needs more ends, as for a failed test.
const maxData = 8 << 30

// tool is one run of this command.
type tool struct {
	limit      time.Duration
	only       string
	workers    int
	least      int // how many mutants of each package are tried before the rest of the sample
	judges     []string
	equivalent map[string]string        // reasons, by FILE FUNCTION: LINE: WHAT
	took       map[string]time.Duration // how long a package's tests take without a change

	mu   sync.Mutex
	left int // number of mutants that are still to be tried
	err  error
}

// score counts the mutants of one package.
type score struct{ tried, noticed, equivalent int }

func (s score) String() string {
	return fmt.Sprintf("%d of %d mutants noticed (%.1f %%), %d equivalent ones left out",
		s.noticed, s.tried, 100*float64(s.noticed)/float64(max(s.tried, 1)), s.equivalent)
}

func (t *tool) run(seed uint64, dirs []string) error {
	var all []mutant
	for _, dir := range dirs {
		found, err := mutants(dir)
		if err != nil {
			return err
		}
		all = append(all, found...)
	}
	if err := t.checkEquivalent(all, dirs); err != nil {
		return err
	}
	judges, err := importers(dirs, append(t.judges, dirs...))
	if err != nil {
		return err
	}
	rnd := rand.New(rand.NewPCG(seed, 0))
	rnd.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	inTurn(all, t.least)
	tmp, err := os.MkdirTemp("", "mutate")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	t.took = map[string]time.Duration{}
	for _, dir := range append(slices.Clone(t.judges), dirs...) {
		began := time.Now()
		if out, err := test("", dir, t.limit).CombinedOutput(); err != nil {
			return fmt.Errorf("the tests of %s fail without a change: %w\n%s", dir, err, out)
		}
		t.took[dir] = time.Since(began)
	}
	scores := map[string]*score{}
	for _, dir := range dirs {
		scores[dir] = &score{}
	}
	var sample []*mutant
	for i := range all {
		if m := &all[i]; t.only == "" || m.name() == t.only || strings.HasSuffix(t.only, ":") && strings.HasPrefix(m.name(), t.only) {
			sample = append(sample, m)
		}
	}
	var wg sync.WaitGroup
	for i := range t.workers {
		wg.Go(func() {
			for m := t.next(&sample, scores); m != nil; m = t.next(&sample, scores) {
				verdict, err := t.judge(filepath.Join(tmp, fmt.Sprint(i)), m, judges[m.dir])
				t.settle(m, verdict, err, scores[m.dir])
			}
		})
	}
	wg.Wait()
	if t.err != nil {
		return t.err
	}
	total := score{}
	for _, dir := range dirs {
		of := *scores[dir]
		fmt.Printf("%-12s %v\n", dir, of)
		total = score{total.tried + of.tried, total.noticed + of.noticed, total.equivalent + of.equivalent}
	}
	fmt.Printf("%-12s %v, of %d possible\n", "all", total, len(all))
	return nil
}

// inTurn moves the first `least` mutants of each package to the front: first one of each package, then the second of each, and so on.
func inTurn(all []mutant, least int) {
	seen := map[string]int{}
	turn := make(map[*mutant]int, len(all))
	order := make([]*mutant, len(all))
	for i := range all {
		m := &all[i]
		order[i], turn[m] = m, min(seen[m.dir], least)
		seen[m.dir]++
	}
	slices.SortStableFunc(order, func(a, b *mutant) int { return turn[a] - turn[b] })
	out := make([]mutant, len(all))
	for i, m := range order {
		out[i] = *m
	}
	copy(all, out)
}

// next removes the next mutant from the sample and returns it; nil when enough mutants are judged.
func (t *tool) next(sample *[]*mutant, scores map[string]*score) *mutant {
	t.mu.Lock()
	defer t.mu.Unlock()
	for t.left > 0 && len(*sample) > 0 && t.err == nil {
		m := (*sample)[0]
		*sample = (*sample)[1:]
		if _, ok := t.equivalent[m.key()]; !ok {
			t.left--
			return m
		}
		scores[m.dir].equivalent++
	}
	return nil
}

// settle prints the verdict about a mutant and counts it in `of`, the score of the mutant's package. An error ends the run.
func (t *tool) settle(m *mutant, verdict string, err error, of *score) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case err != nil:
		t.err = err
		return
	case verdict == "": // the mutant does not compile: another one is tried instead
		t.left++
		return
	case verdict != "SURVIVED":
		of.noticed++
	}
	of.tried++
	fmt.Printf("%-9s %s\n", verdict, m.name())
}

// readEquivalent reads the list of mutants that no test can notice: a line "FILE FUNCTION: LINE", and below it, indented, a line "WHAT:
// REASON" for each of its mutants.
func (t *tool) readEquivalent(path string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	t.equivalent = map[string]string{}
	at := ""
	for line := range strings.Lines(string(b)) {
		text := strings.TrimSpace(line)
		switch {
		case text == "" || text[0] == '#':
		case line[0] != '\t':
			at = text
		default:
			what, why, ok := strings.Cut(text, ": ")
			if !ok || at == "" {
				return fmt.Errorf("%s: %q gives no reason", path, text)
			}
			t.equivalent[at+": "+what] = why
		}
	}
	return nil
}

// checkEquivalent returns an error if equivalent.txt lists a mutant that the packages do not have.
func (t *tool) checkEquivalent(all []mutant, dirs []string) error {
	there := map[string]bool{}
	for i := range all {
		there[all[i].key()] = true
	}
	for key := range t.equivalent {
		file, _, _ := strings.Cut(key, " ")
		if !there[key] && slices.ContainsFunc(dirs, func(dir string) bool { return filepath.Clean(dir) == filepath.Dir(file) }) {
			return fmt.Errorf("%q is listed as equivalent, and there is no such mutant", key)
		}
	}
	return nil
}

// importers returns, for each directory, the directories whose tests judge it: first its own, then those of its importers, and those
// whose tests import it.
func importers(dirs, judges []string) (map[string][]string, error) {
	out := map[string][]string{}
	deps := map[string][]string{}
	paths := map[string]string{}
	for _, dir := range judges {
		list, err := exec.Command("go", "list", "-test", "-f", "{{.ImportPath}} {{join .Deps \" \"}}", dir).Output() // the package first, then its test packages
		if err != nil {
			return nil, fmt.Errorf("go list %s: %w", dir, err)
		}
		f := strings.Fields(string(list))
		paths[dir], deps[dir] = f[0], f[1:]
	}
	for _, dir := range dirs {
		out[dir] = []string{dir}
		for _, other := range judges {
			if other != dir && slices.Contains(deps[other], paths[dir]) {
				out[dir] = append(out[dir], other)
			}
		}
	}
	return out, nil
}

// judge runs the tests against a mutant. It returns KILLED, TIMEOUT or SURVIVED, or "" for a mutant that does not compile.
func (t *tool) judge(tmp string, m *mutant, dirs []string) (string, error) {
	if err := os.MkdirAll(tmp, 0o700); err != nil {
		return "", err
	}
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
		limit := min(t.limit, 30*time.Second+5*t.took[dir])
		out, err := test(overlay, dir, limit).CombinedOutput()
		_ = os.RemoveAll(filepath.Join(dir, "testdata", "rapid")) // otherwise rapid would repeat a failed case with the next mutant
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

// test returns the command that runs the tests of a package.
func test(overlay, dir string, limit time.Duration) *exec.Cmd {
	args := []string{"test", "-vet=off", "-ldflags=-s -w", "-count=1", "-failfast", "-timeout", limit.String()}
	if overlay != "" {
		args = append(args, "-overlay", overlay)
	}
	return exec.Command("go", append(args, dir)...)
}

// mutants returns all changes that are possible in the code of a directory.
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
		lines := strings.Split(string(src), "\n")
		var found []mutant
		add := func(from, to token.Pos, text, what string) {
			p := fset.Position(from)
			code := funcAt(f, from) + ": " + strings.TrimSpace(lines[p.Line-1])
			found = append(found, mutant{dir, path, src, p.Line, code, p.Offset, fset.Position(to).Offset, text, what})
		}
		ast.Inspect(f, func(n ast.Node) bool { return visit(n, src, fset, add) })
		out = append(out, numbered(found)...)
	}
	return out, nil
}

// funcAt returns the name of the function that contains a position; "": there is none.
func funcAt(f *ast.File, at token.Pos) string {
	for _, d := range f.Decls {
		if d, ok := d.(*ast.FuncDecl); ok && d.Pos() <= at && at < d.End() {
			return d.Name.Name
		}
	}
	return ""
}

// numbered numbers the equal changes of one line, from left to right.
func numbered(found []mutant) []mutant {
	slices.SortStableFunc(found, func(a, b mutant) int { return a.from - b.from })
	seen := map[string]int{}
	for i := range found {
		m := &found[i]
		at := fmt.Sprint(m.line, m.what)
		if seen[at]++; seen[at] > 1 {
			m.what += fmt.Sprint(" #", seen[at])
		}
	}
	return found
}

var swapped = map[token.Token]string{
	token.EQL: "!=", token.NEQ: "==", token.LSS: "<=", token.LEQ: "<", token.GTR: ">=", token.GEQ: ">",
	token.LAND: "||", token.LOR: "&&", token.ADD: "-", token.SUB: "+", token.MUL: "+", token.QUO: "*", token.AND: "|", token.OR: "&",
}

// droppable reports whether a mutant may leave out a call of that function. It is false for logs, locks and panics.
func droppable(function string) bool {
	return !strings.Contains(strings.ToLower(function), "log.") && function != "panic" && !strings.HasSuffix(function, "lock") &&
		!strings.HasSuffix(function, "Lock") && !strings.HasPrefix(function, "crashPoint") && !strings.Contains(function, ".say")
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
		if call, ok := n.X.(*ast.CallExpr); ok && droppable(code(call.Fun)) {
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
