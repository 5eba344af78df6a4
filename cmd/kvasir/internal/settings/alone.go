// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"cmp"
	"reflect"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// Alone returns the command that args name, as an option for a grammar without commands, because building the flags
// of all commands takes longer than a server's start. It returns nil if the whole grammar is needed: for help, if
// args name no command of the grammar, and for a command with the tag whole.
func Alone(grammar any, args []string) kong.Option {
	at := 0
	for at < len(args) && strings.HasPrefix(args[at], "--log-") {
		if at++; !strings.Contains(args[at-1], "=") {
			at++ // its value
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

// dashed is the name of a command by that of its field: store-node of StoreNode.
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
