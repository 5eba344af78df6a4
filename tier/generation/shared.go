// SPDX-License-Identifier: Apache-2.0

package generation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/tier"
)

// Place is a tier that other servers share: its note has the generations.
type Place struct {
	Name string
	Note tier.Notebook

	// Every is how often the note is read. A clear of another server counts here after so long.
	Every time.Duration

	// Foreign says that LMCache servers write to the tier, too. They know no generations, so what is
	// there counts until the first clear.
	Foreign bool
}

// shared is what the Book knows of the places. Its fields belong to Book.writing but for the atomic ones.
type shared struct {
	places []Place
	watch  bool          // other servers may write the notes, or the files
	files  time.Duration // how often the files are read, where other servers share one; else 0
	next   []time.Time   // when the note of each is read again
	read   []bool        // its note was read or written
	failed []error       // of the last try
	unkept bool          // a place took no note
	known  bool          // the note of each place was read or written
	asked  atomic.Int64
	took   atomic.Int64 // of the last Prepare: from reading to having written, ns
	ready  atomic.Bool  // the generations count: every place was read, or a file knew them before
	lost   atomic.Bool  // the first look found a later generation than the files had

	mu     sync.Mutex
	follow func(commit func())
}

// Share has the Book keep the generations in the notes of places, too, and follow the clears of
// other servers there and in the files. It is called before the Book is used.
func (b *Book) Share(places ...Place) {
	b.shared.places, b.shared.watch = places, true
	b.shared.next, b.shared.read, b.shared.failed = make([]time.Time, len(places)), make([]bool, len(places)), make([]error, len(places))
	b.shared.ready.Store(len(places) == 0 || b.knows)
}

// Watch has the files read so often: other servers write them, too, because they share a directory. It is called before the
// Book is used.
func (b *Book) Watch(every time.Duration) { b.shared.watch, b.shared.files = true, every }

// Follow sets what is called when another server has cleared. It calls commit, after which the
// later generation counts.
func (b *Book) Follow(f func(commit func())) {
	b.shared.mu.Lock()
	defer b.shared.mu.Unlock()
	b.shared.follow = f
}

// Settle is how long after a clear every other server of the places and files follows it, but for those that
// only share a bucket: they take up to a second.
func (b *Book) Settle() (d time.Duration) {
	d = 2 * b.shared.files
	for _, p := range b.shared.places {
		if p.Every < time.Second {
			d = max(d, 2*p.Every)
		}
	}
	return d
}

// Confirm waits until the other servers follow a clear that counts here, and reads the notes and files again. One that cleared at the
// same time may have read a note before this server wrote it, and written its own after it: then the clear is written
// once more, so that it is not lost if this server ends now. Confirm waits so long that such a write would have been
// made: twice as long as the one of this server took, and no longer than one may take. A place that takes no note now is left to Run.
func (b *Book) Confirm(ctx context.Context) {
	const rounds = 3 // each of them means another clear at the same time
	for range rounds {
		wait := b.Settle()
		if b.shared.watch {
			wait = max(wait, min(2*time.Duration(b.shared.took.Load()), readTime+clearTime))
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
		if !b.shared.watch || b.sync(ctx, true) {
			return
		}
	}
}

// Run reads the notes, and writes again what could not be written, until ctx ends.
func (b *Book) Run(ctx context.Context) {
	every := cmp.Or(min(b.shared.files, time.Second), time.Second)
	for _, p := range b.shared.places {
		every = min(every, p.Every)
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if b.shared.watch {
			b.Sync(ctx)
			continue
		}
		b.writing.Lock()
		b.retry()
		b.writing.Unlock()
	}
}

// Bounds of a look at the notes: of reading and of writing them, also in a clear.
const (
	readTime  = 2 * time.Second
	writeTime = time.Second
	clearTime = 2 * time.Second
)

// Sync reads the notes and files that are due, follows what is later there, and writes what is
// earlier or missing there. It does not trust a smaller generation than one that it knew.
func (b *Book) Sync(ctx context.Context) { b.sync(ctx, false) }

// sync is Sync, with all of all notes and files. kept reports whether none of them had to be written again.
func (b *Book) sync(ctx context.Context, all bool) (kept bool) {
	now := time.Now()
	b.shared.asked.Store(now.UnixNano())
	b.writing.Lock()
	b.retry()
	next, notes := b.gather(ctx, now, all)
	kept = !all || b.rewrite(&next)
	begins := b.unknown(&next, notes)
	if begins { // no one knows what was cleared: nothing older than now counts
		next.All = next.after(next.All)
	}
	wrote, err := b.spread(ctx, writeTime, &next, notes)
	kept = kept && !wrote
	if err != nil || len(notes) > 0 && b.allRead() {
		b.noteUnkept(err)
	}
	if begins && err != nil { // a note may be there that this server may not read: it counts once it can be read, or is written
		next = b.latest()
	}
	commit, pending := b.adopt(&next)
	if commit == nil && pending == nil && b.shared.known {
		b.shared.ready.Store(true)
	}
	b.writing.Unlock()
	if pending != nil { // whoever asks must not go on with the earlier one
		wait, cancel := context.WithTimeout(ctx, readTime)
		defer cancel()
		select {
		case <-pending:
		case <-wait.Done():
		}
	}
	if commit != nil {
		b.follow(&next, commit)
	}
	return kept
}

// unknown reports whether no file and no note of any place has a generation.
func (b *Book) unknown(next *state, notes map[int]noted) bool {
	if len(notes) == 0 || len(notes) != len(b.shared.places) || b.knows || !next.isZero() {
		return false
	}
	for i, n := range notes {
		if n.err != nil || !n.missing || b.shared.places[i].Foreign {
			return false
		}
	}
	return true
}

// follow has the generations of another server count.
func (b *Book) follow(next *state, commit func()) {
	b.catchUp()
	b.shared.mu.Lock()
	follow := b.shared.follow
	b.shared.mu.Unlock()
	if follow == nil { // before the server runs
		b.shared.lost.Store(true)
		commit()
		return
	}
	b.log.Warn("another server has cleared tiers that it shares with this one: nothing older is served", "generation", next.All.String())
	follow(commit)
}

// rewrite writes the files that another server of their directory has written without what is known, and reports whether
// there was none.
func (b *Book) rewrite(now *state) (kept bool) {
	kept = true
	for _, path := range b.files {
		if s, err := read(path); err == nil && !s.same(now) {
			kept = false
			if err := b.writeOne(path, now); err != nil {
				b.log.Warn("keep the generation of a clear", "err", err)
			}
		}
	}
	return kept
}

// noted is what the note of a place had.
type noted struct {
	state
	missing bool
	err     error
}

// gather returns the latest generations of the files and of the notes that are due, or of all. The
// notes are by the number of their place. All are read at once: one that does not answer keeps no other from being read.
func (b *Book) gather(ctx context.Context, now time.Time, all bool) (next state, notes map[int]noted) {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	next, notes = b.latest(), map[int]noted{}
	read := make([]noted, len(b.shared.places))
	var wg sync.WaitGroup
	for i, p := range b.shared.places {
		if early := p.Every / 10; !all && now.Add(early).Before(b.shared.next[i]) { // ticks come a little early or late
			continue
		}
		b.shared.next[i], notes[i] = now.Add(p.Every), noted{}
		wg.Go(func() { read[i] = b.readNote(ctx, &p) })
	}
	wg.Wait()
	for i := range b.shared.places {
		if _, asked := notes[i]; asked {
			notes[i] = read[i]
			next.merge(&read[i].state)
			b.noteFailure(i, read[i].err)
		}
	}
	next.bound()
	return next, notes
}

// readNote reads the note of a place. One that is damaged counts as missing.
func (b *Book) readNote(ctx context.Context, p *Place) (n noted) {
	text, err := p.Note.Note(ctx)
	switch {
	case errors.Is(err, tier.ErrLongNote):
		err = fmt.Errorf("%w: %w", errDamaged, err)
	case err != nil:
		return noted{err: err}
	case text == nil:
		return noted{missing: true}
	default:
		n.state, err = parse(text)
	}
	switch {
	case errors.Is(err, errNewer): // it is not read, so it is not written either
		return noted{err: err}
	case err != nil:
		b.log.Warn("a note of generations is damaged: it is written anew", "tier", p.Name, "err", err)
		return noted{missing: true}
	}
	return n
}

// noteFailure logs that a place cannot be asked, and that it can again.
func (b *Book) noteFailure(i int, err error) {
	was := b.shared.failed[i]
	b.shared.failed[i] = err
	switch name := b.shared.places[i].Name; {
	case err != nil && was == nil:
		b.log.Warn("the generations in a tier cannot be read: a clear of another server may be missed until they can", "tier", name, "err", err)
	case err == nil && was != nil:
		b.log.Info("the generations in a tier can be read again", "tier", name)
	}
}

// allRead reports whether the last look at each place succeeded. A place that failed is left alone for a while, which says
// nothing of it.
func (b *Book) allRead() bool {
	for _, err := range b.shared.failed {
		if err != nil {
			return false
		}
	}
	return true
}

// noteUnkept logs that a place takes no note, once until it does.
func (b *Book) noteUnkept(err error) {
	if was := b.shared.unkept; (err != nil) == was {
		return
	}
	b.shared.unkept = err != nil
	switch {
	case err == nil:
		b.log.Info("the generations are kept in all tiers")
	case b.closed():
		b.log.Warn("nothing of the tiers is served or written until the generation of the last clear is known", "err", err)
	default:
		b.log.Warn("other servers may serve what was cleared until the generation is kept in the tier", "err", err)
	}
}

// spread writes the generations to the notes that have others, to all at once, for so long at most. wrote reports whether a note was
// written.
func (b *Book) spread(ctx context.Context, most time.Duration, next *state, notes map[int]noted) (wrote bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	errs := make([]error, len(b.shared.places))
	var text []byte
	var writes []int
	var wg sync.WaitGroup
	for i, p := range b.shared.places {
		n, asked := notes[i]
		switch {
		case !asked:
		case n.err != nil:
			errs[i] = n.err
		case n.missing || !n.same(next):
			if text == nil {
				text = next.text()
			}
			writes = append(writes, i)
			wg.Go(func() { errs[i] = p.Note.SetNote(ctx, text) })
		}
	}
	wg.Wait()
	for _, i := range writes {
		wrote = wrote || errs[i] == nil
	}
	done := true
	for i, p := range b.shared.places {
		if _, asked := notes[i]; asked && errs[i] == nil {
			b.shared.read[i] = true
		}
		if errs[i] != nil {
			errs[i] = fmt.Errorf("keep the generation in %s: %w", p.Name, errs[i])
		}
		done = done && b.shared.read[i]
	}
	b.shared.known = b.shared.known || done
	if done && !b.knows {
		b.knows = b.write(next) == nil // a later life knows them without the notes
	}
	return wrote, errors.Join(errs...)
}

// adopt keeps generations that are later than those that count in the files. commit has them
// count; it is nil where nothing is later, and where whoever has found them before has yet to call its own, which closes pending.
func (b *Book) adopt(next *state) (commit func(), pending chan struct{}) {
	b.mu.RLock()
	same, counts := next.same(&b.mu.state), b.mu.number
	b.mu.RUnlock()
	switch {
	case same:
		return nil, nil
	case counts < b.writing.number && next.same(&b.writing.kept):
		return nil, b.writing.counts
	}
	if err := b.write(next); err != nil {
		b.log.Warn("keep the generations of another server", "err", err)
	}
	return b.committer(next), nil
}

func (s *state) isZero() bool { return s.All == (Generation{}) && len(s.Models) == 0 }

func (s *state) same(o *state) bool { return s.All == o.All && maps.Equal(s.Models, o.Models) }

// closed reports whether nothing may be served or written: no generation is known yet, and a
// place that may have one was not asked.
func (b *Book) closed() bool { return !b.shared.ready.Load() }

// fresh has the notes read where they were not for long: this process stood still.
func (b *Book) fresh(ctx context.Context) {
	if len(b.shared.places) == 0 && b.shared.files == 0 {
		return
	}
	const stale = 3 * time.Second
	if last := b.shared.asked.Load(); time.Now().UnixNano()-last > int64(stale) {
		b.Sync(ctx)
	}
}

// Lost reports whether the pool may hold objects from before a clear of another server, or from
// before a clear that no one here knows.
func (b *Book) Lost() bool { return b.damaged || b.shared.lost.Load() }
