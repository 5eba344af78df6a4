// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
)

// MaxBytes is the size of the largest pool. Validate refuses a larger one.
const MaxBytes = 1 << 50

// Validate reports every field that cannot be used, as options.Errors.
func (o Options) Validate() error {
	var c options.Checks
	_, err := shm.Path(o.Dir, o.Name)
	c.That(err == nil, "Name", "%q cannot be the name of a file in /dev/shm", o.Name)
	align := o.Align
	if align == 0 {
		align = DefaultAlign
	}
	c.That(align >= 64 && align <= 1<<30 && align&(align-1) == 0, "Align", "%d is not a power of two from 64 to 2^30", o.Align)
	c.That(o.Bytes >= max(align, 1) && o.Bytes <= MaxBytes, "Bytes", "a pool has %s to %s, not %s", kv.FormatBytes(max(align, 1)), kv.FormatBytes(MaxBytes), kv.FormatBytes(o.Bytes))
	options.Within(&c, "ChunkTokens", o.ChunkTokens, 0, kv.MaxChunkTokens)
	return c.Err()
}
