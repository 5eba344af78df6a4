// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvasir-kv/kvasir/internal/shm"
)

// patience is how long goroutines that are left may take to end. goleak by itself waits for half a second, which may be too short on a
// busy machine.
const patience = 30 * time.Second

// raceChecks is how many cases a property test tries in a build with the race detector: a fifth of the usual number.
const raceChecks = 20

// Main runs the tests of m and exits; call it from TestMain. It fails if a goroutine or a mapping of shared memory is left at the end.
func Main(m *testing.M) { exit(m, patience) }

// left returns an error if shared-memory segments are still mapped.
func left() error {
	if n := shm.Mapped(); n != 0 {
		return fmt.Errorf("%d segments are still mapped", n)
	}
	return nil
}

func exit(m *testing.M, patience time.Duration) {
	if f := flag.Lookup("rapid.checks"); Race && f != nil { // number of cases of property tests; the command line can override it
		_ = f.Value.Set(strconv.Itoa(raceChecks))
	}
	code := m.Run()
	if code == 0 {
		err := errors.Join(goleak.Find(), left())
		for end := time.Now().Add(patience); err != nil && time.Now().Before(end); {
			err = errors.Join(goleak.Find(), left())
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}
