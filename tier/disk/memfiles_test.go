// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
)

// memFiles is a directory in memory. A power cut may lose changes that were not synced: of writes any
// sectors, and of changes of names any.
type memFiles struct {
	rand *rand.Rand // of power cuts
	free int64      // of the file system, at first

	mu sync.Mutex
	memState
	dead  bool                          // everything fails
	fail  func(deed, name string) error // decides whether a deed fails; nil never
	worst int64                         // the most bytes of segments there ever were
}

type memState struct {
	names   map[string]*memFile
	durable map[string]*memFile
	pending []func(names map[string]*memFile) // changes of names since the last sync
}

var errDead = errors.New("test: the machine is off")

// sector is the unit that a disk writes whole.
const sector = 512

type memFile struct {
	d       *memFiles
	name    string
	data    []byte
	durable []byte
	pending []memWrite
	room    int64 // reserved
}

func (f *memFile) takes() int64 { return max(int64(len(f.data)), f.room) }

// mayTakeLocked reports whether there is room for so many bytes of the file.
func (f *memFile) mayTakeLocked(bytes int64) bool {
	_, all := f.d.usedLocked()
	return bytes <= f.takes() || all+bytes-f.takes() <= f.d.free
}

// memWrite is a write, or with data nil a change of the size.
type memWrite struct {
	off  int64
	data []byte
}

func newMemFiles(seed uint64, free int64) *memFiles {
	return &memFiles{
		rand: rand.New(rand.NewPCG(seed, 7)), free: free,
		memState: memState{names: map[string]*memFile{}, durable: map[string]*memFile{}},
	}
}

// edit calls f with the files while nothing else reads or writes them: an open disk makes segments at any time.
func (m *memFiles) edit(f func(names map[string]*memFile)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f(m.names)
}

// kill returns the directory as it is after the process was killed: as it was.
func (m *memFiles) kill() *memFiles {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dead = true
	next := newMemFiles(m.rand.Uint64(), m.free)
	for name, f := range m.names {
		next.names[name] = &memFile{d: next, name: name, data: slices.Clone(f.data), durable: slices.Clone(f.durable), pending: slices.Clone(f.pending)}
	}
	for name, f := range m.durable { // files of both lives are the same
		if same := next.names[name]; same != nil && m.names[name] == f {
			next.durable[name] = same
		} else {
			next.durable[name] = &memFile{d: next, name: name, data: f.data, durable: f.durable, pending: f.pending}
		}
	}
	// Of the names only whole states survive the copy: those of the pending changes.
	if len(m.pending) > 0 {
		after := maps.Clone(next.names)
		next.pending = append(next.pending, func(names map[string]*memFile) {
			clear(names)
			maps.Copy(names, after)
		})
	}
	next.worst = m.worst
	return next
}

// cut returns the directory as it may be after a power cut.
func (m *memFiles) cut() *memFiles {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dead = true
	next := newMemFiles(m.rand.Uint64(), m.free)
	names := maps.Clone(m.durable)
	for _, change := range m.pending {
		if m.rand.IntN(2) == 0 {
			change(names)
		}
	}
	lost := m.rand.IntN(3) // a cut may lose everything, nothing, or some
	for name, f := range names {
		data := slices.Clone(f.durable)
		for _, w := range f.pending {
			data = m.survive(data, w, lost)
		}
		c := &memFile{d: next, name: name, data: data, durable: slices.Clone(data)}
		next.names[name], next.durable[name] = c, c
	}
	next.worst = m.worst
	return next
}

// survive applies what survives of a write.
func (m *memFiles) survive(data []byte, w memWrite, lost int) []byte {
	keep := func() bool { return lost == 0 || lost == 1 && m.rand.IntN(2) == 0 }
	if w.data == nil {
		if keep() {
			data = resize(data, w.off)
		}
		return data
	}
	for at := 0; at < len(w.data); {
		n := sector * (1 + m.rand.IntN(16))
		part := w.data[at:min(at+n, len(w.data))]
		if keep() {
			data = resize(data, max(int64(len(data)), w.off+int64(at+len(part))))
			copy(data[w.off+int64(at):], part)
		}
		at += len(part)
	}
	return data
}

func resize(b []byte, n int64) []byte {
	if n <= int64(len(b)) {
		return b[:n]
	}
	return append(b, make([]byte, n-int64(len(b)))...)
}

// doing begins a deed. If it returns no error, the caller holds the lock and may do the deed.
func (m *memFiles) doing(deed, name string) error {
	m.mu.Lock()
	err := error(nil)
	if m.dead {
		err = errDead
	} else if m.fail != nil {
		err = m.fail(deed, name)
	}
	if err != nil {
		m.mu.Unlock()
	}
	return err
}

func (m *memFiles) change(f func(names map[string]*memFile)) {
	f(m.names)
	m.pending = append(m.pending, f)
}

func (m *memFiles) list() (map[string]int64, error) {
	if err := m.doing("list", ""); err != nil {
		return nil, err
	}
	defer m.mu.Unlock()
	names := map[string]int64{}
	for name, f := range m.names {
		names[name] = int64(len(f.data))
	}
	return names, nil
}

func (m *memFiles) open(name string) (file, error) {
	if err := m.doing("open", name); err != nil {
		return nil, err
	}
	defer m.mu.Unlock()
	f, ok := m.names[name]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return f, nil
}

func (m *memFiles) usedLocked() (segments, all int64) {
	for name, f := range m.names {
		all += f.takes()
		if _, _, ok := parseSegment(name); ok {
			segments += int64(len(f.data))
		}
	}
	return segments, all
}

func (m *memFiles) create(name string, bytes int64) (file, error) {
	if err := m.doing("create", name); err != nil {
		return nil, err
	}
	defer m.mu.Unlock()
	if m.names[name] != nil {
		return nil, fs.ErrExist
	}
	if _, all := m.usedLocked(); all+bytes > m.free {
		return nil, syscall.ENOSPC
	}
	f := &memFile{d: m, name: name, data: make([]byte, bytes)}
	if bytes > 0 {
		f.pending = append(f.pending, memWrite{off: bytes})
	}
	m.change(func(names map[string]*memFile) { names[name] = f })
	segments, _ := m.usedLocked()
	m.worst = max(m.worst, segments)
	return f, nil
}

func (m *memFiles) rename(from, to string) error {
	if err := m.doing("rename", from); err != nil {
		return err
	}
	defer m.mu.Unlock()
	f := m.names[from]
	if f == nil {
		return fs.ErrNotExist
	}
	m.change(func(names map[string]*memFile) {
		if names[from] == f {
			delete(names, from)
		}
		names[to] = f
	})
	return nil
}

func (m *memFiles) remove(name string) error {
	if err := m.doing("remove", name); err != nil {
		return err
	}
	defer m.mu.Unlock()
	if f := m.names[name]; f != nil {
		m.change(func(names map[string]*memFile) {
			if names[name] == f {
				delete(names, name)
			}
		})
	}
	return nil
}

func (m *memFiles) sync() error {
	if err := m.doing("sync names", ""); err != nil {
		return err
	}
	defer m.mu.Unlock()
	m.durable, m.pending = maps.Clone(m.names), nil
	return nil
}

func (m *memFiles) space() (all, free int64, err error) {
	if err := m.doing("space", ""); err != nil {
		return 0, 0, err
	}
	defer m.mu.Unlock()
	_, used := m.usedLocked()
	return m.free, m.free - used, nil
}

func (m *memFiles) close() error { return nil }

func (f *memFile) readv(bufs [][]byte, off int64) error {
	if err := f.d.doing("read", f.name); err != nil {
		return err
	}
	defer f.d.mu.Unlock()
	for _, b := range bufs {
		if off+int64(len(b)) > int64(len(f.data)) {
			return io.ErrUnexpectedEOF
		}
		copy(b, f.data[off:])
		off += int64(len(b))
	}
	return nil
}

func (f *memFile) writev(bufs [][]byte, off int64) error {
	if err := f.d.doing("write", f.name); err != nil {
		return err
	}
	defer f.d.mu.Unlock()
	end := off
	for _, b := range bufs {
		end += int64(len(b))
	}
	if !f.mayTakeLocked(end) {
		return syscall.ENOSPC
	}
	for _, b := range bufs {
		f.data = resize(f.data, max(int64(len(f.data)), off+int64(len(b))))
		copy(f.data[off:], b)
		f.pending = append(f.pending, memWrite{off, slices.Clone(b)})
		off += int64(len(b))
	}
	return nil
}

func (f *memFile) size() (int64, error) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	return int64(len(f.data)), nil
}

func (f *memFile) truncate(bytes int64) error {
	if err := f.d.doing("truncate", f.name); err != nil {
		return err
	}
	defer f.d.mu.Unlock()
	f.data = resize(f.data, bytes)
	f.pending = append(f.pending, memWrite{off: bytes})
	return nil
}

func (f *memFile) reserve(bytes int64) error {
	if err := f.d.doing("reserve", f.name); err != nil {
		return err
	}
	defer f.d.mu.Unlock()
	if !f.mayTakeLocked(bytes) {
		return syscall.ENOSPC
	}
	f.room = max(f.room, bytes)
	return nil
}

func (f *memFile) sync() error {
	if err := f.d.doing("sync", f.name); err != nil {
		return err
	}
	defer f.d.mu.Unlock()
	f.durable, f.pending = slices.Clone(f.data), nil
	return nil
}

func (f *memFile) close() error { return nil }
