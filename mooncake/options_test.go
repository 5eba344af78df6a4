package mooncake

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit/optionstest"
)

func TestOptionsValidate(t *testing.T) {
	optionstest.CheckNumbers[SenderOptions](t)
	optionstest.CheckNumbers[ReceiverOptions](t)
}
