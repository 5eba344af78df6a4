// SPDX-License-Identifier: Apache-2.0

package workers

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/access"
	"github.com/kvasir-kv/kvasir/server/lent"
)

// noteVersion is the version of notes.
const noteVersion = 1

// ErrNewer means that a later release wrote a note. It must stay as it is.
var ErrNewer = errors.New("a later release wrote the note of registrations")

// Note has the registrations of workers. The server stores it beside the pool for the next server.
type Note struct {
	Version int               `json:",omitempty"` // noteVersion; 0 in notes of release 0.1.0
	Workers []json.RawMessage // Saved, in the order of their registrations
	Remains []lent.Segment    // segments of workers that unregistered and whose process still ran
	PIDs    string            // the PID namespace to which the process ids belong
	Chunks  []int             `json:",omitempty"` // chunk sizes that were announced to engines, other than the server's own
	Mixed   []string          `json:",omitempty"` // models that have had several layouts; see tier.Names.Mix
	Pages   []SavedPages      `json:",omitempty"` // workers whose device has pages pinned that are not the pool's
}

// Saved is a registration in a Note.
type Saved struct {
	ID      int64
	Model   string
	World   int
	Chunk   int `json:",omitempty"` // tokens; 0 in notes of servers that had only one size
	Base    int `json:",omitempty"` // chunk size of the listener that it registered over
	Layout  kv.Layout
	Groups  []lmcache.GroupLayout `json:",omitempty"`
	Pinged  bool
	Shard   int              `json:",omitempty"` // 1 + the shard it keeps
	By      access.Principal // the user or address that may speak for it
	Side    Side             `json:",omitzero"`  // how its chunks pass
	Client  string           `json:",omitempty"` // generations that its client may be of; empty: any
	Process peercred.Process `json:",omitzero"`  // the process that registered it, if that is proved
	Mapped  int64            `json:",omitzero"`  // bytes of the pool that it was offered; 0 in notes of servers that could not resize
	Asleep  bool             `json:",omitzero"`  // no lookup counts on it before its next request
	KV      json.RawMessage  `json:",omitzero"`  // lmcache.KVCache of a worker that lends its KV
	Lent    []lent.Segment   `json:",omitempty"`
}

// Encode returns the note n with the registrations, at most max bytes. Refused workers are left out. left is how many registrations had no
// room: the largest ones.
func (r *Registry) Encode(n Note, max int) (b []byte, left int, err error) {
	n.Version, n.PIDs, n.Pages = noteVersion, peercred.Namespace(), r.savedPages()
	total := 1 << 10 // braces and field names
	for _, m := range n.Mixed {
		total += 6*len(m) + 3 // as JSON
	}
	total += 256 * len(n.Pages)
	for _, l := range n.Remains {
		total += len(l.Name) + 128
	}
	for _, in := range r.List() {
		if in.Refused != "" {
			continue
		}
		w, err := json.Marshal(in.saved())
		if err != nil {
			return nil, 0, err
		}
		n.Workers = append(n.Workers, w)
		total += len(w) + 1
	}
	for total > max && len(n.Workers) > 0 {
		i := 0
		for j := range n.Workers {
			if len(n.Workers[j]) > len(n.Workers[i]) {
				i = j
			}
		}
		total -= len(n.Workers[i]) + 1
		n.Workers = slices.Delete(n.Workers, i, i+1)
		left++
	}
	b, err = json.Marshal(&n)
	return b, left, err
}

func (in *Worker) saved() *Saved {
	w := &Saved{
		ID: in.ID, Model: in.Model, World: in.World, Chunk: in.Chunk, Base: in.Base, Layout: in.Layout, Groups: in.GroupLayouts, Pinged: in.Pinged.Load(), Shard: in.Shard() + 1, By: in.By, Side: in.Side(),
		Client: in.Generations.String(), Asleep: in.Asleep(), Mapped: in.Mapped,
	}
	if p := in.Process.Load(); p != nil {
		w.Process = *p
	}
	if in.Lent != nil {
		w.KV, w.Lent = in.Lent.Registration(), in.Lent.Segments
	}
	return w
}

// DecodeNote decodes a Note. Process ids have a meaning only in the PID namespace in which they were recorded; in another one they are
// removed. Error: ErrNewer.
func DecodeNote(b []byte) (n Note, err error) {
	var v struct{ Version int }
	if json.Unmarshal(b, &v) == nil && v.Version > noteVersion {
		return Note{}, fmt.Errorf("%w: version %d, this one reads %d", ErrNewer, v.Version, noteVersion)
	}
	if err := json.Unmarshal(b, &n); err != nil {
		return Note{}, err
	}
	if !n.ofThisNamespace() {
		for i := range n.Pages {
			n.Pages[i].Since = 0
		}
		forget(n.Remains)
	}
	return n, nil
}

// Worker decodes registration i of the note.
func (n *Note) Worker(i int) (*Saved, error) {
	var w Saved
	if err := json.Unmarshal(n.Workers[i], &w); err != nil {
		return nil, err
	}
	if !n.ofThisNamespace() {
		forget(w.Lent)
		w.Process = peercred.Process{}
	}
	return &w, nil
}

func (n *Note) ofThisNamespace() bool { return n.PIDs == peercred.Namespace() }

func forget(list []lent.Segment) {
	for i := range list {
		list[i].Owner = peercred.Process{}
	}
}
