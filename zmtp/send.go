// SPDX-License-Identifier: Apache-2.0

package zmtp

import "errors"

// SendWaiting is Send for many messages at once: while the queue is full, it flushes and waits
// until the peer has read some, or is closed. Only the peer's handler may call it.
func (p *Peer) SendWaiting(frames ...[]byte) error {
	for {
		err := p.Send(frames...)
		if !errors.Is(err, ErrQueueFull) {
			return err
		}
		p.awaitRoom()
	}
}
