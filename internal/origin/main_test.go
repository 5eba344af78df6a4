package origin

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/goroutines"
)

func TestMain(m *testing.M) { goroutines.Main(m) }
