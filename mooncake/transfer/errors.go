// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"errors"
	"fmt"
)

var (
	// ErrRejected means that the peer refused the address range: it is not registered at the peer, is fenced, or lies not wholly inside
	// one of the peer's regions.
	ErrRejected = errors.New("transfer: address range rejected by the peer")

	// ErrLost means that the peer closed or reset the connection before it confirmed the entry. The peer applies no more of that entry.
	ErrLost = errors.New("transfer: connection lost")

	// ErrStalled means that no byte was sent, received or confirmed for Options.ProgressTimeout.
	ErrStalled = errors.New("transfer: the peer moved no bytes within the progress timeout")

	// ErrUnsettled marks a failed write of which the peer may still apply bytes: the
	// client cut the connection before the peer ended its side.
	ErrUnsettled = errors.New("transfer: the peer may still apply the write")

	// ErrProtocol means that the peer sent bytes that do not follow the protocol.
	ErrProtocol = errors.New("transfer: protocol error")

	// ErrUnproven means that the peer did not prove that it has a secret in common with this end, or refused this end's proof. Nothing
	// was sent to it.
	ErrUnproven = errors.New("transfer: the peer and this end did not prove a common secret")

	// ErrBusy means that Options.MaxWaiting callers already wait for a
	// connection to the peer.
	ErrBusy = errors.New("transfer: too many callers wait for the peer")

	// ErrPeers means that Options.MaxPeers peers are in use.
	ErrPeers = errors.New("transfer: too many peers are in use")

	// ErrClosed means that the Client, the Target or the region is closed.
	ErrClosed = errors.New("transfer: closed")

	// ErrRange means that an address range cannot exist: it is empty, begins at address 0, passes 2^63, or wraps around.
	ErrRange = errors.New("transfer: impossible address range")

	// ErrOverlap means that a region would overlap another region of the table, or addresses that Publish has given out.
	ErrOverlap = errors.New("transfer: region overlaps another")

	// ErrRegions means that the table already has MaxRegions regions, as many as one descriptor can publish.
	ErrRegions = errors.New("transfer: too many regions")
)

// BatchError has the result of each entry of a batch.
type BatchError struct {
	// Errs has one element per entry of the batch; nil means that the entry is done.
	Errs []error
}

// Error returns a text with the number of failed entries and the first failed entry's error.
func (e *BatchError) Error() string {
	failed, first := 0, -1
	for i, err := range e.Errs {
		if err != nil {
			failed++
			if first < 0 {
				first = i
			}
		}
	}
	if first < 0 {
		return "transfer: no entry failed"
	}
	return fmt.Sprintf("transfer: %d of %d entries failed, entry %d: %v", failed, len(e.Errs), first, e.Errs[first])
}

// Unwrap returns the distinct errors of the entries, so that errors.Is finds a
// sentinel that any entry carries.
func (e *BatchError) Unwrap() []error {
	var distinct []error
	seen := make(map[error]bool)
	for _, err := range e.Errs {
		if err != nil && !seen[err] {
			seen[err] = true
			distinct = append(distinct, err)
		}
	}
	return distinct
}
