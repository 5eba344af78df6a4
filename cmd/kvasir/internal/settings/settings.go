// SPDX-License-Identifier: Apache-2.0

// Package settings finds the flags of a command in the environment and in a YAML file. It also writes the shells' scripts for
// completion, and the reference pages of the commands.
package settings

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/alecthomas/kong"
	"go.yaml.in/yaml/v3"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/kv"
)

// notInFile are the flags that can be given only on the command line.
var notInFile = []string{"help", "config", "check-config", "drop"}

// maxConfig is the largest configuration file, in bytes; a larger one is refused.
const maxConfig = 1 << 20

// Settings finds the values of flags in the environment and in the file of --config. It implements kong.Resolver.
type Settings struct {
	getenv func(string) (string, bool)

	path     string // path of the file
	file     map[string]setting
	from     map[string]string     // where the value of a flag is from, by the flag's name
	sections map[string]*yaml.Node // the sections of a file for several commands, by the command's name

	command string   // name of the command that reads the file
	faults  []string // what is wrong with the keys; a file with sections is read to its end all the same

	section *yaml.Node         // the section that is read instead of the file; nil: none
	name    string             // name of the section
	last    map[string]setting // values given to Default, used if nothing else gives one
	lastOf  string             // the source of the values in last
}

// setting is the value of one key of the file.
type setting struct {
	value string
	list  []string // the values, if it is a list; value has them as one text
	line  int
}

// New returns Settings that read the environment of the process.
func New() *Settings { return &Settings{getenv: os.LookupEnv, from: make(map[string]string)} }

// Validate does nothing. It implements kong.Resolver.
func (*Settings) Validate(*kong.Application) error { return nil }

// Resolve returns the value for a flag that the command line does not give, from the environment, the file or Default; nil: none of
// them has one. It implements kong.Resolver.
func (s *Settings) Resolve(c *kong.Context, at *kong.Path, f *kong.Flag) (any, error) {
	command := c.Selected()
	if command == nil || FlagNamed(command, "config") == nil || slices.Contains(notInFile, f.Name) {
		return nil, nil
	}
	if err := s.load(c, command); err != nil {
		return nil, err
	}
	name := envName(at, f)
	if v, ok := s.getenv(name); ok && !s.isServiceLink(name, v) {
		s.from[f.Name] = "$" + name
		return asValue(f, listOf, v, nil), nil
	}
	if v, ok := s.file[f.Name]; ok {
		s.from[f.Name] = fmt.Sprintf("%s line %d", s.path, v.line)
		return asValue(f, nil, v.value, v.list), nil
	}
	if v, ok := s.last[f.Name]; ok {
		s.from[f.Name] = s.lastOf
		return asValue(f, nil, v.value, v.list), nil
	}
	return nil, nil
}

// listOf splits a text into the values of a list: at blanks, except for blanks inside JSON objects.
func listOf(text string) []string {
	var out []string
	for d := json.NewDecoder(strings.NewReader(text)); strings.HasPrefix(text, "{"); {
		var v json.RawMessage
		if d.Decode(&v) != nil {
			break
		}
		out = append(out, string(v))
	}
	if out != nil {
		return out
	}
	return strings.Fields(text)
}

// asValue returns a value in the form that the parser takes for the flag. That is text, except for a flag that is repeated for several
// values: then it is a list, the given one or what split makes of the text.
func asValue(f *kong.Flag, split func(string) []string, text string, list []string) any {
	if f.Target.Kind() != reflect.Slice || f.Tag.Sep != -1 {
		return text
	}
	if split != nil {
		list = split(text)
	}
	if list == nil {
		return text
	}
	out := make([]any, len(list))
	for i, e := range list {
		out[i] = e
	}
	return out
}

// envName returns the environment variable of a flag, such as KVASIR_TRANSFER_SERVE_HOST or KVASIR_LOG_LEVEL.
func envName(at *kong.Path, f *kong.Flag) string {
	name := "KVASIR_"
	if at.Command != nil {
		name += at.Command.Path() + "_"
	}
	return strings.ToUpper(strings.NewReplacer("-", "_", " ", "_").Replace(name + f.Name))
}

// isServiceLink reports whether Kubernetes set a variable for a Service with a name such as kvasir-server:
// KVASIR_SERVER_PORT=tcp://10.0.0.1:5555.
func (s *Settings) isServiceLink(name, value string) bool {
	service, ok := strings.CutSuffix(name, "_PORT")
	if !ok || !strings.Contains(value, "://") {
		return false
	}
	_, ok = s.getenv(service + "_SERVICE_HOST")
	return ok
}

// load reads the file that --config names, unless it was read already.
func (s *Settings) load(c *kong.Context, command *kong.Node) error {
	if s.file != nil {
		return nil
	}
	s.file = make(map[string]setting)
	known := knownFlags(command)
	if s.name != "" {
		if s.section == nil {
			return nil
		}
		var err error
		s.file, err = s.readMapping(s.section, known, nil)
		return s.note(err)
	}
	s.command = command.Name
	for _, p := range c.Path {
		if p.Flag != nil && p.Flag.Name == "config" {
			s.path, _ = c.FlagValue(p.Flag).(string)
		}
	}
	if s.path == "" {
		name := envName(&kong.Path{Command: command}, FlagNamed(command, "config"))
		if s.path, _ = s.getenv(name); s.path == "" {
			s.path = FlagNamed(command, "config").Default
		}
		if s.path == "" {
			return nil
		}
	}
	f, err := os.Open(s.path)
	if errors.Is(err, os.ErrNotExist) && sectionsOf(command) != nil {
		return FileError{err.Error() + ": kvasir config init " + s.path + " writes one to begin with", true}
	}
	if err != nil {
		return FileError{err.Error(), true}
	}
	defer f.Close()
	s.file, err = s.readSettings(f, known, sectionsOf(command))
	if sectionsOf(command) != nil {
		return s.note(err)
	}
	return err
}

// note keeps an error about one key of a file with sections for Faults, so that the rest of the file is checked too. It returns other
// errors.
func (s *Settings) note(err error) error {
	file, ok := errors.AsType[FileError](err)
	if !ok || file.structure {
		return err
	}
	s.faults = append(s.faults, file.text)
	return nil
}

// Faults returns one error about all wrong keys of a file with sections, or of a section; nil: no key is wrong.
func (s *Settings) Faults() error {
	if len(s.faults) == 0 {
		return nil
	}
	return FileError{text: strings.Join(s.faults, "; ")}
}

// Skip makes Settings ignore the value that the file has for a flag. It returns false if the file has none.
func (s *Settings) Skip(flag string) bool {
	_, ok := s.file[flag]
	delete(s.file, flag)
	return ok
}

// FlagOf returns the name of the first flag in a text; empty: the text has none.
func FlagOf(text string) string {
	if m := flagInText().FindStringSubmatch(text); m != nil {
		return m[1]
	}
	return ""
}

// knownFlags returns the names of a command's flags that a file may have.
func knownFlags(command *kong.Node) (known []string) {
	for _, group := range command.AllFlags(true) {
		for _, f := range group {
			if !slices.Contains(notInFile, f.Name) {
				known = append(known, f.Name)
			}
		}
	}
	return known
}

// FileError is an error about the configuration file, for which no flag is to blame.
type FileError struct {
	text      string
	structure bool // the file as a whole cannot be read
}

// Unreadable reports whether the file as a whole could not be read.
func (e FileError) Unreadable() bool { return e.structure }

// Error returns the text of the error in one line.
func (e FileError) Error() string {
	return safelog.Text(strings.ReplaceAll(e.text, "\n", "; "), 4096) // keys in the text may be any text
}

// readSettings reads a YAML mapping. Its values are scalars, lists of scalars, and sections, which are mappings themselves. `known` are the
// flags that may be its keys, and sections the names of its sections; other keys are an error, except the sections of a file for kvasir all.
func (s *Settings) readSettings(r io.Reader, known, sections []string) (map[string]setting, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxConfig+1))
	if err != nil {
		return nil, FileError{err.Error(), true}
	}
	if len(text) > maxConfig {
		return nil, FileError{fmt.Sprintf("%s is longer than %s", s.path, kv.FormatBytes(maxConfig)), true}
	}
	var doc, second yaml.Node
	in := yaml.NewDecoder(bytes.NewReader(text))
	err = in.Decode(&doc)
	if errors.Is(err, io.EOF) || err == nil && len(doc.Content) == 0 {
		return make(map[string]setting), nil // the file is empty, or has comments alone
	}
	if err == nil {
		err = in.Decode(&second)
	}
	switch {
	case err == nil:
		return nil, FileError{fmt.Sprintf("%s line %d: a second document begins, want one", s.path, second.Line), true}
	case !errors.Is(err, io.EOF):
		return nil, FileError{fmt.Sprintf("%s: %s", s.path, strings.TrimPrefix(err.Error(), "yaml: ")), true}
	}
	return s.readMapping(doc.Content[0], known, sections)
}

// readMapping reads the mapping of a file or of a section, whose keys may be the flags `known` and the names of the sections. It keeps the
// sections of a file in s.sections.
func (s *Settings) readMapping(top *yaml.Node, known, sections []string) (map[string]setting, error) {
	out := make(map[string]setting)
	of, example := "", "port: 5555"
	if s.name != "" {
		of = " in " + s.name
	}
	if sections != nil {
		s.sections, example = make(map[string]*yaml.Node), sections[0]+":"
	}
	if top.Kind != yaml.MappingNode {
		return out, FileError{fmt.Sprintf("%s line %d: want lines like %s", s.path, top.Line, example+of), true}
	}
	var wrong []string
	for i := 0; i+1 < len(top.Content); i += 2 {
		key, node := top.Content[i], top.Content[i+1]
		fault := func(format string, args ...any) {
			wrong = append(wrong, fmt.Sprintf("%s line %d: %s", s.path, key.Line, fmt.Sprintf(format, args...)))
		}
		value, list, ok := scalars(node)
		before, twice := out[key.Value]
		switch {
		case slices.Contains(sections, key.Value):
			if node.Kind == yaml.AliasNode {
				node = node.Alias
			}
			switch {
			case s.sections[key.Value] != nil:
				fault("%s was given in line %d already", key.Value, s.sections[key.Value].Line)
			case node.Kind == yaml.MappingNode, node.Tag == "!!null":
				s.sections[key.Value] = &yaml.Node{Kind: yaml.MappingNode, Line: key.Line, Content: node.Content}
			default:
				fault("%s is no section: want lines below it like port: 5555", key.Value)
			}
		case sections == nil && s.name == "" && s.isOfAll(key.Value, node, known):
			if key.Value != s.command {
				continue
			}
			ours, err := s.readMapping(node, known, nil)
			if err != nil {
				wrong = append(wrong, err.Error())
			}
			for name, v := range ours {
				if before, twice := out[name]; twice {
					fault("%s was given in line %d already", name, before.line)
				}
				out[name] = v
			}
		case slices.Contains(notInFile, key.Value):
			fault("%s can only be given on the command line", key.Value)
		case !slices.Contains(known, key.Value):
			fault("unknown key %q%s%s", key.Value, of, s.hint(key.Value, known, sections))
		case twice:
			fault("%s was given in line %d already", key.Value, before.line)
		case !ok, hasMapping(node) && key.Value != "l2-adapter" && key.Value != "kv-transfer-config":
			fault("%s is neither a value nor a list of values", key.Value)
		default:
			out[key.Value] = setting{value, list, key.Line}
		}
	}
	if len(wrong) > 0 {
		return out, FileError{text: strings.Join(wrong, "; ")}
	}
	return out, nil
}

// isOfAll reports whether a key is a section in a file that was written for kvasir all, while one of commandsOfAll reads the file. Of
// these sections the command reads its own alone.
func (s *Settings) isOfAll(key string, node *yaml.Node, known []string) bool {
	return slices.Contains(commandsOfAll, key) && !slices.Contains(known, key) && node.Kind == yaml.MappingNode && slices.Contains(commandsOfAll, s.command)
}

// commandsOfAll are the names of the sections in a file for kvasir all.
var commandsOfAll = []string{"bootstrap", "server", "relay", "proxy"}

// scalars returns the value of a node as a flag takes it. A mapping becomes JSON. The elements of a list are in list, and in value with
// commas between them. ok is false if the node is empty, or a list has an element that is neither a scalar nor a mapping.
func scalars(n *yaml.Node) (value string, list []string, ok bool) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	switch {
	case n.Kind == yaml.ScalarNode && n.Tag != "!!null":
		return n.Value, nil, true
	case n.Kind == yaml.MappingNode:
		text, ok := jsonOf(n)
		return text, []string{text}, ok
	case n.Kind == yaml.SequenceNode && len(n.Content) > 0:
		var escaped []string
		for _, e := range n.Content {
			text := e.Value
			if e.Kind == yaml.MappingNode {
				if text, ok = jsonOf(e); !ok {
					return "", nil, false
				}
			} else if e.Kind != yaml.ScalarNode || e.Tag == "!!null" {
				return "", nil, false
			}
			list = append(list, text)
			escaped = append(escaped, strings.ReplaceAll(text, ",", `\,`))
		}
		return strings.Join(escaped, ","), list, true
	}
	return "", nil, false
}

// hasMapping reports whether a node is a mapping, or a list with a mapping in it.
func hasMapping(n *yaml.Node) bool {
	return n.Kind == yaml.MappingNode || slices.ContainsFunc(n.Content, func(e *yaml.Node) bool { return e.Kind == yaml.MappingNode })
}

// jsonOf returns a mapping as JSON, for flags that take JSON, such as l2-adapter.
func jsonOf(n *yaml.Node) (string, bool) {
	var v map[string]any
	if n.Decode(&v) != nil {
		return "", false
	}
	text, err := json.Marshal(v)
	return string(text), err == nil
}

// FlagNamed returns the flag of a command with a name; nil: the command has no such flag.
func FlagNamed(n *kong.Node, name string) *kong.Flag {
	for _, f := range n.Flags {
		if f.Name == name {
			return f
		}
	}
	return nil
}

var flagInText = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`--([a-z0-9][a-z0-9-]*)`) })

// Origins says, for the flags that a text names, where their values are from, unless that is the command line.
func (s *Settings) Origins(text string) string {
	out, named := "", map[string]bool{}
	for _, m := range flagInText().FindAllStringSubmatch(text, -1) {
		if from := s.from[m[1]]; from != "" && !named[m[1]] {
			named[m[1]] = true
			out += fmt.Sprintf(" (--%s is from %s)", m[1], from)
		}
	}
	return out
}

// Misspelt returns the environment variables that begin like those of the command and that no flag reads, if a flag has nearly that
// name.
func (s *Settings) Misspelt(command *kong.Node, environ []string) []string {
	prefix := envName(&kong.Path{Command: command}, &kong.Flag{Value: &kong.Value{}})
	var known, out []string
	for _, f := range command.Flags {
		known = append(known, envName(&kong.Path{Command: command}, f))
	}
	for _, v := range environ {
		name, _, _ := strings.Cut(v, "=")
		if !strings.HasPrefix(name, prefix) || slices.Contains(known, name) || strings.Contains(name, "_SERVICE_") {
			continue
		}
		if near := options.Nearest(name, known); near != "" {
			out = append(out, fmt.Sprintf("%s (did you mean %s?)", name, near))
		}
	}
	return out
}

// Print writes the values of a command's flags in the form of a file for --config.
func (s *Settings) Print(w io.Writer, c *kong.Context) error {
	var lines [][2]string
	width := 0
	for _, p := range c.Path {
		for _, f := range p.Flags {
			if slices.Contains(notInFile, f.Name) {
				continue
			}
			line, err := yamlLine(f)
			if err != nil {
				return err
			}
			lines = append(lines, [2]string{line, s.source(c, f)})
			width = max(width, min(len(line), 40))
		}
	}
	for _, l := range lines {
		if _, err := fmt.Fprintf(w, "%-*s  # %s\n", width, l[0], l[1]); err != nil {
			return err
		}
	}
	return nil
}

// source says where the value of a flag is from.
func (s *Settings) source(c *kong.Context, f *kong.Flag) string {
	switch {
	case s.from[f.Name] != "":
		return s.from[f.Name]
	case onCommandLine(c, f):
		return "command line"
	}
	return "default"
}

// Sources says where the values that Values returns are from, by flag: "command line", a variable with a dollar sign, a file and its
// line, or "default".
func (s *Settings) Sources(c *kong.Context) map[string]string {
	out := make(map[string]string)
	for _, p := range c.Path {
		for _, f := range p.Flags {
			out[f.Name] = s.source(c, f)
		}
	}
	return out
}

// Values returns the values of a command's flags as text, by name.
func (s *Settings) Values(c *kong.Context) map[string]string {
	out := make(map[string]string)
	for _, p := range c.Path {
		for _, f := range p.Flags {
			if !secret(f) && f.Name != "help" && f.Name != "check-config" {
				out[f.Name] = fmt.Sprint(f.Target.Interface())
			}
		}
	}
	return out
}

func onCommandLine(c *kong.Context, f *kong.Flag) bool {
	return slices.ContainsFunc(c.Path, func(p *kong.Path) bool { return p.Flag == f && !p.Resolved })
}

// secret reports whether the value of a flag must not be shown.
func secret(f *kong.Flag) bool {
	return strings.HasSuffix(f.Name, "token") || strings.HasSuffix(f.Name, "-key") && !strings.HasSuffix(f.Name, "tls-key")
}

// hidden is written in place of a value that must not be shown.
const hidden = "(set)"

// yamlLine returns one flag as a line of YAML. It hides secrets. A flag without a value becomes a comment.
func yamlLine(f *kong.Flag) (string, error) {
	v := f.Target.Interface()
	switch {
	case secret(f) && !f.Target.IsZero():
		return "# " + f.Name + ": " + hidden, nil
	case f.Target.Kind() == reflect.Slice && f.Target.Len() == 0, f.Target.Kind() == reflect.String && f.Target.Len() == 0:
		return "# " + f.Name + ":", nil
	}
	switch t := v.(type) {
	case fmt.Stringer:
		if v = t.String(); v == hidden {
			return "# " + f.Name + ": " + hidden, nil
		}
	case float64:
		return fmt.Sprintf("%s: %v", f.Name, t), nil
	}
	var b strings.Builder
	e := yaml.NewEncoder(&b)
	node := yaml.Node{}
	if err := node.Encode(v); err != nil {
		return "", err
	}
	node.Style |= yaml.FlowStyle
	err := errors.Join(e.Encode(&node), e.Close())
	return f.Name + ": " + strings.TrimSpace(b.String()), err
}
