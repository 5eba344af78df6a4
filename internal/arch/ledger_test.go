// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
)

// ledger is the list of tests that failed once and passed when .ci/run ran them again.
const ledger = "docs/unsteady.md"

// unsteadyDays is a number of days: a test that fails twice within them must be mended.
const unsteadyDays = 31

var ledgerLine = regexp.MustCompile(`^- (\d{4}-\d{2}-\d{2}) ([\w./@-]+)( mended [0-9a-f]{7,40})?$`)

// A test that failed twice within unsteadyDays is mended before anything else lands.
func TestUnsteadyTestsAreMended(t *testing.T) {
	text, err := os.ReadFile("../../" + ledger)
	if err != nil {
		t.Fatal(err)
	}
	if _, list, ok := strings.Cut(string(text), "\n## List\n"); !ok {
		t.Fatalf("%s has no list", ledger)
	} else if err := checkLedger(list); err != nil {
		t.Errorf("%s: %v", ledger, err)
	}
}

func checkLedger(list string) error {
	type failures struct {
		last  time.Time
		twice bool
	}
	var before time.Time
	var errs []error
	tests := make(map[string]failures)
	for line := range strings.Lines(list) {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		m := ledgerLine.FindStringSubmatch(line)
		if m == nil {
			errs = append(errs, fmt.Errorf("%q is neither `- DATE TEST` nor `- DATE TEST mended COMMIT`", line))
			continue
		}
		day, err := time.Parse(time.DateOnly, m[1])
		if err != nil || day.Before(before) {
			errs = append(errs, fmt.Errorf("%q: the date is wrong, or before that of the line above", line))
			continue
		}
		before = day
		if m[3] != "" {
			delete(tests, m[2])
			continue
		}
		f, known := tests[m[2]]
		tests[m[2]] = failures{day, f.twice || known && day.Sub(f.last) <= unsteadyDays*24*time.Hour}
	}
	for name, f := range tests {
		if f.twice {
			errs = append(errs, fmt.Errorf("%s failed twice within %d days and is not mended", name, unsteadyDays))
		}
	}
	return errors.Join(errs...)
}

func TestLedgerFindsTestsThatFailedTwice(t *testing.T) {
	f := func(ok bool, lines ...string) {
		t.Helper()
		if err := checkLedger(strings.Join(lines, "\n")); (err == nil) != ok {
			t.Errorf("%q: %v", lines, err)
		}
	}
	f(true)
	f(true, "- 2026-01-01 a.TestX", "", "- 2026-01-02 b.TestX", "- 2026-02-02 a.TestX")
	f(false, "- 2026-01-01 a.TestX", "- 2026-02-01 a.TestX")
	f(false, "- 2026-01-01 a.TestX", "- 2026-01-01 a.TestX")
	f(true, "- 2026-01-01 a.TestX", "- 2026-01-20 a.TestX", "- 2026-01-21 a.TestX mended 0123abc")
	f(true, "- 2026-01-01 a.TestX", "- 2026-01-02 a.TestX mended 0123abc", "- 2026-01-20 a.TestX")
	f(false, "- 2026-01-01 a.TestX", "- 2026-01-20 a.TestX", "- 2026-01-21 b.TestX mended 0123abc")
	f(false, "- 2026-01-01 a.TestX", "- 2026-01-20 a.TestX", "- 2027-01-01 a.TestX")
	f(false, "- 2026-01-02 a.TestX", "- 2026-01-01 b.TestX")
	f(false, "- 2026-13-02 a.TestX")
	f(false, "- 2026-01-02 a.TestX mended", "- 2026-01-02 interop.kill9-engine")
	f(true, "- 2026-01-02 interop.cluster@0.3.7", "- 2026-01-03 interop.cluster@0.3.7 mended 0123abcdef")
}
