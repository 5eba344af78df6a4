// SPDX-License-Identifier: Apache-2.0

package generation_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/generation"
)

// slowPlace is a place that takes 100 ms for each look and each write.
type slowPlace struct{ *place }

func (p slowPlace) Note(ctx context.Context) ([]byte, error) {
	time.Sleep(100 * time.Millisecond)
	return p.place.Note(ctx)
}

func (p slowPlace) SetNote(ctx context.Context, text []byte) error {
	time.Sleep(100 * time.Millisecond)
	return p.place.SetNote(ctx, text)
}

// Two servers clear at the same time: the second reads the note before the first has written it, and writes its own note
// after that. Once the first clear is confirmed, it is in the note and in the shared file, even if its server ends then.
func TestConfirmedClearOutlivesAnotherOne(t *testing.T) {
	for _, shared := range []string{"note", "file"} {
		t.Run(shared, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPlace()
				dir := t.TempDir()
				start := func(name string) *generation.Book {
					if shared == "file" {
						name = "one"
					}
					names := tier.NewNames()
					names.Add(keyOf(1).Namespace, "m", nil)
					b := open(t, names, filepath.Join(dir, name, generation.FileName))
					if shared == "file" {
						b.Share()
						b.Watch(250 * time.Millisecond)
					} else {
						b.Share(generation.Place{Name: "p", Note: slowPlace{p}, Every: time.Second})
						b.Sync(t.Context())
					}
					b.Follow(func(commit func()) { commit() })
					return b
				}
				a, b := start("a"), start("b")
				var cleared sync.WaitGroup
				cleared.Go(func() {
					commit, err := a.Prepare([]string{"m"})
					if err != nil {
						t.Error(err)
					}
					commit()
					a.Confirm(t.Context())
				})
				time.Sleep(50 * time.Millisecond)
				if shared == "file" { // as written by another server that had read the file before
					if err := os.WriteFile(b.Files()[0], []byte(`{"version":1,"all":{"number":0,"time":0},"models":{"other":{"number":1,"time":7}}}`), 0o600); err != nil {
						t.Fatal(err)
					}
				} else {
					commit, err := b.Prepare([]string{"other"})
					if err != nil {
						t.Fatal(err)
					}
					commit()
				}
				cleared.Wait()
				last := start("c") // the other two are gone
				if !strings.Contains(string(mustRead(t, last)), `"m"`) || shared == "note" && !bytes.Contains(p.text, []byte(`"m"`)) {
					t.Errorf("the confirmed clear is lost: %s, %s", p.text, mustRead(t, last))
				}
				if !bytes.Contains(mustRead(t, last), []byte(`"other"`)) {
					t.Errorf("the clear of the other server is lost: %s", mustRead(t, last))
				}
			})
		})
	}
}

func mustRead(t *testing.T, b *generation.Book) []byte {
	t.Helper()
	text, err := os.ReadFile(b.Files()[0])
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// overwrittenPlace is a place whose note another server overwrites with an earlier one, right after each of the next times writes.
type overwrittenPlace struct {
	*place
	earlier []byte
	times   int
}

func (p *overwrittenPlace) SetNote(ctx context.Context, text []byte) error {
	err := p.place.SetNote(ctx, text)
	p.set(func() {
		if p.times > 0 {
			p.times--
			p.text = p.earlier
		}
	})
	return err
}

// A clear is confirmed only once a look finds it in the note and in the shared file. After another write the Book looks again.
func TestClearIsConfirmedOnceItIsFound(t *testing.T) {
	for _, shared := range []string{"note", "file"} {
		t.Run(shared, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				names := tier.NewNames()
				names.Add(keyOf(1).Namespace, "m", nil)
				b := open(t, names, filepath.Join(t.TempDir(), generation.FileName))
				earlier := []byte(`{"version":1,"all":{"number":0,"time":0}}`)
				p := &overwrittenPlace{place: newPlace(), earlier: earlier}
				if shared == "note" {
					b.Share(generation.Place{Name: "p", Note: p, Every: 250 * time.Millisecond})
					b.Sync(t.Context())
				} else {
					b.Share()
					b.Watch(250 * time.Millisecond)
				}
				b.Follow(func(commit func()) { commit() })
				p.times = 2
				commit, err := b.Prepare([]string{"m"})
				if err != nil {
					t.Fatal(err)
				}
				commit()
				var other sync.WaitGroup
				if shared == "file" {
					other.Go(func() { // before the first look, and between the first and the second one
						for range 2 {
							time.Sleep(b.Settle() - 50*time.Millisecond)
							if err := os.WriteFile(b.Files()[0], earlier, 0o600); err != nil {
								t.Error(err)
							}
						}
					})
				}
				b.Confirm(t.Context())
				other.Wait()
				got := p.text
				if shared == "file" {
					got = mustRead(t, b)
				}
				if !bytes.Contains(got, []byte(`"m"`)) {
					t.Errorf("the confirmed clear is lost: %s", got)
				}
			})
		})
	}
}

// stuckPlace is a place whose reads, or writes, of the note hang until their time is over.
type stuckPlace struct {
	tier.Tier
	reads, writes bool
}

func (p stuckPlace) Note(ctx context.Context) ([]byte, error) {
	if p.reads {
		<-ctx.Done()
	}
	return nil, ctx.Err()
}

func (p stuckPlace) SetNote(ctx context.Context, _ []byte) error {
	if p.writes {
		<-ctx.Done()
	}
	return ctx.Err()
}

// The error of a clear names a place that does not answer or takes no note. The clear ends soon nevertheless.
func TestClearEndsWhereAPlaceTakesNoNote(t *testing.T) {
	for _, p := range []stuckPlace{{reads: true}, {writes: true}} {
		synctest.Test(t, func(t *testing.T) {
			names := tier.NewNames()
			names.Add(keyOf(1).Namespace, "m", nil)
			b := open(t, names, filepath.Join(t.TempDir(), generation.FileName))
			b.Share(generation.Place{Name: "p", Note: newPlace(), Every: time.Second}, generation.Place{Name: "stuck", Note: p, Every: time.Second})
			b.Follow(func(commit func()) { commit() })
			began := time.Now()
			commit, err := b.Prepare(nil)
			if err == nil || !strings.Contains(err.Error(), "stuck") {
				t.Errorf("reads %v, writes %v: %v", p.reads, p.writes, err)
			}
			commit()
			b.Confirm(t.Context())
			if took := time.Since(began); took > 10*time.Second {
				t.Errorf("reads %v, writes %v: the clear took %v", p.reads, p.writes, took)
			}
		})
	}
}
