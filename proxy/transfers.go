// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"errors"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/transferlog"
)

// Transfers returns the last attempts whose KV went from a P, or a relay, to D: at most 64, the newest first. The proxy does not see
// the KV itself: it knows only when P had answered, and when D's first byte came.
func (p *Proxy) Transfers() []transferlog.Transfer { return p.transfers.Last() }

// untilD names the step after P's answer: D takes the KV and computes its first token.
const untilD = "until D's first byte"

// beginHandover begins the log entry of an attempt whose KV goes from P, or a relay, to D.
func (e *exchange) beginHandover(transfer, engine string, c choice, state transferlog.State, what string) {
	t := transferlog.Transfer{ID: transfer, Request: e.id, Model: e.want.model, From: strings.TrimPrefix(engine, relayPrefix), To: c.engine.url}
	if c.prefill != nil {
		t.From = strings.TrimPrefix(t.From+" at "+c.prefill.host, " at ")
	}
	e.handed = e.p.transfers.Begin(t, state, what)
}

// endHandover ends the log entry of an attempt, unless D's first byte has already ended it.
func (e *exchange) endHandover(outcome string, err error) {
	if err == nil && outcome != "ok" {
		err = errors.New("D's answer: " + outcome)
	}
	if e.r.Context().Err() != nil {
		err = errors.New("the client left")
	}
	e.handed.Finish(err, errLate, context.DeadlineExceeded)
}
