// SPDX-License-Identifier: Apache-2.0

package mooncakestore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/store"
	"github.com/kvasir-kv/kvasir/tier"
)

// errOff means that the release of the master is not known.
var errOff = errors.New("mooncakestore: the master is of an unknown release, so the tier is off")

// Delays before SetNote tries again when another server is writing the note: the first, about as long as a put, and the longest.
const (
	noteRetryDelay        = 5 * time.Millisecond
	longestNoteRetryDelay = 200 * time.Millisecond
)

// Note implements tier.Notebook.
func (t *Tier) Note(ctx context.Context) ([]byte, error) {
	if t.off.Load() {
		return nil, errOff
	}
	found, err := t.master.Replicas(ctx, []string{tier.NoteName})
	if err != nil {
		return nil, err
	}
	n := length(&found[0])
	switch {
	case n == 0:
		return nil, nil
	case n > tier.MaxNote:
		return nil, fmt.Errorf("mooncakestore: %w: %d bytes", tier.ErrLongNote, n)
	}
	text := make([]byte, n)
	err = t.client.Get(ctx, []store.Object{{Key: tier.NoteName, Parts: [][]byte{text}}})[0]
	if errors.Is(err, store.NotFound) {
		return nil, nil
	}
	return text, err
}

// SetNote implements tier.Notebook. Objects are immutable, so it first removes the former note;
// between the two steps there is none. If a server ends while it puts its note, that note can be neither read nor removed: the master frees
// its name after put_start_discard_timeout_sec (30).
func (t *Tier) SetNote(ctx context.Context, text []byte) error {
	if t.off.Load() {
		return errOff
	}
	for wait := noteRetryDelay; ; wait = min(2*wait, longestNoteRetryDelay) {
		err := t.master.Remove(ctx, tier.NoteName, true)
		if err == nil || errors.Is(err, store.NotFound) || errors.Is(err, store.NotReady) {
			err = t.client.Put(ctx, []store.Object{{Key: tier.NoteName, Parts: [][]byte{text}}})[0]
		}
		if !errors.Is(err, store.Exists) && !errors.Is(err, store.NotReady) {
			return err
		}
		select { // another server is writing the note
		case <-time.After(wait):
		case <-ctx.Done():
			return err
		}
	}
}
