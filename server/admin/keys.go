// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

// maxKeyFile bounds a file with an API key, bytes.
const maxKeyFile = 4096

// ReadKeys returns the API keys of the HTTP interface as LMCache 0.5.7 finds them: files of one line each, the file that
// LMCACHE_API_KEY_FILE names and the value of LMCACHE_API_KEY, or the older LMCACHE_HTTP_API_KEY_FILE and
// LMCACHE_HTTP_API_KEY. All of them count. None means that no key is asked for.
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

// openPaths are answered without a key: the page, which shows nothing by itself, and probes.
var openPaths = []string{"/", "/healthcheck", "/healthz", "/readyz"}

// withKeys asks for one of keys, as a bearer token or in X-LMCache-API-Key, but for openPaths.
func withKeys(keys []string, h http.Handler) http.Handler {
	if len(keys) == 0 {
		return h
	}
	sums := make([][sha256.Size]byte, len(keys))
	for i, k := range keys {
		sums[i] = sha256.Sum256([]byte(k))
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		given := r.Header.Get("X-LMCache-API-Key")
		if scheme, token, ok := strings.Cut(r.Header.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "bearer") {
			given = strings.TrimSpace(token)
		}
		sum, fits := sha256.Sum256([]byte(given)), 0
		for i := range sums {
			fits |= subtle.ConstantTimeCompare(sum[:], sums[i][:])
		}
		if fits == 0 && !slices.Contains(openPaths, r.URL.Path) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			detail(w, http.StatusUnauthorized, "Invalid or missing API key")
			return
		}
		h.ServeHTTP(w, r)
	})
}
