// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/tenant"
)

// Limits and defaults of pins. A request beyond a limit is refused.
const (
	defaultPinLife              = time.Hour    // of a pin whose request names no time
	pinPage, maxPinPage         = 1000, 10_000 // pinned objects of a page, if the request does not say how many; the most that it may ask for
	maxPinTokens                = 1 << 20      // tokens of one prompt
	maxPinWorld                 = kv.MaxWorldSize
	maxPinLifeSeconds   float64 = float64(tenant.MaxPinLife / time.Second)
)

// pinRequest is the body of POST and DELETE /cache/pins: that of LMCache's coordinator (lmcache 0.5.6, PinRequest), with ttl_seconds in
// addition.
type pinRequest struct {
	Model  string
	World  int
	Tokens []uint32
	Salt   string
	Life   *float64
}

// pinResponse is the answer, which says how long the pins last.
type pinResponse struct {
	Requested int     `json:"requested"` // number of whole chunks of the tokens
	Affected  int     `json:"affected"`  // number of objects
	Status    string  `json:"status"`
	Life      float64 `json:"ttl_seconds,omitempty"`
	Error     string  `json:"error,omitempty"` // why Affected is not larger
}

// handlePins serves pins in the form of LMCache's coordinator. A pin of LMCache keeps the keys of a prompt in a shared tier. A pin here
// keeps the prompt's objects in the pool for a time.
func handlePins(mux *http.ServeMux, guard httpserver.Guard, s *server.Server, lists listBodies) {
	mux.Handle("POST /cache/pins", guard.Handler(lists.handler(func(w http.ResponseWriter, r *http.Request) { pinPrompt(s, w, r) })))
	mux.Handle("DELETE /cache/pins", guard.Handler(lists.handler(func(w http.ResponseWriter, r *http.Request) { unpinPrompt(s, w, r) })))
	mux.Handle("GET /cache/pins", guard.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { listPins(s, w, r) })))
}

// readPin reads a body. If the body cannot be used, it has answered the request and reports false.
func readPin(w http.ResponseWriter, r *http.Request) (p pinRequest, ok bool) {
	err := readBody(w, r, maxDeleteBody, map[string]func(*json.Decoder) error{
		"model_name": value(&p.Model), "world_size": value(&p.World), "token_ids": list(&p.Tokens, maxPinTokens), "cache_salt": value(&p.Salt), "ttl_seconds": value(&p.Life),
	})
	if err != nil {
		badRequest(w, "body is not {\"model_name\": …, \"world_size\": 1, \"token_ids\": [1, 2, …], \"cache_salt\": \"\", \"ttl_seconds\": 3600}: %v", err)
		return p, false
	}
	switch {
	case p.Model == "":
		badRequest(w, "model_name is missing")
	case p.World < 1 || p.World > maxPinWorld:
		badRequest(w, "world_size %d is not between 1 and %d", p.World, maxPinWorld)
	case p.Life != nil && !(*p.Life >= 1 && *p.Life <= maxPinLifeSeconds):
		badRequest(w, "ttl_seconds %g is not between 1 and %.0f", *p.Life, maxPinLifeSeconds)
	default:
		return p, mayUse(w, r, p.Salt)
	}
	return p, false
}

// eachChunk calls f with the resident objects of each whole chunk of the tokens, in all shards and groups, head first, until f reports
// false. It then continues with the next chunk size of the model. It returns how many chunks there are.
func (p *pinRequest) eachChunk(s *server.Server, f func(keys []kv.Key) bool) (chunks int) {
	for _, size := range s.ChunksOf(p.Model, p.World) {
		chunks += p.eachOf(s, kv.ChunkHashes(p.Tokens, size), f)
	}
	return chunks
}

// eachOf is eachChunk for the chunks of one chunk size, whose hashes are given. It returns their number.
func (p *pinRequest) eachOf(s *server.Server, hashes []kv.Hash, f func(keys []kv.Key) bool) int {
	var keys []kv.Key
	for _, h := range hashes {
		keys = keys[:0]
		for _, o := range s.Store().OfChunk(h) {
			if n, ok := s.NameOf(o.Namespace); ok && n.Model == p.Model && n.Salt == p.Salt && int(o.Rank>>24) == p.World {
				keys = append(keys, o)
			}
		}
		if !f(keys) {
			break
		}
	}
	return len(hashes)
}

// pinPrompt pins those chunks of a prompt that are in the pool, head first. A chunk is pinned in all its shards or not at all.
func pinPrompt(s *server.Server, w http.ResponseWriter, r *http.Request) {
	p, ok := readPin(w, r)
	if !ok {
		return
	}
	life := defaultPinLife
	if p.Life != nil {
		life = time.Duration(*p.Life * float64(time.Second))
	}
	out := pinResponse{Status: "pinned", Life: life.Seconds()}
	code := http.StatusOK
	out.Requested = p.eachChunk(s, func(keys []kv.Key) bool {
		n, err := s.Store().Pin(p.Salt, keys, life)
		if err == nil {
			out.Affected += n
			return true
		}
		code, out.Error = http.StatusConflict, err.Error()
		if errors.Is(err, tenant.ErrNoPins) {
			out.Error += fmt.Sprintf(": start the server with --pin-limit %s=SIZE, or PUT {\"pin_limit_bytes\": …} to /tenants/%s", SaltName(p.Salt), SaltName(p.Salt))
		}
		return false
	})
	writeJSON(w, code, out)
}

func unpinPrompt(s *server.Server, w http.ResponseWriter, r *http.Request) {
	p, ok := readPin(w, r)
	if !ok {
		return
	}
	out := pinResponse{Status: "unpinned"}
	out.Requested = p.eachChunk(s, func(keys []kv.Key) bool {
		out.Affected += s.Store().Unpin(keys)
		return true
	})
	writeJSON(w, http.StatusOK, out)
}

// pinEntry is one pinned object. LMCache counts the pins of a key; here a second pin only extends the time, so Count is always 1.
type pinEntry struct {
	Key   objectKey `json:"key"`
	Count int       `json:"pin_count"`
	Bytes int64     `json:"size_bytes"`
	Left  float64   `json:"seconds_left"`
}

// listPins answers one page of the pinned objects. ?cache_salt= and ?model_name= select some of them.
func listPins(s *server.Server, w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	number := func(name string, or, least, most int) (int, bool) {
		text := q.Get(name)
		if text == "" {
			return or, true
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < least || n > most {
			badRequest(w, "%s is not a number from %d to %d", name, least, most)
			return 0, false
		}
		return n, true
	}
	offset, ok := number("offset", 0, 0, tenant.MaxPins)
	if !ok {
		return
	}
	limit, ok := number("limit", pinPage, 1, maxPinPage)
	if !ok {
		return
	}
	may, total, pins := auth.LimitOf(r), 0, []pinEntry{}
	var found []store.PinnedObject
	for from := 0; ; {
		found, from = s.Store().Pins(from, found[:0])
		for _, o := range found {
			n, known := s.NameOf(o.Key.Namespace)
			if may != nil && !(known && may.Allows(n.Salt)) {
				continue
			}
			if salt, model := q.Get("cache_salt"), q.Get("model_name"); salt != "" && salt != n.Salt || model != "" && model != n.Model {
				continue
			}
			if total >= offset && len(pins) < limit {
				pins = append(pins, pinEntry{objectKey{o.Key.Chunk.String(), n.Model, o.Key.Rank, o.Key.Group, n.Salt}, 1, o.Bytes, o.Left.Seconds()})
			}
			total++
		}
		if from == 0 {
			break
		}
	}
	writeJSON(w, http.StatusOK, map[string]any{"total": total, "pins": pins})
}
