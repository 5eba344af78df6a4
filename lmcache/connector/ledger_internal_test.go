// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"slices"
	"strconv"
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
)

// A worker remembers the last requests that ended, and reports each end once.
func TestEndedRequestsAreBounded(t *testing.T) {
	var l ledger
	l.init()
	for i := range maxAnnounced + 10 {
		id := strconv.Itoa(i)
		if f := l.take([]string{id}); !slices.Equal(f.Sent, []string{id}) {
			t.Fatalf("%s: %+v", id, f)
		}
		if f := l.take([]string{id}); len(f.Sent) > 0 {
			t.Fatalf("%s is reported twice: %+v", id, f)
		}
	}
	if len(l.announced) != maxAnnounced || len(l.order) != maxAnnounced {
		t.Errorf("%d and %d ended requests are remembered, want %d", len(l.announced), len(l.order), maxAnnounced)
	}
	// The oldest is forgotten, the next is not; one that begins again ends again.
	if f := l.take([]string{"9", "10"}); !slices.Equal(f.Sent, []string{"9"}) {
		t.Errorf("%+v", f)
	}
	l.begin(&lmcache.LoadStore{Direction: lmcache.Store, RequestID: "20"})
	less(l.stores, "20", 1)
	if f := l.take([]string{"20"}); !slices.Equal(f.Sent, []string{"20"}) || len(l.order) != maxAnnounced {
		t.Errorf("%+v, %d", f, len(l.order))
	}
}
