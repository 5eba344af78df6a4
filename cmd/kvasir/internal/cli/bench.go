// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"reflect"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/bench"
)

// benchCmd measures an endpoint, or compares results.
type benchCmd struct{ bench.Flags }

// Help is shown by kvasir bench --help.
func (benchCmd) Help() string { return bench.Help }

// Run measures, or compares.
func (c *benchCmd) Run(e *env) error {
	err := c.Flags.Run(e.ctx, e.stdout, e.stderr)
	if text, ok := errors.AsType[bench.UsageError](err); ok {
		return usagef("%s", text)
	}
	return err
}

// wordsFlag parses a flag whose value is all words up to the next flag.
var wordsFlag = kong.TypeMapper(reflect.TypeFor[bench.Words](), kong.MapperFunc(func(ctx *kong.DecodeContext, target reflect.Value) error {
	var word string
	if err := ctx.Scan.PopValueInto("word", &word); err != nil {
		return err
	}
	all := append(target.Interface().(bench.Words), word)
	for next := ctx.Scan.Peek(); !next.IsEOL() && !strings.HasPrefix(next.String(), "-"); next = ctx.Scan.Peek() {
		all = append(all, ctx.Scan.Pop().String())
	}
	target.Set(reflect.ValueOf(all))
	return nil
}))
