// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"fmt"
	"os"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// A worker reserves places for a prompt's chunks, writes them through its own mapping,
// and commits: only then does a lookup find them. The lookup pins what it found until
// its session ends.
func Example() {
	dir, err := os.MkdirTemp("", "kvasir")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	p, err := pool.Open(pool.Options{Name: "kvasir_example", Bytes: 1 << 20, Dir: dir, ChunkTokens: 4})
	if err != nil {
		panic(err)
	}
	st := store.New(p, store.Options{})
	defer st.Close()

	prompt := kv.ChunkHashes([]uint32{1, 2, 3, 4, 5, 6, 7, 8}, 4)
	shard := object.Shard{Namespace: kv.NamespaceOf("model", "", "layout"), World: 1, Groups: object.FullAttention(4, 4096)}
	name := hold.Transfer{Instance: 1, Shard: shard, From: 0, To: len(prompt), Last: prompt[len(prompt)-1]}

	var place store.Transfer
	if _, err := st.BeginStore(name, []byte("request 1"), prompt, &place); err != nil {
		panic(err)
	}
	before := st.Lookup([]byte("request 2"), shard, store.Hashed(prompt), 1)
	// Here the worker writes its chunks at place.Offsets.
	done := st.CommitStore(name, []byte("request 1"), prompt, true)
	after := st.Lookup([]byte("request 3"), shard, store.Hashed(prompt), 1)
	st.EndSession([]byte("request 3"), lease.Owner{})

	fmt.Println(before.Hit, before.Why)
	fmt.Println(done.Chunks, after.Hit)
	// Output:
	// 0 being stored right now
	// 2 2
}
