// Package leaks ends a package's tests by checking that no goroutine and no
// shared-memory mapping is left. Only tests import it.
package leaks

import (
	"fmt"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit/goroutines"
)

// Main runs m and exits; call it from TestMain.
func Main(m *testing.M) {
	goroutines.Exit(m, func() error {
		if n := shm.Mapped(); n != 0 {
			return fmt.Errorf("%d segments are still mapped", n)
		}
		return nil
	})
}
