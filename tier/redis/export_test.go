// SPDX-License-Identifier: Apache-2.0

package redis

// SlotOf is slotOf, for tests.
var SlotOf = slotOf

// HeaderBytes is how much stands before an object in its first value.
const HeaderBytes = headerBytes
