// SPDX-License-Identifier: Apache-2.0

package arch

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

// logs names the variables and fields that are loggers.
var logs = map[string]bool{"log": true, "Log": true, "logger": true}

// speaksVLLM lists files whose messages copy vLLM's, word for word, with their figures.
var speaksVLLM = map[string]bool{
	"mooncake/bootstrap/registry.go": true, "mooncake/bootstrap/serve.go": true, "mooncake/scheduler/scheduler.go": true,
}

// eachCall visits all calls of the code that is not of tests or interop.
func eachCall(t *testing.T, visit func(path string, at func(ast.Node) token.Position, call *ast.CallExpr)) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); path != root && (strings.HasPrefix(name, ".") || name == "testdata" || name == "bin" || name == "interop") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(f, func(n ast.Node) bool {
			if call, ok := n.(*ast.CallExpr); ok {
				visit(strings.TrimPrefix(filepath.ToSlash(path), root+"/"), func(n ast.Node) token.Position { return set.Position(n.Pos()) }, call)
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Every log line has a constant message, so that a search finds all of one kind, and
// what varies is an attribute; an error's key is err.
func TestLogStyle(t *testing.T) {
	lines := 0
	eachCall(t, func(path string, at func(ast.Node) token.Position, call *ast.CallExpr) {
		if !isLogCall(call) {
			return
		}
		lines++
		if !isConstant(call.Args[0]) && !speaksVLLM[path] {
			t.Errorf("%s: the message varies", at(call))
		}
		for _, arg := range call.Args[1:] {
			if key, ok := arg.(*ast.BasicLit); ok && key.Kind == token.STRING {
				if text, _ := strconv.Unquote(key.Value); text == "error" || text == "cause" {
					t.Errorf("%s: the key of an error is err, not %s", at(key), text)
				}
			}
		}
	})
	if lines < 50 {
		t.Errorf("only %d log lines were found: the walk is broken", lines)
	}
}

// No timer is due when it is made: what is due at once is done at once. Two goroutines of one synctest bubble that receive from such
// timers at the same time crash the race detector of Go 1.26 (golang/go#78156).
func TestNoTimerIsDueWhenItIsMade(t *testing.T) {
	timers := 0
	eachCall(t, func(_ string, at func(ast.Node) token.Position, call *ast.CallExpr) {
		f, ok := call.Fun.(*ast.SelectorExpr)
		if !ok || len(call.Args) != 1 || f.Sel.Name != "NewTimer" && f.Sel.Name != "After" {
			return
		}
		if pkg, ok := f.X.(*ast.Ident); !ok || pkg.Name != "time" {
			return
		}
		timers++
		if n, ok := call.Args[0].(*ast.BasicLit); ok && n.Value == "0" {
			t.Errorf("%s: a timer of 0", at(call))
		}
	})
	if timers < 10 {
		t.Errorf("only %d timers were found: the walk is broken", timers)
	}
}

// isLogCall reports whether a call is one of a logger's four levels.
func isLogCall(call *ast.CallExpr) bool {
	level, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || len(call.Args) == 0 {
		return false
	}
	switch level.Sel.Name {
	case "Debug", "Info", "Warn", "Error":
	default:
		return false
	}
	switch x := level.X.(type) {
	case *ast.Ident:
		return logs[x.Name]
	case *ast.SelectorExpr:
		return logs[x.Sel.Name]
	}
	return false
}

// isConstant reports whether an expression is a text, or several put together.
func isConstant(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.BasicLit:
		return e.Kind == token.STRING
	case *ast.BinaryExpr:
		return isConstant(e.X) && isConstant(e.Y)
	case *ast.Ident:
		return e.Name == "msg" // a function that logs for its callers, which are checked
	}
	return false
}
