// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// poolCmd manages the pools that servers leave in /dev/shm.
type poolCmd struct {
	Ls poolLsCmd `cmd:"" help:"List the pools, whose they are and who uses them."`
	Rm poolRmCmd `cmd:"" help:"Remove this user's pools that no process uses."`
}

// Help returns the text that kvasir pool --help shows. It implements kong's detailed help.
func (poolCmd) Help() string {
	return `A pool outlives its server, and its memory is taken until it is removed.

Examples:
  kvasir pool ls
  kvasir pool ls --json | jq .removed
  kvasir pool rm lmcache_l1_pool_kvasir_5555_1a2b3c4d
  kvasir pool rm --all`
}

type poolLsCmd struct {
	JSON bool `name:"json" help:"Print the pools as JSON."`
}

// Help returns the text that kvasir pool ls --help shows. It implements kong's detailed help.
func (poolLsCmd) Help() string {
	return `Examples:
  kvasir pool ls
  kvasir pool ls --json | jq .removed`
}

// Run lists the pools.
func (c *poolLsCmd) Run(e *env) error {
	found, err := pool.List("")
	if err != nil {
		return err
	}
	free, err := shm.Free(shm.Dir)
	if err != nil {
		return err
	}
	removed := pool.ListRemoved("")
	if c.JSON {
		return json.NewEncoder(e.stdout).Encode(map[string]any{"pools": found, "removed": removed, "free_bytes": free})
	}
	if len(found)+len(removed) == 0 {
		_, err := fmt.Fprintf(e.stdout, "no pool in %s, which has %s free\n", shm.Dir, sizeWords(free))
		return err
	}
	t := tabwriter.NewWriter(e.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tSIZE\tMEMORY\tOWNER\tUSED BY\tSINCE")
	for i := range found {
		f := &found[i]
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", printable(f.Name), sizeWords(f.Bytes), sizeWords(f.Taken), f.Owner, usedBy(f), f.Since.Format(time.DateTime))
	}
	for _, r := range removed {
		fmt.Fprintf(t, "%s (removed)\t%s\t%s\t\t%s\t\n", printable(r.Name), sizeWords(r.Bytes), sizeWords(r.Taken), processNames(r.Mappers))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	if len(removed) > 0 {
		fmt.Fprintln(e.stdout, "A removed pool's memory comes back when its processes end or register with a server again.")
	}
	_, err = fmt.Fprintf(e.stdout, "%s has %s free\n", shm.Dir, sizeWords(free))
	return err
}

// usedBy returns the names of the processes that use a pool, its server first.
func usedBy(f *pool.Found) string {
	var out []string
	switch {
	case f.Server > 0:
		out = append(out, fmt.Sprintf("server %d", f.Server))
	case f.Server < 0:
		out = append(out, "a server")
	}
	for _, pid := range f.Mappers {
		if pid != f.Server {
			out = append(out, processName(pid))
		}
	}
	switch {
	case len(out) > 0:
		return strings.Join(out, ", ")
	case !f.Ours:
		return "not known" // the processes of another user cannot be examined
	case f.Trouble != "":
		return "no process; " + f.Trouble
	}
	return "no process"
}

// processName returns the number of a process, with the name of its command if that is known.
func processName(pid int) string {
	if command := peercred.Command(pid); command != "" {
		return strconv.Itoa(pid) + " " + command
	}
	return strconv.Itoa(pid)
}

func processNames(pids []int) string {
	var out []string
	for _, pid := range pids {
		out = append(out, processName(pid))
	}
	return strings.Join(out, ", ")
}

type poolRmCmd struct {
	Names []string `arg:"" optional:"" name:"name" help:"Pools, by their names in kvasir pool ls."`
	All   bool     `help:"All of this user's pools that no process uses."`
}

// Help returns the text that kvasir pool rm --help shows. It implements kong's detailed help.
func (poolRmCmd) Help() string {
	return `Examples:
  kvasir pool rm lmcache_l1_pool_kvasir_5555_1a2b3c4d
  kvasir pool rm --all`
}

// Run removes pools.
func (c *poolRmCmd) Run(e *env) error {
	if c.All == (len(c.Names) > 0) {
		return usagef("name the pools to remove (kvasir pool ls lists them), or give --all")
	}
	found, err := pool.List("")
	if err != nil {
		return err
	}
	var failed error
	removed := 0
	for i := range found {
		f := &found[i]
		named := slices.Contains(c.Names, f.Name) || slices.Contains(c.Names, shm.Dir+"/"+f.Name)
		if !named && !(c.All && f.Ours && !f.InUse()) {
			continue
		}
		removed++
		failed = errors.Join(failed, removePool(e.stdout, f))
	}
	for _, name := range c.Names {
		base := strings.TrimPrefix(name, shm.Dir+"/")
		if !slices.ContainsFunc(found, func(f pool.Found) bool { return f.Name == base }) {
			failed = errors.Join(failed, fmt.Errorf("nothing to remove: there is no pool %s in %s", base, shm.Dir))
		}
	}
	if c.All && removed == 0 {
		_, err := fmt.Fprintln(e.stdout, "nothing to remove: no pool is this user's and unused")
		return err
	}
	return failed
}

func removePool(w io.Writer, f *pool.Found) error {
	if !f.Ours {
		return fmt.Errorf("%s belongs to %s, this process is uid %d: run as that user", printable(f.Name), f.Owner, os.Geteuid())
	}
	if f.InUse() {
		return fmt.Errorf("%s is used by %s: stop that first", printable(f.Name), usedBy(f))
	}
	freed, err := pool.Drop("", f.Name)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "removed %s: %s of memory are free again\n", printable(f.Name), sizeWords(freed))
	return err
}
