// SPDX-License-Identifier: Apache-2.0

package s3_test

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/s3"
	"github.com/kvasir-kv/kvasir/tier/s3/aws"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// uploading returns how many uploads have neither ended nor been given up.
func (f *fake) uploading() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.uploads)
}

// If two servers upload one object in parts at once, the object of the first one to finish stays, and nothing of the
// other.
func TestTwoUploads(t *testing.T) {
	f := newFake(t)
	o := s3.Options{URL: f.url, Upload: 5 << 20}
	a, z := open(t, o), open(t, o)
	first, firstMeta := tiertest.Object(1, 6<<20)
	second, secondMeta := tiertest.Object(2, 6<<20)
	var begun atomic.Bool
	f.misbehave(func(_ http.ResponseWriter, r *http.Request, _ *httptest.ResponseRecorder) bool {
		if strings.Contains(r.URL.RawQuery, "partNumber=1") && begun.CompareAndSwap(false, true) { // in the middle of a's
			write(t, z, tiertest.Key(1), secondMeta, second)
		}
		return false
	})
	write(t, a, tiertest.Key(1), firstMeta, first)
	dst := make([]byte, len(first))
	if m, err := a.Read(t.Context(), tiertest.Key(1), dst); err != nil || m != secondMeta || !bytes.Equal(dst, second) || f.uploading() != 0 {
		t.Errorf("%+v, %v, %d uploads are left", m, err, f.uploading())
	}
}

// An upload that ends in the middle leaves no parts, also if its caller does not wait any more.
func TestCancelledUploadLeavesNothing(t *testing.T) {
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url, Upload: 5 << 20})
	b, meta := tiertest.Object(1, 11<<20)
	ctx, cancel := context.WithCancel(t.Context())
	f.misbehave(func(_ http.ResponseWriter, r *http.Request, _ *httptest.ResponseRecorder) bool {
		if strings.Contains(r.URL.RawQuery, "partNumber=2") {
			cancel()
		}
		return false
	})
	if err := x.Write(ctx, tiertest.Key(1), meta, b); err == nil || len(f.names()) > 0 || f.uploading() != 0 {
		t.Errorf("%v, %q, %d uploads are left", err, f.names(), f.uploading())
	}
}

// If a server closes a connection while the next request is under way, the tier sends that request again over a new connection.
func TestConnectionClosedBeforeItsUse(t *testing.T) {
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url, Tries: 1})
	b, meta := tiertest.Object(1, 100)
	write(t, x, tiertest.Key(1), meta, b)
	for _, method := range []string{http.MethodHead, http.MethodGet, http.MethodPut, http.MethodDelete} {
		var closed atomic.Bool
		f.misbehave(func(w http.ResponseWriter, r *http.Request, _ *httptest.ResponseRecorder) bool {
			if r.Method != method || !closed.CompareAndSwap(false, true) {
				return false
			}
			_ = hijack(w).Close()
			return true
		})
		if m := stat(t, x, tiertest.Key(1)); m != meta {
			t.Errorf("%s: %+v", method, m)
		}
		if m, err := x.Read(t.Context(), tiertest.Key(1), make([]byte, 100)); err != nil || m != meta {
			t.Errorf("%s: %+v, %v", method, m, err)
		}
		write(t, x, tiertest.Key(2), meta, b)
		if err := x.Delete(t.Context(), keysOf(2)); err != nil || !closed.Load() {
			t.Errorf("%s: %v", method, err)
		}
	}
}

// A request that timed out is not sent again: a call to a silent store takes one timeout.
func TestSilentStoreCostsOneTimeout(t *testing.T) {
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url, Timeout: 300 * time.Millisecond})
	f.misbehave(func(_ http.ResponseWriter, r *http.Request, _ *httptest.ResponseRecorder) bool {
		<-r.Context().Done()
		return true
	})
	if _, err := x.Read(t.Context(), tiertest.Key(1), make([]byte, 100)); err == nil || requests(x, "GET") != 1 {
		t.Errorf("%d requests: %v", requests(x, "GET"), err)
	}
}

// If a store also refuses the renewed credentials, one call does not renew them again and
// again.
func TestRenewalIsTriedOnce(t *testing.T) {
	f := newFake(t)
	source := &changing{}
	x := open(t, s3.Options{URL: f.url, Keys: aws.Keep(source)})
	f.misbehave(status(400, "ExpiredToken"))
	if _, err := x.Read(t.Context(), tiertest.Key(1), make([]byte, 100)); err == nil || requests(x, "GET") != 2 || source.n != 2 {
		t.Errorf("%d requests with %d credentials: %v", requests(x, "GET"), source.n, err)
	}
}

func keysOf(seeds ...int) (all []kv.Key) {
	for _, s := range seeds {
		all = append(all, tiertest.Key(s))
	}
	return all
}

// Objects of two layouts of a model have the same name in LMCache's layout. Delete for one layout does not delete the other's object.
func TestDeleteSparesAnotherLayout(t *testing.T) {
	f := newFake(t)
	n := tier.NewNames()
	x := open(t, s3.Options{URL: f.url, Layout: s3.LMCache, Names: n})
	mine, other := tiertest.Key(1), tiertest.Key(1)
	other.Namespace[5]++
	n.Add(mine.Namespace, "m", nil)
	n.Add(other.Namespace, "m", nil)
	b, meta := tiertest.Object(1, 100)
	write(t, x, mine, meta, b)
	if err := x.Delete(t.Context(), []kv.Key{other}); err != nil || stat(t, x, mine) != meta {
		t.Errorf("%v: it is gone", err)
	}
	if err := x.Delete(t.Context(), []kv.Key{mine}); err != nil || len(f.names()) > 0 {
		t.Errorf("%v, %q are left", err, f.names())
	}
}
