// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/store"
	"github.com/kvasir-kv/kvasir/mooncake/store/connector"
	"github.com/kvasir-kv/kvasir/mooncake/store/storetest"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

// A block whose object a silent node has is not counted as saved, and the error names the cause.
func TestSaveOfAHiddenBlock(t *testing.T) {
	master := storetest.New(t)
	m, err := store.NewMaster(store.MasterOptions{Addresses: []string{master.Addr}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	te := transfer.New(transfer.Options{})
	defer te.Close()
	s := scheduler(t, connector.Options{Layout: layout(t, "full,bs=16"), Model: "m", ObjectBytes: []int64{5}})
	p, block := prompt(4), connector.Block{}
	key, _ := s.Key(p, block, 0)
	master.Set(func() {
		master.Lengths = true
		master.Objects[key] = &storetest.Object{Complete: true}
		master.Hidden = map[string]bool{key: true}
	})
	w := connector.NewWorker(s, 0, store.NewClient(m, te, store.ClientOptions{}), m)
	errs := w.Save(t.Context(), p, []connector.Block{block}, [][][]byte{{make([]byte, 5)}})
	if !errors.Is(errs[0], store.NotReady) {
		t.Error(errs)
	}
	if n := w.Stats(); n.NotReady != 1 || n.Saved+n.SaveErrors+n.Existed != 0 {
		t.Errorf("%+v", n)
	}
	n := s.Stats()
	asked, put := [2]string{"save_exists", "ok"}, [2]string{"save_put", "partial_failure"}
	if n.Calls[asked] != 1 || n.Keys[asked] != 1 || n.Failed[asked] != 0 {
		t.Errorf("save_exists: %d calls of %d keys, %d failed", n.Calls[asked], n.Keys[asked], n.Failed[asked])
	}
	if n.Calls[put] != 1 || n.Keys[put] != 1 || n.Failed[put] != 1 || n.Bytes[put] != 5 {
		t.Errorf("save_put: %d calls of %d keys and %d bytes, %d failed", n.Calls[put], n.Keys[put], n.Bytes[put], n.Failed[put])
	}
}

// Calls of the store are counted under the names, labels and bucket edges of vLLM 0.33.
func TestOperationMetrics(t *testing.T) {
	s := scheduler(t, connector.Options{Layout: layout(t, "full,bs=16"), Model: "m", Batch: 16})
	d := &directory{has: map[string]uint64{}, fails: 2}
	for i := range 40 {
		k, _ := s.Key(prompt(40), connector.Block{Index: i}, 0)
		d.has[k] = 5
	}
	if _, err := s.Lookup(t.Context(), d, prompt(40), 640); err == nil {
		t.Fatal("the second question was answered")
	}
	var text strings.Builder
	if err := metrics.Write(&text, s.Stats()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`vllm:mooncake_store_operation_total{operation="lookup_exists",status="ok"} 1`,
		`vllm:mooncake_store_operation_total{operation="lookup_exists",status="error"} 1`,
		`vllm:mooncake_store_operation_keys_total{operation="lookup_exists",status="ok"} 16`,
		`vllm:mooncake_store_operation_failed_keys_total{operation="lookup_exists",status="error"} 16`,
		`vllm:mooncake_store_operation_bytes_total{operation="load_get",status="ok"} 0`,
		`vllm:mooncake_store_operation_time_seconds_count{operation="lookup_exists",status="ok"} 1`,
	} {
		if !strings.Contains(text.String(), want+"\n") {
			t.Errorf("no %s", want)
		}
	}
	edges := []string{"0.001", "0.005", "0.01", "0.05", "0.1", "0.2", "0.3", "0.4", "0.5", "0.75", "1", "1.5", "2", "3", "4", "+Inf"}
	if got := testkit.Buckets(text.String(), `vllm:mooncake_store_operation_time_seconds_bucket{operation="save_put",status="ok",`); !slices.Equal(got, edges) {
		t.Errorf("bucket edges %q, want %q", got, edges)
	}
}
