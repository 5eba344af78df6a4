// SPDX-License-Identifier: Apache-2.0

package aws

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

// Credentials are the keys with which requests are signed.
type Credentials struct {
	ID, Secret string
	Token      string    // session token; empty for none
	Expires    time.Time // zero for never
}

// ErrNone means that a source has no credentials.
var ErrNone = errors.New("aws: no credentials")

// Source is a place to look for credentials.
type Source interface {
	// Find returns credentials. The error wraps ErrNone if the source is not set up.
	Find(ctx context.Context) (Credentials, error)
	// Name returns where Find looks, in words for people.
	Name() string
}

const (
	renewBefore = 5 * time.Minute        // credentials are renewed this long before their end
	renewTries  = 30 * time.Second       // pause after a renewal that failed
	findTime    = 20 * time.Second       // bounds one look at all sources
	renewWait   = 100 * time.Millisecond // how long the call that begins a renewal waits for it
)

// Keeper has the credentials of the first source that is set up, and renews them before
// they end. Its methods are safe for concurrent use.
type Keeper struct {
	sources []Source

	turn chan struct{} // capacity 1: full while a call looks for credentials
	mu   struct {
		sync.Mutex
		now    Credentials
		source string
		next   time.Time // time of the next look, while now can be used or after a failure
		failed error     // error of the last look
	}
}

// Keep returns a Keeper that asks the sources in this order.
func Keep(sources ...Source) *Keeper {
	return &Keeper{sources: sources, turn: make(chan struct{}, 1)}
}

// Get returns credentials that can be used. It waits for a look at the sources only
// if it has none. While it renews credentials it returns the old ones.
func (k *Keeper) Get(ctx context.Context) (Credentials, error) {
	c, due, err := k.known()
	if c.ID != "" && due {
		return k.renew(c), nil
	}
	if c.ID != "" || err != nil {
		return c, err
	}
	select {
	case k.turn <- struct{}{}:
	case <-ctx.Done():
		return Credentials{}, ctx.Err()
	}
	defer func() { <-k.turn }()
	if c, _, err := k.known(); c.ID != "" || err != nil { // another call found them meanwhile
		return c, err
	}
	return k.look(ctx)
}

// renew looks for new credentials in the background, unless another call does, and returns the credentials
// to use now.
func (k *Keeper) renew(former Credentials) Credentials {
	select {
	case k.turn <- struct{}{}:
	default:
		return former
	}
	done := make(chan Credentials, 1)
	go func() {
		defer func() { <-k.turn }()
		if _, due, _ := k.known(); !due { // another call has just renewed them
			done <- former
			return
		}
		c, err := k.look(context.Background())
		if err != nil {
			c = former
		}
		done <- c
	}()
	timer := time.NewTimer(renewWait)
	defer timer.Stop()
	select {
	case c := <-done:
		return c
	case <-timer.C:
		return former
	}
}

// look finds credentials. The caller must hold k.turn.
func (k *Keeper) look(ctx context.Context) (Credentials, error) {
	c, source, err := k.find(ctx)
	if err != nil && ctx.Err() != nil {
		return Credentials{}, ctx.Err()
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	k.mu.failed, k.mu.next = err, now.Add(renewTries)
	if err == nil {
		k.mu.now, k.mu.source, k.mu.next = c, source, c.Expires.Add(-renewBefore)
		if k.mu.next.Before(now.Add(renewTries)) {
			k.mu.next = now.Add(renewTries) // else credentials with a short life would be renewed at each request
		}
		return c, nil
	}
	if k.usableLocked(now) { // the old credentials can be used for a while
		return k.mu.now, nil
	}
	return Credentials{}, err
}

// known returns the result that needs no look: credentials and whether they are due for a renewal, or the error
// of a recent look.
func (k *Keeper) known() (c Credentials, due bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	switch {
	case k.usableLocked(now):
		return k.mu.now, !k.mu.now.Expires.IsZero() && !now.Before(k.mu.next), nil
	case k.mu.failed != nil && now.Before(k.mu.next):
		return c, false, k.mu.failed
	}
	return c, false, nil
}

func (k *Keeper) usableLocked(now time.Time) bool {
	c := k.mu.now
	return c.ID != "" && (c.Expires.IsZero() || now.Before(c.Expires))
}

func (k *Keeper) find(ctx context.Context) (Credentials, string, error) {
	ctx, cancel := context.WithTimeout(ctx, findTime)
	defer cancel()
	var looked []string
	for _, s := range k.sources {
		c, err := s.Find(ctx)
		switch {
		case err == nil:
			return c, s.Name(), nil
		case !errors.Is(err, ErrNone): // the source is set up and fails: credentials of another source would be a surprise
			return c, "", fmt.Errorf("credentials from %s: %w", s.Name(), err)
		}
		looked = append(looked, s.Name())
	}
	return Credentials{}, "", fmt.Errorf("%w: looked at %s", ErrNone, strings.Join(looked, ", "))
}

// Reject says that a server refused credentials. If they have an end, the Keeper looks for new
// ones.
func (k *Keeper) Reject(c Credentials) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mu.now.ID == c.ID && k.mu.now.Token == c.Token && !c.Expires.IsZero() {
		k.mu.now = Credentials{}
	}
}

// Source returns the name of the source of the credentials in use; empty while there are none.
func (k *Keeper) Source() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.mu.source
}
