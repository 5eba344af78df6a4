// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// The path of a root may lead to another directory at run time: an operator removes the directory to empty a cache, and vLLM makes it anew;
// a file system is mounted on it; a symbolic link changes. The keeper then goes on with the directory that has the path now.

// pathsEvery is the time between two looks at which directory has the path of a root.
const pathsEvery = time.Second

// followAll follows all roots whose path leads to another directory now. It reports whether a root was replaced.
func (k *Keeper) followAll() (any bool) {
	for _, r := range k.roots {
		replaced, err := k.follow(r)
		switch {
		case replaced:
			k.log.Info("a directory was replaced: the keeper uses the new one", "directory", r.path)
			r.warned, any = false, true
		case err != nil && !r.warned:
			k.log.Warn("a path now leads to a directory that the keeper cannot use", "directory", r.path, "err", err)
			r.warned = true
		}
	}
	return any
}

// anyMoved reports whether entries of a root changed, since a directory of a rank that is moved in or out brings no events of its files.
// It ignores a root with LMCache's files: its entries change all the time, and files there have events of their own.
func (k *Keeper) anyMoved() (moved bool) {
	for _, r := range k.roots {
		var now unix.Stat_t
		if unix.Fstat(int(r.dir.Fd()), &now) != nil || now.Mtim == r.changed {
			continue
		}
		moved = moved || !k.hasLMCache(r)
		r.changed = now.Mtim
	}
	return moved
}

// anyMissed reports whether, since the last call, a file appeared or was removed in a directory whose path was not found. Mostly the
// directory was removed before the keeper read the event.
func (k *Keeper) anyMissed() bool { return k.fan != nil && k.fan.missed.Swap(false) }

func (k *Keeper) hasLMCache(r *rootDir) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	n, ok := r.dirs[""]
	return ok && k.books.dirs[n].count > 0
}

// restOfLooks is the least time between two looks that anyMoved or anyMissed asks for.
func (k *Keeper) restOfLooks() time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	return max(k.o.pathsEvery, 4*k.looking)
}

// hasRank reports whether the path of a root has the directory of a rank that the keeper knows. An engine that goes on after its
// directories were removed makes these directories again, but config.json only at its next start.
func (k *Keeper) hasRank(r *rootDir) bool {
	k.mu.Lock()
	ranks := slices.Collect(maps.Keys(r.dirs))
	k.mu.Unlock()
	return slices.ContainsFunc(ranks, func(rank string) bool {
		st, err := os.Lstat(filepath.Join(r.path, rank))
		return rank != "" && err == nil && st.IsDir()
	})
}

// follow makes a root use the directory that has its path now. It reports whether that is another directory than before. An error means that
// the root still uses the former one.
func (k *Keeper) follow(r *rootDir) (replaced bool, err error) {
	var now, had unix.Stat_t
	if unix.Stat(r.path, &now) != nil || unix.Fstat(int(r.dir.Fd()), &had) != nil || now.Dev == had.Dev && now.Ino == had.Ino {
		return false, nil // the same directory, or none: an engine may make one
	}
	if err := checkRoot(r.path); err != nil && !k.hasRank(r) {
		return false, err
	}
	real, err := realPath(r.path)
	if err != nil {
		return false, err
	}
	for _, other := range k.roots {
		if other != r && (within(real, other.place()) || within(other.place(), real)) {
			return false, fmt.Errorf("it is the directory %s of this keeper, or one lies in the other", other.path)
		}
	}
	dir, err := os.Open(r.path)
	if err != nil {
		return false, err
	}
	defer dir.Close()
	if err := k.lock.take(r, dir); err != nil {
		return false, err
	}
	if err := unix.Dup3(int(dir.Fd()), int(r.dir.Fd()), unix.O_CLOEXEC); err != nil { // users of the descriptor see the old or the new directory
		return false, err
	}
	r.real.Store(&real)
	switch {
	case k.fan != nil:
		err = k.fan.add(r)
	case k.ino != nil:
		k.ino.forget(r)
	}
	k.watch(r, "")
	if err != nil {
		k.log.Error("no events come from the new directory: it is read again and again", "directory", r.path, "err", err)
		k.eventsEnded.Store(true)
	}
	return true, nil
}
