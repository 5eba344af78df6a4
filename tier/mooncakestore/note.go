// SPDX-License-Identifier: Apache-2.0

package mooncakestore

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvasir-kv/kvasir/mooncake/store"
	"github.com/kvasir-kv/kvasir/tier"
)

// errOff means that the master's release is not known.
var errOff = errors.New("mooncakestore: the master's release is not known")

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
		return nil, fmt.Errorf("mooncakestore: a note of %d bytes", n)
	}
	text := make([]byte, n)
	err = t.client.Get(ctx, []store.Object{{Key: tier.NoteName, Parts: [][]byte{text}}})[0]
	if errors.Is(err, store.NotFound) {
		return nil, nil
	}
	return text, err
}

// SetNote implements tier.Notebook. Objects are immutable, so the former note is removed first;
// between the two steps there is none.
func (t *Tier) SetNote(ctx context.Context, text []byte) error {
	if t.off.Load() {
		return errOff
	}
	if err := t.master.Remove(ctx, tier.NoteName, true); err != nil && !errors.Is(err, store.NotFound) {
		return err
	}
	return t.client.Put(ctx, []store.Object{{Key: tier.NoteName, Parts: [][]byte{text}}})[0]
}
