// SPDX-License-Identifier: Apache-2.0

package server

import (
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server/events"
)

// A batch of events ends with the bytes that it may have, whatever the chunk size of what it is about; the next one goes on behind it.
func TestBatchesOfLargeChunks(t *testing.T) {
	var chunks []*events.Chunk
	var records []events.Record
	for i := range 5 {
		c := &events.Chunk{Tokens: make([]byte, streamBytes*3/5), Hash: kv.Hash{byte(i)}}
		chunks = append(chunks, c)
		records = append(records, events.Record{Seq: uint64(10 + 2*i), Placed: events.Placed{Chunk: c}})
	}
	st := &stream{limit: 1000, chunks: slices.Clone(chunks), resume: 99}
	for i, want := range []int{2, 2, 1} {
		if got := st.fromSnapshot(); len(got) != want {
			t.Errorf("batch %d of a snapshot has %d chunks, want %d", i, len(got), want)
		}
	}
	if st.chunks != nil || st.resume != 99 {
		t.Errorf("%d chunks left, goes on at %d", len(st.chunks), st.resume)
	}
	if got := st.fitting(records); len(got) != 2 || st.resume != 12 {
		t.Errorf("%d records, goes on behind %d", len(got), st.resume)
	}
	st.resume = 99
	if got := st.fitting(records[:2]); len(got) != 2 || st.resume != 99 {
		t.Errorf("%d records, goes on behind %d", len(got), st.resume)
	}
	records[0].Removed, records[1].Removed = true, true // they carry no tokens
	if got := st.fitting(records); len(got) != 4 || st.resume != 16 {
		t.Errorf("%d records, goes on behind %d", len(got), st.resume)
	}
}
