package kvasir

import (
	"cmp"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Limits that keep a room small enough to be read in one go.
const (
	maxFileLines    = 600  // of a file, all of them
	maxPackageLines = 3000 // of code in a package: without tests, comments and blank lines
)

// larger packages, and what they may have.
var larger = map[string]int{
	"mooncake": 3600, // both sides of a pull, which share every message, region and deadline
}

func TestSizes(t *testing.T) {
	code := map[string]int{}
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
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if n := strings.Count(string(text), "\n"); n > maxFileLines {
			t.Errorf("%s has %d lines, more than %d", path, n, maxFileLines)
		}
		if !strings.HasSuffix(path, "_test.go") {
			code[filepath.Dir(path)] += codeLines(text)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(code) < 40 {
		t.Fatalf("only %d packages found", len(code))
	}
	for pkg, n := range code {
		if most := cmp.Or(larger[filepath.ToSlash(pkg)], maxPackageLines); n > most {
			t.Errorf("package %s has %d lines of code, more than %d", pkg, n, most)
		}
	}
}

// codeLines counts the lines on which a token is, or a part of one.
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
			continue // written by nobody
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
