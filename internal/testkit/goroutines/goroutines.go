// Package goroutines ends a package's tests by checking that no goroutine is left. Only tests import it.
package goroutines

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// patience is how long what is left may take to end. goleak alone waits for half a second, which a busy machine may need
// for a goroutine that has been told to end.
const patience = 30 * time.Second

// Main runs m and exits; call it from TestMain.
func Main(m *testing.M) { Exit(m, func() error { return nil }) }

// Exit is Main that also waits until left answers nil.
func Exit(m *testing.M, left func() error) { exit(m, patience, left) }

func exit(m *testing.M, patience time.Duration, left func() error) {
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
