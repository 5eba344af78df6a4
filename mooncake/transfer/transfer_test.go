// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"
)

// Batches of every shape arrive byte for byte, both ways.
func TestWriteRead(t *testing.T) {
	target, mem := listen(t, 48<<20, TargetOptions{})
	f := func(o Options, size, n, stride int, shuffled bool) {
		t.Helper()
		c := client(t, o)
		clear(mem)
		target.Table().Observe()
		src, dst := pattern(size*n, byte(n)), make([]byte, size*n)
		place := rand.Perm(n)
		var out, back []Entry
		want := make([]byte, len(mem))
		for i := range n {
			at := i * stride
			if shuffled {
				at = place[i] * stride
			}
			out = append(out, Entry{src[i*size:][:size], testBase + uint64(at)})
			back = append(back, Entry{dst[i*size:][:size], testBase + uint64(at)})
			copy(want[at:], src[i*size:][:size])
		}
		ctx := timeout(t, 60*time.Second)
		if err := c.Write(ctx, target.Name(), out); err != nil {
			t.Fatal(err)
		}
		target.Table().Observe()
		if !bytes.Equal(mem, want) {
			t.Fatalf("size %d, n %d, stride %d: target memory differs", size, n, stride)
		}
		if err := c.Read(ctx, target.Name(), back); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(src, dst) {
			t.Fatalf("size %d, n %d, stride %d: bytes read differ", size, n, stride)
		}
	}
	f(Options{}, 1, 1, 1, false)
	f(Options{}, 1, 4096, 1, true)
	f(Options{}, 1, 4096, 3, true)
	f(Options{}, 4096, 1, 4096, false)
	f(Options{}, 4096, 4096, 4096, false)
	f(Options{}, 4096, 4096, 5000, true)
	f(Options{Window: 1}, 4096, 100, 5000, true)
	f(Options{SplitBytes: 1 << 20, Conns: 4}, 4096, 4096, 5000, true)
	f(Options{}, 65536, 300, 70000, true)
	f(Options{}, 8<<20, 4, 9<<20, false)
	f(Options{SplitBytes: 1 << 20, Conns: 4}, 8<<20, 4, 9<<20, true)
	f(Options{SplitBytes: 1 << 20, Conns: 4}, 16<<20, 2, 16<<20, false)
	f(Options{}, 33<<20, 1, 1, false)
	f(Options{SplitBytes: 1 << 20, Conns: 3}, 33<<20, 1, 1, false)
}
