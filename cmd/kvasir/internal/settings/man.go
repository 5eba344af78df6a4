// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"fmt"
	"strings"
	"time"

	"github.com/alecthomas/kong"
)

// ManPages returns the pages of section 1 of the manual for a tree of commands: one for the root and one for each command, in the
// man(7) macros. The key is the name of the file, such as kvasir-transfer-serve.1.
func ManPages(root *kong.Node, version string, date time.Time) map[string]string {
	pages := map[string]string{}
	var walk func(n *kong.Node, name string)
	walk = func(n *kong.Node, name string) {
		pages[name+".1"] = manPage(n, name, version, date)
		for _, c := range commandsOf(n) {
			walk(c, name+"-"+c.Name)
		}
	}
	walk(root, root.Name)
	return pages
}

func commandsOf(n *kong.Node) (out []*kong.Node) {
	for _, c := range n.Children {
		if c.Type == kong.CommandNode && !c.Hidden {
			out = append(out, c)
		}
	}
	return out
}

func manPage(n *kong.Node, name, version string, date time.Time) string {
	var b strings.Builder
	fmt.Fprintf(&b, ".TH %s 1 %s %s\n", roffWord(strings.ToUpper(name)), date.UTC().Format(time.DateOnly), roffWord("kvasir "+version))
	fmt.Fprintf(&b, ".SH NAME\n%s \\- %s\n", roff(name), roff(strings.TrimSuffix(n.Help, ".")))
	fmt.Fprintf(&b, ".SH SYNOPSIS\n.B %s\n%s\n", roff(strings.ReplaceAll(name, "-", " ")), roff(synopsis(n)))
	if n.Detail != "" {
		fmt.Fprintf(&b, ".SH DESCRIPTION\n.nf\n%s\n.fi\n", roff(n.Detail))
	}
	if commands := commandsOf(n); len(commands) > 0 {
		b.WriteString(".SH COMMANDS\n")
		for _, c := range commands {
			fmt.Fprintf(&b, ".TP\n.BR %s (1)\n%s\n", roff(name+"-"+c.Name), roff(c.Help))
		}
	}
	if len(n.Positional) > 0 {
		b.WriteString(".SH ARGUMENTS\n")
		for _, p := range n.Positional {
			fmt.Fprintf(&b, ".TP\n.I %s\n%s\n", roff(p.Name), roff(p.Help))
		}
	}
	b.WriteString(".SH OPTIONS\n")
	group := ""
	for _, flags := range n.AllFlags(true) {
		for _, f := range flags {
			if f.Group != nil && f.Group.Title != group {
				group = f.Group.Title
				fmt.Fprintf(&b, ".SS %s\n", roff(group))
			}
			fmt.Fprintf(&b, ".TP\n\\fB%s\\fR\n%s\n", roff(f.String()), roff(f.Help))
		}
	}
	if name != "kvasir" {
		b.WriteString(".SH SEE ALSO\n.BR kvasir (1)\n")
	}
	return b.String()
}

func synopsis(n *kong.Node) string {
	var parts []string
	if len(commandsOf(n)) > 0 {
		parts = append(parts, "COMMAND")
	}
	for _, p := range n.Positional {
		parts = append(parts, p.Summary())
	}
	return strings.Join(append(parts, "[flags]"), " ")
}

// roff escapes a text for man(7), so that no line of it is a request, and its hyphens can be searched for and copied.
func roff(s string) string {
	s = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(s)
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		if strings.HasPrefix(l, ".") || strings.HasPrefix(l, "'") {
			lines[i] = `\&` + l
		}
	}
	return strings.Join(lines, "\n")
}

// roffWord returns a text as one quoted argument of a request.
func roffWord(s string) string { return `"` + strings.ReplaceAll(roff(s), `"`, `\(dq`) + `"` }
