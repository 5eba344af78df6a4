// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// code has what the reference needs from the source files.
type code struct {
	metrics   []metric
	routes    []route
	variables []string     // environment variables, sorted by name
	tests     [][][]string // by test file: the words of the string literals in each call and list
}

// A metric is a field with a tag of package internal/metrics.
type metric struct {
	name, kind, help, file string
	labels                 []string
}

// A route is a path of an HTTP server. Its method is empty if the code accepts several.
type route struct{ method, path, file string }

var (
	routeText = regexp.MustCompile(`^(?:(GET|POST|PUT|DELETE|PATCH|HEAD) )?(/[\w{}$./-]*)$`)
	variable  = regexp.MustCompile(`^(?:(?:KVASIR|LMCACHE|VLLM|AWS|OPENAI|MOONCAKE|XDG|OTEL|NO|NOTIFY|SOURCE)_[A-Z0-9_]*[A-Z0-9]|TERM)$`)
)

// notProduct are the folders whose code does not belong to the product.
var notProduct = []string{"interop", "internal/tools", "internal/testkit", "internal/arch", "docs"}

// scan reads the Go files in root and below.
func scan(root string) (*code, error) {
	c := &code{}
	err := filepath.WalkDir(root, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		if d.IsDir() {
			if n := d.Name(); rel != "." && (strings.HasPrefix(n, ".") || n == "testdata" || n == "bin" || slices.Contains(notProduct, rel)) {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(rel, ".go") || strings.HasSuffix(rel, "crash_on.go") { // that file is only in a test build
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		if strings.HasSuffix(rel, "_test.go") {
			c.tests = append(c.tests, commandLines(f))
		} else {
			s := &source{code: c, file: rel}
			ast.Inspect(f, s.visit)
		}
		return nil
	})
	slices.Sort(c.variables)
	c.variables = slices.Compact(c.variables)
	return c, err
}

// source is a source file of the product.
type source struct {
	*code
	file string
}

func (s *source) visit(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.Field:
		s.tag(n)
	case *ast.BasicLit:
		if text, ok := literal(n); ok && variable.MatchString(text) {
			s.variables = append(s.variables, text)
		}
	case *ast.CallExpr:
		s.call(n)
	case *ast.RangeStmt:
		if list, ok := n.X.(*ast.CompositeLit); ok && registers(n.Body) {
			s.list(list)
		}
	case *ast.ValueSpec:
		for i, name := range n.Names {
			if list, ok := valueOf(n, i).(*ast.CompositeLit); ok && name.Name == "routes" {
				s.list(list)
			}
		}
	case *ast.SwitchStmt:
		s.choices(n)
	}
	return true
}

func valueOf(n *ast.ValueSpec, i int) ast.Expr {
	if i < len(n.Values) {
		return n.Values[i]
	}
	return nil
}

// tag records a field that has the tag of a metric.
func (s *source) tag(f *ast.Field) {
	if f.Tag == nil {
		return
	}
	text, _ := literal(f.Tag)
	tag := reflect.StructTag(text)
	for _, kind := range []string{"counter", "gauge", "histogram"} {
		name, ok := tag.Lookup(kind)
		if !ok {
			continue
		}
		m := metric{name: name, kind: kind, help: tag.Get("help"), file: s.file}
		if label := tag.Get("label"); label != "" {
			m.labels = strings.Split(label, ",")
		}
		if always := tag.Get("always"); always != "" {
			m.labels = append(m.labels, strings.Split(always, ",")...)
		}
		s.metrics = append(s.metrics, m)
	}
}

// callName returns the last part of the name of the called function.
func callName(n *ast.CallExpr) string {
	switch f := n.Fun.(type) {
	case *ast.Ident:
		return f.Name
	case *ast.SelectorExpr:
		return f.Sel.Name
	}
	return ""
}

// call records the route that a call registers.
func (s *source) call(n *ast.CallExpr) {
	if len(n.Args) < 2 {
		return
	}
	text, ok := literal(n.Args[0])
	if !ok {
		return
	}
	switch callName(n) {
	case "Handle", "HandleFunc", "handle", "one":
		s.route(text)
	case "post":
		s.route("POST " + text)
	}
}

func (s *source) route(text string) {
	if m := routeText.FindStringSubmatch(text); m != nil && (m[2] == "/{$}" || !strings.HasSuffix(m[2], "/")) {
		s.routes = append(s.routes, route{m[1], m[2], s.file})
	}
}

// registers reports whether a loop registers routes.
func registers(b *ast.BlockStmt) (found bool) {
	ast.Inspect(b, func(n ast.Node) bool {
		if c, ok := n.(*ast.CallExpr); ok {
			found = found || strings.HasPrefix(callName(c), "Handle")
		}
		return !found
	})
	return found
}

// list records the routes in a list, or in the keys of a map.
func (s *source) list(l *ast.CompositeLit) {
	for _, e := range l.Elts {
		if pair, ok := e.(*ast.KeyValueExpr); ok {
			e = pair.Key
		}
		if text, ok := literal(e); ok {
			s.route(text)
		}
	}
}

// choices records the routes of a switch over a request's path, whose cases are paths or comparisons with paths.
func (s *source) choices(n *ast.SwitchStmt) {
	ofPath := func(e ast.Node) (found bool) {
		ast.Inspect(e, func(n ast.Node) bool {
			path, ok := n.(*ast.SelectorExpr)
			if ok && path.Sel.Name == "Path" {
				if url, ok := path.X.(*ast.SelectorExpr); ok && url.Sel.Name == "URL" {
					_, direct := url.X.(*ast.Ident)
					found = found || direct
				}
			}
			return !found
		})
		return found
	}
	known := n.Init != nil && ofPath(n.Init) || n.Tag != nil && ofPath(n.Tag)
	for _, stmt := range n.Body.List {
		for _, e := range stmt.(*ast.CaseClause).List {
			if known || n.Tag == nil && comparesPath(e) {
				s.choice(e)
			}
		}
	}
}

// comparesPath reports whether a condition uses a variable path and the method of a request.
func comparesPath(e ast.Expr) bool {
	var path, method bool
	ast.Inspect(e, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.Ident:
			path, method = path || n.Name == "path", method || n.Name == "reads"
		case *ast.SelectorExpr:
			method = method || strings.HasPrefix(n.Sel.Name, "Method")
		}
		return true
	})
	return path && method
}

// choice records the paths of a case, with the method with which the case compares.
func (s *source) choice(e ast.Expr) {
	var paths []string
	method := ""
	ast.Inspect(e, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BasicLit:
			text, _ := literal(n)
			paths = append(paths, text)
		case *ast.Ident:
			if n.Name == "reads" {
				method = "GET "
			}
		case *ast.SelectorExpr:
			if m, ok := strings.CutPrefix(n.Sel.Name, "Method"); ok {
				method = strings.ToUpper(m) + " "
			}
		}
		return true
	})
	for _, p := range paths {
		if !strings.HasSuffix(p, "/") && !strings.Contains(p, " ") {
			p = method + p
		}
		s.route(p)
	}
}

func literal(e ast.Expr) (string, bool) {
	lit, ok := e.(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return "", false
	}
	text, err := strconv.Unquote(lit.Value)
	return text, err == nil
}

// commandLines returns the words of the string literals in each call and each list.
func commandLines(f *ast.File) (lines [][]string) {
	ast.Inspect(f, func(n ast.Node) bool {
		var args []ast.Expr
		switch n := n.(type) {
		case *ast.CallExpr:
			args = n.Args
		case *ast.CompositeLit:
			args = n.Elts
		}
		var words []string
		for _, a := range args {
			if text, ok := literal(a); ok {
				words = append(words, strings.Fields(text)...)
			}
		}
		if words != nil {
			lines = append(lines, words)
		}
		return true
	})
	return lines
}

// untested returns the commands that no test file runs. A file runs a command if a line has all words of the command, or if one line,
// in a helper, has the first word and another line has the rest. A line that asks for help does not count.
func untested(commands []string, files [][][]string) (missing []string) {
	for _, command := range commands {
		first, rest, below := strings.Cut(command, " ")
		if !slices.ContainsFunc(files, func(lines [][]string) bool {
			has := func(words ...string) bool {
				return slices.ContainsFunc(lines, func(l []string) bool { return follows(l, words) && !slices.Contains(l, "--help") })
			}
			return has(strings.Fields(command)...) || below && has(first) && has(rest)
		}) {
			missing = append(missing, command)
		}
	}
	return missing
}

// follows reports whether a line contains the words directly one after the other.
func follows(line, words []string) bool {
	for i := range len(line) - len(words) + 1 {
		if slices.Equal(line[i:i+len(words)], words) {
			return true
		}
	}
	return false
}
