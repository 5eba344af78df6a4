package transfer

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit/optionstest"
)

func TestOptionsValidate(t *testing.T) {
	optionstest.CheckNumbers[Options](t)
	optionstest.CheckNumbers[TargetOptions](t)
}
