// SPDX-License-Identifier: Apache-2.0

package settings

import (
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/kvasir-kv/kvasir/internal/options"
)

// One configuration file may serve several commands. The flag --config of the command that reads the file has the tag
// sections:"server,relay", the names of these commands. Each name is a key of the file, and the keys below it are the flags of that
// command.

// sectionsOf returns the names of the sections that a command's file may have; nil: none.
func sectionsOf(command *kong.Node) []string {
	if text := FlagNamed(command, "config").Tag.Get("sections"); text != "" {
		return strings.Split(text, ",")
	}
	return nil
}

// Section returns Settings for one section of the file that was read. They look for a flag in the environment first, then in the
// section, then among the values given to Default. ok is false if the file lacks the section.
func (s *Settings) Section(name string) (*Settings, bool) {
	node, ok := s.sections[name]
	return &Settings{getenv: s.getenv, from: make(map[string]string), path: s.path, name: name, section: node, last: make(map[string]setting)}, ok
}

// Default gives a flag a value that is used if neither the environment nor the file has one. `from` names, for Sources, the source of this
// and of all earlier values given to Default.
func (s *Settings) Default(flag, value, from string) {
	s.last[flag] = setting{value: value}
	s.lastOf = from
}

// hint returns the end of an error about an unknown key: which of the names `known` was probably meant, or else the names of the sections,
// if the file may have any.
func (s *Settings) hint(key string, known, sections []string) string {
	if near := options.NearestHint(key, slices.Concat(known, sections)); near != "" || sections == nil {
		return near
	}
	return ": sections are " + strings.Join(sections, ", ")
}
