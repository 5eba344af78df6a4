// SPDX-License-Identifier: Apache-2.0

// Package settings finds the flags of a command in the environment and in a YAML file, and writes the scripts
// by which shells complete them.
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

// notInFile are flags that only a command line gives.
var notInFile = []string{"help", "config", "check-config", "drop"}

// maxConfig bounds the file, bytes.
const maxConfig = 1 << 20

// Settings finds flags in the environment and the file. It implements kong.Resolver.
type Settings struct {
	getenv func(string) (string, bool)

	path     string // of the file
	file     map[string]setting
	from     map[string]string     // where a flag's value is from, by name
	sections map[string]*yaml.Node // of a file for several commands, by command

	command string   // that reads the file
	faults  []string // of the file; a file with sections is read to its end

	section *yaml.Node         // a section, read instead of the file; nil: none
	name    string             // of the section
	last    map[string]setting // values of Default, used if there is no other
	lastOf  string             // where the values of last are from
}

// setting is a value of the file.
type setting struct {
	value string
	list  []string // the values of a list; value has them too
	line  int
}

// New returns Settings that read the environment.
func New() *Settings { return &Settings{getenv: os.LookupEnv, from: make(map[string]string)} }

// Validate implements kong.Resolver.
func (*Settings) Validate(*kong.Application) error { return nil }

// Resolve implements kong.Resolver: it is asked for each flag that the command line
// does not give.
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

// listOf splits the values of a list: at blanks, but for those inside JSON objects.
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

// asValue returns the value that the parser accepts for a flag: text, or for a flag that
// is repeated instead of separated by commas a list, which split makes of text.
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

// envName is the variable of a flag: KVASIR_TRANSFER_SERVE_HOST, KVASIR_LOG_LEVEL.
func envName(at *kong.Path, f *kong.Flag) string {
	name := "KVASIR_"
	if at.Command != nil {
		name += at.Command.Path() + "_"
	}
	return strings.ToUpper(strings.NewReplacer("-", "_", " ", "_").Replace(name + f.Name))
}

// isServiceLink reports whether a variable is one that Kubernetes sets for a Service of
// the name kvasir-server or the like: KVASIR_SERVER_PORT=tcp://10.0.0.1:5555.
func (s *Settings) isServiceLink(name, value string) bool {
	service, ok := strings.CutSuffix(name, "_PORT")
	if !ok || !strings.Contains(value, "://") {
		return false
	}
	_, ok = s.getenv(service + "_SERVICE_HOST")
	return ok
}

// load reads the file that --config names, once.
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

// note collects an error of one key of a file with sections for Faults, so that the rest of the file is checked too. It
// returns other errors.
func (s *Settings) note(err error) error {
	file, ok := errors.AsType[FileError](err)
	if !ok || file.structure {
		return err
	}
	s.faults = append(s.faults, file.text)
	return nil
}

// Faults returns what is wrong with the keys of a file with sections, or of a section.
func (s *Settings) Faults() error {
	if len(s.faults) == 0 {
		return nil
	}
	return FileError{text: strings.Join(s.faults, "; ")}
}

// Skip ignores the value that the file has for a flag. It reports false where the file has none.
func (s *Settings) Skip(flag string) bool {
	_, ok := s.file[flag]
	delete(s.file, flag)
	return ok
}

// FlagOf returns the first flag that a text names, empty for none.
func FlagOf(text string) string {
	if m := flagInText().FindStringSubmatch(text); m != nil {
		return m[1]
	}
	return ""
}

// knownFlags returns the flags of a command that can stand in a file.
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

// FileError is an error about the file: no flag is to blame.
type FileError struct {
	text      string
	structure bool // nothing of the file can be read
}

// Unreadable reports whether nothing of the file could be read.
func (e FileError) Unreadable() bool { return e.structure }

// Error returns the text, in one line.
func (e FileError) Error() string {
	return safelog.Text(strings.ReplaceAll(e.text, "\n", "; "), 4096) // keys may be any text
}

// readSettings reads one YAML mapping of scalars and lists of scalars, and of sections,
// which are mappings themselves.
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
		return make(map[string]setting), nil // empty, or comments
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

// readMapping reads the mapping of a file or of a section. Sections are noted.
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

// isOfAll reports whether a key is a section of a file for kvasir all, from which a command reads only its own section.
func (s *Settings) isOfAll(key string, node *yaml.Node, known []string) bool {
	return slices.Contains(commandsOfAll, key) && !slices.Contains(known, key) && node.Kind == yaml.MappingNode && slices.Contains(commandsOfAll, s.command)
}

// commandsOfAll are the sections of a file for kvasir all.
var commandsOfAll = []string{"bootstrap", "server", "relay", "proxy"}

// scalars returns a value, or the values of a list as a flag takes them.
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

// hasMapping reports whether a value is a mapping, or a list with one.
func hasMapping(n *yaml.Node) bool {
	return n.Kind == yaml.MappingNode || slices.ContainsFunc(n.Content, func(e *yaml.Node) bool { return e.Kind == yaml.MappingNode })
}

// jsonOf returns a mapping as JSON, for flags that take that, such as l2-adapter.
func jsonOf(n *yaml.Node) (string, bool) {
	var v map[string]any
	if n.Decode(&v) != nil {
		return "", false
	}
	text, err := json.Marshal(v)
	return string(text), err == nil
}

// FlagNamed returns the flag of a command with that name, or nil.
func FlagNamed(n *kong.Node, name string) *kong.Flag {
	for _, f := range n.Flags {
		if f.Name == name {
			return f
		}
	}
	return nil
}

var flagInText = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`--([a-z0-9][a-z0-9-]*)`) })

// Origins says where the flags that a text names were given, if not on the command line.
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

// Misspelt returns the variables that begin like the command's and that no flag
// reads, where a flag has nearly that name.
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

// Print writes the flags of a command as a file for --config.
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

// source is where a flag's value is from.
func (s *Settings) source(c *kong.Context, f *kong.Flag) string {
	switch {
	case s.from[f.Name] != "":
		return s.from[f.Name]
	case onCommandLine(c, f):
		return "command line"
	}
	return "default"
}

// Sources returns where the values of Values are from: "command line", a variable with a dollar sign, a file and its line, "default".
func (s *Settings) Sources(c *kong.Context) map[string]string {
	out := make(map[string]string)
	for _, p := range c.Path {
		for _, f := range p.Flags {
			out[f.Name] = s.source(c, f)
		}
	}
	return out
}

// Values returns the flags of a command as text.
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

// secret reports whether a flag's value must not be shown.
func secret(f *kong.Flag) bool {
	return strings.HasSuffix(f.Name, "token") || strings.HasSuffix(f.Name, "-key") && !strings.HasSuffix(f.Name, "tls-key")
}

// hidden stands for a value that must not be shown.
const hidden = "(set)"

// yamlLine writes one flag. Secrets are not shown, and what has no value is a comment.
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
