// SPDX-License-Identifier: Apache-2.0

package kv_test

import (
	"fmt"

	"github.com/kvasir-kv/kvasir/kv"
)

// A chunk's hash covers the chunk and every token before it. So prompts have equal hashes for
// the chunks of their common beginning, and different ones behind it.
func ExampleChunkHashes() {
	a := kv.ChunkHashes([]uint32{1, 2, 3, 4, 5, 6, 7, 8, 9}, 4) // the last token fills no chunk
	b := kv.ChunkHashes([]uint32{1, 2, 3, 4, 0, 6, 7, 8}, 4)
	fmt.Println(len(a), len(b), a[0] == b[0], a[1] == b[1])
	// Output: 2 2 true false
}

// A layout says how many bytes a chunk takes on one worker.
func ExampleLayout() {
	l := kv.Layout{Layers: 28, Slots: 256, Hidden: 512, DType: "bfloat16"}
	n, err := l.Bytes()
	if err != nil {
		panic(err)
	}
	fmt.Println(l.Shape(), kv.FormatBytes(n))
	// Output: [2 28 256 512] 14 MiB
}
