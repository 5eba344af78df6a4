// SPDX-License-Identifier: Apache-2.0

package verify

import (
	"context"
	"encoding/json"
	"net/http"
	"time"
)

// page is one page of the server's list of objects.
type page struct {
	Entries []struct {
		Key json.RawMessage `json:"key"`
	} `json:"entries"`
	Next *string `json:"next_page_token"`
}

// Limits of a removal.
const (
	maxPages  = 10_000 // pages of the list that are read; objects on further pages stay
	deletable = 5000   // objects that one request removes; further ones follow in the next request
)

// remove removes the objects under the run's own salts from the server, and returns how many there were. `from` says where: "l1" is the
// pool alone, "all" also the tiers.
func (r *run) remove(ctx context.Context, from string) (removed int, err error) {
	own := map[string]bool{}
	for _, t := range r.tenants {
		own[t] = true
		if salt, err := r.Sign(t); err == nil {
			own[salt] = true
		}
	}
	var keys []json.RawMessage
	token := ""
	for range maxPages {
		text, err := r.Server.Ask(ctx, http.MethodGet, "/cache/objects?page_size=5000"+token, nil)
		if err != nil {
			return 0, err
		}
		var p page
		if err := json.Unmarshal(text, &p); err != nil {
			return 0, err
		}
		for _, e := range p.Entries {
			var key struct {
				Salt string `json:"cache_salt"`
			}
			if json.Unmarshal(e.Key, &key) == nil && own[key.Salt] {
				keys = append(keys, e.Key)
			}
		}
		if p.Next == nil {
			break
		}
		token = "&page_token=" + *p.Next
	}
	for len(keys) > 0 {
		n := min(len(keys), deletable)
		text, err := r.Server.Ask(ctx, http.MethodDelete, "/cache/objects", map[string]any{"tier": from, "keys": keys[:n]})
		if err != nil {
			return removed, err
		}
		var done struct {
			Deleted int `json:"deleted"`
		}
		if err := json.Unmarshal(text, &done); err != nil {
			return removed, err
		}
		removed, keys = removed+done.Deleted, keys[n:]
	}
	return removed, nil
}

// cleanTime is how long it may take to remove what the run stored. After that the report says that it stays on the server.
const cleanTime = 30 * time.Second

// cleanUp removes what the run stored. If it cannot, it says so in the report.
func (r *run) cleanUp(ctx context.Context) {
	if r.Server == nil {
		r.report.Left = "the KV of the prompts stays until it is evicted: without --server it cannot be removed"
		return
	}
	ctx, cancel := context.WithTimeout(ctx, cleanTime)
	defer cancel()
	if _, err := r.remove(ctx, "all"); err != nil {
		r.report.Left = "the KV of the prompts stays until it is evicted: " + err.Error()
	}
}
