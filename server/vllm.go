// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/server/lookup"
	"github.com/kvasir-kv/kvasir/server/offload"
)

// newOffload returns the server of the tier socket, for engines of vLLM whose tiered offloading has a Kvasir tier. It uses the same store,
// books and figures as the server for LMCache clients.
func (s *Server) newOffload() *offload.Server {
	return offload.New(s.store, offload.Options{
		Version: s.opts.Version, Dir: s.opts.ShmDir, Log: s.log, Revisions: s.opts.Revisions, Draining: s.draining.Load,
		Name: func(ns kv.Namespace, model, salt []byte, layout string) {
			s.store.NameTenant(ns, salt)
			if _, ok := s.names.Of(ns); !ok {
				s.names.AddLayout(ns, string(model), salt, layout)
				if s.opts.Publisher != nil {
					s.opts.Publisher.IntroduceModel(string(model))
				}
			}
		},
		Announce: func(model, salt []byte, group int, sh *object.Shard, hashes []kv.Hash) {
			if book := s.opts.Events; book != nil && book.Active() {
				book.AnnounceRows(model, salt, group, sh, hashes)
			}
		},
		HasUnannounced: func() bool { return s.opts.Events != nil && s.opts.Events.Active() && s.opts.Events.HasUnannounced() },
		Ended: func(o *lookup.Outcome) {
			if len(o.Salt) > 0 {
				s.n.salted.Add(1)
			}
			s.lookupEnded(o)
		},
		Loaded: func(model string, salt []byte, engine int64, rows int) {
			s.n.retrievesSubmitted.Add(false)
			s.n.retrievesFinished.Add(false)
			s.tally.Loaded(model, salt, engine, rows)
		},
	})
}

// ListenVLLM serves the tier socket at a path, for engines of vLLM with tiered offloading, until Shutdown or Close.
func (s *Server) ListenVLLM(ctx context.Context, path string) error {
	s.vllmTier = true
	return s.offload.Listen(ctx, path)
}

// Offload returns the server of the tier socket.
func (s *Server) Offload() *offload.Server { return s.offload }

// VLLMStatus is the state of engines of vLLM with a Kvasir tier.
type VLLMStatus struct {
	Engines []offload.Engine `json:"engines"` // connected engines
	Left    []offload.Region `json:"left"`    // regions in /dev/shm that engines left
}

// vllmStatus returns the part of the status about vLLM's tiered offloading; nil if no tier socket is served.
func (s *Server) vllmStatus() *VLLMStatus {
	if !s.vllmTier {
		return nil
	}
	return &VLLMStatus{s.offload.Engines(), s.offload.Left()}
}
