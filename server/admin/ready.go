// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// Limits of GET /readyz.
const (
	readyTimeout = 5 * time.Second // longest time for the answer of the server's own socket
	readyFor     = time.Second     // largest age of an answer that is used again
)

// readiness asks a server as an engine would, over the server's own socket. A process and its HTTP interface can be alive while no engine
// gets an answer.
type readiness struct {
	server *server.Server
	url    string // URL of the socket; empty: it is not asked
	as     lmcache.ClientOptions

	mu  sync.Mutex // the request that has it asks the socket; the others wait for its answer
	at  time.Time
	why string
}

// trouble returns why no hit can be served; empty: hits can be served.
func (r *readiness) trouble() string {
	if why := r.server.Unhealthy(); len(why) > 0 {
		return strings.Join(why, "; ")
	}
	if r.url == "" {
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.at) >= readyFor {
		r.why = r.ask()
		r.at = time.Now()
	}
	return r.why
}

func (r *readiness) ask() string {
	ctx, cancel := context.WithTimeout(context.Background(), readyTimeout)
	defer cancel()
	c, err := lmcache.OpenClient(r.url, r.as)
	if err != nil {
		return "its own socket cannot be asked: " + err.Error()
	}
	defer c.Close()
	if _, err := c.ChunkTokens(ctx); err != nil {
		return "its own socket does not answer within 5 s: " + err.Error()
	}
	held := make(chan struct{})
	go func() { // a goroutine that has the store's lock releases it within microseconds
		defer close(held)
		_ = r.server.Store().Stats()
	}()
	select {
	case <-held:
		return ""
	case <-ctx.Done():
		return "its store does not answer within 5 s"
	}
}

func (r *readiness) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	if why := r.trouble(); why != "" {
		writeJSON(w, http.StatusServiceUnavailable, map[string]string{"status": "not ready", "reason": why})
		return
	}
	writeJSON(w, http.StatusOK, map[string]string{"status": "ready"})
}
