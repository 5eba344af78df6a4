// SPDX-License-Identifier: Apache-2.0

package connector_test

import (
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/lmcache/connector"
)

// What cannot be used is refused before anything is started, all of it at once.
func TestValidate(t *testing.T) {
	f := func(err error, want int) {
		t.Helper()
		n := 0
		options.Each(err, func(*options.Error) { n++ })
		if n != want {
			t.Errorf("%d fields, want %d: %v", n, want, err)
		}
	}
	bad := lmcache.Parallel{World: -1}
	f(connector.WorkerOptions{Cache: &connector.Paged{}}.Validate(), 0)
	f(connector.WorkerOptions{Parallel: bad, ChunkTokens: -1, CallTimeout: -1, Heartbeat: -1, MaxQueue: -1, Concurrency: -1, MaxEvents: -1}.Validate(), 8)
	f(connector.ServerCacheOptions{ChunkTokens: 16, Heartbeat: time.Second}.Validate(), 0)
	f(connector.ServerCacheOptions{Parallel: bad, CallTimeout: -1, Heartbeat: -1, MaxLookups: -1, MaxNotices: -1}.Validate(), 6)
	if _, err := connector.NewServerCache(nil, connector.ServerCacheOptions{}); err == nil {
		t.Error("a cache without a chunk size was made")
	}
	if _, err := connector.OpenWorker(t.Context(), nil, connector.WorkerOptions{}); err == nil {
		t.Error("a worker without KV was opened")
	}
}
