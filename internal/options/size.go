// SPDX-License-Identifier: Apache-2.0

package options

import (
	"fmt"
	"strconv"
	"strings"
)

// Bytes, KiB, MiB and GiB are sizes in bytes, read from a number with an optional unit: 4096, 64k, 256MiB, 1.5g, 4GB. All units are
// powers of 1024. A number without a unit counts in the unit of the type's name.
type (
	Bytes int64 // bytes
	KiB   int64 // bytes; read from a number without a unit: KiB
	MiB   int64 // bytes; read from a number without a unit: MiB
	GiB   int64 // bytes; read from a number without a unit: GiB
)

// UnmarshalText implements encoding.TextUnmarshaler.
func (b *Bytes) UnmarshalText(text []byte) error { return parseSize((*int64)(b), text, 0) }

// UnmarshalText implements encoding.TextUnmarshaler.
func (b *KiB) UnmarshalText(text []byte) error { return parseSize((*int64)(b), text, 10) }

// UnmarshalText implements encoding.TextUnmarshaler.
func (b *MiB) UnmarshalText(text []byte) error { return parseSize((*int64)(b), text, 20) }

// UnmarshalText implements encoding.TextUnmarshaler.
func (b *GiB) UnmarshalText(text []byte) error { return parseSize((*int64)(b), text, 30) }

func (b Bytes) String() string { return formatSize(int64(b)) }
func (b KiB) String() string   { return formatSize(int64(b)) }
func (b MiB) String() string   { return formatSize(int64(b)) }
func (b GiB) String() string   { return formatSize(int64(b)) }

// maxSize bounds every size: 1 PiB, in bytes. A larger one is an error.
const maxSize = 1 << 50

var unitShift = map[string]uint{"k": 10, "m": 20, "g": 30, "t": 40, "p": 50}

// parseSize parses a size. A number without a unit counts in units of 1<<shift bytes.
func parseSize(n *int64, text []byte, shift uint) error {
	number := strings.TrimRight(string(text), "bBiIkKmMgGtTpP")
	if err := LeadingZero(number); err != nil {
		return err
	}
	unit := strings.ToLower(string(text[len(number):]))
	power, known := shift, true
	switch unit {
	case "":
	case "b":
		power = 0
	default:
		power, known = unitShift[strings.TrimSuffix(strings.TrimSuffix(unit, "b"), "i")]
	}
	value, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if err != nil || !known {
		return fmt.Errorf("%q is no size: want for example %s", text, map[uint]string{0: "4096, 64k or 256MiB", 10: "64, 64KiB or 1MiB", 20: "64, 64MiB or 1GiB", 30: "4, 4GiB or 256MiB"}[shift])
	}
	if bytes := value * float64(int64(1)<<power); bytes >= 0 && bytes <= maxSize {
		*n = int64(bytes)
		return nil
	}
	return fmt.Errorf("%q is outside 0 to 1 PiB", text)
}

// formatSize returns a size as a text that parseSize reads as the same size: 4GiB, 0.5GiB, 100B.
func formatSize(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}
	i := 0
	for i < len(units)-1 && n != 0 && n&1023 == 0 {
		n >>= 10
		i++
	}
	return strconv.FormatInt(n, 10) + units[i]
}
