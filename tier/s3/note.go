// SPDX-License-Identifier: Apache-2.0

package s3

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/s3/aws"
)

// note is the last read note and its ETag.
type note struct {
	tag  string
	text []byte
}

// errHidden means that the note exists and the credentials may not read it.
var errHidden = errors.New("s3: the note of generations is there and may not be read: allow s3:GetObject and s3:ListBucket")

// Note implements tier.Notebook with a GET, which the store answers with 304 if the note has not changed. A forbidden note counts as
// missing, because without the right to list S3 says that a missing object is forbidden. SetNote then never replaces an existing note.
func (t *Tier) Note(ctx context.Context) ([]byte, error) {
	was := t.note.Load()
	r := request{kind: kindGet, name: t.o.Prefix + tier.NoteName}
	if was != nil && was.tag != "" {
		r.fields = header(nil, "if-none-match", was.tag)
	}
	var now note
	err := t.do(ctx, &r, func(a *http1.Response) error {
		n, err := length(a)
		if err != nil {
			return err
		}
		if n > tier.MaxNote {
			return fmt.Errorf("%w: %w: %d bytes", errAnswer, tier.ErrLongNote, n)
		}
		now = note{a.Field("Etag"), make([]byte, n)}
		return t.fill(a, now.text, nil, nil)
	})
	switch {
	case status(err) == http.StatusNotModified && was != nil:
		return was.text, nil
	case status(err) == http.StatusNotFound && !hasCode(err, "NoSuchBucket"):
		t.note.Store(nil)
		t.hidden.Store(false)
		return nil, nil
	case status(err) == http.StatusForbidden && hasCode(err, "AccessDenied"):
		t.note.Store(nil)
		t.hidden.Store(true)
		return nil, nil
	case err != nil:
		return nil, err
	}
	t.note.Store(&now)
	t.hidden.Store(false)
	return now.text, nil
}

// SetNote implements tier.Notebook.
func (t *Tier) SetNote(ctx context.Context, text []byte) error {
	fields := []aws.Field{{Name: "content-type", Value: "application/json"}}
	hidden := t.hidden.Load()
	if hidden && (t.o.Overwrite || t.unconditional.Load()) {
		return errHidden
	}
	if hidden {
		fields = append(fields, aws.Field{Name: "if-none-match", Value: "*"})
	}
	err := t.do(ctx, &request{kind: kindPut, name: t.o.Prefix + tier.NoteName, fields: fields, body: text}, discardAnswer)
	if hidden && status(err) == http.StatusPreconditionFailed {
		return errHidden
	}
	return err
}
