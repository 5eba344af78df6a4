// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"fmt"
	"testing"
)

// Loopback, both ends in this process. Blocks of 4 KiB and 64 KiB are 16 tokens
// of one layer's K or V with 1 and 16 local heads of 128 bytes; 1 MiB is a layer
// of a 256-token chunk.
func BenchmarkTransfer(b *testing.B) {
	const room = 64 << 20
	target, _ := listen(b, 2*room, TargetOptions{})
	c := client(b, Options{})
	local := pattern(room, 1)
	f := func(op string, size, n, stride int) {
		b.Run(fmt.Sprintf("op=%s/size=%d/batch=%d/stride=%d", op, size, n, stride), func(b *testing.B) {
			list := make([]Entry, n)
			for i := range list {
				list[i] = Entry{local[i*size:][:size], testBase + uint64(i*stride)}
			}
			call := c.Write
			if op == "read" {
				call = c.Read
			}
			b.SetBytes(int64(size * n))
			b.ReportAllocs()
			for b.Loop() {
				if err := call(b.Context(), target.Name(), list); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	for _, op := range []string{"write", "read"} {
		f(op, 4<<10, 1, 4<<10)
		f(op, 4<<10, 1024, 4<<10)
		f(op, 4<<10, 1024, 8<<10)
		f(op, 64<<10, 64, 64<<10)
		f(op, 64<<10, 64, 128<<10)
		f(op, 1<<20, 64, 1<<20)
	}
}

func BenchmarkFence(b *testing.B) {
	table := NewTable()
	for i := range uint64(64) {
		if _, err := table.RegisterFunc(Range{1<<40 + i<<30, 1 << 30}, nil, nil); err != nil {
			b.Fatal(err)
		}
	}
	for range 256 { // connections
		defer table.newClaims(func() {}).drop()
	}
	blocks := make([]Range, 128)
	for i := range blocks {
		blocks[i] = Range{1<<40 + uint64(i)<<20, 64 << 10}
	}
	b.ReportAllocs()
	for b.Loop() {
		table.Fence(b.Context(), blocks...)
		table.Reopen(blocks...)
	}
}
