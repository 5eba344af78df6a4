// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"

	"github.com/kvasir-kv/kvasir/internal/hostmem"
)

// checkMemory refuses a region of n bytes that this machine cannot hold. Go ends the process when it gets no memory; and if it gets the
// memory, peers fill it until the kernel kills a process. If the free memory is unknown, checkMemory refuses nothing.
func checkMemory(n int64) error {
	have, ok := hostmem.Available()
	if !ok || n <= have {
		return nil
	}
	return fmt.Errorf("serve %.1f GiB: this machine has %.1f GiB of memory available: lower --size",
		float64(n)/(1<<30), float64(have)/(1<<30))
}
