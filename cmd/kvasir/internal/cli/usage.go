// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/settings"
)

// usageError is an error in the command line; --help says what is right.
type usageError struct{ text string }

func (e *usageError) Error() string { return e.text }

// usagef returns a usageError. Its text must name the flag.
func usagef(format string, args ...any) error {
	return &usageError{fmt.Sprintf(format, args...)}
}

// plainer rewrites messages of the parser about values into plainer words.
var plainer = []struct{ was, is string }{
	{`expected \S+ value but got "EOL" \(<EOL>\)`, "a value is missing"},
	{`^expected "<([a-z-]+)>"`, "an argument is missing: $1"},
	{`missing value, expecting "<arg>,\.\.\."`, "a value is missing"},
	{`expected (?:int|string|value) value but got "([^"]*)" \([a-z ]+\); perhaps try (\S+)\?`, `a value is missing, or write $2`},
	{`expected a valid \d+ bit u?int but got ("[^"]*")`, "$1 is no whole number"},
	{`expected a float but got ("[^"]*") \(string\)`, "$1 is no number"},
	{`slog: level string ("[^"]*"): unknown name`, "$1 is no level: want debug, info, warn or error"},
	{`bool value must be .* but got ("[^"]*")`, "$1 is neither true nor false"},
}

// parseText returns the text of a parser's error in plainer words.
func parseText(err error) string {
	if all, ok := errors.AsType[*lineError](err); ok {
		return all.Error()
	}
	if file, ok := errors.AsType[settings.FileError](err); ok {
		return file.Error()
	}
	text := err.Error()
	for _, p := range plainer {
		text = regexp.MustCompile(p.was).ReplaceAllString(text, p.is)
	}
	if m := suggestion.FindStringSubmatchIndex(text); m != nil && !alike(text[m[2]:m[3]], text[m[4]:m[5]]) {
		text = text[:m[3]] + text[m[1]:]
	}
	return text
}

// suggestion matches the flag that the parser suggests instead of an unknown one.
var suggestion = regexp.MustCompile(`unknown flag --([\w-]+), did you mean "--([\w-]+)"\?`)

// alike reports whether one of two names begins with the other, or at most a third of its letters are wrong.
func alike(a, b string) bool {
	if strings.HasPrefix(a, b) || strings.HasPrefix(b, a) {
		return true
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}
			diagonal, row[j+1] = row[j+1], min(replaced, row[j+1]+1, row[j]+1)
		}
	}
	return row[len(b)] <= max(1, len(a)/3)
}

// commandOf returns the command line up to the command that the user meant, as far as the parser could read it.
func commandOf(err error) string {
	path := "kvasir"
	parse, ok := errors.AsType[*kong.ParseError](err)
	if !ok || parse.Context == nil {
		return path
	}
	for _, p := range parse.Context.Path {
		if p.Command != nil {
			path += " " + p.Command.Name
		}
	}
	return path
}

// faults collects the mistakes in a command line, so that all of them are reported together.
type faults []string

// unless adds a fault if ok is false.
func (f *faults) unless(ok bool, format string, args ...any) {
	if !ok {
		*f = append(*f, fmt.Sprintf(format, args...))
	}
}

// port adds a fault that names the flag if port is not a port to listen on. If `free` is true, 0, which takes a free port, is allowed.
func (f *faults) port(flag string, port int, free bool) {
	low := 1
	if free {
		low = 0
	}
	f.unless(port >= low && port <= 65535, "%s %d is outside %d to 65535", flag, port, low)
}

// maxSeconds is the longest time that can be given in seconds: ten years. A flag with a longer one is refused.
const maxSeconds = 10 * 365 * 86400

// err returns all faults as one usageError; nil: there are none.
func (f faults) err() error {
	if len(f) == 0 {
		return nil
	}
	return &usageError{strings.Join(f, "; ")}
}
