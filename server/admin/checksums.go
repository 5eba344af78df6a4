// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/server/lent"
	"github.com/kvasir-kv/kvasir/server/workers"
)

// Limits of POST /cache/checksums, which LMCache's server does not have: bytes of a body, and block ids in it. A request with more is
// refused.
const (
	maxChecksumBody   = 1 << 20
	maxChecksumBlocks = 1 << 16
)

// handleChecksums serves LMCache's POST /cache/checksums (0.5.6, http_apis/cache_api.py): digests of blocks of the KV that a CPU engine
// lends. It answers one request at a time, because a request may read much memory.
func handleChecksums(mux *http.ServeMux, guard httpserver.Guard, s *server.Server) {
	turn := make(chan struct{}, 1)
	mux.Handle("POST /cache/checksums", guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case turn <- struct{}{}:
			defer func() { <-turn }()
			checksums(s, w, r)
		case <-r.Context().Done():
		}
	})))
}

func checksums(s *server.Server, w http.ResponseWriter, r *http.Request) {
	var body struct {
		Blocks    []int
		PerChunk  int // blocks
		Instance  int64
		Layerwise bool
	}
	err := readBody(w, r, maxChecksumBody, map[string]func(*json.Decoder) error{
		"block_ids": list(&body.Blocks, maxChecksumBlocks), "chunk_size": value(&body.PerChunk), "instance_id": value(&body.Instance), "layerwise": value(&body.Layerwise),
	})
	if _, ok := errors.AsType[*tooManyError](err); ok {
		detail(w, http.StatusBadRequest, err.Error())
		return
	}
	if err != nil {
		detail(w, http.StatusUnprocessableEntity, `body is not {"instance_id": 1, "block_ids": [0, 1, …], "chunk_size": 16}: `+err.Error())
		return
	}
	var of *workers.Worker
	for _, in := range s.Registry().List() {
		if in.ID == body.Instance && in.Refused == "" && (of == nil || in.Lent != nil) {
			of = in
		}
	}
	switch {
	case of == nil:
		detail(w, http.StatusNotFound, fmt.Sprintf("instance_id %d is not registered: GET /status has the workers", body.Instance))
		return
	case of.Lent == nil:
		detail(w, http.StatusNotImplemented, "that worker copies KV itself (engine_driven): this server does not see its memory")
		return
	case len(body.Blocks) == 0:
		detail(w, http.StatusBadRequest, "block_ids has no block")
		return
	case body.PerChunk < 1:
		detail(w, http.StatusBadRequest, "chunk_size, a number of blocks, must be above 0")
		return
	}
	got, err := of.Lent.Checksums(r.Context(), body.Blocks, body.PerChunk, body.Layerwise)
	switch {
	case errors.Is(err, paged.ErrBlocks):
		detail(w, http.StatusBadRequest, err.Error())
		return
	case errors.Is(err, lent.ErrChecksums):
		detail(w, http.StatusNotImplemented, err.Error())
		return
	case err != nil: // the client is gone
		return
	}
	var digests any = got.Digests[0]
	if body.Layerwise {
		each := make(map[string][]string)
		for i, layer := range got.Layers {
			each[fmt.Sprintf("layer_%d", layer)] = got.Digests[i]
		}
		digests = each
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"status": "success", "chunk_size": body.PerChunk, "num_chunks": len(got.Digests[0]), "chunk_checksums": digests, "layerwise": body.Layerwise,
		"block_id_ranges": ranges(body.Blocks),
	})
}

// ranges writes ids in a shorter form, in the same order: three or more consecutive ids become [first, last].
func ranges(ids []int) []any {
	out := []any{}
	for i := 0; i < len(ids); {
		n := 1
		for i+n < len(ids) && ids[i+n] == ids[i]+n {
			n++
		}
		if n < 3 {
			for _, id := range ids[i : i+n] {
				out = append(out, id)
			}
		} else {
			out = append(out, [2]int{ids[i], ids[i+n-1]})
		}
		i += n
	}
	return out
}
