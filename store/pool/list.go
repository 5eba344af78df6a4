// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/shm"
)

// Found is a pool in a folder. It may belong to any user.
type Found struct {
	Name    string    `json:"name"`
	Owner   string    `json:"owner"`            // the user that it belongs to
	Ours    bool      `json:"ours"`             // it belongs to this process's user, who may remove it
	Bytes   int64     `json:"bytes"`            // size of the segment, as the pool was made
	Taken   int64     `json:"memory_bytes"`     // memory that all its files take
	Server  int       `json:"server,omitempty"` // id of the process that serves it; 0: none, or not known
	Since   time.Time `json:"since"`
	Mappers []int     `json:"mapped_by,omitempty"` // ids of processes that map it, the server's and engines', as far as this user may see them
	Trouble string    `json:"trouble,omitempty"`   // why a server cannot take it over; empty: it can
}

// InUse reports whether a process serves or maps the pool.
func (f *Found) InUse() bool { return f.Server != 0 || len(f.Mappers) > 0 }

// List returns the pools of a folder, by name: all segments with an index, and those without an index that have a name of Kvasir's.
func List(dir string) ([]Found, error) {
	dir = cmp.Or(dir, shm.Dir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, e := range entries {
		name := e.Name()
		if i := strings.Index(name, NoteSuffix+".new-"); i > 0 {
			name = name[:i]
		}
		base, isIndex := strings.CutSuffix(name, IndexSuffix)
		base = strings.TrimSuffix(base, NoteSuffix)
		if e.Type().IsRegular() && (isIndex || strings.HasPrefix(base, "lmcache_l1_pool_") && namedByUs(base) || strings.HasPrefix(base, "kvasir_")) {
			names[base] = true
		}
	}
	var out []Found
	for name := range names {
		if f, ok := find(filepath.Join(dir, name)); ok {
			f.Name = name
			out = append(out, f)
		}
	}
	slices.SortFunc(out, func(a, b Found) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// find describes one pool. It reports false if the pool's files are gone.
func find(path string) (f Found, ok bool) {
	f.Ours = true
	for _, p := range []string{path, path + IndexSuffix, path + NoteSuffix} {
		st, err := os.Lstat(p)
		if err != nil {
			continue
		}
		if file, err := shm.Stat(p); err == nil {
			ok = true
			f.Taken += file.Taken
			f.Owner = userName(file.UID)
			f.Ours = f.Ours && file.UID == os.Geteuid()
			if p == path {
				f.Bytes = file.Bytes
				f.Mappers, _ = peercred.Mappers(filepath.Base(path), file.Inode, peercred.Process{})
			}
		}
		if f.Since.IsZero() {
			f.Since = st.ModTime()
		}
	}
	index, err := shm.AttachIf(path+IndexSuffix, shm.Ours)
	if err != nil {
		return f, ok
	}
	defer index.Close()
	h, err := readHeader(index)
	if err != nil {
		f.Trouble = "its index is damaged or of another version"
	} else {
		f.Since = time.Unix(0, int64(binary.LittleEndian.Uint64(index.Bytes(headerStarted, 8))))
	}
	if lock, err := shm.LockFile(path + IndexSuffix); errors.Is(err, shm.ErrLocked) {
		f.Server = cmp.Or(h.pid, -1)
	} else if err == nil {
		_ = lock.Close()
	}
	return f, ok
}

// Removed is a pool whose files were removed and that processes still map. Its memory comes back when these processes end or map another
// pool.
type Removed struct {
	Name    string `json:"name"`         // its former name
	Bytes   int64  `json:"bytes"`        // length of the mapping
	Taken   int64  `json:"memory_bytes"` // memory that its file takes; equal to Bytes if this process may not know
	Mappers []int  `json:"mapped_by"`
}

// ListRemoved returns the pools of a folder that were removed and are still mapped, as far as this user may see them.
func ListRemoved(dir string) []Removed {
	var out []Removed
	for _, m := range peercred.MappedRemoved(cmp.Or(dir, shm.Dir)) {
		if name := filepath.Base(m.Path); namedByUs(name) && !strings.HasSuffix(name, IndexSuffix) && !strings.Contains(name, NoteSuffix) {
			out = append(out, Removed{name, m.Bytes, m.Taken, m.PIDs})
		}
	}
	return out
}

// processes returns a text with the ids of processes and their commands.
func processes(pids []int) string {
	var out []string
	for _, pid := range pids {
		s := fmt.Sprintf("process %d", pid)
		if command := peercred.Command(pid); command != "" {
			s += " (" + command + ")"
		}
		out = append(out, s)
	}
	return strings.Join(out, ", ")
}
