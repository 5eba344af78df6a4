package cli

import (
	"github.com/kvasir-kv/kvasir/internal/size"
	"github.com/kvasir-kv/kvasir/kv"
)

type (
	byteSize = size.Bytes
	kibSize  = size.KiB
	mibSize  = size.MiB
	gibSize  = size.GiB
)

// sizeWords writes a size for people: 3.7 GiB.
func sizeWords(n int64) string { return kv.FormatBytes(n) }
