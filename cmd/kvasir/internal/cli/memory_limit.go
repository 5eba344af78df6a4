// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"path/filepath"

	"github.com/kvasir-kv/kvasir/internal/hostmem"
)

// fitsLimit returns an error if memory in /dev/shm, of the size that a flag sets, exceeds what the cgroups of this process allow: the
// kernel would kill this process, or an engine beside it, while the memory is filled. root is "/" except in tests.
func fitsLimit(root, flag string, size gibSize) error {
	limit, file, limited := hostmem.Limit(filepath.Join(root, "proc"), filepath.Join(root, "sys"))
	if !limited || int64(size) <= limit {
		return nil
	}
	return fmt.Errorf("%s %v is more than the memory limit of this process, %s (%s): memory of /dev/shm counts against it. Lower %[1]s, or raise the limit to %[5]s, 1 GiB more than %[1]s",
		flag, size, sizeWords(limit), file, sizeWords(int64(size)+1<<30))
}
