// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"log/slog"

	"github.com/alecthomas/kong"

	"github.com/kvasir-kv/kvasir/tier/adapter"
	"github.com/kvasir-kv/kvasir/tier/generation"
)

// coldStart says what a server forgets when it starts: nothing, the content of its pool (true), or everything.
type coldStart string

// The values of --cold.
const (
	coldNone coldStart = "false"
	coldPool coldStart = "true"
	coldAll  coldStart = "all"
)

// IsBool implements kong.BoolMapperValue: --cold without a value means --cold=true.
func (coldStart) IsBool() bool { return true }

// Decode implements kong.MapperValue.
func (c *coldStart) Decode(ctx *kong.DecodeContext) error {
	*c = coldPool
	if ctx.Scan.Peek().Type != kong.FlagValueToken {
		return nil
	}
	switch v := fmt.Sprint(ctx.Scan.Pop().Value); v {
	case "true", "1", "yes":
	case "false", "0", "no":
		*c = coldNone
	case "all":
		*c = coldAll
	default:
		return fmt.Errorf("%q is none of true, false and all", v)
	}
	return nil
}

// pool reports whether the pool starts empty.
func (c coldStart) pool() bool { return c == coldPool || c == coldAll }

// forget begins a new generation in the tiers for --cold=all. For --cold it only logs which tiers still serve older objects. If it
// returns an error, tiers may still serve older objects.
func (c coldStart) forget(book *generation.Book, below *adapter.Set, log *slog.Logger) error {
	var tiers []string
	for _, t := range below.Each {
		tiers = append(tiers, t.Name())
	}
	if c == coldPool {
		log.Warn("--cold emptied the pool; these tiers still serve what they have, --cold=all forgets that too", "tiers", tiers)
	}
	if c != coldAll {
		return nil
	}
	commit, err := book.Prepare(nil)
	if err != nil {
		return fmt.Errorf("--cold=all: %w", err)
	}
	commit()
	log.Warn("--cold=all: the tiers serve nothing older than this start; a tier that can list its objects loses the older ones bit by bit, the others keep them until they evict them", "tiers", tiers)
	return nil
}
