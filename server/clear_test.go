// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/disk"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/generation"
)

// clearNode is a server over a tier that outlives it.
type clearNode struct {
	*drivenNode
	t     *testing.T
	files []string
	open  func(names *tier.Names) tier.Tier
	note  tier.Notebook // of the tier, where other servers share it

	revisions map[string]string
	end       func() // of the background
}

func (n *clearNode) start() {
	n.t.Helper()
	log := new(logBuffer)
	logger := slog.New(slog.NewTextHandler(log, nil))
	names := tier.NewNames()
	names.SetRevisions(n.revisions)
	book, err := generation.Open(n.files, names, logger)
	if err != nil {
		n.t.Fatal(err)
	}
	if n.note != nil {
		book.Share(generation.Place{Name: "shared", Note: n.note, Every: time.Millisecond})
		book.Sync(n.t.Context())
	}
	dir := filepath.Dir(n.files[0])
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: 4 << 20, Dir: dir, ChunkTokens: drivenChunk})
	if err != nil {
		n.t.Fatal(err)
	}
	below := n.open(names)
	st := store.New(p, store.Options{
		ChecksumRate: 1 << 40, SumAtOnce: true, Log: logger, Below: book.Tier(below), Place: "below", Moment: book.Moment,
		DropRestored: book.Lost(), LoadTimeout: time.Minute,
	})
	if err := book.Repair(); err != nil {
		n.t.Fatal(err)
	}
	n.drivenNode = &drivenNode{t: n.t, dir: dir, log: log, store: st}
	n.Server = server.New(st, server.Options{
		ChunkTokens: drivenChunk, ShmDir: dir, Log: logger, Generations: book, Names: names, Revisions: n.revisions,
		Contents: map[string]tier.Tier{"below": below}, SweepRate: 1 << 20,
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		n.Run(ctx)
	}()
	n.end = func() { cancel(); <-ended }
}

func (n *clearNode) stop() {
	n.t.Helper()
	n.end()
	n.drivenNode.stop()
}

// hit returns how many chunks of a prompt a lookup finds.
func (n *clearNode) hit(e *engine, prompt []uint32, request string) int {
	n.t.Helper()
	e.drivenNode = n.drivenNode
	return e.lookup(prompt, request)
}

// A clear, an engine's and an operator's, leaves no object for a later lookup in any
// tier, also over restarts and a kill; what is stored after it hits, with its own bytes.
func TestClearReachesTheTiers(t *testing.T) {
	tiers := map[string]func(t *testing.T) func(*tier.Names) tier.Tier{
		"disk": func(t *testing.T) func(*tier.Names) tier.Tier {
			dir := t.TempDir()
			return func(*tier.Names) tier.Tier {
				d, err := disk.Open(disk.Options{Dirs: []disk.Dir{{Path: dir, Bytes: 256 << 20}}, FirstTouch: true})
				if err != nil {
					t.Fatal(err)
				}
				<-d.Opened()
				return d
			}
		},
		"fs": func(t *testing.T) func(*tier.Names) tier.Tier {
			dir := t.TempDir()
			return func(names *tier.Names) tier.Tier {
				d, err := fs.Open(fs.Options{Path: dir, Names: names})
				if err != nil {
					t.Fatal(err)
				}
				return d
			}
		},
	}
	clears := map[string]func(n *clearNode){
		"engine": func(n *clearNode) { n.call(lmcache.OpClear, lmcache.AppendBool(nil, true)) },
		"engine without force": func(n *clearNode) {
			n.call(lmcache.OpClear, lmcache.AppendBool(nil, false))
		},
		"operator": func(n *clearNode) {
			if _, err := n.Clear(server.Clear{Tier: server.ClearAll, By: "a test"}); err != nil {
				n.t.Error(err)
			}
		},
	}
	for of, open := range tiers {
		for by, clear := range clears {
			t.Run(of+", "+by, func(t *testing.T) {
				n := &clearNode{t: t, files: []string{filepath.Join(t.TempDir(), generation.FileName)}, open: open(t)}
				n.start()
				e := n.newEngine()
				e.register()
				prompt := tokens(3*drivenChunk, 6)
				put := func(tint int) {
					t.Helper()
					e.tint(tint)
					written := n.store.Stats().WrittenChunks
					if got := e.storeBlocks(prompt, 0, 96, span(1, 6)); got != done {
						t.Fatal(got)
					}
					testkit.Eventually(t, "writes below", func() bool { return n.store.Stats().WrittenChunks == written+3 })
				}
				put(1)
				// The tier has it: without the pool it is a hit.
				_, _ = n.Clear(server.Clear{Tier: server.ClearL1, Force: true})
				if hit := n.hit(e, prompt, "before"); hit != 3 {
					t.Fatalf("hit %d of what the tier has", hit)
				}
				n.call(lmcache.OpEndSession, lmcache.AppendString(nil, "before"))
				clear(n)
				if !strings.Contains(n.log.String(), "level=WARN msg=\"the cache was cleared\"") {
					t.Error("a clear is no warning in the log")
				}
				if hit := n.hit(e, prompt, "cleared"); hit != 0 {
					t.Errorf("hit %d after the clear", hit)
				}
				n.stop()
				n.start()
				if hit := n.hit(e, prompt, "restarted"); hit != 0 {
					t.Errorf("hit %d after the clear and a restart", hit)
				}
				put(2)
				want := bytes.Clone(e.block(0, 0, 1))
				_, _ = n.Clear(server.Clear{Tier: server.ClearL1, Force: true})
				if hit := n.hit(e, prompt, "again"); hit != 3 {
					t.Fatalf("hit %d of what was stored after the clear", hit)
				}
				if got := e.retrieve(prompt, 0, 96, 0, "again", span(20, 6)); got != done || !bytes.Equal(e.block(0, 0, 20), want) {
					t.Errorf("loaded after the clear: %+v", got)
				}
				n.stop()
			})
		}
	}
}

// What the pool has stays a hit after a clear of the tiers alone, and is written there again once an engine loads it.
func TestClearOfTheTiersIsWrittenThereAgain(t *testing.T) {
	for name, models := range map[string][]string{"all": nil, "one model": {"m"}} {
		n := &clearNode{t: t, files: []string{filepath.Join(t.TempDir(), generation.FileName)}, open: func(*tier.Names) tier.Tier { return tier.NewMemory(64 << 20) }}
		n.start()
		e := n.newEngine()
		e.register()
		prompt := tokens(3*drivenChunk, 6)
		if got := e.storeBlocks(prompt, 0, 96, span(1, 6)); got != done {
			t.Fatal(got)
		}
		testkit.Eventually(t, "writes below", func() bool { return n.store.Stats().WrittenChunks == 3 })
		if out, err := n.Clear(server.Clear{Tier: server.ClearL2, Models: models, By: "a test"}); err != nil || out.Stays != "" {
			t.Fatal(out, err)
		}
		if out, err := n.Clear(server.Clear{Tier: server.ClearL2, Models: []string{"misspelt"}, By: "a test"}); err != nil || !strings.Contains(out.Stays, "no engine has used model misspelt") {
			t.Errorf("%s: a clear of a model that is not known: %+v, %v", name, out, err)
		}
		if hit := n.hit(e, prompt, "pool"); hit != 3 {
			t.Errorf("%s: hit %d in the pool", name, hit)
		}
		if got := e.retrieve(prompt, 0, 96, 0, "pool", span(20, 6)); got != done {
			t.Errorf("%s: %+v", name, got)
		}
		testkit.Eventually(t, name+": writes below after the clear", func() bool { return n.store.Stats().WrittenChunks == 6 })
		_, _ = n.Clear(server.Clear{Tier: server.ClearL1, Force: true})
		if hit := n.hit(e, prompt, "tier"); hit != 3 {
			t.Errorf("%s: hit %d in the tier", name, hit)
		}
		n.stop()
	}
}

// A clear of a model reaches a tier of files whose objects a new server has seen before any request of the model: a file names the
// model with its revision.
func TestClearOfAModelWhoseFilesWereSeenFirst(t *testing.T) {
	dir := t.TempDir()
	n := &clearNode{t: t, revisions: map[string]string{"m": "R1"}, open: func(names *tier.Names) tier.Tier {
		d, err := fs.Open(fs.Options{Path: dir, Names: names})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}}
	prompt := tokens(3*drivenChunk, 6)
	var e *engine
	for life := range 2 { // each with a pool of its own
		n.files = []string{filepath.Join(t.TempDir(), "pool"), filepath.Join(dir, generation.FileName)}
		n.start()
		if life == 1 { // as the removal of what an earlier clear left does
			if _, err := tier.RemoveIf(t.Context(), n.Options().Contents["below"], func(tier.Content) bool { return false }, nil); err != nil {
				t.Fatal(err)
			}
		}
		e = n.newEngine()
		e.register()
		if life == 0 {
			if got := e.storeBlocks(prompt, 0, 96, span(1, 6)); got != done {
				t.Fatal(got)
			}
			testkit.Eventually(t, "writes below", func() bool { return n.store.Stats().WrittenChunks == 3 })
			n.stop()
		}
	}
	defer func() { n.stop() }()
	if hit := n.hit(e, prompt, "before"); hit != 3 {
		t.Fatalf("hit %d of what the tier has", hit)
	}
	n.call(lmcache.OpEndSession, lmcache.AppendString(nil, "before"))
	if _, err := n.Clear(server.Clear{Tier: server.ClearAll, Force: true, Models: []string{"m"}, By: "a test"}); err != nil {
		t.Fatal(err)
	}
	if hit := n.hit(e, prompt, "cleared"); hit != 0 {
		t.Errorf("hit %d after the clear", hit)
	}
}

// A server that is killed between the note of a clear and its end serves nothing older
// from the pool that it left.
func TestKillInTheMiddleOfAClear(t *testing.T) {
	n := &clearNode{t: t, files: []string{filepath.Join(t.TempDir(), generation.FileName)}, open: func(*tier.Names) tier.Tier { return tier.NewMemory(64 << 20) }}
	n.start()
	e := n.newEngine()
	e.register()
	prompt := tokens(3*drivenChunk, 6)
	if got := e.storeBlocks(prompt, 0, 96, span(1, 6)); got != done {
		t.Fatal(got)
	}
	testkit.Eventually(t, "checksums", func() bool { return n.store.Stats().SummedChunks+n.store.Stats().WrittenChunks >= 3 })
	n.store.BeginForget()
	if _, err := n.Options().Generations.Prepare(nil); err != nil { // and no more
		t.Fatal(err)
	}
	n.stop()
	n.start()
	defer n.stop()
	if hit := n.hit(e, prompt, "r"); hit != 0 {
		t.Errorf("hit %d after a kill in the middle of a clear", hit)
	}
	if got := e.storeBlocks(prompt, 0, 96, span(1, 6)); got != done {
		t.Fatal(got)
	}
	testkit.Eventually(t, "checksums", func() bool { return n.store.Stats().SummedChunks+n.store.Stats().WrittenChunks >= 3 })
	n.stop()
	n.start()
	if hit := n.hit(e, prompt, "r"); hit != 3 {
		t.Errorf("hit %d of what was stored after the clear", hit)
	}
}

// An engine's clear leaves alone, in the tiers, what other users' models have there.
func TestAnEngineClearsItsOwnModels(t *testing.T) {
	names := tier.NewNames()
	mine, theirs := kv.Namespace{1}, kv.Namespace{2}
	names.Add(mine, "mine", nil)
	names.Add(theirs, "theirs", nil)
	files := []string{filepath.Join(t.TempDir(), generation.FileName)}
	book, err := generation.Open(files, names, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	x := book.Tier(tier.NewMemory(1 << 20))
	keys := []kv.Key{{Namespace: mine}, {Namespace: theirs}}
	for _, k := range keys {
		if err := x.Write(t.Context(), k, tier.Meta{Len: 1, Sum: 7}, []byte{1}); err != nil {
			t.Fatal(err)
		}
	}
	commit, err := book.Prepare([]string{"mine"})
	if err != nil {
		t.Fatal(err)
	}
	commit()
	metas := make([]tier.Meta, 2)
	if err := x.Stat(t.Context(), keys, metas); err != nil || metas[0].Len != 0 || metas[1].Len != 1 {
		t.Errorf("%+v, %v", metas, err)
	}
}

// A clear that no file keeps is no success: an engine's client fails, with the reason,
// and the operator gets an error. Nothing older is found until the server ends.
func TestClearThatIsNotKeptFails(t *testing.T) {
	for name, spoil := range map[string]func(dir string) error{
		"read-only": func(dir string) error { return os.Chmod(dir, 0o500) },
		"a file":    func(dir string) error { return errors.Join(os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600)) },
	} {
		if name == "read-only" && os.Geteuid() == 0 {
			continue
		}
		dir := filepath.Join(t.TempDir(), "tier")
		n := &clearNode{t: t, files: []string{filepath.Join(t.TempDir(), "pool"), filepath.Join(dir, generation.FileName)}, open: func(*tier.Names) tier.Tier { return tier.NewMemory(64 << 20) }}
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		n.start()
		e := n.newEngine()
		e.register()
		prompt := tokens(3*drivenChunk, 6)
		if got := e.storeBlocks(prompt, 0, 96, span(1, 6)); got != done {
			t.Fatal(got)
		}
		testkit.Eventually(t, "writes below", func() bool { return n.store.Stats().WrittenChunks == 3 })
		if err := spoil(dir); err != nil {
			t.Fatal(err)
		}
		out := n.Answer([][]byte{{7}, msgp.AppendString(nil, "clear"), lmcache.AppendBool(nil, false)})
		if len(out) != 2 {
			t.Fatalf("%s: a client of 0.5.6 is answered %q", name, out)
		}
		if got, _, err := msgp.ReadStringBytes(out[1]); err != nil || !strings.HasPrefix(got, "clear failed: ") || !strings.Contains(got, "the generation in "+dir) {
			t.Errorf("%s: a client of 0.5.6 is answered %q, %v", name, got, err)
		}
		if got := n.Answer([][]byte{{7}, lmcache.AppendInt(nil, 20), lmcache.AppendBool(nil, false)}); got != nil {
			t.Errorf("%s: an earlier client is answered %q, which it takes for success", name, got)
		}
		if _, err := n.Clear(server.Clear{Tier: server.ClearAll, By: "a test"}); err == nil || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s: an operator's clear: %v", name, err)
		}
		if hit := n.hit(e, prompt, "cleared"); hit != 0 {
			t.Errorf("%s: hit %d after the clear", name, hit)
		}
		_ = os.Chmod(dir, 0o700)
		n.stop()
	}
}

// An engine whose workers are not registered, as just after a start of the server, is not
// told that the tiers are cleared.
func TestClearWithoutWorkersFails(t *testing.T) {
	n := &clearNode{t: t, files: []string{filepath.Join(t.TempDir(), generation.FileName)}, open: func(*tier.Names) tier.Tier { return tier.NewMemory(64 << 20) }}
	n.start()
	defer n.stop()
	clear := func() string {
		t.Helper()
		out := n.Answer([][]byte{{7}, msgp.AppendString(nil, "clear"), lmcache.AppendBool(nil, false)})
		if len(out) != 2 {
			t.Fatalf("answered %q", out)
		}
		got, _, err := msgp.ReadStringBytes(out[1])
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	if got := clear(); !strings.HasPrefix(got, "clear failed: ") || !strings.Contains(got, "no worker") {
		t.Errorf("a clear without workers is answered %q", got)
	}
	n.newEngine().register()
	if got := clear(); got != "clear" {
		t.Errorf("a clear with workers is answered %q", got)
	}
}

// notedTier is a tier in memory that several servers share.
type notedTier struct {
	tier.Tier
	mu   sync.Mutex
	text []byte
	err  error // of Note
}

func (n *notedTier) Close() error { return nil }

func (n *notedTier) Note(context.Context) ([]byte, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.text, n.err
}

func (n *notedTier) fail(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.err = err
}

func (n *notedTier) SetNote(_ context.Context, text []byte) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.text = text
	return nil
}

// A clear of one server of a fleet leaves nothing older to be found on another one, neither in
// its memory nor in the tier, also over its restart. What is stored after it hits on both.
func TestClearReachesTheFleet(t *testing.T) {
	shared := &notedTier{Tier: tier.NewMemory(64 << 20)}
	var nodes [2]*clearNode
	var engines [2]*engine
	for i := range nodes {
		n := &clearNode{t: t, files: []string{filepath.Join(t.TempDir(), generation.FileName)}, open: func(*tier.Names) tier.Tier { return shared }, note: shared}
		n.start()
		defer func() { n.stop() }()
		nodes[i], engines[i] = n, n.newEngine()
		engines[i].register()
	}
	prompt := tokens(3*drivenChunk, 6)
	put := func(i, tint int) {
		t.Helper()
		engines[i].tint(tint)
		written := nodes[i].store.Stats().WrittenChunks
		if got := engines[i].storeBlocks(prompt, 0, 96, span(1, 6)); got != done {
			t.Fatal(got)
		}
		testkit.Eventually(t, "writes below", func() bool { return nodes[i].store.Stats().WrittenChunks == written+3 })
	}
	requests := 0
	want := func(when string, hit int) {
		t.Helper()
		for i, n := range nodes {
			requests++
			if got := n.hit(engines[i], prompt, fmt.Sprint("r", requests)); got != hit {
				t.Errorf("%s: server %d hits %d chunks, want %d\n%s", when, i, got, hit, n.log)
			}
		}
	}
	put(0, 1)
	want("stored", 3)
	if out, err := nodes[0].Clear(server.Clear{Tier: server.ClearAll, Force: true, By: "a test"}); err != nil || strings.Contains(out.Stays, "older objects") {
		t.Fatal(out, err)
	}
	nodes[1].Options().Generations.Sync(t.Context())
	want("cleared", 0)
	nodes[1].stop()
	nodes[1].start()
	want("restarted", 0)
	put(1, 2)
	want("stored after the clear", 3)
}

// What is stored while a server cannot read which generation its tier has waits in the pool. It is written to the tier once
// the generation is read, unless another server has cleared before: then it is not there, nor in the pool.
func TestWritesWaitUntilTheGenerationIsKnown(t *testing.T) {
	for name, c := range map[string]struct {
		cleared bool
		want    int
	}{"no clear": {false, 3}, "a clear of another server": {true, 0}} {
		t.Run(name, func(t *testing.T) {
			shared := &notedTier{Tier: tier.NewMemory(64 << 20)}
			start := func() *clearNode {
				n := &clearNode{t: t, files: []string{filepath.Join(t.TempDir(), generation.FileName)}, open: func(*tier.Names) tier.Tier { return shared }, note: shared}
				n.start()
				return n
			}
			if c.cleared {
				shared.text = []byte(`{"version":1,"all":{"number":1,"time":1}}`)
			} else {
				shared.text = []byte(`{"version":1,"all":{"number":0,"time":0}}`)
			}
			shared.fail(errors.New("it does not answer"))
			n := start()
			defer func() { n.stop() }()
			e := n.newEngine()
			e.register()
			prompt := tokens(3*drivenChunk, 6)
			if got := e.storeBlocks(prompt, 0, 96, span(1, 6)); got != done {
				t.Fatal(got)
			}
			testkit.Eventually(t, "a write was tried", func() bool { return n.store.Stats().SummedChunks == 3 })
			if got := n.store.Stats(); got.WrittenChunks != 0 || got.NotKeptBelow != 0 {
				t.Errorf("while no generation is known: %+v", got)
			}
			shared.fail(nil)
			testkit.Eventually(t, "what waited is written or forgotten", func() bool {
				got := n.store.Stats()
				return int(got.WrittenChunks) == c.want && got.Outbox.Waiting == 0 && (c.want > 0 || got.Resident == 0)
			})
			if hit := n.hit(e, prompt, "r"); hit != c.want {
				t.Errorf("hit %d, want %d", hit, c.want)
			}
			if c.want > 0 {
				other := start()
				defer other.stop()
				theirs := other.newEngine()
				theirs.register()
				if hit := other.hit(theirs, prompt, "s"); hit != c.want {
					t.Errorf("another server hits %d, want %d", hit, c.want)
				}
			}
		})
	}
}

// A clear that cannot be read fails: no answer of it looks like a clear that was done.
func TestMalformedClearFails(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 16, server.Options{})
	defer stop()
	op := lmcache.AppendString(nil, "clear")
	for name, payloads := range map[string][][]byte{"no boolean": {{0xc1}}, "a text": {lmcache.AppendString(nil, "yes")}, "two payloads": {{0xc3}, {0xc3}}} {
		reply := n.Answer(append([][]byte{{1}, op}, payloads...))
		if len(reply) < 2 {
			t.Fatalf("%s: no answer", name)
		}
		if got, _, err := msgp.ReadStringBytes(reply[1]); err != nil || !strings.HasPrefix(got, "clear failed: ") {
			t.Errorf("%s: answered %q, %v", name, got, err)
		}
	}
	if got := n.Status().Clears; got != 0 {
		t.Errorf("%d clears", got)
	}
}
