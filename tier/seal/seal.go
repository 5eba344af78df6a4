// SPDX-License-Identifier: Apache-2.0

// Package seal encrypts the objects of a tier.
//
// A Tier lies between the store and a tier with a layout of Kvasir's own (disk, native Redis, native S3). Each object is encrypted with
// AES-256-GCM under a key of its own, which is derived from a master key and a random salt. The tag replaces the checksum, and
// covers the object's name, generation, length and end of life: an object that was changed, cut, exchanged or put back is a miss.
//
// The tier below stores the short name of the master key in tier.Meta.Seal. So a Stat knows without a read which objects can be opened.
// With keys, plain objects are misses, and so are encrypted ones without their key. Neither are removed. The store's next write may replace
// them, an encrypted object only by an encrypted one.
package seal

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// reason says why an existing object is a miss.
type reason int

const (
	missingKey reason = iota
	plain
	damaged
	newer
	reasons
)

var reasonNames = [reasons]string{"missing_key", "plain", "damaged", "newer"}

var reasonTexts = [reasons]string{
	"encrypted with a key that this server does not have; they stay",
	"not encrypted, while this server has keys; they are replaced when they are stored again",
	"changed, cut, exchanged or put back after a clear; they are removed",
	"encrypted by a later release; they stay until they are stored again",
}

// Stats are the figures of a Tier.
type Stats struct {
	Misses    map[string]uint64 `counter:"kvasir_tier_sealed_misses_total" label:"reason" help:"Times that an object of the tier was there and counted as a miss: missing_key (encrypted with a key that the server does not have), plain (not encrypted, while the server has keys), damaged (changed, cut, exchanged, put back after a clear), newer (of a newer build)."`
	Encrypted uint64            `counter:"kvasir_tier_encrypted_objects_total" help:"Objects that were encrypted to be written to the tier."`
	Decrypted uint64            `counter:"kvasir_tier_decrypted_objects_total" help:"Objects of the tier that were read and decrypted."`
	Rekeyed   uint64            `counter:"kvasir_tier_rekeyed_objects_total" help:"Objects that kvasir tier rekey encrypted with a newer key."`
	Keys      int               `gauge:"kvasir_tier_keys" help:"Keys that the server has for the tier; 0: the tier is not encrypted."`
}

// Tier is a tier.Tier that stores its objects encrypted in another one. Without keys it passes plain objects on, and encrypted ones are
// misses. Its methods are safe for concurrent use.
type Tier struct {
	of   tier.Tier
	keys *Keys
	o    Options
	log  *slog.Logger
	n    struct {
		misses                        [reasons]atomic.Uint64
		encrypted, decrypted, rekeyed atomic.Uint64
	}
	said [reasons]atomic.Bool

	changed atomic.Bool   // ErrSum was logged
	turn    chan struct{} // capacity 1: held by a RemoveIf, or for one object of a Rekey
	busy    chan struct{} // capacity 1: held by a Rekey

	stale atomic.Int64 // length of mu.stale

	mu struct {
		sync.Mutex
		stale    map[kv.Key]struct{} // objects whose header has another key or version than the tier below reports; maxStale at most
		rekeyed  kv.Key              // the object that Rekey is encrypting anew
		done     chan struct{}       // closed when rekeyed is done; nil while there is none
		deleting map[kv.Key]int      // number of running Deletes; such objects are not encrypted anew
		writing  map[*key]int        // writes in progress, by the key that they encrypt with
		ended    chan struct{}       // closed when one ends; nil: no caller waits
	}
}

// Options configures a Tier.
type Options struct {
	Name string // of the tier, for the log
	Log  *slog.Logger
}

// New returns the Tier over another one, `of`. It is a tier.Notebook if the other one is.
func New(of tier.Tier, keys *Keys, o Options) interface {
	tier.Tier
	Sealed() *Tier
} {
	t := &Tier{of: of, keys: keys, o: o, log: o.Log, turn: make(chan struct{}, 1), busy: make(chan struct{}, 1)}
	t.mu.deleting, t.mu.writing, t.mu.stale = make(map[kv.Key]int), make(map[*key]int), make(map[kv.Key]struct{})
	if t.log == nil {
		t.log = slog.New(slog.DiscardHandler)
	}
	if n, ok := of.(tier.Notebook); ok {
		return &notebook{t, n}
	}
	return t
}

// Sealed returns t.
func (t *Tier) Sealed() *Tier { return t }

// Below returns the tier below, which has the encrypted objects.
func (t *Tier) Below() tier.Tier { return t.of }

// notebook is a Tier over a tier.Notebook. Notes are not encrypted: they only contain generations of models.
type notebook struct {
	*Tier
	note tier.Notebook
}

// Note implements tier.Notebook.
func (n *notebook) Note(ctx context.Context) ([]byte, error) { return n.note.Note(ctx) }

// SetNote implements tier.Notebook.
func (n *notebook) SetNote(ctx context.Context, text []byte) error { return n.note.SetNote(ctx, text) }

// Stats returns the figures.
func (t *Tier) Stats() Stats {
	s := Stats{Misses: make(map[string]uint64), Encrypted: t.n.encrypted.Load(), Decrypted: t.n.decrypted.Load(), Rekeyed: t.n.rekeyed.Load(), Keys: len(t.keys.ring().list)}
	for i, name := range reasonNames {
		s.Misses[name] = t.n.misses[i].Load()
	}
	return s
}

// refuse counts an object as a miss, and logs the first one of each reason.
func (t *Tier) refuse(why reason, k *kv.Key, seal uint16) {
	t.n.misses[why].Add(1)
	if !t.said[why].Swap(true) {
		t.log.Warn("objects of a tier cannot be opened: they are misses", "why", reasonTexts[why], "tier", t.o.Name, "object", k.String(), "key", fmt.Sprintf("%04x", seal), "keys", t.keys.IDs())
	}
}

// maxStale bounds the objects in Tier.mu.stale. Beyond it any of them is forgotten, until it is read again.
const maxStale = 4096

// noteStale remembers an object whose header has another key or version than the tier below says. A newer build may have written it, or its
// key may have the same short name, so it is not removed. For this server it is a miss, and this server's next write replaces it.
func (t *Tier) noteStale(k kv.Key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.mu.stale) >= maxStale {
		for other := range t.mu.stale { // the next read of it will find that again
			delete(t.mu.stale, other)
			break
		}
	}
	t.mu.stale[k] = struct{}{}
	t.stale.Store(int64(len(t.mu.stale)))
}

func (t *Tier) isStale(k *kv.Key) bool {
	if t.stale.Load() == 0 {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	_, is := t.mu.stale[*k]
	return is
}

// dropStale deletes an object whose header does not fit before a write, since the tier below would otherwise keep it and skip the write.
func (t *Tier) dropStale(ctx context.Context, k kv.Key) error {
	if !t.isStale(&k) {
		return nil
	}
	if err := t.of.Delete(ctx, []kv.Key{k}); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.mu.stale, k)
	t.stale.Store(int64(len(t.mu.stale)))
	return nil
}

// shown turns a Meta of the tier below into the Meta for the caller: zero for a miss.
func (t *Tier) shown(k *kv.Key, m tier.Meta) tier.Meta {
	if m.Len == 0 || t.isStale(k) {
		return tier.Meta{}
	}
	r := t.keys.ring()
	if len(r.list) == 0 && m.Seal == 0 {
		return m
	}
	one, size := r.byNumber[m.Seal], plainBytes(m.Len)
	switch {
	case m.Seal == 0:
		t.refuse(plain, k, 0)
	case one == nil:
		t.refuse(missingKey, k, m.Seal)
	case size == 0:
		t.refuse(damaged, k, m.Seal)
	default:
		return tier.Meta{Len: size, Sum: one.masked(m.Sum, k), End: m.End}
	}
	return tier.Meta{}
}

// Stat implements tier.Tier.
func (t *Tier) Stat(ctx context.Context, keys []kv.Key, metas []tier.Meta) error {
	if err := t.of.Stat(ctx, keys, metas); err != nil {
		return err
	}
	for i := range keys {
		metas[i] = t.shown(&keys[i], metas[i])
	}
	return nil
}

// Read implements tier.Tier. It deletes a damaged object, so that the next write replaces it.
func (t *Tier) Read(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	m, _, err := t.read(ctx, k, dst, false)
	return m, err
}

// ReadSummed implements tier.Summing. For an encrypted object it returns the stored checksum, since the tag proves that the bytes are right.
func (t *Tier) ReadSummed(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, uint64, error) {
	return t.read(ctx, k, dst, true)
}

func (t *Tier) read(ctx context.Context, k kv.Key, dst []byte, summed bool) (m tier.Meta, sum uint64, err error) {
	if len(t.keys.ring().list) > 0 {
		m, err = t.readSealed(ctx, k, dst)
		return m, m.Sum, err
	}
	if summed {
		m, sum, err = tier.ReadSummed(ctx, t.of, k, dst)
	} else {
		m, err = t.of.Read(ctx, k, dst)
	}
	if e, ok := errors.AsType[*tier.CorruptError](err); ok && e.Got.Seal != 0 {
		m.Seal, err = e.Got.Seal, nil
	}
	if err == nil && m.Seal != 0 {
		t.refuse(missingKey, &k, m.Seal)
		return tier.Meta{}, 0, tier.ErrMissing
	}
	return m, sum, err
}

// readSealed reads an encrypted object. While Rekey runs it tries a missing object twice: if the tier below stores it in several values, it
// is missing for a moment.
func (t *Tier) readSealed(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	m, err := t.readSealedOnce(ctx, k, dst)
	if errors.Is(err, tier.ErrMissing) && ctx.Err() == nil && len(t.busy) > 0 {
		return t.readSealedOnce(ctx, k, dst)
	}
	return m, err
}

func (t *Tier) readSealedOnce(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	if len(dst) == 0 {
		return tier.Meta{}, tier.ErrMissing
	}
	buf := takeBuffer(sealedBytes(int64(len(dst))))
	defer giveBuffer(buf)
	o := newOpening(t.keys.ring(), &k, dst, buf.b)
	m, err := t.of.Read(tier.WithFlow(ctx, &tier.Flow{Begin: o.begin, Got: o.recordRead}), k, buf.b)
	opened := o.end(err == nil, m)
	if e, ok := errors.AsType[*tier.CorruptError](err); ok {
		got := tier.Meta{Len: plainBytes(e.Got.Len)}
		if e.Got.Seal == 0 && e.Got.Len == int64(len(dst)) {
			t.refuse(plain, &k, 0)
			return tier.Meta{}, tier.ErrMissing
		}
		return tier.Meta{}, &tier.CorruptError{Key: k, Want: tier.Meta{Len: int64(len(dst))}, Got: got}
	}
	if err != nil {
		return tier.Meta{}, err
	}
	if m.Seal == 0 {
		t.refuse(plain, &k, 0)
		return tier.Meta{}, tier.ErrMissing
	}
	one := t.keys.ring().byNumber[m.Seal]
	if one == nil {
		t.refuse(missingKey, &k, m.Seal)
		return tier.Meta{}, tier.ErrMissing
	}
	m.Sum = one.masked(m.Sum, &k)
	h, err := parseHeader(buf.b)
	if err == nil && h.id != one.id {
		err = errKeyID
	}
	if err == nil && !opened {
		err = one.open(dst, buf.b, &h, &k, m.Sum)
	}
	switch {
	case err == nil:
	case errors.Is(err, errNewer):
		t.refuse(newer, &k, m.Seal)
		t.noteStale(k)
		return tier.Meta{}, tier.ErrMissing
	case errors.Is(err, errKeyID):
		t.refuse(missingKey, &k, m.Seal)
		t.noteStale(k)
		return tier.Meta{}, tier.ErrMissing
	case errors.Is(err, shm.ErrFault): // dst could not be accessed; the tier below is not at fault
		return tier.Meta{}, err
	default:
		t.refuse(damaged, &k, m.Seal)
		_ = t.of.Delete(ctx, []kv.Key{k}) // otherwise no write would replace it
		return tier.Meta{}, &tier.CorruptError{Key: k, Want: tier.Meta{Len: int64(len(dst))}, Got: tier.Meta{Len: int64(len(dst))}}
	}
	if (tier.Meta{End: h.end}).Over(time.Now()) {
		return tier.Meta{}, tier.ErrMissing
	}
	t.n.decrypted.Add(1)
	return tier.Meta{Len: int64(len(dst)), Sum: m.Sum, End: h.end}, nil // from the header: m.End of Redis may be 0
}

// ErrSum, together with tier.ErrNotKept, means that an object in memory no longer has its checksum.
var ErrSum = errors.New("seal: the object changed in memory since its checksum was computed")

// Write implements tier.Tier.
func (t *Tier) Write(ctx context.Context, k kv.Key, m tier.Meta, src []byte) error {
	if len(t.keys.ring().list) == 0 {
		return t.of.Write(ctx, k, m, src)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if m.Len != int64(len(src)) || m.Len < 1 {
		return fmt.Errorf("seal: write of %d bytes for an object of %d", len(src), m.Len)
	}
	if err := t.dropStale(ctx, k); err != nil {
		return err
	}
	one := t.beginWrite()
	defer t.endWrite(one)
	if m.NoSum {
		m.Sum, m.NoSum = xxh3.Hash(src), false
	}
	below := tier.Meta{Len: sealedBytes(m.Len), Sum: one.masked(m.Sum, &k), End: m.End, Seal: one.number}
	buf := takeBuffer(below.Len)
	defer giveBuffer(buf)
	s := newSealing(one, buf.b, src, &k, m.Sum, m.End)
	defer s.end()
	if _, ok := t.of.(tier.Flowing); ok {
		ctx = tier.WithFlow(ctx, &tier.Flow{Need: s.need})
	} else if err := s.need(0, below.Len); err != nil {
		return err
	}
	err := t.of.Write(ctx, k, below, buf.b)
	if errors.Is(err, ErrSum) && !t.changed.Swap(true) {
		t.log.Error("an object changed in memory since its checksum was computed: it is not written to a tier", "tier", t.o.Name, "object", k.String())
	}
	if err == nil && s.used() { // if not used, the tier below did not take the object
		t.n.encrypted.Add(1)
	}
	return err
}

// beginWrite returns the key that encrypts. The caller must call endWrite after the write.
func (t *Tier) beginWrite() *key {
	t.mu.Lock()
	defer t.mu.Unlock()
	one := t.keys.ring().list[0]
	t.mu.writing[one]++
	return one
}

func (t *Tier) endWrite(one *key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.mu.writing[one]--; t.mu.writing[one] == 0 {
		delete(t.mu.writing, one)
	}
	if t.mu.ended != nil {
		close(t.mu.ended)
		t.mu.ended = nil
	}
}

// Delete implements tier.Tier. It waits while Rekey encrypts one of the objects anew, which would write it again, and prevents Rekey from
// beginning with one.
func (t *Tier) Delete(ctx context.Context, keys []kv.Key) error {
	if len(t.keys.ring().list) == 0 {
		return t.of.Delete(ctx, keys)
	}
	done := t.beginDelete(keys)
	defer t.endDelete(keys)
	if done != nil {
		select {
		case <-done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return t.of.Delete(ctx, keys)
}

// beginDelete returns a channel to wait for if one of the objects is being encrypted anew.
func (t *Tier) beginDelete(keys []kv.Key) (done chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range keys {
		t.mu.deleting[keys[i]]++
		if keys[i] == t.mu.rekeyed {
			done = t.mu.done
		}
	}
	return done
}

func (t *Tier) endDelete(keys []kv.Key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range keys {
		if t.mu.deleting[keys[i]]--; t.mu.deleting[keys[i]] == 0 {
			delete(t.mu.deleting, keys[i])
		}
	}
}

// List implements tier.Lister. It leaves out objects that cannot be opened.
func (t *Tier) List(ctx context.Context, f func(kv.Key, tier.Meta) bool) error {
	l, ok := t.of.(tier.Lister)
	if !ok {
		return tier.ErrNoList
	}
	return l.List(ctx, func(k kv.Key, m tier.Meta) bool {
		m = t.shown(&k, m)
		return m.Len == 0 || f(k, m)
	})
}

// Hottest implements tier.Ranking.
func (t *Tier) Hottest(ctx context.Context, n int, f func(kv.Key, tier.Meta) bool) error {
	return tier.Hottest(ctx, t.of, n, func(k kv.Key, m tier.Meta) bool {
		m = t.shown(&k, m)
		return m.Len == 0 || f(k, m)
	})
}

// RemoveIf implements tier.Emptying. Rekey encrypts no object meanwhile.
func (t *Tier) RemoveIf(ctx context.Context, f func(tier.Content) bool, pace tier.Pace) (removed int, err error) {
	select {
	case t.turn <- struct{}{}:
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	defer func() { <-t.turn }()
	return tier.RemoveIf(ctx, t.of, f, pace)
}

// Space implements tier.Sized.
func (t *Tier) Space() tier.Space {
	if s, ok := t.of.(tier.Sized); ok {
		return s.Space()
	}
	return tier.Space{Free: -1}
}

// Requests implements tier.Billed.
func (t *Tier) Requests() (tier.Requests, bool) {
	if b, ok := t.of.(tier.Billed); ok {
		return b.Requests()
	}
	return tier.Requests{}, false
}

// Close implements tier.Tier.
func (t *Tier) Close() error { return t.of.Close() }

// Verify returns an error if the stored bytes of an encrypted object are not those that were written. It returns nil if the object's
// key is missing. Tiers that verify their objects in the background call it.
func (k *Keys) Verify(name kv.Key, m tier.Meta, stored []byte) error {
	one := k.ring().byNumber[m.Seal]
	if one == nil {
		return nil
	}
	h, err := parseHeader(stored)
	switch {
	case errors.Is(err, errNewer), err == nil && h.id != one.id:
		return nil
	case err != nil:
		return err
	}
	return one.check(stored, &h, &name, one.masked(m.Sum, &name))
}

// buffer is the memory of a call, at a multiple of a page, as tiers with direct I/O need it.
type buffer struct{ all, b []byte }

var buffers = sync.Pool{New: func() any { return new(buffer) }}

func takeBuffer(n int64) *buffer {
	b := buffers.Get().(*buffer)
	if int64(len(b.all)) < n {
		b.all = shm.MakeAligned(int(tier.Padded(n)), tier.Page)
	}
	b.b = b.all[:n]
	return b
}

func giveBuffer(b *buffer) { buffers.Put(b) }
