// SPDX-License-Identifier: Apache-2.0

package server

import (
	"io"
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
)

// The readers of an early client's lookup: all ranks of the tensor parallelism where the newest worker of the model
// has a single plane, or where they outnumber the shards; one elsewhere, as before any worker of the model is known.
func TestReadersByTheNewestWorker(t *testing.T) {
	s := newBareServer(t, io.Discard)
	e := &engine{t, s}
	readers := func(model string, world int, tensorParallel int64) int {
		k := lmcache.KeyView{Model: []byte(model), WorldSize: world, Readers: lmcache.ReadersUnsaid}
		s.settleReaders(&scratch{conn: new(connection), chunk: s.own}, &k, tensorParallel)
		return k.Readers
	}
	check := func(model string, world int, tensorParallel int64, want int) {
		t.Helper()
		if got := readers(model, world, tensorParallel); got != want {
			t.Errorf("%s of %d shards, %d ranks: %d readers, want %d", model, world, tensorParallel, got, want)
		}
	}
	check("m", 2, 2, 1)
	check("m", 2, 4, 4)
	for id, model := range map[int64]string{1: "single", 2: "double"} {
		e.call(lmcache.OpRegisterEngineDriven, (&lmcache.EngineDriven{
			InstanceID: id, Model: model, WorldSize: 2, BlockSize: 4, Layers: 1, Hidden: 512, DType: "bfloat16", SinglePlane: id == 1, PhysicalSlots: 4,
		}).Append(nil))
	}
	check("single", 2, 2, 2)
	check("double", 2, 2, 1)
	check("double", 2, 4, 4)
}
