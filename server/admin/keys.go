// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// maxKeyFile bounds a file with an API key in bytes. A longer one is an error.
const maxKeyFile = 4096

// ReadKeys returns the API keys of the HTTP interface from the same sources as LMCache 0.5.7: files of one line each, the file that
// LMCACHE_API_KEY_FILE names and the value of LMCACHE_API_KEY, or the older LMCACHE_HTTP_API_KEY_FILE and LMCACHE_HTTP_API_KEY. Each key
// that it returns is valid. If it returns none, requests need no key.
func ReadKeys(files []string, getenv func(string) string) (keys []string, err error) {
	value := func(names ...string) string {
		for _, n := range names {
			if v := strings.TrimSpace(getenv(n)); v != "" {
				return v
			}
		}
		return ""
	}
	if f := value("LMCACHE_API_KEY_FILE", "LMCACHE_HTTP_API_KEY_FILE"); f != "" {
		files = append(slices.Clone(files), f)
	}
	for _, f := range files {
		key, err := readKey(f)
		if err != nil {
			return nil, fmt.Errorf("API key file %s: %w", f, err)
		}
		keys = append(keys, key)
	}
	if k := value("LMCACHE_API_KEY", "LMCACHE_HTTP_API_KEY"); k != "" {
		keys = append(keys, k)
	}
	return keys, nil
}

func readKey(path string) (string, error) {
	b, err := auth.ReadSecret(path, maxKeyFile)
	if err != nil {
		return "", err
	}
	key := strings.TrimSpace(string(b))
	if key == "" || strings.ContainsAny(key, "\r\n") {
		return "", errors.New("it must have one line with a key")
	}
	return key, nil
}

// need returns the scope that a request needs. The page, which shows nothing by itself, and probes need none.
func need(r *http.Request) auth.Need {
	reads := r.Method == http.MethodGet || r.Method == http.MethodHead
	switch path := r.URL.Path; {
	case path == "/", path == "/healthcheck", path == "/healthz", path == "/readyz":
		return auth.NeedNothing
	case strings.HasPrefix(path, "/debug/"):
		return auth.NeedAdmin
	case reads, path == "/cache/checksums":
		return auth.NeedRead
	case path == "/cache/pins", path == "/cache/prefetches":
		return auth.NeedWrite
	}
	return auth.NeedAdmin
}

// newGate returns the gate in front of all routes. A request without a credential gets the answer of LMCache 0.5.7.
func newGate(o auth.Options) *auth.Gate {
	o.Need = need
	o.Refuse = func(w http.ResponseWriter, status int, text string) {
		if w.Header().Get("WWW-Authenticate") != "" {
			text = "Invalid or missing API key"
		}
		detail(w, status, text)
	}
	return auth.New(o)
}
