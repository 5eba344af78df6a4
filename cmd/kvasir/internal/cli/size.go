// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/status"
	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/kv"
)

type (
	byteSize = options.Bytes
	kibSize  = options.KiB
	mibSize  = options.MiB
	gibSize  = options.GiB
)

// sizeWords returns a size as a text for people: 3.7 GiB.
func sizeWords(n int64) string { return kv.FormatBytes(n) }

// printable returns a text from outside, such as the name of a model or a file, in a form that is safe on a terminal: it moves no
// cursor and begins no line.
func printable(s string) string { return safelog.Text(s, 4096) }

// thousands returns a number with its digits in groups of three: 3,308,093.
func thousands(n uint64) string { return status.Thousands(n) }
