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

// Credentials are what requests are signed with.
type Credentials struct {
	ID, Secret string
	Token      string    // of a session; empty for none
	Expires    time.Time // zero for never
}

// ErrNone means that a source has no credentials.
var ErrNone = errors.New("aws: no credentials")

// Source is where credentials are.
type Source interface {
	// Find returns credentials. The error wraps ErrNone where the source is not set up.
	Find(ctx context.Context) (Credentials, error)
	// Name says where it looks, for people.
	Name() string
}

const (
	renewBefore = 5 * time.Minute        // the end of credentials
	renewTries  = 30 * time.Second       // after one that failed
	findTime    = 20 * time.Second       // of one look
	renewWait   = 100 * time.Millisecond // for which the one call that begins a renewal waits for it
)

// Keeper keeps the credentials of the first source that has some, and renews them before
// they end. Its methods are safe for concurrent use.
type Keeper struct {
	sources []Source

	turn chan struct{} // has a place for the one who looks
	mu   struct {
		sync.Mutex
		now    Credentials
		source string
		next   time.Time // not looked again before, while now can be used
		failed error     // the last look
	}
}

// Keep returns a Keeper of sources, the first one first.
func Keep(sources ...Source) *Keeper {
	return &Keeper{sources: sources, turn: make(chan struct{}, 1)}
}

// Get returns credentials that can be used. It looks for them, and waits for that, only
// where it has none: while it renews those that it has they go on.
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
	if c, _, err := k.known(); c.ID != "" || err != nil { // another one found them meanwhile
		return c, err
	}
	return k.look(ctx)
}

// renew looks for new credentials in the background, unless another call does, and returns those
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
		if _, due, _ := k.known(); !due { // another one has just done it
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

// look finds credentials. It is called by the one whose turn it is.
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
			k.mu.next = now.Add(renewTries) // short ones are not looked for with each request
		}
		return c, nil
	}
	if k.usableLocked(now) { // the former ones go on for a while
		return k.mu.now, nil
	}
	return Credentials{}, err
}

// known returns what needs no look: credentials, and whether it is time to renew them, or the error
// of a look a moment ago.
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
		case !errors.Is(err, ErrNone): // set up, and it does not work: another one would be a surprise
			return c, "", fmt.Errorf("credentials from %s: %w", s.Name(), err)
		}
		looked = append(looked, s.Name())
	}
	return Credentials{}, "", fmt.Errorf("%w: looked at %s", ErrNone, strings.Join(looked, ", "))
}

// Reject says that a server did not take credentials. Those that end some time are looked
// for again.
func (k *Keeper) Reject(c Credentials) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.mu.now.ID == c.ID && k.mu.now.Token == c.Token && !c.Expires.IsZero() {
		k.mu.now = Credentials{}
	}
}

// Source is where the credentials in use are from; empty while there are none.
func (k *Keeper) Source() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.mu.source
}
