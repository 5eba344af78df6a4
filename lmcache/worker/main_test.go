package worker_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvasir-kv/kvasir/shm"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if n := shm.Mapped(); code == 0 && n != 0 {
		fmt.Fprintf(os.Stderr, "%d segments are still mapped\n", n)
		code = 1
	}
	os.Exit(code)
}
