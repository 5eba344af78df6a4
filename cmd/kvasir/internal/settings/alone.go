// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"cmp"
	"reflect"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// Alone returns an option that makes the parser know only the command that args name. Building the flags of all commands takes longer
// than the start of a server. Alone returns nil if the parser needs the whole grammar: for help, for a command with the tag whole, and
// if args name no command.
func Alone(grammar any, args []string) kong.Option {
	at := 0
	for at < len(args) && strings.HasPrefix(args[at], "--log-") {
		if at++; !strings.Contains(args[at-1], "=") {
			at++ // skips the value of the flag
		}
	}
	if at >= len(args) || slices.Contains(args, "-h") || slices.Contains(args, "--help") {
		return nil
	}
	for f := range reflect.TypeOf(grammar).Elem().Fields() {
		_, command := f.Tag.Lookup("cmd")
		_, whole := f.Tag.Lookup("whole")
		if command && !whole && cmp.Or(f.Tag.Get("name"), dashed(f.Name)) == args[at] {
			return kong.DynamicCommand(args[at], f.Tag.Get("help"), "", reflect.New(f.Type).Interface())
		}
	}
	return nil
}

// dashed returns the name of a command for the name of its field: store-node for StoreNode.
func dashed(field string) string {
	var b strings.Builder
	for i, r := range field {
		if i > 0 && r >= 'A' && r <= 'Z' {
			b.WriteByte('-')
		}
		b.WriteRune(r)
	}
	return strings.ToLower(b.String())
}
