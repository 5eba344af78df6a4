// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"os"
	"regexp"
	"strconv"
	"testing"
	"unicode"
)

// resident returns how much of the program's file is mapped now, KiB.
func resident(t *testing.T) (n int64) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	n, ok := field(string(text), "RssFile:")
	if !ok {
		t.Fatalf("%s", text)
	}
	return n
}

// Pages that only the start needed are not resident any more, and the program goes on.
func TestGiveBack(t *testing.T) {
	parts := program()
	if len(parts) < 2 { // code and constants
		t.Fatalf("%v", parts)
	}
	everything := func() int {
		sum := 0
		for r := range rune(unicode.MaxRune) {
			if unicode.IsLetter(r) {
				sum++
			}
		}
		return sum + len(regexp.MustCompile(`(a|b)+\d{3}`).FindString("ab123")) + len(strconv.Itoa(sum))
	}
	want := everything()
	before := resident(t)
	GiveBack()
	after := resident(t)
	if after >= before {
		t.Errorf("%d KiB of the program are resident, %d before", after, before)
	}
	if got := everything(); got != want {
		t.Errorf("%d, before %d", got, want)
	}
}
