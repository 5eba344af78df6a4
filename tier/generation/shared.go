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

// Place is a tier that other servers may share. Its note has the generations.
type Place struct {
	Name string
	Note tier.Notebook

	// Every is how often the note is read, and so how soon a clear of another server counts here.
	Every time.Duration

	// Foreign says that LMCache servers write to the tier, too. They know no generations, so objects
	// without a generation count until the first clear.
	Foreign bool
}

// shared is the Book's state of the places. Book.writing guards its fields, except the atomic ones and those after mu.
type shared struct {
	places []Place
	watch  bool          // other servers may write the notes, or the files
	files  time.Duration // how often the files are read, where other servers share one; else 0
	next   []time.Time   // by place: when to read its note again
	read   []bool        // by place: its note was read or written
	failed []error       // by place: the error of the last read
	unkept bool          // the last write of a note failed
	known  bool          // the note of each place was read or written
	asked  atomic.Int64
	took   atomic.Int64 // ns that the last Prepare took to read and write files and notes
	ready  atomic.Bool  // objects may be served: every place was read, or a file had generations at the start
	lost   atomic.Bool  // before Follow was set, a later generation than that of the files was found

	mu     sync.Mutex
	follow func(commit func())
}

// Share makes the Book write the generations to the notes of places, too, and follow the clears of
// other servers in the notes and the files. Call it before the Book is used.
func (b *Book) Share(places ...Place) {
	b.shared.places, b.shared.watch = places, true
	b.shared.next, b.shared.read, b.shared.failed = make([]time.Time, len(places)), make([]bool, len(places)), make([]error, len(places))
	b.shared.ready.Store(len(places) == 0 || b.knows)
}

// Watch makes the Book read the files this often, because other servers that share a directory write them, too. Call it before the
// Book is used.
func (b *Book) Watch(every time.Duration) { b.shared.watch, b.shared.files = true, every }

// Follow sets the function that is called after another server has cleared. f must call commit, which puts the later generation into
// effect.
func (b *Book) Follow(f func(commit func())) {
	b.shared.mu.Lock()
	defer b.shared.mu.Unlock()
	b.shared.follow = f
}

// Settle returns the time after a clear within which every other server of the places and files follows the clear. Places that are read
// only once a second (S3) do not count: servers that share only such places take up to a second.
func (b *Book) Settle() (d time.Duration) {
	d = 2 * b.shared.files
	for _, p := range b.shared.places {
		if p.Every < time.Second {
			d = max(d, 2*p.Every)
		}
	}
	return d
}

// Confirm waits until the other servers follow a clear that counts here, and reads the notes and files again. A server that cleared at the
// same time may have read a note before this server wrote it, and overwritten it afterwards. Then Confirm writes the clear
// once more, so that it is not lost if this server ends now. It waits long enough for such a write to end: twice as long as this server's
// last write took, at most as long as one may take. If a place takes no note now, Run tries again later.
func (b *Book) Confirm(ctx context.Context) {
	const rounds = 3 // each round that finds a lost note means another clear at the same time
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

// Run reads the notes and files, and writes those again that could not be written, until ctx ends.
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

// Bounds of the time to read all notes, to write them, and to write them in a clear.
const (
	readTime  = 2 * time.Second
	writeTime = time.Second
	clearTime = 2 * time.Second
)

// Sync reads the files and the notes that are due. It follows later generations, and writes notes and files
// that have earlier ones or none. It never goes back to an earlier generation.
func (b *Book) Sync(ctx context.Context) { b.sync(ctx, false) }

// sync is Sync; with all it reads all notes, and writes all differing files. kept reports whether it had to write none again.
func (b *Book) sync(ctx context.Context, all bool) (kept bool) {
	now := time.Now()
	b.shared.asked.Store(now.UnixNano())
	b.writing.Lock()
	b.retry()
	next, notes := b.gather(ctx, now, all)
	kept = !all || b.rewrite(&next)
	begins := b.unknown(&next, notes)
	if begins { // no server has recorded a clear: begin a generation, so that older objects do not count
		next.All = next.after(next.All)
	}
	wrote, err := b.spread(ctx, writeTime, &next, notes)
	kept = kept && !wrote
	if err != nil || len(notes) > 0 && b.allRead() {
		b.noteUnkept(err)
	}
	if begins && err != nil { // a note may exist that this server cannot read: wait until it can read or write it
		next = b.latest()
	}
	commit, pending := b.adopt(&next)
	if commit == nil && pending == nil && b.shared.known {
		b.shared.ready.Store(true)
	}
	b.writing.Unlock()
	if pending != nil { // the caller must not go on with the earlier generation
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

// unknown reports whether all notes were read, and no file and no note has a generation. It is false if a place is Foreign.
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

// follow puts the generations `next` of another server into effect: the server, if it runs already, calls commit itself. Otherwise follow
// calls it.
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

// rewrite writes the files that differ from the state `now`, because another server of their directory has overwritten them, and reports
// whether there was none.
func (b *Book) rewrite(now *state) (kept bool) {
	kept = true
	for _, path := range b.files {
		if s, err := read(path); err == nil && !s.same(now) {
			kept = false
			if err := b.writeOne(path, now); err != nil {
				b.log.Warn("the generation of a clear cannot be written to its file", "err", err)
			}
		}
	}
	return kept
}

// noted is the result of reading the note of a place.
type noted struct {
	state
	missing bool
	err     error
}

// gather returns the latest generations of the files and of the notes that are due, or with all of all notes. The
// result notes is by the index of the place. It reads all notes at once, so that a place that does not answer delays no other.
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

// readNote reads the note of a place. A damaged note counts as missing.
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
	case errors.Is(err, errNewer): // a note that cannot be understood must not be overwritten
		return noted{err: err}
	case err != nil:
		b.log.Warn("a note of generations is damaged: it is written anew", "tier", p.Name, "err", err)
		return noted{missing: true}
	}
	return n
}

// noteFailure logs when the note of a place cannot be read, and when it can be read again.
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

// allRead reports whether the last read of each place's note succeeded. It includes places that were not
// due in this round.
func (b *Book) allRead() bool {
	for _, err := range b.shared.failed {
		if err != nil {
			return false
		}
	}
	return true
}

// noteUnkept logs once when a note cannot be written, and once when all can be written again.
func (b *Book) noteUnkept(err error) {
	if was := b.shared.unkept; (err != nil) == was {
		return
	}
	b.shared.unkept = err != nil
	switch {
	case err == nil:
		b.log.Info("the generations are kept in all tiers")
	case b.notReady():
		b.log.Warn("nothing of the tiers is served or written until the generation of the last clear is known", "err", err)
	default:
		b.log.Warn("other servers may serve what was cleared until the generation is kept in the tier", "err", err)
	}
}

// spread writes the generations to the notes that differ, to all at once, within the time `most`. wrote reports whether a note was written.
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
		b.knows = b.write(next) == nil // after a restart the generations are known without the notes
	}
	return wrote, errors.Join(errs...)
}

// adopt writes generations that are later than the present ones to the files. commit puts them into effect. commit is nil if nothing is
// later, and if an earlier call returned a commit for them that was not called yet; that commit closes pending.
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
		b.log.Warn("the generations of another server cannot be written to a file", "err", err)
	}
	return b.committer(next), nil
}

func (s *state) isZero() bool { return s.All == (Generation{}) && len(s.Models) == 0 }

func (s *state) same(o *state) bool { return s.All == o.All && maps.Equal(s.Models, o.Models) }

// notReady reports whether nothing may be served or written, because no generation is known yet and the note of a place that may have one
// was not read.
func (b *Book) notReady() bool { return !b.shared.ready.Load() }

// syncIfStale reads the notes if the last read is over 3 s ago, because this process was paused.
func (b *Book) syncIfStale(ctx context.Context) {
	if len(b.shared.places) == 0 && b.shared.files == 0 {
		return
	}
	const stale = 3 * time.Second
	if last := b.shared.asked.Load(); time.Now().UnixNano()-last > int64(stale) {
		b.Sync(ctx)
	}
}

// Lost reports whether the pool may have objects from before a clear of another server, or from
// before a clear in a damaged file.
func (b *Book) Lost() bool { return b.damaged || b.shared.lost.Load() }
