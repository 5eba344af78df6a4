// SPDX-License-Identifier: Apache-2.0

package tier

import (
	"context"
	"errors"
)

// NoteName is the name of the note of a Notebook, after the tier's prefix.
const NoteName = ".kvasir-generations"

// MaxNote bounds the bytes of a note. Note returns ErrLongNote for a longer one.
const MaxNote = 8 << 20

// ErrLongNote means that a note is longer than MaxNote. No server writes such a note.
var ErrLongNote = errors.New("tier: the note that servers keep in the tier is too long")

// Notebook is a Tier that stores one small text beside its objects, for all servers that share it.
type Notebook interface {
	Tier

	// Note returns the text, nil if there is none. The caller must not change it. Error: ErrLongNote.
	Note(ctx context.Context) ([]byte, error)

	// SetNote replaces the text as a whole.
	SetNote(ctx context.Context, text []byte) error
}
