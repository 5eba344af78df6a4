// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvasir-kv/kvasir/internal/shm"
)

// patience is how long what is left may take to end. goleak alone waits for half a second, which a busy machine may need
// for a goroutine that is about to end.
const patience = 30 * time.Second

// Main runs m and exits; call it from TestMain. It fails when a goroutine or a shared-memory mapping is left.
func Main(m *testing.M) { exit(m, patience) }

// left reports the shared-memory mappings that are still there.
func left() error {
	if n := shm.Mapped(); n != 0 {
		return fmt.Errorf("%d segments are still mapped", n)
	}
	return nil
}

func exit(m *testing.M, patience time.Duration) {
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
