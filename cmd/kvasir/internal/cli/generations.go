// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"

	"github.com/kvasir-kv/kvasir/tier/adapter"
	"github.com/kvasir-kv/kvasir/tier/generation"
)

// openGenerations puts the generations (generation.Book) between the store and the tiers. Files remember the clears: one file in each
// directory of a tier, and for tiers that other servers may share, a file of this user.
func (c *serverCmd) openGenerations(o *serverOptions, below adapter.Set) error {
	if below.Tier == nil {
		return nil
	}
	if len(o.tiers.Adapters) > 0 {
		o.server.Places = append(o.server.Places, "the tiers of --l2-adapter keep the older bytes until they evict them; LMCache servers on them still serve those")
	}
	files := c.generationFiles(&o.tiers)
	book, err := generation.Open(files, o.tiers.Names, o.store.Log)
	if err != nil {
		return err
	}
	if len(o.tiers.Adapters) > 0 {
		book.Share(below.Shared...)
		book.Watch(below.ReadFiles)
		book.Sync(context.Background())
	}
	if err := c.Cold.forget(book, &below, o.store.Log); err != nil {
		return err
	}
	o.tiers.Changes.Translate(book.Back)
	o.store.Below, o.store.Moment, o.store.DropRestored = book.Tier(below.Tier), book.Moment, book.Lost()
	o.server.Generations, o.server.Changes = book, o.tiers.Changes
	return nil
}

// generationFiles returns the files that keep the generations of tiers: one in each local directory of a tier. Shared tiers have one
// file beside --state; without --state they have one file per address in this user's state directory, so that each address keeps its
// generations when other tiers change.
func (c *serverCmd) generationFiles(o *adapter.Options) (files []string) {
	var shared []string
	for _, d := range o.Disk.Dirs {
		files = append(files, filepath.Join(d.Path, generation.FileName))
	}
	for _, a := range o.Adapters {
		if names := a.Shared(); len(names) > 0 {
			shared = append(shared, names...)
		} else {
			files = append(files, filepath.Join(a.Path, generation.FileName))
		}
	}
	if len(shared) > 0 && c.State != "" {
		return append(files, c.State+".generations")
	}
	dir := os.Getenv("XDG_STATE_HOME")
	if !filepath.IsAbs(dir) {
		home, err := os.UserHomeDir()
		if err != nil {
			home = os.TempDir()
		}
		dir = filepath.Join(home, ".local", "state")
	}
	for _, name := range shared {
		h := fnv.New64a()
		_, _ = h.Write([]byte(name))
		files = append(files, filepath.Join(dir, "kvasir", fmt.Sprintf("generations-%016x", h.Sum64())))
	}
	return files
}
