// SPDX-License-Identifier: Apache-2.0

package events

import (
	"cmp"

	"github.com/kvasir-kv/kvasir/kv"
	kvevent "github.com/kvasir-kv/kvasir/kv/event"
)

// Feed is what a Publisher publishes: the chunks of a Book, or the files of a keeper. Its methods are safe for concurrent use. The
// Publisher calls them while it has its own mutex.
type Feed interface {
	// Activate begins to record.
	Activate()
	// Changed returns a channel that is closed when there are records after the newest one.
	Changed() <-chan struct{}
	// Last returns the number of the newest record.
	Last() uint64
	// Read appends to dst the records after number `after`, oldest first, limit at most. It returns the number of the last one. lost means
	// that some of them were dropped: Read then returns none, and the caller must call Everything.
	Read(after uint64, limit int, dst []Announcement) (_ []Announcement, next uint64, lost bool)
	// Everything returns all present contents, and the number of the newest record that they include.
	Everything() (all Contents, last uint64)
}

// Announcement is one record of a Feed: the event for the readers, and its model and tenant.
type Announcement struct {
	Model string
	Salt  string // salt of the tenant; "": none
	Event kvevent.Event
}

// Contents has what is there at one moment. It never changes. The events of one model are together. If clients may be limited to some
// tenants, those of one model and salt are together.
type Contents interface {
	Len() int
	Model(i int) string
	Salt(i int) string
	Event(i int) kvevent.Event // of kind Stored
}

// bookFeed makes a Feed of a Book.
type bookFeed struct {
	*Book
	chunkTokens int  // tokens of a chunk whose tokens cannot be counted
	bySalt      bool // contents are also in the order of salts
}

// Read implements Feed.
func (f bookFeed) Read(after uint64, limit int, dst []Announcement) (_ []Announcement, next uint64, lost bool) {
	records, next, lost := f.Book.Read(after, limit, nil, nil)
	for _, r := range records {
		dst = append(dst, Announcement{r.Model, r.Salt, f.event(r.Placed, r.Removed)})
	}
	return dst, next, lost
}

// Everything implements Feed: it returns the chunks in all media.
func (f bookFeed) Everything() (Contents, uint64) {
	chunks, last := f.Book.Everything()
	if f.bySalt {
		sortBySalt(chunks)
	}
	return placedChunks{f, chunks}, last
}

// placedChunks are the Contents of a Book.
type placedChunks struct {
	feed   bookFeed
	chunks []Placed
}

func (c placedChunks) Len() int                  { return len(c.chunks) }
func (c placedChunks) Model(i int) string        { return c.chunks[i].Model }
func (c placedChunks) Salt(i int) string         { return c.chunks[i].Salt }
func (c placedChunks) Event(i int) kvevent.Event { return c.feed.event(c.chunks[i], false) }

// mediumNames are vLLM's names of the media.
var mediumNames = [media]string{InPool: kvevent.CPU, Below: kvevent.Storage}

// event returns the event for routers about a chunk.
func (f bookFeed) event(c Placed, removed bool) kvevent.Event {
	hash := kv.SaltedHash(c.Salt, c.Hash)
	e := kvevent.Event{Kind: kvevent.Stored, Hashes: [][]byte{hash[:]}, Medium: mediumNames[c.Medium], Group: c.Group}
	if removed {
		e.Kind = kvevent.Removed
	}
	if removed || c.Group >= 0 { // the events of vLLM's own tiers say as little about a row
		return e
	}
	e.Encoded, e.BlockTokens = c.Tokens, cmp.Or(kvevent.TokensIn(c.Tokens), f.chunkTokens)
	if c.Index > 0 {
		parent := kv.SaltedHash(c.Salt, c.Parent)
		e.Parent = parent[:]
	} else {
		e.Salt = c.Salt // as in vLLM, which hashes the salt into the first block only
	}
	return e
}
