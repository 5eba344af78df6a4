// SPDX-License-Identifier: Apache-2.0

// Command concurrent prints the packages whose tests can have a data race: those whose test binary links code of this module, other
// than internal/testkit, that starts a goroutine. Code that runs in one goroutine cannot race, and the race detector makes it ten times
// slower.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// starters are the names of functions that start a goroutine, or that make another package call a function of this module in a
// goroutine.
var starters = []string{"Go", "AfterFunc", "Parallel", "RunParallel", "Serve", "ServeTLS", "ListenAndServe", "ListenAndServeTLS", "NewServer", "NewUnstartedServer", "NewTLSServer", "HandleFunc"}

type pkg struct {
	ImportPath, Dir string
	Deps            []string
	GoFiles         []string
	Module          *struct{ Path string }
}

func main() {
	if err := run(os.Stdout, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "concurrent:", err)
		os.Exit(1)
	}
}

func run(out io.Writer, patterns []string) error {
	list := exec.Command("go", append([]string{"list", "-test", "-deps", "-json=ImportPath,Dir,Deps,GoFiles,Module"}, patterns...)...)
	list.Stderr = os.Stderr
	text, err := list.Output()
	if err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	own := map[string]bool{} // by package of this module, test packages included: it starts goroutines
	var tests []pkg
	for d := json.NewDecoder(bytes.NewReader(text)); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		if strings.HasSuffix(p.ImportPath, ".test") {
			tests = append(tests, p)
			continue
		}
		if p.Module == nil || p.Module.Path != module || strings.HasPrefix(p.ImportPath, module+"/internal/testkit") {
			continue
		}
		if own[p.ImportPath], err = starts(p.Dir, p.GoFiles); err != nil {
			return err
		}
	}
	for _, p := range tests {
		if slices.ContainsFunc(p.Deps, func(d string) bool { return own[d] }) {
			fmt.Fprintln(out, strings.TrimSuffix(p.ImportPath, ".test"))
		}
	}
	return nil
}

const module = "github.com/kvasir-kv/kvasir"

// starts reports whether a file starts a goroutine.
func starts(dir string, files []string) (found bool, err error) {
	for _, name := range files {
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return false, err
		}
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.GoStmt:
				found = true
			case *ast.CallExpr:
				if s, ok := n.Fun.(*ast.SelectorExpr); ok && slices.Contains(starters, s.Sel.Name) {
					found = true
				}
			}
			return !found
		})
	}
	return found, nil
}
