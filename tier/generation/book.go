// SPDX-License-Identifier: Apache-2.0

// Package generation makes all objects in all tiers absent at once, for a clear.
//
// Each clear begins a new generation, for one model or for all. No tier finds
// objects of earlier generations any more. The tier below the
// wrapper sees each object under a namespace that is made of the object's own and of
// its generation. Before the first clear it is the object's own, so tiers that were
// filled before, and layouts shared with LMCache servers, stay as they are.
//
// Each generation has the time of its clear in its name, so two servers that clear never
// begin the same one. Servers share objects again when they read the same file.
package generation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// Generation is one generation. The zero Generation has the objects that were stored before any clear.
type Generation struct {
	Number uint64 `json:"number"`
	Time   int64  `json:"time"` // of the clear, Unix ns
}

func (g Generation) String() string { return fmt.Sprintf("%x.%x", g.Number, g.Time) }

// FileName is the name of the file with the generations, in the root of a tier on this host.
const FileName = ".kvasir-generations"

const (
	maxModels = 4096    // models that have a generation of their own; with more, one new generation for all models begins
	maxFile   = 8 << 20 // bytes of a file, as of a note (tier.MaxNote); a longer file counts as damaged
	maxKnown  = 1 << 16 // namespaces that Back translates, beyond them it forgets any; and those in stale, of which the oldest are forgotten
	maxBegun  = 16      // generations that outdate has not handled yet; beyond them the oldest is forgotten, and its objects are never stale
)

// state is the content of a file or note.
type state struct {
	Version int                   `json:"version"`
	All     Generation            `json:"all"`
	Models  map[string]Generation `json:"models,omitempty"`
}

// Book knows the generations that count, and stores them in files. Its methods are safe for concurrent use.
type Book struct {
	files   []string
	names   *tier.Names
	log     *slog.Logger
	damaged bool // a file was damaged
	knows   bool // a file existed; changed under writing after Open
	shared  shared

	outdating sync.Mutex // orders outdate; before mu

	writing struct {
		sync.Mutex               // orders Prepare and Repair
		kept       state         // the state written last; later than mu.state until the commit
		number     uint64        // number of the last Prepare or adopt
		counts     chan struct{} // closed once that number was committed
		unkept     bool          // a file could not be written and lacks the last state
	}

	mu struct {
		sync.RWMutex
		state
		number uint64                        // number of the last commit that took effect
		moment uint64                        // counts the changes of state
		known  map[kv.Namespace]kv.Namespace // namespace in the tier → the object's own namespace
		stale  map[kv.Namespace]bool         // namespaces in tiers of earlier generations, at most maxKnown
		order  []kv.Namespace                // the keys of stale, oldest first
		begun  []begun                       // generations whose earlier namespaces are not in stale yet, at most maxBegun
	}
}

// Open reads the files that exist; the latest generation of each model counts. The
// book writes all files at each clear, and makes missing directories then. A damaged
// file begins a new generation of all models, since its generation is not known. A file of a later release is an error.
func Open(files []string, names *tier.Names, log *slog.Logger) (*Book, error) {
	b := &Book{files: files, names: names, log: log}
	b.mu.state = state{Version: version}
	b.mu.known, b.mu.stale = make(map[kv.Namespace]kv.Namespace), make(map[kv.Namespace]bool)
	for _, path := range files {
		s, err := read(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case errors.Is(err, errDamaged):
			b.knows = true
			log.Warn("a file of generations is damaged: everything in the tiers counts as cleared", "path", path, "err", err)
			b.mu.All, b.mu.Models, b.damaged = b.mu.after(b.mu.All), nil, true
			continue
		case err != nil:
			return nil, fmt.Errorf("read generations: %s: %w", path, err)
		}
		b.knows = true
		b.mu.merge(&s)
	}
	b.shared.ready.Store(true)
	b.writing.kept.merge(&b.mu.state)
	return b, nil
}

func read(path string) (s state, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a FIFO without a writer would hang
	if err != nil {
		return s, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return s, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxFile {
		return s, fmt.Errorf("%w: it is %s with %d bytes, not a regular file of at most %d", errDamaged, info.Mode(), info.Size(), maxFile)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err != nil {
		return s, err
	}
	return parse(text)
}

// version is the version of files and notes.
const version = 1

var (
	errDamaged = errors.New("generation: a damaged file")
	errNewer   = errors.New("a later release wrote the generations")
)

// parse reads a file or a note. Errors: errDamaged; errNewer: the file or note must not be changed.
func parse(text []byte) (s state, err error) {
	var v struct {
		Version int `json:"version"`
	}
	if json.Unmarshal(text, &v) == nil && v.Version > version {
		return s, fmt.Errorf("%w: version %d, this release reads %d", errNewer, v.Version, version)
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return state{}, fmt.Errorf("%w: %w", errDamaged, err)
	}
	if s.Version != version || len(s.Models) > maxModels {
		return state{}, fmt.Errorf("%w: its version is %d, not %d, or its %d models are more than %d", errDamaged, s.Version, version, len(s.Models), maxModels)
	}
	return s, nil
}

func (s *state) merge(o *state) {
	if o.All.Time > s.All.Time {
		s.All = o.All
	}
	for model, g := range o.Models {
		if g.Time > s.Models[model].Time {
			s.set(model, g)
		}
	}
	for model, g := range s.Models {
		if g.Time < s.All.Time {
			delete(s.Models, model)
		}
	}
}

func (s *state) set(model string, g Generation) {
	if s.Models == nil {
		s.Models = make(map[string]Generation)
	}
	s.Models[model] = g
}

// after returns the generation of a clear that happens now and follows g. Its time is later than all times in s, even if the clock was set
// back.
func (s *state) after(g Generation) Generation {
	last := max(g.Time, s.All.Time)
	for _, other := range s.Models {
		last = max(last, other.Time)
	}
	return Generation{g.Number + 1, max(time.Now().UnixNano(), last+1)}
}

// bound begins one new generation for all models if more than maxModels have their own, or if their names are too long for a file. Whatever
// any model stored before is absent then.
func (s *state) bound() {
	if len(s.Models) > maxModels || !s.fits() {
		s.All, s.Models = s.after(s.All), nil
	}
}

// fits reports whether the text of s is short enough to be read again.
func (s *state) fits() bool {
	const most = 128 // bytes of a model's line without its name, and of the rest
	n := most
	for model := range s.Models {
		n += most + 6*len(model) // a character that JSON escapes takes 6
	}
	if n <= maxFile {
		return true
	}
	return len(s.text()) <= maxFile
}

// text returns the content of a file or a note.
func (s *state) text() []byte {
	text, err := json.Marshal(s)
	if err != nil {
		panic(fmt.Sprintf("BUG: generation: %v", err))
	}
	return text
}

// Prepare writes a new generation of models, or with nil of all models, to the files and notes. The generation takes effect when the caller
// calls commit. An error says which file or note could not be written; commit is then not nil, and the generation lasts until the server
// ends. If a later generation was committed before, commit does nothing, because the later one includes this one.
func (b *Book) Prepare(models []string) (commit func(), err error) {
	ctx := context.Background()
	b.catchUp()
	b.writing.Lock()
	defer b.writing.Unlock()
	began := time.Now()
	next, notes := b.gather(ctx, began, true)
	for _, model := range models {
		next.set(model, next.after(next.Models[model]))
	}
	if models == nil {
		next.All, next.Models = next.after(next.All), nil
	}
	next.bound()
	err = b.write(&next)
	_, unspread := b.spread(ctx, clearTime, &next, notes)
	err = errors.Join(err, unspread)
	b.shared.took.Store(int64(time.Since(began)))
	return b.committer(&next), err
}

// committer remembers `next` as the state written last, and returns the function that puts it into effect.
func (b *Book) committer(next *state) (commit func()) {
	b.writing.kept = state{}
	b.writing.kept.merge(next)
	b.writing.number++
	number, known, counts := b.writing.number, b.shared.known, make(chan struct{})
	b.writing.counts = counts
	return sync.OnceFunc(func() {
		defer close(counts)
		if known { // after the commit: nothing may be served before the later generation takes effect
			defer b.shared.ready.Store(true)
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		if number < b.mu.number {
			return
		}
		b.mu.number = number
		began := begun{before: b.mu.state, known: b.mu.known}
		b.mu.state = state{}
		b.mu.merge(next)
		began.after = b.mu.state
		b.mu.moment++
		b.mu.known = make(map[kv.Namespace]kv.Namespace)
		if len(b.mu.begun) == maxBegun {
			b.mu.begun = slices.Delete(b.mu.begun, 0, 1)
		}
		b.mu.begun = append(b.mu.begun, began)
	})
}

// latest returns a copy of the state written last, merged with the files, which another server that shares
// a directory may have written since.
func (b *Book) latest() state {
	out := state{Version: version}
	out.merge(&b.writing.kept)
	for _, path := range b.files {
		if s, err := read(path); err == nil {
			out.merge(&s)
		}
	}
	return out
}

// Damaged reports whether a file was damaged. The pool may then have objects from before
// a clear.
func (b *Book) Damaged() bool { return b.damaged }

// Repair writes each file that is missing, damaged or different, so that each file alone has
// the whole state. It also reserves room for a clear in directories that become full. Call it once the pool has no objects from before a
// clear.
func (b *Book) Repair() error {
	b.writing.Lock()
	defer b.writing.Unlock()
	now := b.latest()
	for _, path := range b.files {
		makeRoom(path, int64(len(now.text())))
	}
	if now.isZero() && !(b.knows && len(b.shared.places) > 0) {
		return nil
	}
	var errs []error
	for _, path := range b.files {
		if s, err := read(path); err == nil && s.same(&now) {
			continue
		}
		errs = append(errs, b.writeOne(path, &now))
	}
	return errors.Join(errs...)
}

// retry writes the files again that could not be written. Otherwise each restart would begin another generation because of a damaged
// file, or miss a clear because of an old one. It goes on until a call finds all files right: another server of the directory may
// replace a file at the same time. The caller holds b.writing.
func (b *Book) retry() {
	if !b.writing.unkept {
		return
	}
	now, kept := b.latest(), true
	for _, path := range b.files {
		s, err := read(path)
		if err == nil && s.same(&now) || errors.Is(err, errNewer) {
			continue
		}
		kept = false
		_ = b.writeOne(path, &now) // the first failure was logged
	}
	if kept {
		b.writing.unkept = false
		b.log.Info("the generations are kept in all files again")
	}
}

// Files returns the paths of the files with the generations.
func (b *Book) Files() []string { return b.files }

// write replaces each file as a whole. It goes on after an error, and returns all errors. It is also an error if there is no file.
func (b *Book) write(s *state) error {
	var errs []error
	for _, path := range b.files {
		errs = append(errs, b.writeOne(path, s))
	}
	if len(b.files) == 0 {
		errs = append(errs, errors.New("there is no file to keep the generation in"))
	}
	return errors.Join(errs...)
}

func (b *Book) writeOne(path string, s *state) error {
	_, err := read(path)
	if !errors.Is(err, errNewer) {
		if err = replace(path, s.text()); err != nil {
			b.writing.unkept = true
		}
	}
	if err != nil {
		return fmt.Errorf("keep the generation in %s: %w", path, err)
	}
	return nil
}
