// SPDX-License-Identifier: Apache-2.0

package redis

import "time"

// SlotOf is slotOf, for tests.
var SlotOf = slotOf

// HeaderBytes is the length of the header before an object in its first value.
const HeaderBytes = headerBytes

// Timeouts returns how long a call and a dial may take.
func (t *Tier) Timeouts() (call, dial time.Duration) { return t.o.Timeout, t.o.DialTimeout }
