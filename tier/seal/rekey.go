// SPDX-License-Identifier: Apache-2.0

package seal

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// RekeyStats say how far a Rekey is.
type RekeyStats struct {
	Key         string `json:"key"`               // id of the key that encrypts
	Seen        int64  `json:"seen"`              // objects that Rekey has looked at
	Current     int64  `json:"current"`           // objects that had this key already
	Rewritten   int64  `json:"rewritten"`         // objects that have it now
	Bytes       int64  `json:"bytes"`             // bytes of the rewritten objects
	Plain       int64  `json:"plain"`             // objects that are not encrypted; they stay, and are misses
	Unknown     int64  `json:"missing_key"`       // objects whose key the server lacks; they stay
	Failed      int64  `json:"failed"`            // objects that were damaged, or that the tier below did not return or take
	LastFailure string `json:"failure,omitempty"` // reason of the last failure
}

// Errors of Rekey.
var (
	ErrNoKeys = errors.New("the tier is not encrypted")
	ErrBusy   = errors.New("another rekey of the tier goes on")
)

// Rekey encrypts every object anew that an older key encrypted, one after the other. The tier below does not count that as a use of the
// objects. Rekey calls pace before it reads an object and writes it back; pace must wait until that many bytes may be read and written.
// After each object, Rekey calls `so` with the counts until then. If Rekey ends early, the objects done so far stay encrypted anew, and
// another call does the rest. Errors: ErrNoKeys, ErrBusy, tier.ErrNoList, those of pace and of the list.
func (t *Tier) Rekey(ctx context.Context, pace func(ctx context.Context, bytes int64) error, so func(RekeyStats)) (s RekeyStats, err error) {
	l, ok := t.of.(tier.Lister)
	switch {
	case len(t.keys.ring().list) == 0:
		return s, fmt.Errorf("%w: give the server keys (--tier-key-file or --tier-key-command)", ErrNoKeys)
	case !ok:
		return s, tier.ErrNoList
	}
	select {
	case t.busy <- struct{}{}:
	default:
		return s, ErrBusy
	}
	defer func() { <-t.busy }()
	if err := t.keys.Reload(ctx); err != nil {
		return s, fmt.Errorf("read the keys again: %w", err)
	}
	if err := t.awaitFormerWrites(ctx); err != nil {
		return s, err
	}
	var stopped error
	err = l.List(ctx, func(k kv.Key, m tier.Meta) bool {
		r := t.keys.ring()
		s.Key = hex.EncodeToString(r.list[0].id[:])
		s.Seen++
		switch {
		case m.Seal == r.list[0].number:
			s.Current++
		case m.Seal == 0:
			s.Plain++
		case r.byNumber[m.Seal] == nil:
			s.Unknown++
		case plainBytes(m.Len) == 0, plainBytes(m.Len) > maxRekey: // do not wait for a pace because of an impossible length
			s.Failed++
			s.LastFailure = fmt.Sprintf("%s: an encrypted object cannot have %d bytes, or they are more than %d", k, m.Len, int64(maxRekey))
		default:
			stopped = pace(ctx, 2*m.Len)
			if stopped == nil {
				stopped = t.rekeyOne(ctx, k, m, &s)
			}
		}
		so(s)
		return stopped == nil
	})
	return s, errors.Join(stopped, err)
}

// maxRekey bounds the bytes of an object in a Rekey, so that a wrong length in the tier below never sizes a larger memory. A larger object
// counts as failed, and stays.
const maxRekey = 1 << 30

// rekeyOne encrypts one object anew. It returns only the context's error.
func (t *Tier) rekeyOne(ctx context.Context, k kv.Key, m tier.Meta, s *RekeyStats) error {
	select {
	case t.turn <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-t.turn }()
	done := make(chan struct{})
	t.mu.Lock()
	deleted := t.mu.deleting[k] > 0
	if !deleted {
		t.mu.rekeyed, t.mu.done = k, done
	}
	t.mu.Unlock()
	if deleted {
		return nil
	}
	defer func() {
		t.mu.Lock()
		t.mu.rekeyed, t.mu.done = kv.Key{}, nil
		t.mu.Unlock()
		close(done)
	}()
	err := t.rewrite(ctx, k, plainBytes(m.Len))
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, tier.ErrMissing): // removed meanwhile, or its header does not fit
		if t.isStale(&k) {
			s.Unknown++
		}
	case err != nil:
		s.Failed++
		s.LastFailure = err.Error()
	default:
		s.Rewritten++
		s.Bytes += m.Len
		t.n.rekeyed.Add(1)
	}
	return nil
}

func (t *Tier) rewrite(ctx context.Context, k kv.Key, size int64) error {
	buf := takeBuffer(size)
	defer giveBuffer(buf)
	ctx = tier.WithoutUse(ctx)
	m, err := t.readSealed(ctx, k, buf.b)
	if err != nil {
		return err
	}
	err = t.Write(ctx, k, m, buf.b)
	if errors.Is(err, tier.ErrNotKept) { // a tier may keep an object only at the second offer
		err = t.Write(ctx, k, m, buf.b)
	}
	return err
}

// awaitFormerWrites waits for running writes that encrypt with a former key, since the list may not have their objects yet.
func (t *Tier) awaitFormerWrites(ctx context.Context) error {
	for {
		former, ended := t.formerWrites()
		if former == 0 {
			return nil
		}
		select {
		case <-ended:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (t *Tier) formerWrites() (n int, ended chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.keys.ring().list[0]
	for one, of := range t.mu.writing {
		if one.id != now.id {
			n += of
		}
	}
	if t.mu.ended == nil && n > 0 {
		t.mu.ended = make(chan struct{})
	}
	return n, t.mu.ended
}
