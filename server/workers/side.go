// SPDX-License-Identifier: Apache-2.0

package workers

import (
	"sync"

	"github.com/kvasir-kv/kvasir/store"
)

// Side says where a worker's chunks pass. Every worker that may open the pool learns its
// name, and only the first commit shows whether the worker could map it: a commit without
// data ends places in the pool, one with data carries the chunks. From then on the worker
// keeps its side: else places that it never wrote would become chunks, and it would read
// through the socket what the memory held before.
type Side uint8

// The sides.
const (
	Open   Side = iota // not known yet
	Places             // it copies in and out of the pool itself
	Pickle             // its chunks pass through the socket
)

type sided struct {
	sync.Mutex // held over a commit, so before store.mu
	is         Side
}

// Side returns the worker's.
func (in *Worker) Side() Side {
	in.sided.Lock()
	defer in.sided.Unlock()
	return in.sided.is
}

// TakeSide notes the worker's side. It reports false when the worker has the other
// one, and whether this was the first time.
func (in *Worker) TakeSide(to Side) (first, ok bool) {
	in.sided.Lock()
	defer in.sided.Unlock()
	first = in.sided.is == Open
	if first {
		in.sided.is = to
	}
	return first, in.sided.is == to
}

// CommitPlaces ends places with commit. Those of a worker that pickles do not
// become chunks (false): it cannot have written them.
func (in *Worker) CommitPlaces(commit func(publish bool) store.Committed) (store.Committed, bool) {
	in.sided.Lock()
	defer in.sided.Unlock()
	ok := in.sided.is != Pickle
	got := commit(ok)
	if ok && got.Chunks > 0 {
		in.sided.is = Places
	}
	return got, ok
}
