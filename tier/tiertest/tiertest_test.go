// SPDX-License-Identifier: Apache-2.0

package tiertest_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestMemory(t *testing.T) {
	tiertest.Run(t, func(*testing.T) tier.Tier { return tier.NewMemory(64 << 20) })
}

// A wrapper must do what a Tier must do, too.
func TestFlakyWithoutFaults(t *testing.T) {
	tiertest.Run(t, func(t *testing.T) tier.Tier {
		f, err := tiertest.NewFlaky(tier.NewMemory(64<<20), "read * slow 1ms")
		if err != nil {
			t.Fatal(err)
		}
		return f
	})
}

// Memory keeps as many bytes as it was made for, and drops the oldest objects first.
func TestMemoryIsBounded(t *testing.T) {
	m := tier.NewMemory(1000)
	for i := range 5 {
		b, meta := tiertest.Object(i, 300)
		if err := m.Write(t.Context(), tiertest.Key(i), meta, b); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 5 {
		_, err := m.Read(t.Context(), tiertest.Key(i), make([]byte, 300))
		if (err == nil) != (i >= 2) {
			t.Errorf("object %d: %v", i, err)
		}
	}
	b, meta := tiertest.Object(9, 1001)
	if err := m.Write(t.Context(), tiertest.Key(9), meta, b); err == nil {
		t.Error("an object larger than the whole was written")
	}
}
