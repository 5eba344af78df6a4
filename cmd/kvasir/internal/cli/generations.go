package cli

import (
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"

	"github.com/kvasir-kv/kvasir/tier/adapter"
	"github.com/kvasir-kv/kvasir/tier/generation"
)

// openGenerations puts the generations between the store and the tiers, and says what
// is known of them. A clear is kept in each directory of a tier, and for tiers that other
// servers may share in a file of this user.
func (c *serverCmd) openGenerations(o *serverOptions, below adapter.Set) error {
	if below.Tier == nil {
		return nil
	}
	var files []string
	for _, d := range o.tiers.Disk.Dirs {
		files = append(files, filepath.Join(d.Path, generation.FileName))
	}
	shared := false
	for _, a := range o.tiers.Adapters {
		if a.Path != "" {
			files = append(files, filepath.Join(a.Path, generation.FileName))
		} else {
			shared = true
		}
	}
	if shared || len(o.tiers.Adapters) > 0 {
		o.server.Places = append(o.server.Places, "the tiers of --l2-adapter keep the older bytes until they evict them, and other servers on them still serve those: clear each")
	}
	if shared {
		path, err := c.generationsFile(below.Place)
		if err != nil {
			return err
		}
		files = append(files, path)
	}
	book, err := generation.Open(files, o.tiers.Names, o.store.Log)
	if err != nil {
		return err
	}
	o.tiers.Changes.Translate(book.Back)
	o.store.Below, o.store.Moment, o.store.DropRestored = book.Tier(below.Tier), book.Moment, book.Damaged()
	o.server.Generations, o.server.Changes = book, o.tiers.Changes
	return nil
}

// generationsFile is where the generations of tiers without a directory of this host
// are kept: beside --state, else in the state directory of this user.
func (c *serverCmd) generationsFile(place string) (string, error) {
	if c.State != "" {
		return c.State + ".generations", nil
	}
	dir := os.Getenv("XDG_STATE_HOME")
	if !filepath.IsAbs(dir) {
		home, err := os.UserHomeDir()
		if err != nil {
			home = os.TempDir()
		}
		dir = filepath.Join(home, ".local", "state")
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(place))
	return filepath.Join(dir, "kvasir", fmt.Sprintf("generations-%016x", h.Sum64())), nil
}
