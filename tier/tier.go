// SPDX-License-Identifier: Apache-2.0

// Package tier is what lies below the pool: places where objects are kept that are slower
// than memory, and larger. The store reads them into the pool when a lookup wants them.
//
// A Tier keeps bytes under names and decides nothing: which objects go there, and when,
// is the store's business. tiertest.Run says what every Tier must do.
package tier

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
)

// Meta is what a Tier knows of an object without reading it.
type Meta struct {
	Len   int64  // bytes; an object has at least one
	Sum   uint64 // xxh3 of the bytes, as the store gave it; the store compares it after Read
	NoSum bool   // the place has no checksum of it, because another program put it there

	// Seal is the short name of the key that package seal encrypted it with; 0: it is plain. Sum is masked then, and Len that of the
	// encrypted bytes. Only places with a layout of ours keep it, and only package seal and they see it.
	Seal uint16

	// End is the end of its life, Unix seconds; 0: it has none. The disk, native Redis and native S3 treat what is over as
	// missing; places with LMCache's layouts keep no End.
	End uint32
}

// Over reports whether the life of an object is over.
func (m Meta) Over(now time.Time) bool { return m.End > 0 && now.Unix() >= int64(m.End) }

// Lasts reports whether an object that a place has under the key of m is good for m: the same bytes, with a life that
// is not longer.
func (m Meta) Lasts(has Meta) bool {
	return has.Len == m.Len && has.Sum == m.Sum && has.NoSum == m.NoSum && has.Seal == m.Seal && (has.End == m.End || has.End > 0 && m.End > 0 && has.End < m.End)
}

// Unseals reports whether an object of m, which is plain, would replace an encrypted one.
func (m Meta) Unseals(has Meta) bool { return m.Seal == 0 && has.Seal != 0 }

// Page is what padding rounds lengths up to, bytes.
const Page = 4096

// Padded returns n rounded up to whole pages.
func Padded(n int64) int64 { return (n + Page - 1) &^ (Page - 1) }

// Fits reports whether an object of n bytes can be the one of m. An object that another
// program put there may be padded.
func (m Meta) Fits(n int64) bool { return m.Len == n || m.NoSum && m.Len == Padded(n) }

// Tier is one place below the pool. Its methods are safe for concurrent use, and end soon
// after their context.
type Tier interface {
	// Stat sets metas[i] to the Meta of keys[i], and to zero where the object is missing.
	// It is one call to the place, however many keys there are.
	Stat(ctx context.Context, keys []kv.Key, metas []Meta) error

	// Read fills dst, which is as long as the object, and returns what the place knows of
	// it. It never writes to dst after it has returned, also when the context ended: the
	// memory of dst is reused then. Errors: ErrMissing, *CorruptError where
	// the object is not as long as dst. With an error the bytes of dst mean nothing.
	Read(ctx context.Context, k kv.Key, dst []byte) (Meta, error)

	// Write keeps src under k; others see all of it or nothing. What is there already need
	// not be written again. Write does not look at src after it has returned. Errors:
	// ErrNotKept, with a reason, where the place does not take the object now; ErrResting
	// where it is to be offered again.
	Write(ctx context.Context, k kv.Key, m Meta, src []byte) error

	// Delete forgets objects. That one is not there is no error.
	Delete(ctx context.Context, keys []kv.Key) error

	// Close ends the use of the place. Nothing is called afterwards.
	Close() error
}

// Summing is a Tier that computes the xxh3 of what it reads on the way, which is cheaper than in a second pass.
type Summing interface {
	// ReadSummed is Read, and returns the xxh3 of the bytes in dst too.
	ReadSummed(ctx context.Context, k kv.Key, dst []byte) (m Meta, sum uint64, err error)
}

// ReadSummed reads an object and returns the xxh3 of its bytes.
func ReadSummed(ctx context.Context, t Tier, k kv.Key, dst []byte) (m Meta, sum uint64, err error) {
	if s, ok := t.(Summing); ok {
		return s.ReadSummed(ctx, k, dst)
	}
	if m, err = t.Read(ctx, k, dst); err == nil {
		sum = xxh3.Hash(dst)
	}
	return m, sum, err
}

// Lister is a Tier that can say what it holds.
type Lister interface {
	// List calls f for each object until it answers false. What is written or deleted
	// meanwhile may be named or not.
	List(ctx context.Context, f func(kv.Key, Meta) bool) error
}

// Space is what a place takes, and what it may take.
type Space struct {
	Objects int64 // kept
	Used    int64 // bytes that they take there
	Limit   int64 // bytes that they may take; 0 for no limit
	Free    int64 // bytes free in its file system; -1 where that is not known
	Written int64 // bytes written since the start, padding and books included
}

// Sized is a Tier that knows its Space. Space is asked for often and does not wait for the
// place.
type Sized interface{ Space() Space }

var (
	// ErrMissing means that an object is not there.
	ErrMissing = errors.New("tier: no such object")

	// ErrNotKept means that a place did not take an object: it is full, has its budget
	// written, or does not keep what comes for the first time. It is no failure.
	ErrNotKept = errors.New("tier: not kept")

	// ErrSealed, beside ErrNotKept, says that an encrypted object is there: a plain one never replaces it.
	ErrSealed = errors.New("tier: an encrypted object is there, and this server has no key")

	// ErrNewer, beside ErrNotKept, says that an object of a later release is there: it is a miss, and stays as it is.
	ErrNewer = errors.New("tier: a later release wrote the object that is there")

	// ErrResting means that a place is left alone after failures, or is not there now; it
	// may be asked again later.
	ErrResting = errors.New("tier: it rests")
)

// Error says which tier an error is of.
type Error struct {
	Tier string
	Err  error
}

func (e *Error) Error() string { return "tier " + e.Tier + ": " + e.Err.Error() }

// Unwrap returns the tier's error.
func (e *Error) Unwrap() error { return e.Err }

// NameOf returns which tier an error is of, empty where it does not say.
func NameOf(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Tier
	}
	return ""
}

// CorruptError means that an object is there and is not what it was.
type CorruptError struct {
	Key       kv.Key
	Want, Got Meta
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("tier: %s has %d bytes and checksum %x, want %d and %x", e.Key, e.Got.Len, e.Got.Sum, e.Want.Len, e.Want.Sum)
}
