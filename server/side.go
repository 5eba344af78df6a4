package server

import (
	"sync"

	"github.com/kvasir-kv/kvasir/store"
)

// side says where a worker's chunks pass. Every worker that may open the pool is
// told of it, and only its first commit tells whether it could: one without data
// ends places in the pool, one with data carries the chunks. From then on it keeps
// its side: else places that it never wrote would become chunks, and it would read
// through the socket what the memory held before.
type side uint8

const (
	sideOpen   side = iota // not known yet
	sidePlaces             // it copies in and out of the pool itself
	sidePickle             // its chunks pass through the socket
)

type sided struct {
	sync.Mutex // held over a commit, so before store.mu
	is         side
}

func (in *instance) side() side {
	in.sided.Lock()
	defer in.sided.Unlock()
	return in.sided.is
}

// takeSide notes the worker's side. It reports false when the worker has the other
// one, and whether this was the first time.
func (in *instance) takeSide(to side) (first, ok bool) {
	in.sided.Lock()
	defer in.sided.Unlock()
	first = in.sided.is == sideOpen
	if first {
		in.sided.is = to
	}
	return first, in.sided.is == to
}

// commitPlaces ends places with commit. Those of a worker that pickles do not
// become chunks (false): it cannot have written them.
func (in *instance) commitPlaces(commit func(publish bool) store.Committed) (store.Committed, bool) {
	in.sided.Lock()
	defer in.sided.Unlock()
	ok := in.sided.is != sidePickle
	got := commit(ok)
	if ok && got.Chunks > 0 {
		in.sided.is = sidePlaces
	}
	return got, ok
}
