package store_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit/optionstest"
	"github.com/kvasir-kv/kvasir/store"
)

// No number means "off" by being negative.
func TestValidate(t *testing.T) { optionstest.CheckNumbers[store.Options](t) }
