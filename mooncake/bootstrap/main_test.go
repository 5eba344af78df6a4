package bootstrap

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit/goroutines"
)

func TestMain(m *testing.M) { goroutines.Main(m) }
