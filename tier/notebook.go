// SPDX-License-Identifier: Apache-2.0

package tier

import "context"

// NoteName is what the note of a Notebook is called, after the tier's prefix.
const NoteName = ".kvasir-generations"

// MaxNote bounds a note, bytes.
const MaxNote = 8 << 20

// Notebook is a Tier that keeps one small text beside its objects, for all servers that share it.
type Notebook interface {
	Tier

	// Note returns the text, nil where there is none. The caller does not change it.
	Note(ctx context.Context) ([]byte, error)

	// SetNote replaces the text as a whole.
	SetNote(ctx context.Context, text []byte) error
}
