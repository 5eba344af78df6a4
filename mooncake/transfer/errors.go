// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"errors"
	"fmt"
)

var (
	// ErrRejected means that the peer refused the address range: not
	// registered there, fenced, or not wholly inside one of its regions.
	ErrRejected = errors.New("transfer: address range rejected by the peer")

	// ErrLost means that the peer closed or reset the connection before it
	// confirmed the entry. The peer applies nothing more of it.
	ErrLost = errors.New("transfer: connection lost")

	// ErrStalled means that the peer made no progress for the progress timeout.
	ErrStalled = errors.New("transfer: the peer moved no bytes within the progress timeout")

	// ErrUnsettled marks a failed write of which the peer may still apply bytes: the
	// client cut the connection before the peer ended its side.
	ErrUnsettled = errors.New("transfer: the peer may still apply the write")

	// ErrProtocol means that the peer sent something that is not its protocol.
	ErrProtocol = errors.New("transfer: protocol error")

	// ErrUnproven means that the peer did not prove that it has a secret in common with
	// this end, or refused this end's proof; nothing was sent.
	ErrUnproven = errors.New("transfer: the peer and this end did not prove a common secret")

	// ErrBusy means that Options.MaxWaiting callers already wait for a
	// connection to the peer.
	ErrBusy = errors.New("transfer: too many callers wait for the peer")

	// ErrPeers means that Options.MaxPeers peers are in use.
	ErrPeers = errors.New("transfer: too many peers")

	// ErrClosed means that the Client, the Target or the region is closed.
	ErrClosed = errors.New("transfer: closed")

	// ErrRange means a range that cannot exist: empty, at address 0, past
	// 2^63, or wrapping around.
	ErrRange = errors.New("transfer: impossible address range")

	// ErrOverlap means that a region would overlap a registered one.
	ErrOverlap = errors.New("transfer: region overlaps another")

	// ErrRegions means that the table holds as many regions as one descriptor
	// can publish.
	ErrRegions = errors.New("transfer: too many regions")
)

// BatchError has the result of each entry of a batch.
type BatchError struct {
	// Errs has one element per entry of the batch; nil means done.
	Errs []error
}

// Error names the number of failed entries and the first of them.
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
