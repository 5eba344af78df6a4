// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"strconv"
	"sync"

	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
)

// Boot is P's bootstrap server, as in SGLang 0.5.23. It is also the registry of the simulated P, so it names its own address as P's
// side channel.
type Boot struct {
	registry *bootstrap.Registry
	page     int
	ranks    int // number of ranks of P

	mu struct {
		sync.Mutex
		puts  int                        // ranks that have registered; they are only counted
		rooms map[string]json.RawMessage // data-parallel rank by room
	}
}

// NewBoot returns a bootstrap server that knows P once `ranks` ranks have registered. The caller must close the registry.
func NewBoot(registry *bootstrap.Registry, page, ranks int) *Boot {
	b := &Boot{registry: registry, page: page, ranks: ranks}
	b.mu.rooms = make(map[string]json.RawMessage)
	return b
}

// Register counts one rank, as a PUT request to the server does.
func (b *Boot) Register() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.mu.puts++
}

// Serve serves until ctx ends.
func (b *Boot) Serve(ctx context.Context, l net.Listener) error {
	web := httpserver.NewServer(b)
	defer context.AfterFunc(ctx, func() { _ = web.Close() })() // Serve returns its end
	return web.Serve(l)
}

// ServeHTTP implements http.Handler.
func (b *Boot) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	text := func(status int, s string) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(status)
		_, _ = w.Write([]byte(s)) // the client has gone
	}
	switch r.Method + " " + r.URL.Path {
	case "GET /health":
		text(200, "OK")
	case "PUT /route":
		b.Register()
		text(200, "OK")
	case "GET /route":
		b.route(w, r, text)
	case "POST /register_dp_rank":
		var in struct {
			Room json.Number     `json:"bootstrap_room"`
			Rank json.RawMessage `json:"dp_rank"`
		}
		if json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16)).Decode(&in) != nil {
			text(500, "500 Internal Server Error\n\nServer got itself in trouble")
			return
		}
		b.mu.Lock()
		b.mu.rooms[in.Room.String()] = in.Rank
		b.mu.Unlock()
		text(200, "OK")
	case "POST /query_dp_ranks":
		var in struct {
			Rooms []json.RawMessage `json:"bootstrap_rooms"`
		}
		if json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(&in) != nil || in.Rooms == nil {
			text(500, "500 Internal Server Error\n\nServer got itself in trouble")
			return
		}
		out := make(map[string]json.RawMessage)
		b.mu.Lock()
		for _, raw := range in.Rooms {
			room := string(raw)
			if s, err := strconv.Unquote(room); err == nil {
				room = s
			}
			if rank, ok := b.mu.rooms[room]; ok {
				out[room] = rank
			}
		}
		b.mu.Unlock()
		reply(w, 200, out)
	default:
		b.registry.ServeHTTP(w, r)
	}
}

func (b *Boot) route(w http.ResponseWriter, r *http.Request, text func(int, string)) {
	var ranks []int
	for _, name := range []string{"prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"} {
		n, err := strconv.Atoi(r.URL.Query().Get(name))
		if err != nil {
			text(400, "Missing inputs for bootstrap server.")
			return
		}
		ranks = append(ranks, n)
	}
	b.mu.Lock()
	puts := b.mu.puts
	b.mu.Unlock()
	switch {
	case ranks[0] == -1 && puts < b.ranks:
		text(503, "Prefill server not fully registered yet ("+strconv.Itoa(puts)+"/"+strconv.Itoa(b.ranks)+")")
	case ranks[0] == -1:
		reply(w, 200, map[string]any{
			"attn_tp_size": b.ranks, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": b.page, "kv_cache_dtype": "auto", "follow_bootstrap_room": true,
		})
	case ranks[0] != 0 || ranks[1] != 0 || ranks[2] >= b.ranks || ranks[3] != 0:
		text(404, "Bootstrap info not found")
	default:
		host, port, _ := net.SplitHostPort(r.Host) // as the client dialed it
		n, _ := strconv.Atoi(port)
		reply(w, 200, map[string]any{"rank_ip": host, "rank_port": n})
	}
}
