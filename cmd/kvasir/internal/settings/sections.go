// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/kvasir-kv/kvasir/internal/options"
)

// A file may be for several commands: the flag --config of the command that reads it
// has the tag sections:"server,relay", their names. Each is a key of the file, and what
// stands below it are the flags of the command of that name.

// sectionsOf returns the sections that a command's file may have; nil for none.
func sectionsOf(command *kong.Node) []string {
	if text := FlagNamed(command, "config").Tag.Get("sections"); text != "" {
		return strings.Split(text, ",")
	}
	return nil
}

// Section returns Settings for one section of the file that was read: environment, the
// section, and then what Default gave. It reports false when the file lacks the section.
func (s *Settings) Section(name string) (*Settings, bool) {
	node, ok := s.sections[name]
	return &Settings{getenv: s.getenv, from: make(map[string]string), path: s.path, name: name, section: node, last: make(map[string]setting)}, ok
}

// Default gives a flag a value for the case that the environment and the file give none. from
// names the source of the value.
func (s *Settings) Default(flag, value, from string) {
	s.last[flag] = setting{value: value}
	s.lastOf = from
}

// hint says which key was probably meant.
func (s *Settings) hint(key string, known, sections []string) string {
	if near := options.NearestHint(key, slices.Concat(known, sections)); near != "" || sections == nil {
		return near
	}
	return ": sections are " + strings.Join(sections, ", ")
}
