// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/statefile"
)

// Field is a setting that a tenant can have of its own. Its value is the name in the HTTP interface.
type Field string

// The fields.
const (
	Quota    Field = "quota_bytes"
	TTL      Field = "ttl_seconds"
	PinLimit Field = "pin_limit_bytes"
)

// Value is the value of a tenant's field. The zero Value means that the tenant has none of its own.
type Value struct {
	Set bool
	N   float64 // bytes; seconds of a TTL, -1 for ever
}

// BytesValue returns a value of Quota or PinLimit. A PinLimit of 0 means that nothing may be pinned.
func BytesValue(n int64) Value { return Value{true, float64(n)} }

// TimeValue returns a value of TTL. For 0 it returns no value.
func TimeValue(ttl time.Duration) Value {
	switch ttl {
	case 0:
		return Value{}
	case Forever:
		return Value{true, -1}
	}
	return Value{true, ttl.Seconds()}
}

// TermStore is the store in which the terms take effect. Its methods are those of store.Store.
type TermStore interface {
	SetQuota(salt string, bytes int64) error
	DropQuota(salt string) bool
	SetTTL(salt string, ttl time.Duration) error // 0 takes it away
	SetPinLimit(salt string, bytes int64) error  // 0 takes it away
}

// MaxTerms bounds the terms that are set while servers run, those that are not in effect included: as many as tenants may have, and as many
// flags as may be overruled. Each takes less than 1 KiB.
const MaxTerms = 6 * MaxQuotas

// ErrTooManyTerms means that MaxTerms terms are set already.
var ErrTooManyTerms = errors.New("tenant: too many settings of tenants are kept")

// NotKeptError says that a term is in effect but the file does not have it. The term then ends with the server, unless a later write
// succeeds.
type NotKeptError struct{ Err error }

func (e *NotKeptError) Error() string {
	return fmt.Sprintf("it is in effect, and not kept for a restart: %v", e.Err)
}

func (e *NotKeptError) Unwrap() error { return e.Err }

type termKey struct {
	salt  string
	field Field
}

func compareTermKeys(a, b termKey) int {
	return cmp.Or(strings.Compare(a.salt, b.salt), strings.Compare(string(a.field), string(b.field)))
}

// Flags are the terms that a command line gives. Its methods record them.
type Flags map[termKey]Value

// SetQuota records a quota.
func (f Flags) SetQuota(salt string, bytes int64) error { return f.set(salt, Quota, BytesValue(bytes)) }

// SetTTL records a TTL.
func (f Flags) SetTTL(salt string, ttl time.Duration) error { return f.set(salt, TTL, TimeValue(ttl)) }

// SetPinLimit records a limit of pins.
func (f Flags) SetPinLimit(salt string, bytes int64) error {
	return f.set(salt, PinLimit, BytesValue(bytes))
}

func (f Flags) set(salt string, field Field, v Value) error {
	f[termKey{salt, field}] = v
	return nil
}

// setTerm is a term that an operator set while a server ran.
type setTerm struct {
	value Value     // none: the operator took the term away
	over  Value     // the flag's value at that time
	at    time.Time // when it was set
	idle  string    // why it is not in effect
}

// Terms has the settings of operators for the tenants of one server: how much of the pool is kept for a tenant, its TTL, and how much of it
// may be pinned. Some are given by flags. The others are set while the server runs, and a file stores them for the next start.
//
// The newest decision counts: a value that was set at run time stays over restarts until the flag for the same tenant and field has another
// value, or is gone.
//
// Methods are safe for concurrent use.
type Terms struct {
	flags  Flags  // immutable, as the next three
	path   string // of the file; empty: none
	log    *slog.Logger
	now    func() time.Time
	unkept atomic.Bool // the last write failed

	changing sync.Mutex      // orders changes of the store, of set and of the file; guards the fields below
	file     *statefile.File // nil: none, or closed
	store    TermStore
	set      map[termKey]setTerm
	stale    bool // the file differs from set
}

// OpenTerms returns the terms of flags, and those that an earlier server left in the file at path; an empty path means no file. A damaged
// file is renamed to path.bad, with a warning, because a server without its tenants' terms is better than none. Errors: the file is of
// another kind, belongs to another server, or cannot be read; then it is not touched.
func OpenTerms(path string, flags Flags, log *slog.Logger) (*Terms, error) {
	b := &Terms{flags: flags, path: path, log: cmp.Or(log, slog.New(slog.DiscardHandler)), now: time.Now, set: make(map[termKey]setTerm)}
	if path == "" {
		return b, nil
	}
	list, err := b.read(path)
	if damaged, ok := errors.AsType[*statefile.Error](err); ok && !damaged.Foreign {
		if err := os.Rename(path, path+".bad"); err != nil {
			return nil, errors.Join(damaged, err)
		}
		b.log.Warn("the settings of tenants are lost: their file is damaged and was moved aside", "err", damaged.Reason, "file", path, "aside", path+".bad")
		list, err = b.read(path)
	}
	if err != nil {
		return nil, err
	}
	for _, t := range list {
		k := termKey{t.Salt, t.Field}
		if t.over() != flags[k] {
			b.stale = true
			b.log.Info("the flag for a tenant was changed: it replaces the setting that was made at run time", "tenant", k.salt, "setting", string(k.field), "set_at", t.At)
			continue
		}
		b.set[k] = setTerm{value: t.value(), over: t.over(), at: t.At}
	}
	return b, nil
}

func (b *Terms) read(path string) ([]savedTerm, error) {
	file, doc, err := statefile.Open(path, termsMagic, maxTermsFile)
	if err != nil {
		return nil, err
	}
	list, err := decodeTerms(doc)
	if err != nil {
		return nil, errors.Join(&statefile.Error{Path: path, Reason: "damaged: " + err.Error()}, file.Close())
	}
	b.file = file
	return list, nil
}

// Close releases the file for other processes, after a last try to write what it lacks.
func (b *Terms) Close() error {
	b.changing.Lock()
	defer b.changing.Unlock()
	if b.file == nil {
		return nil
	}
	err := b.saveLocked()
	err = errors.Join(err, b.file.Close())
	b.file = nil
	return err
}

// Apply sets all terms in a store. Call it once, before all other methods. A term of an earlier server that does not fit, for example into
// a smaller pool, gives way to the flag; a warning names it, and it stays in the file. Error: the store refuses a flag.
func (b *Terms) Apply(st TermStore) error {
	b.changing.Lock()
	defer b.changing.Unlock()
	b.store = st
	for _, k := range sortedTerms(b.flags) {
		if _, ok := b.set[k]; !ok {
			if err := b.put(k, b.flags[k]); err != nil {
				return fmt.Errorf("%s of tenant %q: %w", k.field, k.salt, err)
			}
		}
	}
	inEffect := 0
	for _, k := range sortedTerms(b.set) {
		e := b.set[k]
		err := b.put(k, e.value)
		if err == nil {
			inEffect++
			continue
		}
		e.idle = err.Error()
		b.set[k] = e
		b.log.Warn("a stored setting of a tenant cannot be applied: set it again", "tenant", k.salt, "setting", string(k.field), "value", e.value.N, "err", err)
		if flag := b.flags[k]; flag.Set {
			if err := b.put(k, flag); err != nil {
				b.log.Warn("the flag for the tenant cannot be applied either", "tenant", k.salt, "setting", string(k.field), "value", flag.N, "err", err)
			}
		}
	}
	if inEffect > 0 {
		b.log.Info("restored the settings of tenants", "settings", inEffect, "file", b.path)
	}
	if b.stale {
		_ = b.saveLocked() // the error is logged, and the next change tries again
	}
	return nil
}

// put sets one value in the store.
func (b *Terms) put(k termKey, v Value) error {
	switch k.field {
	case Quota:
		if !v.Set {
			b.store.DropQuota(k.salt)
			return nil
		}
		return b.store.SetQuota(k.salt, int64(max(-1, min(v.N, math.MaxInt64/2))))
	case TTL:
		ttl := time.Duration(0)
		switch {
		case v.Set && v.N == -1:
			ttl = Forever
		case v.Set && !(v.N >= 1 && v.N <= MaxTTL.Seconds()):
			return ErrTTL
		case v.Set:
			ttl = time.Duration(v.N * float64(time.Second))
		}
		return b.store.SetTTL(k.salt, ttl)
	}
	return b.store.SetPinLimit(k.salt, int64(max(-1, min(v.N, math.MaxInt64/2))))
}

// Set sets one field of a tenant; the zero Value takes it away. Errors: those of the store, and ErrTooManyTerms, after which nothing has
// changed; *NotKeptError: the value is in effect, but the file lacks it.
func (b *Terms) Set(salt string, f Field, v Value) error {
	b.changing.Lock()
	defer b.changing.Unlock()
	if err := b.setLocked(salt, f, v); err != nil {
		return err
	}
	return b.saveLocked()
}

// Drop takes away all terms of a tenant, and reports whether it had any. Errors: ErrTooManyTerms, *NotKeptError.
func (b *Terms) Drop(salt string) (had bool, _ error) {
	b.changing.Lock()
	defer b.changing.Unlock()
	for _, f := range []Field{Quota, TTL, PinLimit} {
		k := termKey{salt, f}
		was, ok := b.set[k]
		had = had || was.value.Set || !ok && b.flags[k].Set
		if err := b.setLocked(salt, f, Value{}); err != nil {
			return had, err
		}
	}
	return had, b.saveLocked()
}

func (b *Terms) setLocked(salt string, f Field, v Value) error {
	if f == PinLimit && v.N == 0 {
		v = Value{}
	}
	k := termKey{salt, f}
	was, had := b.set[k]
	flag := b.flags[k]
	if !had && v != flag && len(b.set) == MaxTerms {
		return ErrTooManyTerms
	}
	if err := b.put(k, v); err != nil {
		return err
	}
	switch {
	case v != flag:
		b.set[k] = setTerm{value: v, over: flag, at: b.now()}
		b.stale = b.stale || !had || was.value != v
	case had:
		delete(b.set, k)
		b.stale = true
	}
	return nil
}

// saveLocked writes the file, if there is one and it differs from set.
func (b *Terms) saveLocked() error {
	if b.file == nil || !b.stale {
		return nil
	}
	err := b.file.Write(encodeTerms(b.set))
	switch {
	case err != nil && !b.unkept.Load():
		b.log.Warn("the settings of tenants cannot be saved and will not survive a restart", "file", b.path, "err", err)
	case err == nil && b.unkept.Load():
		b.log.Info("the settings of tenants are saved again", "file", b.path)
	}
	b.unkept.Store(err != nil)
	if err != nil {
		return &NotKeptError{err}
	}
	b.stale = false
	return nil
}

// Path returns the path of the file; empty for none.
func (b *Terms) Path() string { return b.path }

// Unkept reports whether the file lacks a term that is in effect, because it could not be written. It does not wait for the disk.
func (b *Terms) Unkept() bool { return b.unkept.Load() }

// Term is the value of one field of a tenant, and its source.
type Term struct {
	Salt  string
	Field Field
	Value Value
	Flag  bool      // a flag gives it; else it was set while a server ran
	At    time.Time // when it was set; zero if a flag gives it
	Idle  string    // why it is not in effect; empty: it is
}

// List returns all terms, by salt and field. A flag's term that was taken away is listed without a value. A flag's term that was changed is
// listed with the new value only.
func (b *Terms) List() []Term {
	b.changing.Lock()
	defer b.changing.Unlock()
	out := make([]Term, 0, len(b.flags)+len(b.set))
	for _, k := range sortedTerms(b.set) {
		e := b.set[k]
		out = append(out, Term{Salt: k.salt, Field: k.field, Value: e.value, At: e.at, Idle: e.idle})
	}
	for _, k := range sortedTerms(b.flags) {
		if e, ok := b.set[k]; !ok || e.idle != "" {
			out = append(out, Term{Salt: k.salt, Field: k.field, Value: b.flags[k], Flag: true})
		}
	}
	slices.SortStableFunc(out, func(a, b Term) int { return compareTermKeys(termKey{a.Salt, a.Field}, termKey{b.Salt, b.Field}) })
	return out
}

func sortedTerms[V any](m map[termKey]V) []termKey {
	keys := make([]termKey, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, compareTermKeys)
	return keys
}
