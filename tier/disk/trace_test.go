// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"bufio"
	"container/list"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// traceTokens is how many tokens a block of a trace has.
const traceTokens = 512

// readTrace returns the full blocks of each request of a trace in Mooncake's format.
func readTrace(b *testing.B, path string) (requests [][]int64) {
	b.Helper()
	f, err := os.Open(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	for lines := json.NewDecoder(bufio.NewReader(f)); lines.More(); {
		var r struct {
			Input  int     `json:"input_length"`
			Blocks []int64 `json:"hash_ids"`
		}
		if err := lines.Decode(&r); err != nil {
			b.Fatal(err)
		}
		requests = append(requests, r.Blocks[:min(len(r.Blocks), r.Input/traceTokens)])
	}
	return requests
}

// lru is a pool of so many blocks above a disk.
type lru struct {
	most  int
	at    map[int64]*list.Element
	order list.List // of blocks, the one used last in front
}

func (p *lru) has(block int64) bool { return p.at[block] != nil }

func (p *lru) use(block int64) {
	if e := p.at[block]; e != nil {
		p.order.MoveToFront(e)
		return
	}
	if p.most == 0 {
		return
	}
	if p.order.Len() == p.most {
		delete(p.at, p.order.Remove(p.order.Back()).(int64))
	}
	p.at[block] = p.order.PushFront(block)
}

// playTrace returns how many blocks of prompts are hits, in a row from a prompt's start, of a pool over a disk,
// either of which may be missing. As a store does, it reads the blocks from the disk that the pool lacks, and offers the
// disk each block that is stored or hit and is not on it.
func playTrace(b *testing.B, requests [][]int64, pool *lru, d *Disk) (hits, all int) {
	b.Helper()
	buf := make([]byte, 1)
	sum := hashOf(buf)
	onDisk := func(block int64) bool {
		var m [1]tier.Meta
		if d != nil {
			_ = d.Stat(b.Context(), []kv.Key{benchKey(block)}, m[:])
		}
		return m[0].Len > 0
	}
	for _, blocks := range requests {
		all += len(blocks)
		n := 0
		for n < len(blocks) && (pool.has(blocks[n]) || onDisk(blocks[n])) {
			n++
		}
		hits += n
		for _, block := range blocks[:n] {
			if d == nil || pool.has(block) {
				continue
			}
			if _, err := d.Read(b.Context(), benchKey(block), buf); err != nil && !errors.Is(err, tier.ErrMissing) {
				b.Fatal(err)
			}
		}
		for _, block := range slices.Backward(blocks) { // tails first, as a pool is used
			pool.use(block)
			if d != nil && !onDisk(block) {
				_ = d.Write(b.Context(), benchKey(block), tier.Meta{Len: 1, Sum: sum}, buf) // it may not be kept
			}
		}
	}
	return hits, all
}

// BenchmarkTrace plays the trace KVASIR_TRACE against disks of some sizes, alone and below a pool of 2,000 blocks. An
// object is one byte, which takes a block of the disk.
func BenchmarkTrace(b *testing.B) {
	path := os.Getenv("KVASIR_TRACE")
	if path == "" {
		b.Skip("KVASIR_TRACE names no trace")
	}
	requests := readTrace(b, path)
	disk := func(b *testing.B, blocks int64, rule Options) *Disk {
		if blocks == 0 {
			return nil
		}
		rule.Dirs, rule.SegmentBytes, rule.MinFree = []Dir{{benchDir(b), blocks * block}}, max(minSegment, blocks*block/1024/block*block), 1
		d := open(b, rule)
		b.Cleanup(func() { closeDisk(b, d) })
		return d
	}
	run := func(name string, pool int, blocks int64, rule Options) {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				d := disk(b, blocks, rule)
				hits, all := playTrace(b, requests, &lru{most: pool, at: map[int64]*list.Element{}}, d)
				b.ReportMetric(100*float64(hits)/float64(all), "%hits")
				if d != nil {
					b.ReportMetric(float64(d.Stats().Written["objects"])/float64(all), "written/block")
				}
			}
		})
	}
	const above = 2000
	run(fmt.Sprintf("pool=%d", above), above, 0, Options{})
	for _, blocks := range []int{5000, 10_000, 20_000, 50_000, 100_000} {
		run(fmt.Sprintf("lru=%d", blocks), blocks, 0, Options{})
		for _, pool := range []int{0, above} {
			run(fmt.Sprintf("pool=%d,disk=%d,first", pool, blocks), pool, int64(blocks), Options{FirstTouch: true})
			run(fmt.Sprintf("pool=%d,disk=%d,second", pool, blocks), pool, int64(blocks), Options{SecondTouch: true})
			run(fmt.Sprintf("pool=%d,disk=%d,default", pool, blocks), pool, int64(blocks), Options{})
		}
	}
}
