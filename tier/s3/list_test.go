// SPDX-License-Identifier: Apache-2.0

package s3_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/s3"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// A list ends if the store returns the same page again.
func TestListThatLoops(t *testing.T) {
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url})
	f.misbehave(func(w http.ResponseWriter, r *http.Request, _ *httptest.ResponseRecorder) bool {
		if r.URL.Path != "/bucket/" {
			return false
		}
		next := "b"
		if r.URL.Query().Get("continuation-token") == "b" {
			next = "a"
		}
		fmt.Fprintf(w, "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>%s</NextContinuationToken></ListBucketResult>", next)
		return true
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := x.List(ctx, func(kv.Key, tier.Meta) bool { return true }); err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

// Objects of others whose names cannot be written in XML do not hide our objects.
func TestListPastOddNames(t *testing.T) {
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url})
	b, meta := tiertest.Object(1, 100)
	write(t, x, tiertest.Key(1), meta, b)
	f.set("kvasir/\x01odd %+&", stored{[]byte("theirs"), ""})
	f.misbehave(func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool {
		if r.URL.Path != "/bucket/" {
			return false
		}
		if r.URL.Query().Get("encoding-type") == "" { // as Amazon's S3 writes it
			_, _ = w.Write(bytes.ReplaceAll(normal.Body.Bytes(), []byte("\uFFFD"), []byte("&#x1;")))
			return true
		}
		text := strings.ReplaceAll(normal.Body.String(), "<ListBucketResult>", "<ListBucketResult><EncodingType>url</EncodingType>")
		text = strings.ReplaceAll(text, "\uFFFDodd %+&amp;", "%01odd+%25%2B%26")
		_, _ = w.Write([]byte(text))
		return true
	})
	var listed []kv.Key
	if err := x.List(t.Context(), func(k kv.Key, _ tier.Meta) bool { listed = append(listed, k); return true }); err != nil || len(listed) != 1 {
		t.Errorf("%v, %v", listed, err)
	}
}
