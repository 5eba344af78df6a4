// SPDX-License-Identifier: Apache-2.0

package offload

import (
	"context"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/server/access"
	"github.com/kvasir-kv/kvasir/server/lookup"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/vllm"
)

// maxTenants is the largest number of tenants whose namespaces one engine keeps. When it is reached, all are forgotten and made again when
// needed.
const maxTenants = 1024

// engine is one connection of an engine.
type engine struct {
	server     *Server
	conn       *vllm.Conn
	caller     access.Caller
	hello      vllm.Hello
	region     Region
	instance   int64 // identifies its stores; differs for each connection
	since      time.Time
	groups     *object.Groups
	keys       []vllm.Key            // reused for the keys of each Ask
	namespaces map[space]named       // used only by the goroutine that reads
	tenants    map[string]struct{}   // those with an entry in namespaces
	stores     map[uint64][]transfer // stores in progress, by id; used only by the goroutine that reads
	pending    sync.WaitGroup        // lookups that wait for the tier below or for checksums
	figures    struct {
		lent   atomic.Int64 // bytes lent to the engine, including those of lookups that are not answered yet
		stores atomic.Int64
	}

	mu struct {
		sync.Mutex
		left  bool // the connection has ended
		lent  map[uint64]loan
		begun int // lookups that have no entry in lent yet
	}
}

// space is a key of engine.namespaces: a tenant and a group.
type space struct {
	tenant string
	group  uint32
}

// named is a namespace with the name of its layout. That name tells its rows apart from others of the model in tiers whose object names
// contain no namespace: names in LMCache's layouts contain neither vLLM's groups nor its parallelism.
type named struct {
	ns     kv.Namespace
	layout string
}

// loan is what one lookup lends to the engine.
type loan struct {
	loan   *store.Loan
	rows   uint32
	bytes  int64
	tenant string
}

// transfer is a store of one group that is not committed yet.
type transfer struct {
	name    hold.Transfer
	request []byte
	tenant  string
	group   uint32
	hashes  []kv.Hash
	places  int
}

func newEngine(s *Server, conn *vllm.Conn, caller access.Caller, hello vllm.Hello, region Region) *engine {
	e := &engine{
		server: s, conn: conn, caller: caller, hello: hello, region: region, instance: rand.Int64(), since: time.Now(),
		groups:     object.FullAttention(hello.ChunkTokens, hello.RowBytes),
		namespaces: make(map[space]named), tenants: make(map[string]struct{}), stores: make(map[uint64][]transfer),
	}
	e.mu.lent = make(map[uint64]loan)
	return e
}

// run reads messages until the connection ends.
func (e *engine) run() error {
	for {
		kind, body, err := e.conn.Read()
		if err == nil {
			err = e.handle(kind, body)
		}
		if err != nil {
			return err
		}
	}
}

func (e *engine) handle(kind byte, body []byte) error {
	switch kind {
	case vllm.TypeLookup:
		return e.lookup(body)
	case vllm.TypeRelease:
		return e.release(body)
	case vllm.TypeStore:
		return e.store(body)
	case vllm.TypeCommit:
		return e.commit(body)
	}
	return fmt.Errorf("%w: a frame of type %d, which engines do not send", vllm.ErrMalformed, kind)
}

// leave ends the engine's loans. With ended the engine touches no memory any more, and leave ends its stores, too. Without ended the server
// ends before the engine, which may still be writing: those places stay held for the next server.
func (e *engine) leave(ended bool) {
	if s := e.server.store; ended {
		s.Detach(e.instance)
		s.EndQuarantine(e.instance)
	}
	e.markLeft()
	e.pending.Wait()
	for _, l := range e.takeAll() {
		l.loan.GiveBack()
	}
}

func (e *engine) markLeft() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mu.left = true
}

func (e *engine) takeAll() map[uint64]loan {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := e.mu.lent
	e.mu.lent = nil
	e.figures.lent.Store(0)
	return all
}

// namespace returns the namespace of a tenant's rows of a group. It reports false for a tenant or a group that the engine cannot have.
func (e *engine) namespace(tenant []byte, group uint32) (named, bool) {
	if n, ok := e.namespaces[space{string(tenant), group}]; ok {
		return n, true
	}
	if group >= uint32(e.hello.Groups) || kv.CheckSalt(string(tenant)) != nil { // a client of the engine chose the tenant
		return named{}, false
	}
	if _, known := e.tenants[string(tenant)]; !known && len(e.tenants) >= maxTenants {
		clear(e.namespaces)
		clear(e.tenants)
	}
	e.tenants[string(tenant)] = struct{}{}
	model, layout := tier.Revised(e.hello.Model, e.server.opts.Revisions[e.hello.Model]), e.hello.Fingerprint(group)
	n := named{kv.NamespaceOf(model, string(tenant), layout), "vllm-" + kv.NamespaceOf("", "", layout).String()[:12]}
	e.namespaces[space{string(tenant), group}] = n
	return n, true
}

// name tells the store and the tiers below the tenant of a namespace: some tiers find nothing without it.
func (e *engine) name(n named, tenant []byte) {
	if e.server.opts.Name != nil {
		e.server.opts.Name(n.ns, []byte(e.hello.Model), tenant, n.layout)
	}
}

// lookup answers a Lookup: at once if all rows are ready, else later, in one answer for all rows.
func (e *engine) lookup(body []byte) error {
	a, err := vllm.DecodeAsk(body, e.keys)
	if err != nil {
		return err
	}
	e.keys = a.Keys
	e.server.n.lookups.Add(1)
	e.server.n.asked.Add(uint64(len(a.Keys)))
	keys, at := make([]kv.Key, 0, len(a.Keys)), make([]int, 0, len(a.Keys))
	var last named
	var runs []run
	for i, k := range a.Keys {
		n, ok := e.namespace(a.Tenant, k.Group)
		if !ok {
			continue
		}
		if n != last {
			e.name(n, a.Tenant)
			last = n
			runs = append(runs, run{n.ns, k.Group, len(keys)})
		}
		keys, at = append(keys, rowKey(n.ns, k.Hash)), append(at, i)
	}
	l := found{engine: e, id: a.ID, tenant: string(a.Tenant), request: string(a.Request), keys: keys, runs: runs, at: at, places: make([]vllm.Place, len(a.Keys))}
	if e.server.opts.Draining() {
		return l.answer(nil)
	}
	if !e.begin(a.ID) {
		return l.answer(nil)
	}
	x, err := e.server.store.LookupEach(store.EachQuery{
		Owner: e.caller.Owner(), Keys: keys, Bytes: e.hello.RowBytes, AnyLength: e.hello.Canonical,
		Most: int64(e.server.opts.Share * float64(e.server.store.Files().Bytes())), Lent: &e.figures.lent,
	})
	if err != nil { // too many transfers are in progress
		e.keep(a.ID, loan{})
		return l.answer(nil)
	}
	if !x.Incomplete() {
		return l.answer(x)
	}
	e.pending.Add(1)
	wait := func() {
		defer e.pending.Done()
		ctx, stop := context.WithTimeout(e.server.life, e.server.opts.Patience)
		defer stop()
		x.Fetch(ctx)
		_ = l.answer(x) // fails only if the connection is gone
	}
	if !e.server.store.Go(wait) {
		e.pending.Done()
		return l.answer(x)
	}
	return nil
}

// rowKey returns the key of a row in the store.
func rowKey(ns kv.Namespace, hash kv.Hash) kv.Key {
	var k kv.Key
	sh := object.Shard{Namespace: ns, World: 1}
	sh.Key(&k, 0, 0, hash)
	return k
}

// begin counts a lookup that begins. It reports false if the id is in use, if too many lookups are not released, or if the engine has left:
// the lookup is then answered without a hit.
func (e *engine) begin(id uint64) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if _, used := e.mu.lent[id]; used || e.mu.left || len(e.mu.lent)+e.mu.begun >= e.server.opts.MaxLent {
		return false
	}
	e.mu.begun++
	return true
}

// keep records what a lookup lends. It reports false if the lookup lends nothing, if another lookup with this id was faster, or if the
// engine has left: the caller must then give the loan back itself.
func (e *engine) keep(id uint64, l loan) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mu.begun--
	if _, used := e.mu.lent[id]; used || e.mu.left || l.loan == nil {
		return false
	}
	e.mu.lent[id] = l
	return true
}

// found is a lookup on its way to its answer.
type found struct {
	engine  *engine
	id      uint64
	tenant  string
	request string
	keys    []kv.Key
	runs    []run // parts of keys
	at      []int // position of each key in the Lookup
	places  []vllm.Place
}

// run is a part of found.keys that is in one namespace.
type run struct {
	ns    kv.Namespace
	group uint32
	from  int // index of its first key; it ends where the next run begins
}

// announce describes the rows that were found, as long as the pool may contain rows that were never announced.
func (l *found) announce(x *store.EachLookup) {
	o := &l.engine.server.opts
	if !o.HasUnannounced() {
		return
	}
	end := len(l.keys)
	for _, r := range slices.Backward(l.runs) {
		var hashes []kv.Hash
		for i := r.from; i < end; i++ {
			if x.Places[i].Bytes > 0 {
				hashes = append(hashes, l.keys[i].Chunk)
			}
		}
		if len(hashes) > 0 {
			sh := object.Shard{Namespace: r.ns, World: 1, Groups: l.engine.groups}
			o.Announce([]byte(l.engine.hello.Model), []byte(l.tenant), int(r.group), &sh, hashes)
		}
		end = r.from
	}
}

// answer sends a Found frame. From then on the engine may use what x lends; a nil x lends nothing.
func (l *found) answer(x *store.EachLookup) error {
	e := l.engine
	for i := range l.places {
		l.places[i].Offset = vllm.NoPlace
	}
	if x != nil {
		result := x.Result()
		rows := uint32(0)
		for i, p := range x.Places {
			if p.Bytes > 0 {
				l.places[l.at[i]] = vllm.Place{Offset: uint64(p.Offset), Bytes: uint32(p.Bytes)}
				rows++
			}
		}
		if e.keep(l.id, loan{x.Loan, rows, x.Bytes, l.tenant}) {
			e.server.n.hits.Add(uint64(rows))
		} else {
			for i := range l.places {
				l.places[i] = vllm.Place{Offset: vllm.NoPlace}
			}
			if x.Loan != nil {
				x.Loan.GiveBack()
			}
			e.figures.lent.Add(-x.Bytes)
		}
		l.announce(x)
		l.ended(&result)
	}
	return e.conn.Write(vllm.TypeFound, func(dst []byte) []byte { return vllm.AppendPlaces(dst, l.id, l.places) })
}

// ended passes the end of a lookup to Options.Ended.
func (l *found) ended(r *store.LookupResult) {
	e := l.engine
	if e.server.opts.Ended == nil || len(l.keys) == 0 {
		return
	}
	r.Tokens = e.hello.ChunkTokens
	e.server.opts.Ended(&lookup.Outcome{
		Request: []byte(l.request), Model: []byte(e.hello.Model), Salt: []byte(l.tenant), Registered: true, ChunkTokens: e.hello.ChunkTokens,
		LookupResult: *r, Searched: true, HashesOnly: true,
	})
}

// release takes back the rows that lookups lent to the engine, and counts those that it has loaded.
func (e *engine) release(body []byte) error {
	list, err := vllm.DecodeReleased(body)
	if err != nil {
		return err
	}
	for _, r := range list {
		l, ok := e.take(r.ID)
		if !ok {
			continue
		}
		n := &e.server.n
		n.releases.Add(1)
		if loaded := min(r.Loaded, l.rows); loaded > 0 {
			bytes := min(int64(loaded)*e.hello.RowBytes, l.bytes)
			n.loads.Add(uint64(loaded))
			n.loadedBytes.Add(uint64(bytes))
			l.loan.Counted(int(loaded), bytes)
			if e.server.opts.Loaded != nil {
				e.server.opts.Loaded(e.hello.Model, []byte(l.tenant), e.instance, int(loaded))
			}
		}
		l.loan.GiveBack()
	}
	return nil
}

func (e *engine) take(id uint64) (loan, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	l, ok := e.mu.lent[id]
	if ok {
		delete(e.mu.lent, id)
		e.figures.lent.Add(-l.bytes)
	}
	return l, ok
}

// store answers a Store: it reserves places for the rows that the pool does not have.
func (e *engine) store(body []byte) error {
	a, err := vllm.DecodeAsk(body, e.keys)
	if err != nil {
		return err
	}
	e.keys = a.Keys
	e.server.n.stores.Add(1)
	places := make([]vllm.Place, len(a.Keys))
	for i := range places {
		places[i].Offset = vllm.NoPlace
	}
	if _, used := e.stores[a.ID]; !used && len(e.stores) < e.server.opts.MaxStores && !e.server.opts.Draining() {
		if transfers := e.beginStores(&a, places); len(transfers) > 0 {
			e.stores[a.ID] = transfers
			e.figures.stores.Store(int64(len(e.stores)))
		}
	}
	return e.conn.Write(vllm.TypePlaces, func(dst []byte) []byte { return vllm.AppendPlaces(dst, a.ID, places) })
}

// beginStores reserves places for the keys of a Store, group by group, and enters them in places. A key whose group the engine cannot have,
// whose row is there already, or for which there is no room, gets none.
func (e *engine) beginStores(a *vllm.Ask, places []vllm.Place) (out []transfer) {
	at := make(map[uint32][]int)
	var order []uint32
	for i, k := range a.Keys {
		if at[k.Group] == nil {
			order = append(order, k.Group)
		}
		at[k.Group] = append(at[k.Group], i)
	}
	request := []byte(string(a.Request) + "#" + hex.EncodeToString([]byte{byte(a.ID >> 24), byte(a.ID >> 16), byte(a.ID >> 8), byte(a.ID)}))
	for _, group := range order {
		n, ok := e.namespace(a.Tenant, group)
		if !ok {
			continue
		}
		e.name(n, a.Tenant)
		t := transfer{request: request, tenant: string(a.Tenant), group: group, hashes: make([]kv.Hash, len(at[group]))}
		for j, i := range at[group] {
			t.hashes[j] = a.Keys[i].Hash
		}
		t.name = hold.Transfer{
			Instance: e.instance, By: e.caller.Name, To: len(t.hashes), Last: t.hashes[len(t.hashes)-1],
			Shard: object.Shard{Namespace: n.ns, World: 1, Groups: e.groups},
		}
		move := store.Transfer{Lasting: true}
		if _, err := e.server.store.BeginStore(t.name, t.request, t.hashes, &move); err != nil || len(move.Offsets) == 0 {
			continue // busy, no room, or all is there
		}
		for j, offset := range move.Offsets {
			places[at[group][move.Indices[j]]] = vllm.Place{Offset: uint64(offset), Bytes: uint32(e.hello.RowBytes)}
		}
		t.places = len(move.Offsets)
		out = append(out, t)
	}
	return out
}

// commit ends a store. Its rows become visible, or are dropped if the engine gave the store up.
func (e *engine) commit(body []byte) error {
	id, ok, err := vllm.DecodeCommit(body)
	if err != nil {
		return err
	}
	n := &e.server.n
	for _, t := range e.stores[id] {
		got := e.server.store.CommitStore(t.name, t.request, t.hashes, ok)
		n.rows.Add(uint64(got.Chunks))
		n.writtenBytes.Add(uint64(got.Chunks) * uint64(e.hello.RowBytes))
		if !ok {
			n.aborted.Add(1)
		}
		if got.Chunks > 0 {
			e.server.opts.Announce([]byte(e.hello.Model), []byte(t.tenant), int(t.group), &t.name.Shard, t.hashes)
		}
	}
	delete(e.stores, id)
	e.figures.stores.Store(int64(len(e.stores)))
	return nil
}
