// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package hostmem

import "runtime/debug"

// GiveBack returns memory to the kernel that only the start of the process needed.
func GiveBack() { debug.FreeOSMemory() }
