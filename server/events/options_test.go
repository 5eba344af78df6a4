package events

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit/optionstest"
)

func TestValidate(t *testing.T) {
	optionstest.CheckNumbers[Options](t)
	optionstest.CheckNumbers[PublisherOptions](t)
}
