package zmtp

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit/optionstest"
)

func TestOptionsValidate(t *testing.T) {
	optionstest.CheckNumbers[RouterOptions](t)
	optionstest.CheckNumbers[DealerOptions](t)
	optionstest.CheckNumbers[PubOptions](t)
}
