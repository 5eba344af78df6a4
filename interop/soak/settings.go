// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// settings are what a run was started with, as run.json has it: -resume goes on with them, and -shrink replays with them.
type settings struct {
	Binary    string
	Previous  string
	Bug       string // of which Binary has been built
	Clocks    bool
	Collects  bool
	Redis     string
	Store     string
	Master    string
	Real      string
	Lacks     map[string]string
	Compare   string
	Clients   int
	KeepGoing bool
}

const settingsFile = "run.json"

func (o *options) save() error {
	return writeJSON(filepath.Join(o.dir, settingsFile), settings{
		Binary: o.binary, Previous: o.previous, Bug: o.bug, Clocks: o.clocks, Collects: o.collects, Redis: o.redis, Store: o.store, Master: o.master, Real: o.real,
		Lacks: o.lacks, Compare: o.compare, Clients: o.clients, KeepGoing: o.keepGoing,
	})
}

// ofSettings are the flags that settings, and the schedule beside them, stand for.
var ofSettings = []string{
	"binary", "previous", "bug", "clocks", "redis", "s3-store", "mooncake-master", "compare", "real", "clients", "keep-going", "for", "seed", "only", "faults", "dir", "replay",
}

// goOn takes the settings of the run that -resume names, or that of the schedule that -shrink replays where none are given.
func (o *options) goOn() error {
	dir, kept := o.resume, []string(nil)
	if dir == "" {
		dir, kept = filepath.Dir(o.replay), []string{"replay", "dir", "clients", "keep-going"}
	}
	var given []string
	flag.Visit(func(f *flag.Flag) {
		if slices.Contains(ofSettings, f.Name) && !slices.Contains(kept, f.Name) {
			given = append(given, "-"+f.Name)
		}
	})
	var c settings
	err := readJSON(filepath.Join(dir, settingsFile), &c)
	switch {
	case o.resume != "" && len(given) > 0:
		return fmt.Errorf("-resume goes on with what the run was started with: leave out %v", given)
	case o.resume != "" && err != nil:
		return fmt.Errorf("%s is no directory of a run that can go on: %w", dir, err)
	case errors.Is(err, os.ErrNotExist) || len(given) > 0: // a schedule from elsewhere, or another build
		return nil
	case err != nil:
		return err
	}
	o.binary, o.previous, o.clocks, o.collects, o.redis, o.store, o.master, o.real = c.Binary, c.Previous, c.Clocks, c.Collects, c.Redis, c.Store, c.Master, c.Real
	o.built, o.lacks = c.Bug != "" || c.Clocks, c.Lacks
	if o.resume != "" {
		o.compare, o.clients, o.keepGoing = c.Compare, c.Clients, c.KeepGoing
	} else if c.Bug != "" {
		fmt.Printf("the build is that of %s, with %s\n", dir, c.Bug)
	}
	o.bug = c.Bug
	return nil
}
