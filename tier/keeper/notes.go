// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/statefile"
)

// notes save the times of use over a restart, since the kernel writes access times once a day or never. The document
// of each root is
//
//	n × { length of the directory's name u16, name, files u32, files × { hash 32 bytes, its length u8, group u16, microseconds i64 } }
//
// with the files of a directory sorted by hash, length and group.
type notes struct {
	files []*statefile.File // one for each root
	dirs  []map[string][]byte
	roots []*rootDir
}

const (
	notesMagic  = "kvasir-keeper-uses-1"
	notesEvery  = 10 * time.Minute
	maxNotes    = 4 << 30 // bytes of a file of notes, or of sums
	recordBytes = 32 + 1 + 2 + 8
	keyBytes    = 32 + 1 + 2
)

// stateName returns the name of a root's file in the state directory: `what` the file is, and a hash of where the root is.
func stateName(what string, r *rootDir) string {
	return fmt.Sprintf("%s-%016x", what, xxh3.HashString(r.place()))
}

func openNotes(dir string, roots []*rootDir) (_ *notes, err error) {
	s := &notes{roots: roots}
	if dir == "" {
		return s, nil
	}
	if err := makeStateDir(dir, roots); err != nil {
		return nil, err
	}
	for _, r := range roots {
		f, doc, err := statefile.Open(filepath.Join(dir, stateName("uses", r)), notesMagic, maxNotes)
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.files = append(s.files, f)
		s.dirs = append(s.dirs, parseNotes(doc))
	}
	return s, nil
}

// makeStateDir makes the directory of notes, which must not lie in a directory that engines fill.
func makeStateDir(dir string, roots []*rootDir) error {
	real, err := futurePath(dir)
	if err != nil {
		return fmt.Errorf("directory of notes: %w", err)
	}
	for _, r := range roots {
		if within(real, r.place()) {
			return fmt.Errorf("the state directory %s lies in %s, into which the keeper never writes: name another one", dir, r.path)
		}
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("directory of notes: %w", err)
	}
	return nil
}

// futurePath is the path without symbolic links of a directory that may not exist yet.
func futurePath(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	for at, rest := dir, ""; ; at, rest = filepath.Dir(at), filepath.Join(filepath.Base(at), rest) {
		real, err := filepath.EvalSymlinks(at)
		if err == nil || at == "/" {
			return filepath.Join(real, rest), err
		}
		if !errors.Is(err, os.ErrNotExist) {
			return "", err
		}
	}
}

// parseNotes splits a document by directories. After an impossible length it leaves out the rest; access times count for those files.
func parseNotes(b []byte) map[string][]byte {
	out := map[string][]byte{}
	for len(b) >= 2 {
		n := int(binary.LittleEndian.Uint16(b))
		if len(b) < 2+n+4 {
			break
		}
		name := string(b[2 : 2+n])
		bytes := int64(binary.LittleEndian.Uint32(b[2+n:])) * recordBytes
		b = b[2+n+4:]
		if bytes > int64(len(b)) {
			break
		}
		out[name], b = b[:bytes], b[bytes:]
	}
	return out
}

func appendKey(b []byte, k id) []byte {
	return binary.BigEndian.AppendUint16(append(append(b, k.hash[:]...), k.bytes), k.group)
}

// at returns the time of use that a former keeper saved.
func (s *notes) at(r *rootDir, dir string, k id) (int64, bool) {
	i := slices.Index(s.roots, r)
	if i >= len(s.dirs) || s.dirs[i] == nil {
		return 0, false
	}
	records := s.dirs[i][dir]
	key := appendKey(make([]byte, 0, keyBytes), k)
	n := len(records) / recordBytes
	at := sort.Search(n, func(i int) bool { return bytes.Compare(records[i*recordBytes:i*recordBytes+keyBytes], key) >= 0 })
	if at == n || !bytes.Equal(records[at*recordBytes:at*recordBytes+keyBytes], key) {
		return 0, false
	}
	return int64(binary.LittleEndian.Uint64(records[at*recordBytes+keyBytes:])), true
}

// drop frees the notes once all files are known.
func (s *notes) drop() { s.dirs = nil }

func (s *notes) close() error {
	var errs []error
	for _, f := range s.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// noted returns the time of use that a former keeper saved, if it is not in the future. Callers hold k.mu.
func (k *Keeper) noted(dir uint32, key id) (int64, bool) {
	d := k.books.dirs[dir]
	at, ok := k.notes.at(d.root, d.path, key)
	return at, ok && at <= k.now().UnixMicro()
}

// noteAgain saves the times of use from time to time, on a goroutine of its own: a million files take seconds, and a disk may hang.
func (k *Keeper) noteAgain(ctx context.Context) {
	tick := time.NewTicker(k.o.notesEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := k.saveNotes(); err != nil {
				k.log.Warn("the times of use cannot be saved", "err", err)
			}
		}
	}
}

// saveNotes writes the times of use of all files, once they are known.
func (k *Keeper) saveNotes() error {
	if len(k.notes.files) == 0 {
		return nil
	}
	type record struct {
		id     id
		usedAt int64
	}
	var errs []error
	for i, r := range k.roots {
		of, names, known := map[uint32][]record{}, map[uint32]string{}, false
		for first := uint32(1); ; first += slabFiles { // in parts, to hold the lock only shortly
			k.mu.Lock()
			known = k.arranged
			end := k.books.used
			for n := first; n < min(first+slabFiles, end); n++ {
				if f := k.books.file(n); f.id.bytes != 0 && k.books.dirs[f.dir].root == r {
					of[f.dir] = append(of[f.dir], record{f.id, f.usedAt})
					names[f.dir] = k.books.dirs[f.dir].path
				}
			}
			k.mu.Unlock()
			if first+slabFiles >= end {
				break
			}
		}
		if !known {
			return nil
		}
		var doc []byte
		for d, records := range of {
			slices.SortFunc(records, func(x, y record) int {
				return cmp.Or(bytes.Compare(x.id.hash[:], y.id.hash[:]), cmp.Compare(x.id.bytes, y.id.bytes), cmp.Compare(x.id.group, y.id.group))
			})
			doc = append(binary.LittleEndian.AppendUint16(doc, uint16(len(names[d]))), names[d]...)
			doc = binary.LittleEndian.AppendUint32(doc, uint32(len(records)))
			for _, e := range records {
				doc = binary.LittleEndian.AppendUint64(appendKey(doc, e.id), uint64(e.usedAt))
			}
		}
		errs = append(errs, k.notes.files[i].Write(doc))
	}
	return errors.Join(errs...)
}
