package p2p_test

import (
	"errors"
	"testing"

	"go.uber.org/goleak"

	"github.com/kvasir-kv/kvasir/p2p"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Two peers' tasks have ids of their own, each result is told once, and what nobody
// asks for is forgotten, the oldest first.
func TestTasks(t *testing.T) {
	var tasks p2p.Tasks
	begin := func(keys int) int64 {
		t.Helper()
		id, err := tasks.Lookup(keys)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	a, b := begin(3), begin(5)
	if a == b {
		t.Errorf("both are %d", a)
	}
	result := func(id int64, keys int, known bool) {
		t.Helper()
		if n, ok := tasks.Result(id); n != keys || ok != known {
			t.Errorf("task %d: %d, %v", id, n, ok)
		}
	}
	result(b, 5, true)
	result(b, 0, false)
	for range 1024 {
		begin(1)
	}
	result(a, 0, false)
	if _, err := tasks.Lookup(1<<16 + 1); !errors.Is(err, p2p.ErrKeys) {
		t.Errorf("too many keys: %v", err)
	}
}
