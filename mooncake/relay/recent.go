// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/transferlog"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// Transfers returns the last transfers, at most 64, beginning with D's latest request. It leaves out requests without blocks, whose D
// needs nothing any more.
func (r *Relay) Transfers() []transferlog.Transfer { return r.last.Last() }

// beginEntry begins the log entry of the request a, for which D's pull wants the blocks in `want`. It returns nil if these are none.
func (e *engine) beginEntry(a *request, pull *wire.Pull, want wire.Wanted) *transferlog.Entry {
	blocks := 0
	for _, ids := range want.Blocks {
		blocks += len(ids)
	}
	if blocks == 0 {
		return nil
	}
	t := transferlog.Transfer{
		ID: want.TransferID, Request: a.id, From: e.place(), To: a.peer, Blocks: blocks, Bytes: bytesOf(pull.Regions, want.Blocks),
	}
	if pull.TPSize > 1 {
		t.Rank = fmt.Sprintf("TP rank %d of %d", pull.TPRank, pull.TPSize)
	}
	return e.r.last.Begin(t, transferlog.Computing, "waits for P")
}

// place returns a text that names the engine of P and the host of its first worker.
func (e *engine) place() string {
	e.r.mu.Lock()
	defer e.r.mu.Unlock()
	var addrs []string
	for _, stages := range e.now.Workers {
		for _, addr := range stages {
			addrs = append(addrs, addr)
		}
	}
	if len(addrs) > 0 {
		if u, err := url.Parse(slices.Min(addrs)); err == nil && u.Hostname() != "" {
			return e.id + " at " + u.Hostname()
		}
	}
	return e.id
}

// notReady is part of the text with which P, like vLLM's, says that it did not have the KV in time.
const notReady = "Timeout waiting for P side ready"

// noteEnd ends the log entry `seen` of a request that ended with err. `late` means that D's own deadline has passed.
func noteEnd(seen *transferlog.Entry, err error, late bool) {
	switch {
	case late && err != nil:
		seen.End(transferlog.Expired, "D waited no longer")
	case errors.Is(err, mooncake.ErrPeer) && strings.Contains(err.Error(), notReady):
		seen.End(transferlog.Expired, err.Error())
	case errors.Is(err, context.Canceled):
		seen.End(transferlog.Failed, "D gave it up")
	default:
		seen.Finish(err, mooncake.ErrTimeout)
	}
}
