// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/store"
)

// Worker moves the blocks of one rank between the engine's memory and a store. Its methods are safe for concurrent use.
type Worker struct {
	s      *Scheduler
	rank   int
	client *store.Client
	dir    Directory

	loaded, loadedBytes, loadErrors, saved, savedBytes, existed, notReady, saveErrors atomic.Int64
}

// WorkerStats are counters since NewWorker.
type WorkerStats struct {
	Loaded      int64 `counter:"kvasir_store_connector_loaded_total" help:"Blocks loaded from Mooncake Store."`
	LoadedBytes int64 `counter:"kvasir_store_connector_loaded_bytes_total" help:"Bytes of them."`
	LoadErrors  int64 `counter:"kvasir_store_connector_load_errors_total" help:"Blocks that a lookup found and that could not be loaded."`
	Saved       int64 `counter:"kvasir_store_connector_saved_total" help:"Blocks put into Mooncake Store."`
	SavedBytes  int64 `counter:"kvasir_store_connector_saved_bytes_total" help:"Bytes of them."`
	Existed     int64 `counter:"kvasir_store_connector_existed_total" help:"Blocks to be put that were there already."`
	NotReady    int64 `counter:"kvasir_store_connector_not_ready_total" help:"Blocks to be put that exist and cannot be read: another client is putting them, or their node is silent."`
	SaveErrors  int64 `counter:"kvasir_store_connector_save_errors_total" help:"Blocks that could not be put."`
}

// NewWorker returns the Worker of one rank. client and dir must belong to the same store. The Worker closes neither.
func NewWorker(s *Scheduler, rank int, client *store.Client, dir Directory) *Worker {
	return &Worker{s: s, rank: rank, client: client, dir: dir}
}

// Stats returns the counters.
func (w *Worker) Stats() WorkerStats {
	return WorkerStats{
		Loaded: w.loaded.Load(), LoadedBytes: w.loadedBytes.Load(), LoadErrors: w.loadErrors.Load(),
		Saved: w.saved.Load(), SavedBytes: w.savedBytes.Load(), Existed: w.existed.Load(), NotReady: w.notReady.Load(), SaveErrors: w.saveErrors.Load(),
	}
}

// Load reads blocks into their memory; parts[i] are the pieces of memory of block i. errs[i] is nil if all of its bytes are there. Load
// writes nothing to the memory after it has returned.
func (w *Worker) Load(ctx context.Context, p *Prompt, blocks []Block, parts [][][]byte) (errs []error) {
	objects, errs := w.objects(p, blocks, parts)
	if len(blocks) == 0 {
		return errs
	}
	began := time.Now()
	got := w.client.Get(ctx, objects)
	w.s.ops.moved(loadGet, began, got, bytes(objects))
	for i, err := range got {
		if errs[i] == nil {
			errs[i] = err
		}
		if errs[i] != nil {
			w.loadErrors.Add(1)
			continue
		}
		w.loaded.Add(1)
		w.loadedBytes.Add(int64(objects[i].Bytes()))
	}
	return errs
}

// Save puts the blocks that are not in the store yet. It does not write blocks again that are there. errs[i] wraps store.NotReady if
// block i exists but cannot be read now.
func (w *Worker) Save(ctx context.Context, p *Prompt, blocks []Block, parts [][][]byte) (errs []error) {
	objects, errs := w.objects(p, blocks, parts)
	if len(blocks) == 0 {
		return errs
	}
	keys := make([]string, len(objects))
	for i := range objects {
		keys[i] = objects[i].Key
	}
	began := time.Now()
	found, err := w.dir.Replicas(ctx, keys)
	w.s.ops.asked(saveExists, began, len(keys), err)
	if err != nil {
		w.saveErrors.Add(int64(len(blocks)))
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	var missing []store.Object
	var of []int
	for i := range objects {
		switch {
		case errs[i] != nil:
			w.saveErrors.Add(1)
		case w.s.readable(&found[i], blocks[i].Group):
			w.existed.Add(1)
		default:
			missing, of = append(missing, objects[i]), append(of, i)
		}
	}
	if len(missing) == 0 {
		return errs
	}
	began = time.Now()
	put := w.client.Put(ctx, missing)
	w.s.ops.moved(savePut, began, put, bytes(missing))
	for n, err := range put {
		errs[of[n]] = err
		switch {
		case errors.Is(err, store.NotReady):
			w.notReady.Add(1)
			continue
		case err != nil:
			w.saveErrors.Add(1)
			continue
		}
		w.saved.Add(1)
		w.savedBytes.Add(int64(missing[n].Bytes()))
	}
	return errs
}

// bytes returns the total length of objects.
func bytes(objects []store.Object) (n uint64) {
	for i := range objects {
		n += uint64(objects[i].Bytes())
	}
	return n
}

// objects returns the objects of blocks: their keys and their memory. A block without a digest gets an error in errs.
func (w *Worker) objects(p *Prompt, blocks []Block, parts [][][]byte) ([]store.Object, []error) {
	objects, errs := make([]store.Object, len(blocks)), make([]error, len(blocks))
	for i, b := range blocks {
		key, ok := w.s.Key(p, b, w.rank)
		if !ok {
			errs[i] = store.BadArgument
		}
		objects[i] = store.Object{Key: key, Parts: parts[i]}
	}
	return objects, errs
}
