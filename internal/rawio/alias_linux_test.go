package rawio

import (
	"testing"
	"unsafe"
)

// Where a copy is slow is a matter of addresses alone; that it is, of the
// processor.
func TestSlowCopy(t *testing.T) {
	page := make([]byte, 64<<10)
	page = page[-uintptr(unsafe.Pointer(&page[0]))%aliasPage:]
	slow := copiesAlias()
	t.Logf("this processor's block copies alias: %v", slow)
	for _, c := range []struct {
		before, at int
		aliased    bool
	}{
		{0, 0, false},
		{1, 0, true},
		{8, 0, true},
		{24, 0, true},
		{31, 0, true},
		{32, 0, false},
		{8, 8, false},
		{8, 9, false},
		{0, 4096 - 8, true},
		{4096 + 8, 4096, true},
		{8, 64, false},
	} {
		if got := SlowCopy(c.before, page[c.at:]); got != (c.aliased && slow) {
			t.Errorf("%d bytes before, %d past a page: slow %v, aliased %v, processor %v", c.before, c.at, got, c.aliased, slow)
		}
	}
	if SlowCopy(8, nil) {
		t.Error("nothing is slow to copy")
	}
}
