// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

// Layout says how the blocks of a batch lie in the peer's region.
type Layout string

// Layouts.
const (
	Packed    Layout = "packed"    // back to back, in order
	Reversed  Layout = "reversed"  // back to back, last block first
	Scattered Layout = "scattered" // shuffled, with gaps: no two blocks adjoin
)

// BenchOptions configures Bench. A zero field means its default.
type BenchOptions struct {
	Client  transfer.Options
	Peers   []PeerFile    // each peer has Callers callers
	Callers int           // callers per peer, each with a client of its own; default 1
	Ops     []string      // "write", "read", "socket"; default write and read
	Sizes   []int         // bytes of a block; default 4 KiB to 16 MiB in steps of 4
	Batches []int         // blocks in a batch; default 1, 8, 64, 256, 1024
	Layout  Layout        // default Packed
	For     time.Duration // duration of each measurement; default 1 s
	Bytes   int           // measurements whose batch has more bytes are left out; default 256 MiB
	Verify  bool          // after each measurement, write a new pattern and read it back
	Pieces  []Piece       // the only batch to measure, instead of Sizes, Batches and Layout
}

// Piece is one entry of a batch that was planned elsewhere: offset in the caller's memory, offset in the peer's region, and length, all
// in bytes.
type Piece [3]int

// Cell is the result of one measurement: calls of one operation with one block size and batch size.
type Cell struct {
	Op      string
	Size    int
	Batch   int
	Calls   int
	Bytes   int64
	Elapsed time.Duration
	P50     time.Duration // of a call
	P99     time.Duration
	CPU     time.Duration // user and system time of this process in those calls; 0: unknown
}

// GBps is the throughput in 10^9 bytes per second.
func (c Cell) GBps() float64 { return float64(c.Bytes) / c.Elapsed.Seconds() / 1e9 }

// Line returns the cell as a line of Go benchmark output.
func (c Cell) Line() string {
	calls := int64(max(c.Calls, 1))
	return fmt.Sprintf("BenchmarkTransfer/op=%s/size=%d/batch=%d %d %d ns/op %.2f MB/s %d p50-ns/op %d p99-ns/op %d cpu-ns/op",
		c.Op, c.Size, c.Batch, c.Calls, c.Elapsed.Nanoseconds()/calls,
		float64(c.Bytes)/c.Elapsed.Seconds()/1e6, c.P50.Nanoseconds(), c.P99.Nanoseconds(), c.CPU.Nanoseconds()/calls)
}

// ErrVerify means that bytes read back differ from those written.
var ErrVerify = errors.New("bench: bytes read back differ")

// Bench measures every combination of operation, size and batch, and prints a Go benchmark line for each. The operation "socket" copies
// the same bytes over a plain loopback connection, with an 8-byte answer per batch: the time that no transfer can beat.
func Bench(ctx context.Context, o BenchOptions, out io.Writer) ([]Cell, error) {
	if len(o.Ops) == 0 {
		o.Ops = []string{"write", "read"}
	}
	if len(o.Sizes) == 0 {
		o.Sizes = []int{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20}
	}
	if len(o.Batches) == 0 {
		o.Batches = []int{1, 8, 64, 256, 1024}
	}
	o.Layout = cmp.Or(o.Layout, Packed)
	o.For = cmp.Or(o.For, time.Second)
	o.Bytes = cmp.Or(o.Bytes, 256<<20)
	o.Callers = cmp.Or(o.Callers, 1)
	for _, op := range o.Ops {
		if !slices.Contains([]string{"write", "read", "socket"}, op) {
			return nil, fmt.Errorf("unknown operation %q: write, read or socket", op)
		}
	}
	if !slices.Contains([]Layout{Packed, Reversed, Scattered}, o.Layout) {
		return nil, fmt.Errorf("unknown layout %q: packed, reversed or scattered", o.Layout)
	}
	var cells []Cell
	if len(o.Pieces) > 0 {
		cell, err := o.pieces(ctx)
		if err != nil {
			return nil, fmt.Errorf("batch of %d pieces: %w", len(o.Pieces), err)
		}
		fmt.Fprintln(out, cell.Line())
		return []Cell{cell}, nil
	}
	for _, op := range o.Ops {
		for _, size := range o.Sizes {
			for _, batch := range o.Batches {
				if size*batch*o.Layout.spread() > o.callerBytes() {
					continue
				}
				cell, err := o.cell(ctx, op, size, batch)
				if err != nil {
					return cells, fmt.Errorf("%s of %d x %d bytes: %w", op, batch, size, err)
				}
				cells = append(cells, cell)
				fmt.Fprintln(out, cell.Line())
			}
		}
	}
	return cells, nil
}

// pieces measures writes of the batch o.Pieces to the first peer.
func (o BenchOptions) pieces(ctx context.Context) (Cell, error) {
	mine, total := 0, 0
	for _, p := range o.Pieces {
		if min(p[0], p[1]) < 0 || p[2] < 1 || uint64(p[1]+p[2]) > o.Peers[0].Len {
			return Cell{}, fmt.Errorf("piece %v: %w", p, transfer.ErrRange)
		}
		mine, total = max(mine, p[0]+p[2]), total+p[2]
	}
	local := make([]byte, mine)
	prepare(local)
	fill(local, 1)
	entries := make([]transfer.Entry, len(o.Pieces))
	for i, p := range o.Pieces {
		entries[i] = transfer.Entry{Local: local[p[0]:][:p[2]], Remote: o.Peers[0].Base + uint64(p[1])}
	}
	c := transfer.New(o.Client)
	defer c.Close()
	write := func() error { return c.Write(ctx, o.Peers[0].Peer, entries) }
	if err := write(); err != nil { // the first call connects and touches the pages
		return Cell{}, err
	}
	before := processTime()
	lat, took, err := repeat(o.For, write)
	cell := newCell("write", total/len(entries), len(entries), lat, took)
	cell.Bytes, cell.CPU = int64(total)*int64(len(lat)), processTime()-before
	return cell, err
}

// spread returns how many blocks of room the layout needs per block.
func (l Layout) spread() int {
	if l == Scattered {
		return 2
	}
	return 1
}

// callerBytes returns how many bytes of its peer's region each caller may use.
func (o BenchOptions) callerBytes() int {
	room := uint64(o.Bytes)
	for _, p := range o.Peers {
		room = min(room, p.Len)
	}
	return int(room) / max(o.Callers, 1)
}

// cell runs one measurement: all callers at once. It merges their samples.
func (o BenchOptions) cell(ctx context.Context, op string, size, batch int) (Cell, error) {
	if op == "socket" {
		lat, took, err := socketCopy(ctx, size*batch, o.For)
		return newCell(op, size, batch, lat, took), err
	}
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		all  []time.Duration
		errs []error
		took time.Duration
	)
	for i, peer := range o.Peers {
		for k := range o.Callers {
			wg.Go(func() {
				base := peer.Base + uint64(k*o.callerBytes())
				lat, t, err := o.caller(ctx, peer.Peer, base, op, size, batch, byte(i*o.Callers+k))
				mu.Lock()
				defer mu.Unlock()
				all, took, errs = append(all, lat...), max(took, t), append(errs, err)
			})
		}
	}
	wg.Wait()
	return newCell(op, size, batch, all, took), errors.Join(errs...)
}

func newCell(op string, size, batch int, lat []time.Duration, took time.Duration) Cell {
	c := Cell{Op: op, Size: size, Batch: batch, Calls: len(lat), Bytes: int64(size) * int64(batch) * int64(len(lat)), Elapsed: took}
	if len(lat) > 0 {
		slices.Sort(lat)
		c.P50, c.P99 = lat[(len(lat)-1)/2], lat[(len(lat)-1)*99/100]
	}
	return c
}

func (o BenchOptions) caller(ctx context.Context, peer string, base uint64, op string, size, batch int, seed byte) ([]time.Duration, time.Duration, error) {
	c := transfer.New(o.Client)
	defer c.Close()
	local := make([]byte, size*batch)
	fill(local, seed)
	entries := o.Layout.entries(local, base, size)
	call := c.Write
	if op == "read" {
		call = c.Read
	}
	if err := call(ctx, peer, entries); err != nil { // the first call connects and touches the pages
		return nil, 0, err
	}
	lat, took, err := repeat(o.For, func() error { return call(ctx, peer, entries) })
	if err != nil || !o.Verify {
		return lat, took, err
	}
	fill(local, seed+1)
	want := bytes.Clone(local)
	if err := c.Write(ctx, peer, entries); err != nil {
		return lat, took, err
	}
	clear(local)
	if err := c.Read(ctx, peer, entries); err != nil {
		return lat, took, err
	}
	if !bytes.Equal(local, want) {
		return lat, took, ErrVerify
	}
	return lat, took, nil
}

// repeat calls f until d has passed, at least three times. lat has the duration of each call, took that of all.
func repeat(d time.Duration, f func() error) (lat []time.Duration, took time.Duration, err error) {
	start := time.Now()
	for last := start; last.Sub(start) < d || len(lat) < 3; {
		if err := f(); err != nil {
			return lat, last.Sub(start), err
		}
		now := time.Now()
		lat = append(lat, now.Sub(last))
		last, took = now, now.Sub(start)
	}
	return lat, took, nil
}

func fill(b []byte, seed byte) {
	r := rand.NewChaCha8([32]byte{seed})
	r.Read(b)
}

// entries places the blocks of local, each of size bytes, at the peer from address base on, in the layout l.
func (l Layout) entries(local []byte, base uint64, size int) []transfer.Entry {
	n := len(local) / size
	place := make([]int, n)
	for i := range place {
		place[i] = i
		if l == Reversed {
			place[i] = n - 1 - i
		}
	}
	if l == Scattered {
		rand.New(rand.NewPCG(1, uint64(n))).Shuffle(n, func(i, j int) { place[i], place[j] = place[j], place[i] })
	}
	list := make([]transfer.Entry, n)
	for i := range list {
		list[i] = transfer.Entry{Local: local[i*size:][:size], Remote: base + uint64(place[i]*l.spread()*size)}
	}
	return list
}

// socketCopy measures a plain connection between two goroutines: one sends n bytes and waits for 8 bytes, again and again, until d has
// passed.
func socketCopy(ctx context.Context, n int, d time.Duration) ([]time.Duration, time.Duration, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, 0, err
	}
	defer l.Close()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		buf, ack := make([]byte, n), make([]byte, 8)
		for {
			if _, err := io.ReadFull(c, buf); err != nil {
				return
			}
			if _, err := c.Write(ack); err != nil {
				return
			}
		}
	})
	c, err := new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		l.Close()
		return nil, 0, err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	buf, ack := make([]byte, n), make([]byte, 8)
	once := func() error {
		if _, err := c.Write(buf); err != nil {
			return err
		}
		_, err := io.ReadFull(c, ack)
		return err
	}
	if err := once(); err != nil {
		return nil, 0, err
	}
	return repeat(d, once)
}
