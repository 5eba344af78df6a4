// SPDX-License-Identifier: Apache-2.0

// Package tier has the tiers below the pool: places for objects that are slower
// than memory, and larger. The store reads objects into the pool when a lookup asks for them.
//
// A Tier stores bytes under names. The store decides which objects go there, and
// when. tiertest.Run checks what every Tier must do.
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
	NoSum bool   // there is no checksum, because another program wrote the object

	// Seal is the short name of the key with which package seal encrypted the object; 0: not encrypted. If it is set, Sum is masked, and
	// Len is that of the encrypted bytes. Only tiers with a layout of Kvasir's own store it, and only they and package seal see it.
	Seal uint16

	// End is the end of the object's life, Unix seconds; 0: none. The disk, native Redis and native S3 treat an object after its End as
	// missing; tiers with LMCache's layouts store no End.
	End uint32
}

// Over reports whether the life of an object is over.
func (m Meta) Over(now time.Time) bool { return m.End > 0 && now.Unix() >= int64(m.End) }

// Lasts reports whether has, an object that a tier has under the key of m, can stay instead of m: it has the same bytes and does
// not live longer.
func (m Meta) Lasts(has Meta) bool {
	return has.Len == m.Len && has.Sum == m.Sum && has.NoSum == m.NoSum && has.Seal == m.Seal && (has.End == m.End || has.End > 0 && m.End > 0 && has.End < m.End)
}

// Unseals reports whether a write of m would replace has, which is encrypted, by an object that is not encrypted.
func (m Meta) Unseals(has Meta) bool { return m.Seal == 0 && has.Seal != 0 }

// Page is the number of bytes to a multiple of which padding rounds lengths up.
const Page = 4096

// Padded returns n rounded up to whole pages.
func Padded(n int64) int64 { return (n + Page - 1) &^ (Page - 1) }

// Fits reports whether m can be the Meta of an object of n bytes. An object that another
// program wrote may be padded.
func (m Meta) Fits(n int64) bool { return m.Len == n || m.NoSum && m.Len == Padded(n) }

// Tier is one place below the pool. Its methods are safe for concurrent use, and return soon after their context has ended.
type Tier interface {
	// Stat sets metas[i] to the Meta of keys[i], and to zero if the object is missing.
	// It is one call, however many keys there are.
	Stat(ctx context.Context, keys []kv.Key, metas []Meta) error

	// Read fills dst, which must be as long as the object, and returns the object's Meta.
	// It must never write to dst after it has returned, even when the context ended, because
	// the caller reuses the memory of dst. Errors: ErrMissing, *CorruptError if
	// the object is not as long as dst. With an error the bytes of dst mean nothing.
	Read(ctx context.Context, k kv.Key, dst []byte) (Meta, error)

	// Write stores src under k; readers see all of it or nothing. It need not write an
	// existing object again. It must not read src after it has returned. Errors:
	// ErrNotKept, with a reason, if the tier does not take the object now; ErrResting
	// if the caller should offer it again later.
	Write(ctx context.Context, k kv.Key, m Meta, src []byte) error

	// Delete removes objects. A missing object is no error.
	Delete(ctx context.Context, keys []kv.Key) error

	// Close ends the use of the tier. No method may be called afterwards.
	Close() error
}

// Summing is a Tier that computes the xxh3 of an object while it reads it, which is cheaper than a second pass.
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

// Lister is a Tier that can list its objects.
type Lister interface {
	// List calls f for each object until f returns false. It may list objects that are
	// written or deleted meanwhile, or not.
	List(ctx context.Context, f func(kv.Key, Meta) bool) error
}

// Space is the space that a tier uses, and may use.
type Space struct {
	Objects int64 // kept
	Used    int64 // bytes that they take there
	Limit   int64 // bytes that they may take; 0 for no limit
	Free    int64 // bytes free in its file system; -1 if not known
	Written int64 // bytes written since the start, padding and books included
}

// Sized is a Tier that knows its Space. Space is called often, so it must not wait for the
// tier's device or server.
type Sized interface{ Space() Space }

var (
	// ErrMissing means that an object is not there.
	ErrMissing = errors.New("tier: no such object")

	// ErrNotKept means that a tier did not take an object: it is full, its write budget is used
	// up, or it does not keep an object at the first offer. It is no failure.
	ErrNotKept = errors.New("tier: refused")

	// ErrSealed, together with ErrNotKept, says that the tier has an encrypted object, which an unencrypted one never replaces.
	ErrSealed = errors.New("tier: an encrypted object is there, and this server has no key")

	// ErrNewer, together with ErrNotKept, says that the tier has an object of a later release: it is a miss, and is not replaced.
	ErrNewer = errors.New("tier: a later release wrote the object that is there")

	// ErrResting means that a tier rests after failures, or is not available now. The caller
	// may try again later.
	ErrResting = errors.New("tier: paused after failures, or until it is ready")
)

// Error says which tier an error is of.
type Error struct {
	Tier string
	Err  error
}

func (e *Error) Error() string { return "tier " + e.Tier + ": " + e.Err.Error() }

// Unwrap returns the tier's error.
func (e *Error) Unwrap() error { return e.Err }

// NameOf returns the name of the tier of an error, empty if the error does not say.
func NameOf(err error) string {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Tier
	}
	return ""
}

// CorruptError means that an existing object has another length or checksum than it should have.
type CorruptError struct {
	Key       kv.Key
	Want, Got Meta
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("tier: %s has %d bytes and checksum %x, want %d and %x", e.Key, e.Got.Len, e.Got.Sum, e.Want.Len, e.Want.Sum)
}
