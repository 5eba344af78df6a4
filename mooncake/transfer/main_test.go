// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"context"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

const testBase = 0x7f00_0000_0000

// listen starts a target with one region of n bytes at testBase.
func listen(t testing.TB, n int, o TargetOptions) (*Target, []byte) {
	t.Helper()
	table := NewTable()
	mem := make([]byte, n)
	if _, err := table.Register(testBase, mem); err != nil {
		t.Fatal(err)
	}
	target, err := Listen(o, table)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { target.Close() })
	return target, mem
}

func client(t testing.TB, o Options) *Client {
	c := New(o)
	t.Cleanup(c.Close)
	return c
}

// pattern returns n bytes that depend on seed and position.
func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range min(n, 1<<16) {
		b[i] = byte(i>>8)*31 + byte(i)*7 + seed
	}
	for done := 1 << 16; done < n; done *= 2 { // it repeats then
		copy(b[done:], b[:done])
	}
	return b
}

func timeout(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}
