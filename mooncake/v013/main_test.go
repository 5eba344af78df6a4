package v013_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit/leaks"
)

func TestMain(m *testing.M) { leaks.Main(m) }
