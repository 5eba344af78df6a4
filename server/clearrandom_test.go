// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/disk"
	"github.com/kvasir-kv/kvasir/tier/fs"
)

// clearPlay is a fleet of two servers over one directory, with a model each that has a revision, a name that is no file's, and neither.
// Each store writes a version of its own, which its bytes show.
type clearPlay struct {
	t       *testing.T
	nodes   []*clearNode
	engines [][]*playEngine // by node and model
	models  []string
	version int
	valid   map[string]int // by model: older versions were cleared
	request int
}

func (p *clearPlay) key(model int, salt string, prompt []uint32, request string) *lmcache.Key {
	return &lmcache.Key{Model: p.models[model], WorldSize: 1, Tokens: prompt, End: 96, RequestID: request, Readers: 1, Salt: salt}
}

// playEngine is an engine that registers late.
type playEngine struct {
	*engine
	known bool
}

// start starts a server, and engines that have not registered yet.
func (p *clearPlay) start(node int) {
	n := p.nodes[node]
	n.start()
	p.engines[node] = nil
	for _, model := range p.models {
		e := &playEngine{engine: n.newEngine()}
		e.reg.Model = model
		p.engines[node] = append(p.engines[node], e)
	}
}

// engine returns an engine of a model, which registers with its first request.
func (p *clearPlay) engine(node, model int) *playEngine {
	e := p.engines[node][model]
	if !e.known {
		e.known = true
		e.register()
	}
	return e
}

func (p *clearPlay) store(node, model int, salt string, prompt []uint32) {
	e := p.engine(node, model)
	p.version++
	e.tint(p.version)
	e.call(lmcache.OpStore, p.key(model, salt, prompt, "s").Append(nil), lmcache.AppendInt(nil, e.reg.InstanceID), lmcache.AppendBlockIDs(nil, [][]int{span(1, 6)}), lmcache.AppendBytes(nil, nil))
}

// load loads what a prompt hits, and checks the version of each chunk.
func (p *clearPlay) load(when string, node, model int, salt string, prompt []uint32) (hits int) {
	p.t.Helper()
	e := p.engine(node, model)
	p.request++
	request := fmt.Sprint("r", p.request)
	k := p.key(model, salt, prompt, request)
	look := *k
	look.Worker = lmcache.AllWorkers
	e.call(lmcache.OpLookup, look.Append(nil), lmcache.AppendInt(nil, 1))
	hit, err := lmcache.DecodeInt(e.call(lmcache.OpWaitPrefetchStatus, lmcache.AppendString(nil, request), msgp.AppendFloat64(nil, 60)))
	if err != nil {
		p.t.Fatal(err)
	}
	if hit > 0 {
		k.End = int(hit) * drivenChunk
		got, err := lmcache.DecodeCopied(e.call(lmcache.OpRetrieve, k.Append(nil), lmcache.AppendInt(nil, e.reg.InstanceID),
			lmcache.AppendBlockIDs(nil, [][]int{span(20, 2*int(hit))}), lmcache.AppendBytes(nil, nil), lmcache.AppendInt(nil, 0)))
		if err != nil || got != done {
			p.t.Fatalf("%s: %+v, %v", when, got, err)
		}
		for c := range int(hit) {
			if v := int(e.block(0, 0, 20+2*c)[0] - byte(37*(1+2*c))); v <= p.valid[p.models[model]] {
				p.t.Errorf("%s: chunk %d of %s with salt %q has version %d, those up to %d were cleared", when, c, p.models[model], salt, v, p.valid[p.models[model]])
			}
		}
	}
	e.call(lmcache.OpEndSession, lmcache.AppendString(nil, request))
	return int(hit)
}

// Whatever two servers of a fleet store, load, clear and restart: nothing from before a clear of a model is loaded after it.
func TestRandomClearsLeaveNothingOlder(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	hits := 0
	for range 2 {
		for tiers, open := range clearPlaces(t) {
			p := newClearPlay(t, open)
			for step := range 60 {
				hits += p.step(r, fmt.Sprintf("%s, step %d", tiers, step))
			}
			for _, n := range p.nodes {
				n.stop()
			}
		}
		if t.Failed() {
			return
		}
	}
	if hits == 0 {
		t.Error("nothing hit")
	}
}

// clearPlaces are the tiers below each of two servers: what they share, with and without a disk of their own before it.
func clearPlaces(t *testing.T) map[string]func(node int) func(*tier.Names) tier.Tier {
	dir, disks, memory := t.TempDir(), []string{t.TempDir(), t.TempDir()}, tier.NewMemory(64<<20)
	files := func(names *tier.Names) tier.Tier {
		d, err := fs.Open(fs.Options{Path: dir, Names: names})
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	return map[string]func(node int) func(*tier.Names) tier.Tier{
		"fs": func(int) func(*tier.Names) tier.Tier { return files },
		"disk and a shared tier": func(node int) func(*tier.Names) tier.Tier {
			return func(*tier.Names) tier.Tier {
				d, err := disk.Open(disk.Options{Dirs: []disk.Dir{{Path: disks[node], Bytes: 256 << 20}}, FirstTouch: true})
				if err != nil {
					t.Fatal(err)
				}
				<-d.Opened()
				return tier.Cascade(tier.CascadeOptions{}, d, memory)
			}
		},
	}
}

func newClearPlay(t *testing.T, open func(node int) func(*tier.Names) tier.Tier) *clearPlay {
	note := &notedTier{Tier: tier.NewMemory(1 << 20)}
	p := &clearPlay{t: t, models: []string{"m", "x/y@z", "plain"}, valid: map[string]int{}}
	for i := range 2 {
		n := &clearNode{t: t, files: []string{filepath.Join(t.TempDir(), "g"), filepath.Join(t.TempDir(), "kept")}, note: note, revisions: map[string]string{"m": "R1"}, open: open(i)}
		p.nodes, p.engines = append(p.nodes, n), append(p.engines, nil)
		p.start(i)
	}
	return p
}

// step does something at random, and returns how many chunks hit.
func (p *clearPlay) step(r *rand.Rand, when string) (hits int) {
	p.t.Helper()
	node, model, salt := r.IntN(2), r.IntN(3), []string{"", "s"}[r.IntN(2)]
	n, prompt := p.nodes[node], tokens(3*drivenChunk, 1)
	var models []string
	if r.IntN(8) > 0 {
		models = []string{p.models[model]}
	}
	clear := func(c server.Clear) {
		p.t.Helper()
		if _, err := n.Clear(c); err != nil {
			p.t.Fatal(err)
		}
		p.nodes[1-node].Options().Generations.Sync(p.t.Context())
	}
	switch r.IntN(12) {
	case 0, 1, 2:
		p.store(node, model, salt, prompt)
	case 3, 4, 5, 6:
		return p.load(fmt.Sprintf("%s, server %d", when, node), node, model, salt, prompt)
	case 7:
		clear(server.Clear{Tier: server.ClearAll, Force: r.IntN(2) > 0, Models: models, By: "a test"})
		for _, m := range p.models {
			if models == nil || m == models[0] {
				p.valid[m] = p.version
			}
		}
	case 8:
		clear(server.Clear{Tier: []server.ClearTier{server.ClearL1, server.ClearL2}[r.IntN(2)], Force: true, Models: models, By: "a test"})
	case 9:
		testkit.Eventually(p.t, "writes below", func() bool { return n.store.Stats().Outbox.Waiting == 0 })
	case 10:
		n.stop()
		if r.IntN(2) > 0 { // with a pool of its own, as on another host
			n.files[0] = filepath.Join(p.t.TempDir(), "g")
		}
		p.start(node)
	case 11:
		_, err := tier.RemoveIf(p.t.Context(), n.Options().Contents["below"], n.Options().Generations.Stale, func(context.Context, int) error { return nil })
		if err != nil {
			p.t.Fatal(err)
		}
	}
	return 0
}
