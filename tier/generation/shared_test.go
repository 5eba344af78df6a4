// SPDX-License-Identifier: Apache-2.0

package generation_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/generation"
)

// place is a tier with a note that several servers share.
type place struct {
	tier.Tier
	mu     sync.Mutex
	text   []byte
	down   error
	frozen bool // it takes no note
	reads  int  // of the note
}

var errDown = errors.New("it is down")

func newPlace() *place { return &place{Tier: tier.NewMemory(1 << 20)} }

func (p *place) Note(ctx context.Context) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reads++
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case len(p.text) > tier.MaxNote:
		return nil, tier.ErrLongNote
	}
	return p.text, p.down
}

func (p *place) SetNote(ctx context.Context, text []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if p.frozen {
		return errDown
	}
	if p.down == nil {
		p.text = text
	}
	return p.down
}

func (p *place) set(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
}

// fleetServer is a server of a fleet.
type fleetServer struct {
	t     *testing.T
	book  *generation.Book
	p     *place
	names *tier.Names
	file  string
	alien bool
}

func startServer(t *testing.T, p *place, file string, alien bool) *fleetServer {
	t.Helper()
	s := &fleetServer{t: t, p: p, names: tier.NewNames(), file: file, alien: alien}
	for i, model := range []string{"m", "other"} {
		s.names.Add(kv.Namespace{byte(i + 1)}, model, nil)
	}
	s.restart()
	return s
}

func (s *fleetServer) restart() {
	s.t.Helper()
	b, err := generation.Open([]string{s.file}, s.names, slog.New(slog.DiscardHandler))
	if err != nil {
		s.t.Fatal(err)
	}
	b.Share(generation.Place{Name: "p", Note: s.p, Every: time.Nanosecond, Foreign: s.alien})
	b.Sync(s.t.Context())
	b.Follow(func(commit func()) { commit() })
	s.book = b
}

func (s *fleetServer) clear(models ...string) error {
	commit, err := s.book.Prepare(models)
	commit()
	return err
}

func keyOf(i int) kv.Key { return kv.Key{Namespace: kv.Namespace{byte(i)}} }

func (s *fleetServer) store(i int) {
	s.t.Helper()
	if err := s.book.Tier(s.p.Tier).Write(s.t.Context(), keyOf(i), tier.Meta{Len: 1}, []byte{1}); err != nil {
		s.t.Error(err)
	}
}

func (s *fleetServer) has(i int) bool {
	s.t.Helper()
	metas := make([]tier.Meta, 1)
	if err := s.book.Tier(s.p.Tier).Stat(s.t.Context(), []kv.Key{keyOf(i)}, metas); err != nil {
		s.t.Fatal(err)
	}
	_, err := s.book.Tier(s.p.Tier).Read(s.t.Context(), keyOf(i), make([]byte, 1))
	if (err == nil) != (metas[0].Len > 0) {
		s.t.Errorf("Stat %+v, Read %v", metas[0], err)
	}
	return metas[0].Len > 0
}

func (s *fleetServer) want(when string, i int, want bool) {
	s.t.Helper()
	if got := s.has(i); got != want {
		s.t.Errorf("%s: object %d is there: %v, want %v", when, i, got, want)
	}
}

// A clear of one server counts on all servers of its tiers: of a model, and of all.
func TestClearReachesTheFleet(t *testing.T) {
	p := newPlace()
	var fleet []*fleetServer
	for range 3 {
		fleet = append(fleet, startServer(t, p, filepath.Join(t.TempDir(), "g"), false))
	}
	all := func(when string, i int, want bool) {
		t.Helper()
		for _, s := range fleet {
			s.book.Sync(t.Context())
			s.want(when, i, want)
		}
	}
	fleet[0].store(1)
	fleet[0].store(2)
	all("stored", 1, true)
	if err := fleet[1].clear("m"); err != nil {
		t.Fatal(err)
	}
	all("its model cleared", 1, false)
	all("another model cleared", 2, true)
	fleet[2].store(1)
	all("stored after the clear", 1, true)
	for _, s := range fleet { // two at once, and a third
		if err := s.clear(); err != nil {
			t.Fatal(err)
		}
	}
	all("all cleared", 1, false)
	all("all cleared", 2, false)
	fleet[0].store(2)
	all("stored after all", 2, true)
	for _, s := range fleet {
		s.restart()
	}
	all("restarted", 1, false)
	all("restarted", 2, true)
}

// If the note was lost, or is of an earlier generation, the servers do not trust it and write it anew.
func TestLostNoteIsWrittenAnew(t *testing.T) {
	p := newPlace()
	a := startServer(t, p, filepath.Join(t.TempDir(), "g"), false)
	b := startServer(t, p, filepath.Join(t.TempDir(), "g"), false)
	a.store(1)
	former := p.text
	if err := a.clear("m"); err != nil {
		t.Fatal(err)
	}
	a.store(2)
	later := string(p.text)
	for name, text := range map[string][]byte{"lost": nil, "earlier": former, "damaged": []byte("{"), "of nothing": []byte(`{"version":1,"all":{}}`)} {
		p.set(func() { p.text = text })
		b.book.Sync(t.Context()) // b did not know the clear before
		b.want(name, 2, true)
		a.book.Sync(t.Context())
		b.book.Sync(t.Context())
		for _, s := range []*fleetServer{a, b} {
			s.want(name, 1, false)
			s.want(name, 2, true)
			s.restart()
			s.want(name+", restarted", 1, false)
			s.want(name+", restarted", 2, true)
		}
		if string(p.text) != later {
			t.Errorf("%s: the note is %s, want %s", name, p.text, later)
		}
	}
	p.set(func() { p.text = nil })
	c := startServer(t, p, filepath.Join(t.TempDir(), "g"), false) // no one knows of the clear
	c.want("a server that knows no generation", 1, false)
	c.want("a server that knows no generation", 2, false)
	if !c.book.Lost() {
		t.Error("the pool of a server that knows no generation may be kept")
	}
	c.store(1)
	c.restart()
	c.want("stored since its start", 1, true)
}

// A server that knows no generation serves and writes nothing until it has read one.
func TestServerThatKnowsNothingServesNothing(t *testing.T) {
	p := newPlace()
	a := startServer(t, p, filepath.Join(t.TempDir(), "g"), false)
	a.store(1)
	p.set(func() { p.down = errDown })
	b := startServer(t, p, filepath.Join(t.TempDir(), "g"), false)
	b.want("the tier is down", 1, false)
	if err := b.book.Tier(p.Tier).Write(t.Context(), keyOf(2), tier.Meta{Len: 1}, []byte{1}); !errors.Is(err, tier.ErrResting) {
		t.Errorf("a write while no generation is known: %v", err)
	}
	if err := b.book.Tier(p.Tier).Delete(t.Context(), []kv.Key{keyOf(1)}); !errors.Is(err, tier.ErrResting) {
		t.Errorf("a deletion while no generation is known, which deletes nothing: %v", err)
	}
	a.want("a server that knows one", 1, true)
	p.set(func() { p.down = nil })
	b.book.Sync(t.Context())
	b.want("the tier is up", 1, true)
	p.set(func() { p.down = errDown })
	b.restart()
	b.want("a later life while the tier is down", 1, true)
}

// The first generation that a server reads may be of a clear. Until that clear counts, the server serves no earlier object, and writes
// nothing under an earlier generation.
func TestNothingIsServedBeforeTheFirstGenerationCounts(t *testing.T) {
	p := newPlace()
	a := startServer(t, p, filepath.Join(t.TempDir(), "g"), false)
	a.store(1)
	if err := a.clear("m"); err != nil {
		t.Fatal(err)
	}
	p.set(func() { p.down = errDown })
	b := startServer(t, p, filepath.Join(t.TempDir(), "g"), false)
	p.set(func() { p.down = nil })
	followed := false
	b.book.Follow(func(commit func()) {
		followed = true
		b.want("the clear is known and does not count yet", 1, false)
		if err := b.book.Tier(p.Tier).Write(t.Context(), keyOf(1), tier.Meta{Len: 1}, []byte{1}); !errors.Is(err, tier.ErrResting) {
			t.Errorf("a write before the clear counts: %v", err)
		}
		commit()
	})
	b.book.Sync(t.Context())
	if !followed {
		t.Error("the server follows no clear")
	}
	b.want("the clear counts", 1, false)
	b.store(1)
	b.want("stored since", 1, true)
}

// A tier that is down causes one warning, also while its calls are paused between two tries.
func TestTierThatIsDownIsOneWarning(t *testing.T) {
	var log strings.Builder
	p := newPlace()
	p.down = errDown
	b, err := generation.Open([]string{filepath.Join(t.TempDir(), "g")}, tier.NewNames(), slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	b.Share(generation.Place{Name: "p", Note: p, Every: time.Hour})
	for range 3 {
		b.Sync(t.Context())
	}
	if n := strings.Count(log.String(), "nothing of the tiers is served"); n != 1 || strings.Contains(log.String(), "kept in all tiers") {
		t.Errorf("%d warnings:\n%s", n, log.String())
	}
}

// The Book reads a note at each tick, also if the tick comes a little early, and not in between.
func TestNotesAreReadAtEachTick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlace()
		b, err := generation.Open([]string{filepath.Join(t.TempDir(), "g")}, tier.NewNames(), slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		b.Share(generation.Place{Name: "p", Note: p, Every: time.Second})
		for i, after := range []struct {
			wait time.Duration
			want int
		}{{0, 1}, {999 * time.Millisecond, 2}, {10 * time.Millisecond, 2}, {800 * time.Millisecond, 2}, {190 * time.Millisecond, 3}} {
			time.Sleep(after.wait)
			b.Sync(t.Context())
			if got := p.reads; got != after.want {
				t.Errorf("look %d: the note was read %d times, want %d", i, got, after.want)
			}
		}
	})
}

// Of a tier that LMCache servers share, everything counts until the first clear.
func TestForeignTierCountsUntilTheFirstClear(t *testing.T) {
	p := newPlace()
	if err := p.Write(t.Context(), keyOf(1), tier.Meta{Len: 1}, []byte{1}); err != nil {
		t.Fatal(err)
	}
	a := startServer(t, p, filepath.Join(t.TempDir(), "g"), true)
	a.want("before a clear", 1, true)
	if a.book.Lost() {
		t.Error("the pool is dropped")
	}
	if err := a.clear(); err != nil {
		t.Fatal(err)
	}
	a.want("after it", 1, false)
}

// A tier that fails in the middle of a clear: the clear says so, counts here, and
// reaches the others when the tier is back.
func TestTierFailsInAClear(t *testing.T) {
	p := newPlace()
	a := startServer(t, p, filepath.Join(t.TempDir(), "g"), false)
	b := startServer(t, p, filepath.Join(t.TempDir(), "g"), false)
	a.store(1)
	p.set(func() { p.frozen = true })
	if err := a.clear("m"); !errors.Is(err, errDown) {
		t.Errorf("a clear that other servers do not hear of: %v", err)
	}
	a.want("cleared", 1, false)
	p.set(func() { p.frozen = false })
	a.book.Sync(t.Context())
	b.book.Sync(t.Context())
	b.want("the tier is back", 1, false)
}

// A file of generations that is a FIFO counts as damaged; the start does not hang.
func TestFileThatIsAFIFO(t *testing.T) {
	file := filepath.Join(t.TempDir(), "g")
	if err := unix.Mkfifo(file, 0o600); err != nil {
		t.Fatal(err)
	}
	opened := make(chan *generation.Book, 1)
	go func() { opened <- open(t, tier.NewNames(), file) }()
	select {
	case b := <-opened:
		if !b.Damaged() {
			t.Error("a FIFO is a file of generations")
		}
		if err := b.Repair(); err != nil {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the start hangs")
	}
}

// silentPlace does not answer while it is silent.
type silentPlace struct {
	*place
	silent atomic.Bool
}

func (p *silentPlace) Note(ctx context.Context) ([]byte, error) {
	if p.silent.Load() {
		<-ctx.Done()
	}
	return p.place.Note(ctx)
}

func (p *silentPlace) SetNote(ctx context.Context, text []byte) error {
	if p.silent.Load() {
		<-ctx.Done()
	}
	return p.place.SetNote(ctx, text)
}

// A tier that does not answer does not delay a clear for the servers that share another tier, and takes no longer than its time limit.
func TestSilentTierKeepsNoClearFromAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		silent, p := &silentPlace{place: newPlace()}, newPlace()
		var servers []*generation.Book
		for range 2 {
			names := tier.NewNames()
			names.Add(keyOf(1).Namespace, "m", nil)
			b := open(t, names, filepath.Join(t.TempDir(), "g"))
			b.Share(generation.Place{Name: "silent", Note: silent, Every: time.Nanosecond}, generation.Place{Name: "p", Note: p, Every: time.Nanosecond})
			b.Sync(t.Context())
			b.Follow(func(commit func()) { commit() })
			servers = append(servers, b)
		}
		servers[0].Sync(t.Context()) // reads the generation that the second one began
		there := func(b *generation.Book) bool {
			t.Helper()
			metas := make([]tier.Meta, 1)
			if err := b.Tier(p).Stat(t.Context(), []kv.Key{keyOf(1)}, metas); err != nil {
				t.Fatal(err)
			}
			return metas[0].Len > 0
		}
		if err := servers[0].Tier(p).Write(t.Context(), keyOf(1), tier.Meta{Len: 1}, []byte{1}); err != nil {
			t.Fatal(err)
		}
		if !there(servers[1]) {
			t.Fatal("the servers share nothing")
		}
		silent.silent.Store(true)
		began := time.Now()
		commit, err := servers[0].Prepare([]string{"m"})
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "silent") || strings.Contains(err.Error(), "in p:") {
			t.Errorf("a clear that one of two tiers does not keep: %v", err)
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("the clear took %v", took)
		}
		commit()
		servers[1].Sync(t.Context())
		if there(servers[0]) || there(servers[1]) {
			t.Errorf("cleared objects are there: %v, %v", there(servers[0]), there(servers[1]))
		}
	})
}

// If the names of models would make a note too long to be read, the Book begins a generation of all models instead. It replaces a note that
// is too long.
func TestNoteIsNeverTooLong(t *testing.T) {
	p := newPlace()
	a := startServer(t, p, filepath.Join(t.TempDir(), "g"), false)
	b := startServer(t, p, filepath.Join(t.TempDir(), "g"), false)
	a.book.Sync(t.Context())
	a.store(1)
	a.store(2)
	models := []string{"m"}
	for i := range 1500 {
		models = append(models, strings.Repeat("<", 1000)+strconv.Itoa(i)) // JSON takes 6 bytes for each <
	}
	if err := a.clear(models...); err != nil {
		t.Fatal(err)
	}
	b.book.Sync(t.Context())
	for _, s := range []*fleetServer{a, b} {
		s.want("cleared", 1, false)
		s.restart()
		if s.book.Damaged() {
			t.Error("the file of a clear is damaged")
		}
		s.want("restarted", 1, false)
	}
	if len(p.text) > tier.MaxNote {
		t.Errorf("the note has %d bytes", len(p.text))
	}
	a.store(1)
	was := string(p.text)
	p.set(func() { p.text = bytes.Repeat([]byte{' '}, tier.MaxNote+1) })
	b.book.Sync(t.Context())
	if string(p.text) != was {
		t.Errorf("a note that was too long has %d bytes, want %d", len(p.text), len(was))
	}
	b.want("the note was written anew", 1, true)
}

// A clear is followed once, also if the notes are read again while the function of Follow waits. The server serves nothing meanwhile.
func TestClearIsFollowedOnce(t *testing.T) {
	p := newPlace()
	a := startServer(t, p, filepath.Join(t.TempDir(), "g"), false)
	a.store(1)
	if err := a.clear("m"); err != nil {
		t.Fatal(err)
	}
	p.set(func() { p.down = errDown })
	b := startServer(t, p, filepath.Join(t.TempDir(), "g"), false) // it knows nothing yet
	p.set(func() { p.down = nil })
	follows := 0
	b.book.Follow(func(commit func()) {
		if follows++; follows > 1 {
			return
		}
		soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		b.book.Sync(soon) // it waits for the commit
		if soon.Err() == nil {
			t.Error("a look at the notes does not wait for the clear to count")
		}
		b.want("the clear does not count yet", 1, false)
		if err := b.book.Tier(p.Tier).Write(t.Context(), keyOf(1), tier.Meta{Len: 1}, []byte{1}); !errors.Is(err, tier.ErrResting) {
			t.Errorf("a write before the clear counts: %v", err)
		}
		commit()
	})
	b.book.Sync(t.Context())
	b.book.Sync(t.Context())
	if follows != 1 {
		t.Errorf("the clear is followed %d times", follows)
	}
	b.store(1)
	b.want("stored since", 1, true)
	commit, err := b.book.Prepare([]string{"m"})
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(10*time.Millisecond, commit)
	b.book.Sync(t.Context()) // a server does not follow its own clear
	if follows != 1 {
		t.Error("a server follows its own clear")
	}
}

// A clear of one server of a shared directory counts on the other servers once it has settled.
func TestClearInASharedDirectorySettles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		defer running.Wait()
		defer cancel()
		file := filepath.Join(t.TempDir(), generation.FileName)
		p := tier.NewMemory(1 << 20)
		var servers []*generation.Book
		for range 2 {
			names := tier.NewNames()
			names.Add(keyOf(1).Namespace, "m", nil)
			b := open(t, names, file)
			b.Share()
			b.Watch(250 * time.Millisecond)
			b.Follow(func(commit func()) { commit() })
			running.Go(func() { b.Run(ctx) })
			servers = append(servers, b)
		}
		for round := range 3 {
			if err := servers[0].Tier(p).Write(ctx, keyOf(1), tier.Meta{Len: 1}, []byte{1}); err != nil {
				t.Fatal(err)
			}
			commit, err := servers[0].Prepare([]string{"m"})
			if err != nil {
				t.Fatal(err)
			}
			commit()
			time.Sleep(servers[0].Settle())
			metas := make([]tier.Meta, 1)
			if err := servers[1].Tier(p).Stat(ctx, []kv.Key{keyOf(1)}, metas); err != nil || metas[0].Len != 0 {
				t.Errorf("round %d: %+v, %v after the clear has settled", round, metas[0], err)
			}
			time.Sleep(70 * time.Millisecond) // in no step with the ticks
		}
	})
}

// A server that has read the note of one tier and not yet that of another begins no generation. The other note may have the present
// generation, and the objects stored under it would be lost.
func TestNoGenerationBeginsBeforeEachTierWasRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		often, seldom := newPlace(), newPlace()
		start := func(places ...generation.Place) *generation.Book {
			names := tier.NewNames()
			names.Add(keyOf(1).Namespace, "m", nil)
			b := open(t, names, filepath.Join(t.TempDir(), "g"))
			b.Share(places...)
			b.Follow(func(commit func()) { commit() })
			b.Sync(t.Context())
			return b
		}
		a := start(generation.Place{Name: "seldom", Note: seldom, Every: time.Second})
		if err := a.Tier(seldom).Write(t.Context(), keyOf(1), tier.Meta{Len: 1}, []byte{1}); err != nil {
			t.Fatal(err)
		}
		seldom.set(func() { seldom.down = errDown })
		b := start(generation.Place{Name: "often", Note: often, Every: time.Nanosecond}, generation.Place{Name: "seldom", Note: seldom, Every: time.Second})
		seldom.set(func() { seldom.down = nil })
		often.set(func() { often.text = nil }) // its note is lost
		time.Sleep(500 * time.Millisecond)
		b.Sync(t.Context())
		time.Sleep(time.Second)
		b.Sync(t.Context())
		metas := make([]tier.Meta, 1)
		if err := b.Tier(seldom).Stat(t.Context(), []kv.Key{keyOf(1)}, metas); err != nil || metas[0].Len != 1 {
			t.Errorf("an object of the present generation: %+v, %v", metas[0], err)
		}
	})
}
