// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
)

// hybridGroups are full attention and a window of half a chunk of 16 tokens.
var hybridGroups = []lmcache.GroupLayout{
	{Layers: 1, Hidden: 4, DType: "uint8", TokensPerBlock: 4, WindowTokens: 16, Planes: 2},
	{Layers: 2, Hidden: 4, DType: "uint8", TokensPerBlock: 4, WindowTokens: 8, Planes: 2, WindowChunks: 1},
}

// hybridClient is a worker of hybridGroups at a server of 0.5.7.
func hybridClient(t *testing.T, s *fakeServer) (*connector.PoolClient, []kv.Layout) {
	t.Helper()
	s.set(lmcache.OpNegotiateChunkSize, func([][]byte) []byte { return lmcache.AppendInt(nil, 16) })
	c, err := lmcache.NewClient(s.url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := c.Negotiate(t.Context(), 4); err != nil {
		t.Fatal(err)
	}
	layout := kv.Layout{Layers: 3, Slots: 16, Hidden: 4, DType: "uint8"}
	w, err := connector.OpenPoolClient(t.Context(), c, connector.PoolClientOptions{Model: "m", Layout: layout, BlockSize: 4, ShmDir: s.dir, Groups: hybridGroups, ChunkTokens: 16})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Close(t.Context()) })
	layouts, err := (&lmcache.EngineDriven{Groups: hybridGroups}).Layouts(16)
	if err != nil {
		t.Fatal(err)
	}
	return w, layouts
}

// placed is an object that a server names: its group, its chunk and its offset.
type placed struct{ group, chunk, offset int }

func slotsOf(layouts []kv.Layout, objects []placed) *lmcache.Slots {
	s := &lmcache.Slots{Layouts: layouts}
	for _, l := range layouts {
		n, _ := l.Bytes()
		s.Lengths = append(s.Lengths, n)
	}
	for _, o := range objects {
		s.Groups, s.Indices, s.Offsets = append(s.Groups, o.group), append(s.Indices, o.chunk), append(s.Offsets, int64(o.offset))
	}
	return s
}

var hybridKey = lmcache.Key{Tokens: make([]uint32, 48), End: 48, RequestID: "r"}

// A load of a hybrid model reads each object that a hit needs, once, and of a window only the last chunks. It refuses any other objects
// from the server, and reads none.
func TestLoadOfGroups(t *testing.T) {
	s := newFakeServer(t)
	w, layouts := hybridClient(t, s)
	for i, b := range s.pool.Bytes(0, poolBytes) {
		s.pool.Bytes(0, poolBytes)[i] = b + byte(i>>8)
	}
	whole := []placed{{0, 0, 0}, {0, 1, 4096}, {0, 2, 8192}, {1, 2, 12288}}
	f := func(name string, right bool, objects []placed, change func([]byte) []byte) {
		t.Helper()
		commits := s.count(lmcache.OpCommitRetrieve)
		s.set(lmcache.OpPrepareRetrieve, func([][]byte) []byte {
			b := lmcache.AppendPrepareRetrieve(nil, slotsOf(layouts, objects))
			if change != nil {
				b = change(b)
			}
			return b
		})
		var got []string
		ok, err := w.RetrieveGroups(t.Context(), hybridKey, 16, func(group, i int, b []byte) {
			got = append(got, fmt.Sprint(group, i, len(b), b[0]))
		})
		if ok != right || right != (err == nil) || !right && (!errors.Is(err, connector.ErrSlot) || len(got) > 0) {
			t.Errorf("%s: %v, %v, took %v", name, ok, err, got)
		}
		if want := []string{"0 0 128 0", "0 1 128 16", "0 2 128 32", "1 2 128 48"}; right && !slices.Equal(got, want) {
			t.Errorf("%s: took %v, want %v", name, got, want)
		}
		if s.count(lmcache.OpCommitRetrieve) != commits+1 {
			t.Errorf("%s: no commit", name)
		}
	}
	with := func(at int, o placed) []placed {
		out := slices.Clone(whole)
		out[at] = o
		return out
	}
	f("right", true, whole, nil)
	f("one object is missing", false, whole[:3], nil)
	f("one object too many", false, append(slices.Clone(whole), placed{1, 1, 0}), nil)
	f("an object twice", false, with(1, placed{0, 0, 4096}), nil)
	f("a chunk before the window", false, with(3, placed{1, 1, 0}), nil)
	f("a chunk that is none", false, with(2, placed{0, 3, 0}), nil)
	f("beyond the pool", false, with(3, placed{1, 2, poolBytes - 100}), nil)
	f("a group that is none", false, whole, func(b []byte) []byte {
		return bytes.Replace(b, []byte("group_ids\x94\x00\x00\x00\x01"), []byte("group_ids\x94\x00\x00\x00\x02"), 1)
	})
	f("without groups", false, whole, func(b []byte) []byte { return bytes.Replace(b, []byte("group_ids"), []byte("other_ids"), 1) })
}

// A store of a hybrid model names the chunks that it leaves out, writes what the server offers, and refuses a place for what it
// left out.
func TestStoreOfGroups(t *testing.T) {
	s := newFakeServer(t)
	w, layouts := hybridClient(t, s)
	var frame []byte
	offer := func(objects ...placed) {
		s.set(lmcache.OpPrepareStore, func(m [][]byte) []byte {
			frame = m[4]
			return lmcache.AppendPrepareStore(nil, slotsOf(layouts, objects))
		})
	}
	f := func(name string, skip [][]int, wantFrame string, want int, refused bool) {
		t.Helper()
		commits := s.count(lmcache.OpCommitStore)
		n, err := w.StoreGroups(t.Context(), hybridKey, 16, skip, func(group, i int, b []byte) {
			for at := range b {
				b[at] = byte(1 + 10*group + i)
			}
		})
		if n != want || refused != errors.Is(err, connector.ErrSlot) || string(frame) != wantFrame {
			t.Errorf("%s: stored %d, %v, skipped_chunks %x", name, n, err, frame)
		}
		if committed := s.count(lmcache.OpCommitStore) > commits; committed != (want > 0) {
			t.Errorf("%s: committed %v", name, committed)
		}
	}
	offer(placed{0, 0, 0}, placed{0, 1, 4096}, placed{1, 1, 8192})
	f("all", nil, "\x90", 3, false)
	f("nothing left out", [][]int{{}, {}}, "\x90", 3, false)
	if got := []byte{s.pool.Bytes(0, 1)[0], s.pool.Bytes(4096, 1)[0], s.pool.Bytes(8192, 1)[0]}; !bytes.Equal(got, []byte{1, 2, 12}) {
		t.Errorf("wrote %v", got)
	}
	f("what the server did not offer", [][]int{{}, {0, 2}}, "\x92\x90\x92\x00\x02", 3, false)
	f("what the server offers all the same", [][]int{{}, {0, 1}}, "\x92\x90\x92\x00\x01", 0, true)
	for _, chunk := range []int{3, 1 << 20} {
		offer(placed{0, 0, 0}, placed{0, chunk, 4096})
		f(fmt.Sprint("chunk ", chunk, " of 3"), nil, "\x90", 0, true)
	}
	offer()
	f("all is there", nil, "\x90", 0, false)
}

// A server of a release before 0.5.7 takes no groups: the worker does not register.
func TestGroupsNeedA057Server(t *testing.T) {
	s := newFakeServer(t)
	c, err := lmcache.NewClient(s.url)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = connector.OpenPoolClient(t.Context(), c, connector.PoolClientOptions{Model: "m", Layout: kv.Layout{Layers: 3, Slots: 16, Hidden: 4, DType: "uint8"}, ShmDir: s.dir, Groups: hybridGroups, ChunkTokens: 16})
	if !errors.Is(err, connector.ErrOneGroup) || s.count(lmcache.OpRegisterEngineDriven) != 0 {
		t.Errorf("%v, registered %d times", err, s.count(lmcache.OpRegisterEngineDriven))
	}
}

// hybridWorker is a worker with two groups over one memory of 16 blocks of 4 tokens: full attention, and a window of 6 tokens, of
// which the last two blocks of a chunk of 4 blocks are kept. Each byte of the memory is its own.
func hybridWorker(t *testing.T, s *fakeServer) (*connector.Worker, *connector.Paged, []kv.Layout) {
	t.Helper()
	s.set(lmcache.OpNegotiateChunkSize, func([][]byte) []byte { return lmcache.AppendInt(nil, 16) })
	c, err := lmcache.NewClient(s.url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := c.Negotiate(t.Context(), 4); err != nil {
		t.Fatal(err)
	}
	p := newPaged(paged.PlanesNHD, 1, 16, 4, 1, 2)
	for i := range p.Layers[0] {
		p.Layers[0][i] = byte(i % 251)
	}
	w, err := connector.OpenWorker(t.Context(), c, connector.WorkerOptions{
		Model: "m", Cache: p, ChunkTokens: 16, ShmDir: s.dir, NoHeartbeat: true, Groups: []connector.Group{{}, {Window: 6}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Close(t.Context()) })
	layouts, err := (&lmcache.EngineDriven{Groups: []lmcache.GroupLayout{
		{Layers: 1, Hidden: 2, DType: "float16", WindowTokens: 16, Planes: 2}, {Layers: 1, Hidden: 2, DType: "float16", WindowTokens: 8, Planes: 2, WindowChunks: 1},
	}}).Layouts(16)
	if err != nil {
		t.Fatal(err)
	}
	return w, p, layouts
}

// A worker leaves out the chunks of a window whose blocks the engine has given up, and stores those that are whole.
func TestStoreLeavesGivenUpBlocksOut(t *testing.T) {
	s := newFakeServer(t)
	w, p, layouts := hybridWorker(t, s)
	frames := make(chan []byte, 1)
	s.set(lmcache.OpPrepareStore, func(m [][]byte) []byte {
		frames <- m[4]
		return lmcache.AppendPrepareStore(nil, slotsOf(layouts, []placed{{0, 0, 0}, {0, 1, 4096}, {1, 1, 8192}}))
	})
	w.Save([]lmcache.LoadStore{{
		Direction: lmcache.Store, RequestID: "r", Tokens: make([]uint32, 32), End: 32,
		Blocks: [][]int{{1, 2, 3, 4, 5, 6, 7, 8}, {0, 0, 0, 9, 0, 0, 10, 11}},
	}})
	flushWorker(t, w)
	if got := <-frames; string(got) != "\x92\x90\x91\x00" {
		t.Errorf("skipped_chunks %x", got)
	}
	if n := s.count(lmcache.OpCommitStore); n != 1 {
		t.Fatalf("%d commits", n)
	}
	window := make([]byte, 2*8*4)
	p.Gather([]int{10, 11}, window)
	if !bytes.Equal(s.pool.Bytes(8192, int64(len(window))), window) {
		t.Error("the object of the window is not its last two blocks")
	}
}

// A load writes the blocks of each object but for the tokens that the engine has, and leaves alone the null block of a window.
func TestLoadOfGroupsSkipsWhatTheEngineHas(t *testing.T) {
	s := newFakeServer(t)
	w, p, layouts := hybridWorker(t, s)
	pool := s.pool.Bytes(0, poolBytes)
	for i := range pool {
		pool[i] = 255
	}
	before := bytes.Clone(p.Layers[0])
	s.set(lmcache.OpPrepareRetrieve, func([][]byte) []byte {
		return lmcache.AppendPrepareRetrieve(nil, slotsOf(layouts, []placed{{0, 0, 0}, {0, 1, 4096}, {1, 1, 8192}}))
	})
	w.Load([]lmcache.LoadStore{{
		Direction: lmcache.Retrieve, RequestID: "r", Tokens: make([]uint32, 32), End: 32, SkipFirst: 8,
		Blocks: [][]int{{1, 2, 3, 4, 5, 6, 7, 8}, {0, 0, 0, 0, 0, 0, 0, 11}},
	}})
	testkit.Eventually(t, "the load ends", func() bool { return len(w.Finished(nil).Received) == 1 })
	if bad := w.LoadErrors(); len(bad.Requests) > 0 {
		t.Fatalf("%+v", bad)
	}
	const block = 4 * 4 // bytes of a plane
	for plane := range 2 {
		for id := range p.Blocks {
			at := (plane*p.Blocks + id) * block
			changed := !bytes.Equal(p.Layers[0][at:at+block], before[at:at+block])
			if want := id >= 3 && id <= 8 || id == 11; changed != want {
				t.Errorf("plane %d, block %d was written: %v, want %v", plane, id, changed, want)
			}
		}
	}
}

// A worker registers with the block size of its options, 16 tokens where they have none.
func TestRegistrationHasTheBlockSize(t *testing.T) {
	s := newFakeServer(t)
	var registered atomic.Int64
	s.set(lmcache.OpRegisterEngineDriven, func(m [][]byte) []byte {
		r, err := new(lmcache.Decoder).Decode(nil, lmcache.Only(lmcache.Latest), lmcache.OpRegisterEngineDriven, m[2:])
		if err != nil {
			t.Error(err)
			return nil
		}
		registered.Store(int64(r.(*lmcache.EngineDriven).BlockSize))
		return lmcache.Pool{ShmName: "pool", Bytes: poolBytes}.Append(nil)
	})
	c, err := lmcache.NewClient(s.url)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, f := range []struct {
		of   int
		want int64
	}{{0, 16}, {4, 4}, {32, 32}} {
		w, err := connector.OpenPoolClient(t.Context(), c, connector.PoolClientOptions{Model: "m", Layout: kv.Layout{Layers: 1, Slots: 16, Hidden: 4, DType: "uint8"}, BlockSize: f.of, ShmDir: s.dir})
		if err != nil {
			t.Fatal(err)
		}
		if got := registered.Load(); got != f.want {
			t.Errorf("blocks of %d tokens are registered as %d", f.of, got)
		}
		_ = w.Close(t.Context()) // the server answers no unregistration
	}
}
