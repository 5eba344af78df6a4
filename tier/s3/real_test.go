package s3_test

import (
	"bytes"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/aws"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/s3"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// TestRealStore runs the conformance suite on a real store, whose bucket KVASIR_S3 names
// (http://HOST:PORT/BUCKET), with credentials from where Amazon's programs have them.
// make interop starts one.
func TestRealStore(t *testing.T) {
	url := os.Getenv("KVASIR_S3")
	if url == "" {
		t.Skip("KVASIR_S3 names no bucket")
	}
	prefix := fmt.Sprintf("test-%d", time.Now().UnixNano())
	n := 0
	start := func(t *testing.T, o s3.Options) *s3.Tier {
		n++ // each gets names of its own
		o.URL, o.Names, o.Prefix = url, tiertest.Names(), fmt.Sprintf("%s-%d/%s", prefix, n, o.Prefix)
		x, err := s3.Open(o)
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "the store answers", func() bool { return x.Stat(t.Context(), []kv.Key{tiertest.Key(1)}, make([]tier.Meta, 1)) == nil })
		return x
	}
	for name, o := range map[string]s3.Options{
		"native": {}, "parts": {Part: 64 << 10}, "LMCache's": {Layout: s3.LMCache}, "a prefix to be escaped": {Prefix: "a b+c@ü/"},
	} {
		t.Run(name, func(t *testing.T) {
			tiertest.Run(t, func(t *testing.T) tier.Tier {
				x := start(t, o)
				if o.Layout == s3.LMCache {
					return struct{ tier.Tier }{x} // it does not list
				}
				return x
			})
		})
	}
	t.Run("upload in parts", func(t *testing.T) {
		x := start(t, s3.Options{Upload: 5 << 20})
		defer x.Close()
		b, meta := tiertest.Object(1, 11<<20+5)
		write(t, x, tiertest.Key(1), meta, b)
		dst := make([]byte, len(b))
		if m, err := x.Read(t.Context(), tiertest.Key(1), dst); err != nil || m != meta || !bytes.Equal(dst, b) {
			t.Errorf("%+v, %v", m, err)
		}
	})
	t.Run("two writers", func(t *testing.T) {
		x := start(t, s3.Options{})
		defer x.Close()
		b, meta := tiertest.Object(1, 5000)
		ended := make(chan error)
		for range 8 {
			go func() { ended <- x.Write(t.Context(), tiertest.Key(1), meta, b) }()
		}
		for range 8 {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
		if stat(t, x, tiertest.Key(1)) != meta {
			t.Error("it is not there")
		}
	})
	if os.Getenv("KVASIR_S3_KEYS") != "" { // it compares signatures
		t.Run("wrong credentials", func(t *testing.T) {
			x := open(t, s3.Options{URL: url, Keys: aws.Keep(aws.Static{ID: os.Getenv("AWS_ACCESS_KEY_ID"), Secret: "another"})})
			if err := x.Stat(t.Context(), []kv.Key{tiertest.Key(1)}, make([]tier.Meta, 1)); err == nil {
				t.Error("they are accepted")
			}
		})
	}
}
