// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"fmt"
	"io"
	"net"
	"time"
)

// exchange connects to the handshake port of segment and calls talk with the connection. ctx must have a deadline.
func exchange(ctx context.Context, segment string, talk func(net.Conn) error) error {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", segment)
	if err != nil {
		return fmt.Errorf("handshake with %s: %w", segment, err)
	}
	defer c.Close() // at once: the engine serves one client at a time
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := talk(c); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return fmt.Errorf("handshake with %s: %w", segment, err)
	}
	return nil
}

// ask sends one handshake frame with request as its JSON, and returns the JSON of the reply.
func ask(c io.ReadWriter, kind byte, request any) ([]byte, error) {
	frame, err := appendFrame(nil, kind, request)
	if err != nil {
		return nil, err
	}
	if _, err := c.Write(frame); err != nil {
		return nil, err
	}
	got, text, err := readFrame(c)
	if err != nil {
		return nil, unexpected(err)
	}
	if got != kind {
		return nil, fmt.Errorf("%w: a handshake reply of type %d to a request of type %d", ErrProtocol, got, kind)
	}
	return text, nil
}
