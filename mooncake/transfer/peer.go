// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"fmt"
	"io"
	"net"
	"time"
)

// exchange sends one handshake frame to segment and returns the reply's JSON.
// ctx needs a deadline.
func exchange(ctx context.Context, segment string, kind byte, request any) ([]byte, error) {
	frame, err := appendFrame(nil, kind, request)
	if err != nil {
		return nil, err
	}
	c, err := new(net.Dialer).DialContext(ctx, "tcp", segment)
	if err != nil {
		return nil, fmt.Errorf("handshake with %s: %w", segment, err)
	}
	defer c.Close() // at once: the engine serves one client at a time
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	text, err := exchangeOn(c, frame, kind)
	if err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, fmt.Errorf("handshake with %s: %w", segment, err)
	}
	return text, nil
}

func exchangeOn(c io.ReadWriter, frame []byte, kind byte) ([]byte, error) {
	if _, err := c.Write(frame); err != nil {
		return nil, err
	}
	got, text, err := readFrame(c)
	if err != nil {
		return nil, unexpected(err)
	}
	if got != kind {
		return nil, fmt.Errorf("%w: reply of type %d to type %d", ErrProtocol, got, kind)
	}
	return text, nil
}

// fetchDescriptor asks segment what it publishes.
func fetchDescriptor(ctx context.Context, segment string) (*Descriptor, error) {
	text, err := exchange(ctx, segment, frameMetadata, struct{}{})
	if err != nil {
		return nil, err
	}
	d, err := parseDescriptor(text)
	if err != nil {
		return nil, fmt.Errorf("handshake with %s: %w", segment, err)
	}
	return d, nil
}
