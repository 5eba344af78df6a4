// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"errors"
	"testing"

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
}
