// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"fmt"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
)

// CompletionScript returns the script with which a shell completes the commands below root. shell is bash, zsh or fish.
func CompletionScript(shell string, root *kong.Node) string {
	list := wordsOf(root, "")
	switch shell {
	case "bash":
		return bashScript(list)
	case "zsh":
		return zshScript(list)
	}
	return fishScript(list)
}

// words are the words that can follow one command.
type words struct {
	path  string // path of the command: "", "/server", "/transfer/serve"
	subs  []*kong.Node
	flags []*kong.Flag
	args  []string // the values of the first argument, if they are known
}

// wordsOf returns the words of a command and of all commands below it, parents first. path is the path of n.
func wordsOf(n *kong.Node, path string) []words {
	w := words{path: path}
	for _, group := range n.AllFlags(true) {
		w.flags = append(w.flags, group...)
	}
	if len(n.Positional) > 0 {
		w.args = enums(n.Positional[0])
	}
	var below []words
	for _, c := range n.Children {
		if c.Type == kong.CommandNode && !c.Hidden {
			w.subs = append(w.subs, c)
			below = append(below, wordsOf(c, path+"/"+c.Name)...)
		}
	}
	return append([]words{w}, below...)
}

// enums returns the values that a flag or argument can have; nil: any value.
func enums(v *kong.Value) []string {
	if v.Enum == "" {
		return nil
	}
	return slices.DeleteFunc(strings.Split(v.Enum, ","), func(s string) bool { return s == "" })
}

func takesFile(f *kong.Flag) bool { return f.PlaceHolder == "FILE" || f.PlaceHolder == "PATH" }

// next returns the words that can come next, commands first.
func (w *words) next() []string {
	out := slices.Clone(w.args)
	for _, s := range w.subs {
		out = append(out, s.Name)
	}
	for _, f := range w.flags {
		out = append(out, "--"+f.Name)
	}
	return out
}

// cases returns parts of the scripts for bash and zsh: the paths of all commands as one pattern (commands), and the branches of two case
// statements. `after` has those for the flag before the cursor, `next` those for the command. offer returns the shell code that offers
// words, and files is the code that offers names of files.
func cases(list []words, offer func([]string) string, files string) (commands, after, next string) {
	var known []string
	var a, n strings.Builder
	for _, w := range list {
		if w.path != "" {
			known = append(known, w.path)
		}
		for _, f := range w.flags {
			switch {
			case takesFile(f):
				fmt.Fprintf(&a, "    %q) %s; return ;;\n", w.path+" --"+f.Name, files)
			case enums(f.Value) != nil:
				fmt.Fprintf(&a, "    %q) %s; return ;;\n", w.path+" --"+f.Name, offer(enums(f.Value)))
			case !f.IsBool():
				fmt.Fprintf(&a, "    %q) return ;;\n", w.path+" --"+f.Name)
			}
		}
		fmt.Fprintf(&n, "    %q) %s ;;\n", w.path, offer(w.next()))
	}
	return strings.Join(known, "|"), a.String(), n.String()
}

func bashScript(list []words) string {
	commands, after, next := cases(list, func(w []string) string {
		return `COMPREPLY=($(compgen -W "` + strings.Join(w, " ") + `" -- "$cur"))`
	}, `COMPREPLY=($(compgen -f -- "$cur"))`)
	return `# bash completion of kvasir: source <(kvasir completion bash)
_kvasir() {
  local cur=${COMP_WORDS[COMP_CWORD]} at= i
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$at/${COMP_WORDS[i]}" in
    ` + commands + `) at="$at/${COMP_WORDS[i]}" ;;
    esac
  done
  case "$at ${COMP_WORDS[COMP_CWORD-1]}" in
` + after + `  esac
  case "$at" in
` + next + `  esac
}
complete -F _kvasir kvasir
`
}

func zshScript(list []words) string {
	commands, after, next := cases(list, func(w []string) string { return "compadd -- " + strings.Join(w, " ") }, "_files")
	return `#compdef kvasir
# zsh completion of kvasir: source <(kvasir completion zsh)
_kvasir() {
  local at= w
  for w in "${(@)words[2,CURRENT-1]}"; do
    case "$at/$w" in
    ` + commands + `) at="$at/$w" ;;
    esac
  done
  case "$at ${words[CURRENT-1]}" in
` + after + `  esac
  case "$at" in
` + next + `  esac
}
compdef _kvasir kvasir
`
}

func fishScript(list []words) string {
	var b strings.Builder
	b.WriteString("# fish completion of kvasir: kvasir completion fish > ~/.config/fish/completions/kvasir.fish\ncomplete -c kvasir -f\n")
	for _, w := range list {
		var names []string
		for _, s := range w.subs {
			names = append(names, s.Name)
		}
		at := "__fish_use_subcommand"
		if w.path != "" {
			at = "__fish_seen_subcommand_from " + strings.Join(strings.Split(w.path[1:], "/"), "; and __fish_seen_subcommand_from ")
		}
		here := at
		if w.path != "" && len(names) > 0 {
			here += "; and not __fish_seen_subcommand_from " + strings.Join(names, " ")
		}
		for _, s := range w.subs {
			fmt.Fprintf(&b, "complete -c kvasir -n %s -a %s -d %s\n", fishQuote(here), s.Name, fishQuote(firstSentence(s.Help)))
		}
		for _, a := range w.args {
			fmt.Fprintf(&b, "complete -c kvasir -n %s -a %s\n", fishQuote(here), a)
		}
		for _, f := range w.flags {
			takes := ""
			switch {
			case takesFile(f):
				takes = " -r -F"
			case enums(f.Value) != nil:
				takes = " -x -a " + fishQuote(strings.Join(enums(f.Value), " "))
			case !f.IsBool():
				takes = " -x"
			}
			fmt.Fprintf(&b, "complete -c kvasir -n %s -l %s%s -d %s\n", fishQuote(here), f.Name, takes, fishQuote(firstSentence(f.Help)))
		}
	}
	return b.String()
}

func fishQuote(s string) string {
	return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s) + "'"
}

// firstSentence returns the first sentence of a help text, because a completion has no room for more.
func firstSentence(s string) string {
	if i := strings.Index(s, ". "); i >= 0 {
		s = s[:i]
	}
	return strings.TrimSuffix(s, ".")
}
