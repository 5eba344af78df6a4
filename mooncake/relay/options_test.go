package relay

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit/optionstest"
)

func TestOptionsValidate(t *testing.T) {
	optionstest.CheckNumbers[Options](t)
}
