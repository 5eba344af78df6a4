// SPDX-License-Identifier: Apache-2.0

package kv

import (
	"errors"
	"fmt"
	"math/bits"
)

// Layout is the shape of one chunk as an engine-driven LMCache worker registers
// it: [2, layers, slots, hidden] row-major (plane 0 = K, plane 1 = V), or
// [layers, slots, hidden] when SinglePlane.
type Layout struct {
	SinglePlane bool   // MLA, or K and V fused in the hidden dimension
	Layers      int    // > 0
	Slots       int    // token slots per chunk, > 0
	Hidden      int    // elements per slot: KV heads x head size (x 2 when fused)
	DType       string // torch name without the "torch." prefix
}

// ErrLayout means that a layout has an unknown dtype, a size that is not positive, or more than MaxChunkBytes.
var ErrLayout = errors.New("kv: unusable layout")

// MaxChunkBytes bounds one chunk: 4 GiB. A Layout with larger chunks is ErrLayout.
const MaxChunkBytes = 4 << 30

// dtypeBytes lists torch's element sizes.
var dtypeBytes = map[string]int{
	"float64": 8, "int64": 8, "uint64": 8, "complex64": 8,
	"float32": 4, "int32": 4, "uint32": 4,
	"float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
	"uint8": 1, "int8": 1, "bool": 1,
	"float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}

// DTypeBytes returns the element size of a torch dtype, 0 when unknown.
func DTypeBytes(dtype string) int { return dtypeBytes[dtype] }

// Bytes returns the byte length of one chunk, 1 to MaxChunkBytes, or an error
// that wraps ErrLayout.
func (l Layout) Bytes() (int64, error) {
	size := dtypeBytes[l.DType]
	if size == 0 {
		return 0, fmt.Errorf("%w: unknown dtype %q", ErrLayout, l.DType)
	}
	n := uint64(size)
	for _, d := range l.Shape() {
		if d <= 0 {
			return 0, fmt.Errorf("%w: dimension %d of a chunk's shape %v is below 1", ErrLayout, d, l.Shape())
		}
		hi, lo := bits.Mul64(n, uint64(d))
		if hi != 0 || lo > MaxChunkBytes {
			return 0, fmt.Errorf("%w: a chunk of shape %v %s is over %d bytes", ErrLayout, l.Shape(), l.DType, int64(MaxChunkBytes))
		}
		n = lo
	}
	return int64(n), nil
}

// Shape returns the dimensions of a chunk in row-major order.
func (l Layout) Shape() []int {
	if l.SinglePlane {
		return []int{l.Layers, l.Slots, l.Hidden}
	}
	return []int{2, l.Layers, l.Slots, l.Hidden}
}

// Fingerprint returns a string that is equal for two layouts exactly when the bytes of
// their chunks mean the same.
func (l Layout) Fingerprint() string {
	return fmt.Sprintf("%v/%s", l.Shape(), l.DType)
}

// FormatBytes renders a byte count for people: 96 MiB, 1.5 GiB, 512 B.
func FormatBytes(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	v, i := float64(n), 0
	for v >= 1024 && i < len(units)-1 {
		v, i = v/1024, i+1
	}
	if v == float64(int64(v)) {
		return fmt.Sprintf("%d %s", int64(v), units[i])
	}
	return fmt.Sprintf("%.1f %s", v, units[i])
}
