// SPDX-License-Identifier: Apache-2.0

package engine

import "github.com/kvasir-kv/kvasir/mooncake/store/connector"

// Spoil changes every byte of the KV memory between two steps.
func (e *Engine) Spoil() {
	_ = e.call(func() {
		for rank := range e.mem.TPSize {
			for _, layer := range e.mem.RankLayers(rank) {
				for i := range layer {
					layer[i] ^= 0x55
				}
			}
		}
	})
}

// StoreStats returns the figures of an engine's MooncakeStoreConnector: of its scheduler, and of its workers, added up.
func (e *Engine) StoreStats() (s StoreStats) {
	k := e.conns[0].(*storeConn)
	s.storeStats = k.stats()
	for _, w := range k.workers {
		n := w.Stats()
		s.Loaded += n.Loaded
		s.LoadedBytes += n.LoadedBytes
		s.LoadErrors += n.LoadErrors
		s.Saved += n.Saved
		s.SavedBytes += n.SavedBytes
		s.Existed += n.Existed
		s.SaveErrors += n.SaveErrors
	}
	return s
}

// StoreStats are the figures of a MooncakeStoreConnector.
type StoreStats struct {
	storeStats
	connector.WorkerStats
}

// HoldLoads occupies the load slot of each rank of an engine's MooncakeStoreConnector until release is called.
func (e *Engine) HoldLoads() (release func()) {
	k := e.conns[0].(*storeConn)
	for _, place := range k.loads {
		place <- struct{}{}
	}
	return func() {
		for _, place := range k.loads {
			<-place
		}
	}
}
