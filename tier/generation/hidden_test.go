// SPDX-License-Identifier: Apache-2.0

package generation_test

import (
	"context"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/generation"
)

// hiding is a place whose note exists and may not be read for a time. Reads report it as missing, as S3 does without the right
// to list.
type hiding struct {
	*place
	hidden atomic.Bool
}

func (h *hiding) Note(ctx context.Context) ([]byte, error) {
	if h.hidden.Load() {
		return nil, nil
	}
	return h.place.Note(ctx)
}

func (h *hiding) SetNote(ctx context.Context, text []byte) error {
	if h.hidden.Load() {
		return errDown
	}
	return h.place.SetNote(ctx, text)
}

// A server without a generation that starts while it may not read the note begins none. So the other servers keep their objects.
func TestNoteThatMayNotBeReadYetIsFollowed(t *testing.T) {
	p := newPlace()
	a := startServer(t, p, filepath.Join(t.TempDir(), "g"), false)
	a.store(1)
	file := filepath.Join(t.TempDir(), "g")
	h := &hiding{place: p}
	h.hidden.Store(true)
	names := tier.NewNames()
	names.Add(keyOf(1).Namespace, "m", nil)
	b := open(t, names, file)
	b.Share(generation.Place{Name: "p", Note: h, Every: time.Nanosecond})
	b.Sync(t.Context())
	b.Sync(t.Context())
	h.hidden.Store(false)
	b.Sync(t.Context())
	a.book.Sync(t.Context())
	a.want("the other server", 1, true)
	if _, err := b.Tier(p.Tier).Read(t.Context(), keyOf(1), make([]byte, 1)); err != nil {
		t.Errorf("the server that may read the note now: %v", err)
	}
}
