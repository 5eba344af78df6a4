// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"hash/crc32"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
	"github.com/kvasir-kv/kvasir/sim/sched"
)

// Bytes gives the engines KV memory with real bytes, with as many layers and KV heads as the model has. Steps write the KV of their
// tokens, and transfers copy blocks when they end. The engines compare the KV that arrives, the KV with which a request begins, and all
// KV of a request at its end, with what it should be. The schedule is the same as without bytes. The store is then the server's own
// (package store).
type Bytes struct {
	// HeadBytes is the size of K and V of one head and token, in bytes; a multiple of 8. Default 8; real models have hundreds.
	HeadBytes int
	// Corrupt is the number, counted from 1, of a block that arrives at an engine and in which one bit is flipped; 0: none.
	Corrupt int
	// Dir is the folder for the file with the store's memory; the file has no name after the start. Default os.TempDir.
	Dir string
}

// maxBytes is the largest total KV memory of a deployment in a run with bytes. More is ErrMemory.
const maxBytes = 2 << 30

// ErrMemory means that the KV memory of a deployment with bytes would exceed 2 GiB.
var ErrMemory = fmt.Errorf("%w: KV memory with bytes", ErrOptions)

// geometry returns the layout of the KV memory of one engine.
func (o *Options) geometry() kvmem.Geometry {
	p := o.Profile
	g := kvmem.Geometry{Layers: p.Model.Layers, Heads: p.Model.KVHeads, HeadBytes: 8, BlockTokens: p.BlockTokens, Blocks: p.KVBlocks(), TPSize: 1}
	if o.Bytes.HeadBytes != 0 {
		g.HeadBytes = o.Bytes.HeadBytes
	}
	return g
}

// memoryBytes returns the size of the KV memory of all engines and the store.
func (o *Options) memoryBytes() int64 {
	g := o.geometry()
	block := int64(g.TokenBytes()) * int64(g.BlockTokens)
	return int64(o.Prefill+o.Decode)*int64(g.Blocks)*block + int64(o.Store.Blocks)*slotBytes(block)
}

// validateBytes reports through f everything that is wrong with a deployment with bytes.
func (o *Options) validateBytes(f func(ok bool, format string, args ...any)) {
	g := o.geometry()
	if err := g.Validate(); err != nil {
		f(false, "%v", err)
		return
	}
	f(!o.PrefillAlone, "engines with PrefillAlone have no blocks, and so no bytes")
	f(o.Bytes.Corrupt >= 0, "block %d cannot get a wrong bit: its number is below 0", o.Bytes.Corrupt)
}

// checkMemory returns an error if a run would need more KV memory than allowed.
func (o *Options) checkMemory() error {
	n, g := o.memoryBytes(), o.geometry()
	if n <= maxBytes {
		return nil
	}
	return fmt.Errorf("%w: %d engines of %d blocks of %d tokens and a store of %d take %s, %s at most",
		ErrMemory, o.Prefill+o.Decode, g.Blocks, g.BlockTokens, o.Store.Blocks, kv.FormatBytes(n), kv.FormatBytes(maxBytes))
}

// Carried counts what a run did with KV bytes.
type Carried struct {
	Memory  int64  `json:"memory_bytes"`   // size of the KV memory: all engines and the store
	Moved   int64  `json:"moved_bytes"`    // from P to D
	Stored  int64  `json:"stored_bytes"`   // to the store
	Loaded  int64  `json:"loaded_bytes"`   // from the store
	Checked int64  `json:"checked_bytes"`  // compared by readers; some bytes count several times
	Wrong   int    `json:"wrong_requests"` // requests that got wrong bytes
	CRC32C  uint32 `json:"crc32c"`         // of all bytes moved, stored and loaded, in their order

	arrived int // blocks that have arrived
}

// prepare makes the tokens of q's prompt, and their chain. If `named` is true, as in a run with a store, it also makes the hashes of the
// prompt's full blocks, of blockTokens tokens each.
func (q *request) prepare(blockTokens int, named bool) {
	from := q.from
	if len(from.Blocks) == 0 { // it has nothing in common with any other request
		from = &workload.Request{Input: q.Input, Blocks: []int64{-1 - int64(q.number)}, BlockTokens: q.Input}
	}
	tokens := from.Tokens()
	q.chain = make(kvmem.Chain, 0, q.Input+q.limit).Append(tokens...)
	if named {
		q.names = kv.ChunkHashes(tokens, blockTokens)
	}
}

// forget drops those fields of q that only runs with bytes need.
func (q *request) forget() { q.chain, q.names, q.pushed = nil, nil, nil }

// generate makes the next token of q, which follows from the tokens before it.
func (q *request) generate() {
	if n := len(q.chain); n > 0 {
		q.chain = q.chain.Append(uint32(q.chain[n-1]>>20) % workload.Vocabulary)
	}
}

// memory is the KV memory of an engine.
type memory struct {
	run   *run
	kv    *kvmem.Memory
	group paged.Group // the same memory in the form that the store's workers use
	block int         // bytes of a block over all layers

	rows    []sched.Row // rows of the current step
	writing map[sched.BlockID]struct{}
	later   []span // KV to be compared when the step has ended
}

// span is a range of a request's tokens.
type span struct {
	q        *request
	table    []sched.BlockID
	from, to int
}

func newMemory(r *run) (*memory, error) {
	g := r.o.geometry()
	m := &memory{run: r, block: g.TokenBytes() * g.BlockTokens, writing: make(map[sched.BlockID]struct{})}
	var err error
	m.kv, err = kvmem.New(g, func(_, _ int, n int64) ([]byte, error) { return make([]byte, n), nil })
	if err != nil {
		return nil, err
	}
	view, _, err := paged.Dense(paged.FusedHND, g.Blocks, g.BlockTokens, g.Heads, g.HeadBytes)
	if err != nil {
		return nil, err
	}
	m.group = paged.Group{PerChunk: 1, Keep: 1}
	for _, layer := range m.kv.RankLayers(0) {
		m.group.Layers = append(m.group.Layers, paged.Layer{Memory: layer, View: view})
	}
	return m, m.group.Check()
}

// begin must be called when a step has been decided. It compares the KV with which requests begin, and all KV of requests that get
// their last token. Blocks that another row of the step still writes are compared at the step's end.
func (m *memory) begin(s *sched.Scheduler, rows []sched.Row) {
	m.rows, m.later = rows, m.later[:0]
	clear(m.writing)
	size := m.kv.BlockTokens
	for i := range rows {
		row := &rows[i]
		q, table := row.Request.Data.(*request), row.Request.Tables()[0]
		if row.Kind != sched.RowRunning || s.Last(row) {
			for at := 0; at < row.Before; at += size {
				part := span{q, table, at, min(at+size, row.Before)}
				if _, ok := m.writing[table[at/size]]; ok {
					m.later = append(m.later, part)
				} else {
					m.check(part)
				}
			}
		}
		for b := row.Before / size; b*size < row.Before+row.Tokens; b++ {
			m.writing[table[b]] = struct{}{}
		}
	}
}

// end writes the KV of the step's tokens.
func (m *memory) end() {
	for i := range m.rows {
		row := &m.rows[i]
		m.kv.Write(row.Request.Tables(), row.Request.Data.(*request).chain, row.Before, row.Before+row.Tokens)
	}
	for _, part := range m.later {
		m.check(part)
	}
	m.rows, m.later = nil, m.later[:0]
}

// check compares KV with what its tokens should give. A request with wrong KV goes on and fails only at its end, so that the schedule
// is that of a run without bytes.
func (m *memory) check(s span) {
	m.run.carried.Checked += int64(s.to-s.from) * int64(m.kv.TokenBytes())
	err := m.kv.Check([][]int32{s.table}, s.q.chain, s.from, s.to)
	if err == nil {
		return
	}
	if s.q.Error == "" {
		m.run.carried.Wrong++
		s.q.Error = fmt.Sprintf("wrong KV: %v", err)
	}
}

// read copies a block to b, layer after layer.
func (m *memory) read(block sched.BlockID, b []byte) {
	n := m.kv.BlockBytes()
	for i, layer := range m.kv.RankLayers(0) {
		copy(b[i*n:(i+1)*n], layer[int64(block)*int64(n):])
	}
}

// write copies b into a block, layer after layer.
func (m *memory) write(block sched.BlockID, b []byte) {
	n := m.kv.BlockBytes()
	for i, layer := range m.kv.RankLayers(0) {
		copy(layer[int64(block)*int64(n):], b[i*n:(i+1)*n])
	}
}

// count adds the bytes b, which were carried, to counter and to the checksum.
func (c *Carried) count(b []byte, counter *int64) {
	c.CRC32C = crc32.Update(c.CRC32C, castagnoli, b)
	*counter += int64(len(b))
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// blockArrived counts a block that has arrived. If it is the block that Bytes.Corrupt names, it flips a bit in the last layer and head
// of the block's first token.
func (m *memory) blockArrived(block sched.BlockID) {
	c := &m.run.carried
	if c.arrived++; c.arrived == m.run.o.Bytes.Corrupt {
		layers, n := m.kv.RankLayers(0), m.kv.BlockBytes()
		layers[len(layers)-1][(int64(block)+1)*int64(n)-int64(m.kv.BlockTokens*m.kv.HeadBytes)] ^= 1
	}
}

// pull copies the blocks `from` of P into the blocks `to` of D, and counts the bytes as moved.
func (r *run) pull(p, d *engine, from, to []sched.BlockID) {
	if r.buffer == nil {
		r.buffer = make([]byte, p.memory.block)
	}
	for i := range from {
		p.memory.read(from[i], r.buffer)
		r.carried.count(r.buffer, &r.carried.Moved)
		d.memory.write(to[i], r.buffer)
		d.memory.blockArrived(to[i])
	}
}

// push copies the prompt's KV from P into q.pushed, D's buffer, because P will give the blocks to other requests.
func (m *memory) push(q *request, table []sched.BlockID) {
	blocks := (q.Input + m.kv.BlockTokens - 1) / m.kv.BlockTokens
	q.pushed = make([]byte, blocks*m.block)
	for i, b := range table[:blocks] {
		part := q.pushed[i*m.block : (i+1)*m.block]
		m.read(b, part)
		m.run.carried.count(part, &m.run.carried.Moved)
	}
}

// receive copies the KV of tokens [from, to) from D's buffer into the blocks of q.
func (m *memory) receive(q *request, table []sched.BlockID, from, to int) {
	size := m.kv.BlockTokens
	for i := from / size; i*size < to; i++ {
		m.write(table[i], q.pushed[i*m.block:(i+1)*m.block])
		m.blockArrived(table[i])
	}
	q.pushed = nil
	m.check(span{q, table, from, to})
}
