// SPDX-License-Identifier: Apache-2.0

package workers

import (
	"sync"

	"github.com/kvasir-kv/kvasir/store"
)

// Side says how a worker's chunks pass. Every worker that may open the pool is given the pool's name, and only its first commit shows
// whether it could map the pool: a commit without data ends places in the pool, a commit with data carries the chunks. From then on the
// worker keeps its side. Otherwise places that it never wrote would become chunks, and it would read through the socket what the memory had
// before.
type Side uint8

// The sides.
const (
	Open   Side = iota // not known yet
	Places             // the worker copies in and out of the pool itself
	Pickle             // the chunks pass through the socket
)

type sided struct {
	sync.Mutex // held during a commit, so it is taken before store.mu
	is         Side
}

// Side returns the worker's side.
func (in *Worker) Side() Side {
	in.sided.Lock()
	defer in.sided.Unlock()
	return in.sided.is
}

// TakeSide makes `to` the worker's side, if the worker has none yet. ok is false if the worker has the other side; first says that it had
// none.
func (in *Worker) TakeSide(to Side) (first, ok bool) {
	in.sided.Lock()
	defer in.sided.Unlock()
	first = in.sided.is == Open
	if first {
		in.sided.is = to
	}
	return first, in.sided.is == to
}

// CommitPlaces ends places in the pool with commit. The places of a worker that pickles do not become chunks, because it cannot have
// written them; CommitPlaces then reports false.
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
