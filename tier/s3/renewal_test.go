// SPDX-License-Identifier: Apache-2.0

package s3_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/s3"
	"github.com/kvasir-kv/kvasir/tier/s3/aws"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// A lookup with credentials that have just expired still finds the objects. The answer to a HEAD does not say that
// they expired, so the tier sends another request to learn it, renews them, and asks again.
func TestLookupRenewsCredentials(t *testing.T) {
	f := newFake(t)
	b, meta := tiertest.Object(1, 100)
	write(t, open(t, s3.Options{URL: f.url}), tiertest.Key(1), meta, b)
	x := open(t, s3.Options{URL: f.url, Keys: aws.Keep(&changing{})})
	f.misbehave(func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool {
		if !strings.Contains(r.Header.Get("Authorization"), "Credential=key1/") {
			return false
		}
		if r.Method == http.MethodHead {
			w.WriteHeader(http.StatusBadRequest)
			return true
		}
		return status(400, "ExpiredToken")(w, r, normal)
	})
	if got := stat(t, x, tiertest.Key(1)); got != meta {
		t.Errorf("%+v", got)
	}
}

// Also without the right to list, a lookup finds out that its credentials have expired, and does not take that for
// a missing object.
func TestLookupRenewsCredentialsWithoutList(t *testing.T) {
	f := newFake(t)
	b, meta := tiertest.Object(1, 100)
	write(t, open(t, s3.Options{URL: f.url}), tiertest.Key(1), meta, b)
	x := open(t, s3.Options{URL: f.url, Keys: aws.Keep(&changing{})})
	var ended atomic.Bool
	f.misbehave(func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool {
		code, name := 403, "AccessDenied"
		if ended.Load() && strings.Contains(r.Header.Get("Authorization"), "Credential=key1/") {
			code, name = 400, "ExpiredToken"
		} else if normal.Code != 404 {
			return false
		}
		if r.Method == http.MethodHead {
			w.WriteHeader(code)
			return true
		}
		return status(code, name)(w, r, normal)
	})
	if got := stat(t, x, tiertest.Key(2)); got != (tier.Meta{}) {
		t.Errorf("%+v", got)
	}
	ended.Store(true)
	if got := stat(t, x, tiertest.Key(1)); got != meta {
		t.Errorf("%+v", got)
	}
}
