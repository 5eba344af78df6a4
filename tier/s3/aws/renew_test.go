// SPDX-License-Identifier: Apache-2.0

package aws_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/tier/s3/aws"
)

// slow is a source whose first answer comes at once, and each later one after a while.
type slow struct {
	n    int
	wait time.Duration
}

func (s *slow) Find(ctx context.Context) (aws.Credentials, error) {
	if s.n++; s.n > 1 {
		select {
		case <-time.After(s.wait):
		case <-ctx.Done():
			return aws.Credentials{}, ctx.Err()
		}
	}
	return aws.Credentials{ID: string(rune('0' + s.n)), Secret: "s", Expires: time.Now().Add(time.Hour)}, nil
}

func (*slow) Name() string { return "a slow one" }

// While credentials are renewed before they end, no caller waits for a slow answer: callers get the
// former ones.
func TestRequestsDoNotWaitForRenewal(t *testing.T) {
	for _, wait := range []time.Duration{15 * time.Second, time.Hour} { // an answer, and none within the time of a look
		synctest.Test(t, func(t *testing.T) {
			k := aws.Keep(&slow{wait: wait})
			if _, err := k.Get(t.Context()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(56 * time.Minute) // it is time to renew, and they hold for four minutes
			for range 40 {
				began := time.Now()
				if c, err := k.Get(t.Context()); err != nil || c.ID == "" || time.Since(began) > 100*time.Millisecond {
					t.Fatalf("%q after %v: %v", c.ID, time.Since(began), err)
				}
				time.Sleep(time.Second)
			}
			if c, err := k.Get(t.Context()); err != nil || (c.ID == "1") != (wait == time.Hour) {
				t.Errorf("%q, %v", c.ID, err)
			}
			time.Sleep(time.Minute)
		})
	}
}
