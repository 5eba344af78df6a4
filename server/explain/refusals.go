// SPDX-License-Identifier: Apache-2.0

package explain

import (
	"slices"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/safelog"
)

// Refused is a reason for which registrations were refused.
type Refused struct {
	Why   string `json:"why"`
	Count uint64 `json:"count"`
	Last  string `json:"last"` // RFC 3339
}

// Refusals remembers the latest reasons for which registrations were refused. The zero Refusals is empty. Its methods are safe for
// concurrent use.
type Refusals struct {
	mu      sync.Mutex
	reasons []Refused // the latest last
}

// MaxRefusals bounds the reasons that Refusals remembers. A further one takes the place of the reason that was seen last the longest ago.
const MaxRefusals = 16

// Add records a refusal.
func (t *Refusals) Add(err error) {
	why := Refused{Why: safelog.Text(err.Error(), safelog.MaxText), Count: 1, Last: time.Now().UTC().Format(time.RFC3339)}
	t.mu.Lock()
	defer t.mu.Unlock()
	if i := slices.IndexFunc(t.reasons, func(r Refused) bool { return r.Why == why.Why }); i >= 0 {
		why.Count += t.reasons[i].Count
		t.reasons = slices.Delete(t.reasons, i, i+1)
	} else if len(t.reasons) == MaxRefusals {
		t.reasons = slices.Delete(t.reasons, 0, 1)
	}
	t.reasons = append(t.reasons, why)
}

// List returns the reasons, the latest last.
func (t *Refusals) List() []Refused {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]Refused{}, t.reasons...)
}
