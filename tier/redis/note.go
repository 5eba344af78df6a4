// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvasir-kv/kvasir/internal/resp"
	"github.com/kvasir-kv/kvasir/tier"
)

func (t *Tier) noteName() string { return t.o.Prefix + tier.NoteName }

// Note implements tier.Notebook.
func (t *Tier) Note(ctx context.Context) (text []byte, err error) {
	err = t.at(ctx, t.noteName(), 0, func(c *resp.Conn) error {
		text = nil
		c.Command("GET", t.noteName())
		n, err := c.Value()
		switch {
		case errors.Is(err, resp.ErrNil):
			return nil
		case err != nil:
			return err
		case n > tier.MaxNote:
			return fmt.Errorf("%w: %w: %d bytes", resp.ErrProtocol, tier.ErrLongNote, n)
		}
		text = make([]byte, n)
		return c.Fill(text)
	})
	return text, err
}

// SetNote implements tier.Notebook.
func (t *Tier) SetNote(ctx context.Context, text []byte) error {
	return t.at(ctx, t.noteName(), int64(len(text)), func(c *resp.Conn) error {
		if err := c.Send([]string{"SET", t.noteName()}, [][]byte{text}); err != nil {
			return err
		}
		return c.OK()
	})
}
