package virtual_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/leaks"
)

func TestMain(m *testing.M) { leaks.Main(m) }
