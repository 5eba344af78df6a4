// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"fmt"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// MarkdownPages returns the pages of the command line's reference, by file name: one page for each command of the first level with the
// commands below it, such as transfer.md, and README.md, which lists all commands and the flags that every command has.
func MarkdownPages(root *kong.Node) map[string]string {
	pages := map[string]string{}
	var list strings.Builder
	for _, c := range commandsOf(root) {
		var b strings.Builder
		markdownCommand(&b, &list, c, c.Name+".md", "#")
		pages[c.Name+".md"] = b.String()
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# Commands of `%s`\n\n| command | what it does |\n| --- | --- |\n%s", root.Name, list.String())
	b.WriteString("\n## Flags of every command\n")
	markdownFlags(&b, root, true)
	pages["README.md"] = b.String()
	return pages
}

func markdownCommand(b, list *strings.Builder, n *kong.Node, page, level string) {
	name := "kvasir " + n.Path()
	link := page
	if level != "#" {
		b.WriteString("\n")
		link += "#" + strings.ReplaceAll(name, " ", "-")
	}
	fmt.Fprintf(b, "%s %s\n\n%s\n", level, name, markdownText(n.Help))
	fmt.Fprintf(b, "\n```text\n%s %s\n```\n", name, synopsis(n))
	if n.Detail != "" {
		fmt.Fprintf(b, "\n```text\n%s\n```\n", strings.TrimSpace(n.Detail))
	}
	if len(n.Positional) > 0 {
		b.WriteString("\n| argument | meaning |\n| --- | --- |\n")
		for _, p := range n.Positional {
			fmt.Fprintf(b, "| `%s` | %s |\n", markdownCode(p.Summary()), markdownText(p.Help))
		}
	}
	markdownFlags(b, n, FlagNamed(n, "config") != nil)
	below := commandsOf(n)
	if len(below) == 0 {
		fmt.Fprintf(list, "| [`%s`](%s) | %s |\n", name, link, markdownText(n.Help))
	}
	for _, c := range below {
		markdownCommand(b, list, c, page, "##")
	}
}

// markdownFlags writes a table for each group of flags that a command has and its parents lack. If environment is true, the table names
// the environment variable of each flag.
func markdownFlags(b *strings.Builder, n *kong.Node, environment bool) {
	group := "none yet"
	for _, f := range n.Flags {
		if f.Hidden || f.Name == "help" && n.Parent != nil {
			continue
		}
		title := ""
		if f.Group != nil {
			title = f.Group.Title
		}
		if title != group {
			group = title
			b.WriteString("\n")
			if title != "" {
				fmt.Fprintf(b, "**%s**\n\n", markdownText(title))
			}
			if b.WriteString("| flag | "); environment {
				b.WriteString("environment | meaning |\n| --- | --- | --- |\n")
			} else {
				b.WriteString("meaning |\n| --- | --- |\n")
			}
		}
		fmt.Fprintf(b, "| `%s` | ", markdownCode(f.String()))
		if environment {
			fmt.Fprintf(b, "%s | ", markdownVariable(n, f))
		}
		fmt.Fprintf(b, "%s |\n", markdownText(f.Help))
	}
}

func markdownVariable(n *kong.Node, f *kong.Flag) string {
	if f.Name != "config" && slices.Contains(notInFile, f.Name) {
		return ""
	}
	at := &kong.Path{Command: n}
	if n.Parent == nil {
		at.Command = nil
	}
	return "`" + envName(at, f) + "`"
}

// markdownText escapes a text for a cell of a table.
func markdownText(s string) string {
	return strings.NewReplacer("\n", " ", "|", `\|`, "<", "&lt;", ">", "&gt;", "*", `\*`, "_", `\_`, "`", "\\`", "[", `\[`).Replace(s)
}

// markdownCode escapes code for a cell of a table.
func markdownCode(s string) string {
	return strings.NewReplacer("\n", " ", "|", `\|`, "`", "'").Replace(s)
}
