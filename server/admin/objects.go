// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
)

// Limits of LMCache's routes. A request beyond one of them is refused.
const (
	pageSize, maxPageSize = 500, 5000 // objects of a page, if the request does not say how many; the most that it may ask for
	maxDelete             = 10_000    // keys in one request to delete objects
	maxDeleteBody         = 8 << 20   // bytes of its body
)

// objectKey is LMCache's name of an object (EncodedObjectKey of 0.5.6).
type objectKey struct {
	Chunk string  `json:"chunk_hash_hex"`
	Model string  `json:"model_name"`
	Rank  kv.Rank `json:"kv_rank"`
	Group uint32  `json:"object_group_id"`
	Salt  string  `json:"cache_salt"`
}

type objectEntry struct {
	Key   objectKey `json:"key"`
	Bytes int64     `json:"size_bytes"`
}

// handleObjects serves LMCache's GET and DELETE /cache/objects of the pool, with LMCache's bodies (lmcache 0.5.6, http_apis/cache_api.py).
// The tier is l1 if the request names none.
func handleObjects(mux *http.ServeMux, guard httpserver.Guard, s *server.Server, lists listBodies) {
	mux.Handle("GET /cache/objects", guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { listObjects(s, w, r) })))
	mux.Handle("DELETE /cache/objects", guard.Handler(lists.handler(func(w http.ResponseWriter, r *http.Request) { deleteObjects(s, w, r) })))
}

func badRequest(w http.ResponseWriter, format string, args ...any) {
	writeJSON(w, http.StatusBadRequest, map[string]string{"error": fmt.Sprintf(format, args...)})
}

// listObjects answers one page of objects. An object whose namespace is not known has an empty model.
func listObjects(s *server.Server, w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	if tier := q.Get("tier"); tier != "" && tier != "l1" {
		badRequest(w, "tier %.20q cannot be listed: the only tier that can is l1", tier)
		return
	}
	most, from := pageSize, 0
	var err error
	if text := q.Get("page_size"); text != "" {
		if most, err = strconv.Atoi(text); err != nil || most < 1 || most > maxPageSize {
			badRequest(w, "page_size is not a number from 1 to %d", maxPageSize)
			return
		}
	}
	if text := q.Get("page_token"); text != "" {
		if from, err = strconv.Atoi(text); err != nil || from < 0 {
			badRequest(w, "page_token is not one of an earlier answer")
			return
		}
	}
	limit, entries := auth.LimitOf(r), []objectEntry{}
	var found []store.Object
	more := true
	for more && len(entries) < most {
		found, from, more = s.Store().Objects(from, found[:0], most-len(entries))
		for _, o := range found {
			n, known := s.NameOf(o.Key.Namespace)
			if limit != nil && !(known && limit.Allows(n.Salt)) {
				continue
			}
			if of := q.Get("model_name"); of == "" || of == n.Model {
				entries = append(entries, objectEntry{objectKey{o.Key.Chunk.String(), n.Model, o.Key.Rank, o.Key.Group, n.Salt}, o.Bytes})
			}
		}
	}
	var next any
	if more {
		next = strconv.Itoa(from)
	}
	writeJSON(w, http.StatusOK, map[string]any{"adapter": "l1", "shared": false, "entries": entries, "next_page_token": next})
}

// deleteObjects drops the objects that a body names, in all layouts of their model. Objects that are pinned or in transfer are skipped,
// even with force, because a worker may be reading them.
func deleteObjects(s *server.Server, w http.ResponseWriter, r *http.Request) {
	var body struct {
		Keys  []objectKey
		Tier  string
		Force bool
	}
	body.Tier = string(server.ClearL1)
	err := readBody(w, r, maxDeleteBody, map[string]func(*json.Decoder) error{
		"keys": list(&body.Keys, maxDelete), "tier": value(&body.Tier), "force": value(&body.Force),
	})
	if err != nil {
		badRequest(w, "body is not {\"keys\": [{\"chunk_hash_hex\": …, \"model_name\": …, \"kv_rank\": …}], \"tier\": \"l1\"}: %v", err)
		return
	}
	of, err := server.ParseClearTier(body.Tier)
	if err != nil {
		badRequest(w, "%v", err)
		return
	}
	for _, k := range body.Keys {
		if !mayUse(w, r, k.Salt) {
			return
		}
	}
	var keys, below []kv.Key
	for i, k := range body.Keys {
		var h kv.Hash
		if b, err := hex.DecodeString(k.Chunk); err != nil || len(b) != len(h) {
			badRequest(w, "keys[%d]: chunk_hash_hex is not %d hexadecimal digits", i, 2*len(h))
			return
		} else {
			copy(h[:], b)
		}
		if of != server.ClearL1 {
			below = append(below, s.KeysBelow(k.Model, k.Salt, kv.Key{Chunk: h, Rank: k.Rank, Group: k.Group})...)
		}
		for _, o := range s.Store().OfChunk(h) {
			if n, ok := s.NameOf(o.Namespace); ok && n.Model == k.Model && n.Salt == k.Salt && o.Rank == k.Rank && o.Group == k.Group {
				keys = append(keys, o)
			}
		}
	}
	dropped, skipped, err := s.DeleteObjects(keys, below, of)
	if err != nil {
		writeJSON(w, http.StatusInternalServerError, map[string]any{"deleted": dropped, "skipped": skipped, "ok": false, "error": err.Error()})
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{"deleted": dropped, "skipped": skipped, "ok": true})
}
