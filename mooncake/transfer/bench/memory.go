// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"

	"github.com/kvasir-kv/kvasir/internal/hostmem"
)

// checkMemory refuses a region that this machine cannot hold. Go ends the process
// when it gets no memory, and peers would fill what it gets until the kernel does.
// Where the kernel does not tell, nothing is refused.
func checkMemory(n int64) error {
	have, ok := hostmem.Available()
	if !ok || n <= have {
		return nil
	}
	return fmt.Errorf("serve %.1f GiB: this machine has %.1f GiB of memory available: lower --size",
		float64(n)/(1<<30), float64(have)/(1<<30))
}
