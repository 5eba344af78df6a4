// SPDX-License-Identifier: Apache-2.0

package s3_test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/s3"
	"github.com/kvasir-kv/kvasir/tier/s3/aws"
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
		o.URL, o.Names, o.TLS, o.Prefix = url, tiertest.Names(), trust(t), fmt.Sprintf("%s-%d/%s", prefix, n, o.Prefix)
		x, err := s3.Open(o)
		if err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "the store answers", func() bool { return x.Stat(t.Context(), []kv.Key{tiertest.Key(1)}, make([]tier.Meta, 1)) == nil })
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
	for name, o := range map[string]s3.Options{"native": {}, "parts": {Part: 64 << 10}, "LMCache's": {Layout: s3.LMCache}} {
		t.Run("ends of lives, "+name, func(t *testing.T) {
			x := start(t, o)
			defer x.Close()
			tiertest.Mortal(t, x)
			tiertest.Ending(t, x)
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
		t.Run("keys", func(t *testing.T) { realKeys(t, url) })
	}
	if revoke := os.Getenv("KVASIR_S3_REVOKE"); revoke != "" { // it has accounts
		t.Run("accounts", func(t *testing.T) { realAccounts(t, url, revoke) })
		t.Run("conditions", func(t *testing.T) { realConditions(t, url) })
	}
}

// realAccounts uses a store with accounts (interop/s3 -gateway, which makes these): one that may do all, and two that may only read.
// The command revoke deletes one of them.
func realAccounts(t *testing.T, url, revoke string) {
	b, meta := tiertest.Object(7, 5000)
	prefix := fmt.Sprintf("accounts-%d/", time.Now().UnixNano())
	with := func(log *lines, c aws.Static) *s3.Tier {
		return open(t, s3.Options{URL: url, Prefix: prefix, TLS: trust(t), Keys: aws.Keep(c), Log: slog.New(slog.NewTextHandler(log, nil))})
	}
	write(t, with(new(lines), aws.Static{ID: "id", Secret: "secret"}), tiertest.Key(1), meta, b)
	refused := func(x *s3.Tier, log *lines) {
		t.Helper()
		for range 2 {
			if m, err := x.Read(t.Context(), tiertest.Key(1), make([]byte, len(b))); err == nil || m != (tier.Meta{}) {
				t.Errorf("a read: %+v, %v", m, err)
			}
			if err := x.Write(t.Context(), tiertest.Key(2), meta, b); err == nil {
				t.Error("it takes objects")
			}
			if err := x.Stat(t.Context(), []kv.Key{tiertest.Key(1)}, make([]tier.Meta, 1)); err == nil {
				t.Error("a miss that is none")
			}
		}
		if log.with("does not accept the credentials") != 1 || log.with("") != 1 {
			t.Errorf("%q", log.all)
		}
	}
	for _, c := range []aws.Static{{ID: "id", Secret: "another"}, {ID: "nobody", Secret: "secret"}} {
		var log lines
		refused(with(&log, c), &log)
	}

	var log lines
	reads := func(x *s3.Tier) {
		t.Helper()
		if m, err := x.Read(t.Context(), tiertest.Key(1), make([]byte, len(b))); err != nil || m != meta {
			t.Errorf("a read of an account that may: %+v, %v", m, err)
		}
	}
	x := with(&log, aws.Static{ID: "reader", Secret: "readers-secret"})
	for range 2 {
		reads(x)
		if err := x.Write(t.Context(), tiertest.Key(3), meta, b); !errors.Is(err, tier.ErrNotKept) {
			t.Errorf("a write of an account that may only read: %v", err)
		}
	}
	if log.with("refuses writes") != 1 || log.with("") != 1 {
		t.Errorf("%q", log.all)
	}

	var left lines
	leaver := with(&left, aws.Static{ID: "leaver", Secret: "readers-secret"})
	reads(leaver)
	if out, err := exec.Command("sh", "-c", revoke).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v, %s", revoke, err, out)
	}
	testkit.Eventually(t, "a deleted account is refused", func() bool {
		_, err := leaver.Read(t.Context(), tiertest.Key(1), make([]byte, len(b)))
		return err != nil
	})
	refused(leaver, &left)
	reads(x)
}

// realConditions lets two servers write different bytes under the same names at once. One of the two objects stays, whole, and both
// servers find it. The store knows If-None-Match, so it refuses the other one.
func realConditions(t *testing.T, url string) {
	var log lines
	prefix := fmt.Sprintf("conditions-%d/", time.Now().UnixNano())
	var both [2]*s3.Tier
	for i := range both {
		both[i] = open(t, s3.Options{URL: url, Prefix: prefix, TLS: trust(t), Keys: aws.Keep(aws.Static{ID: "id", Secret: "secret"}), Log: slog.New(slog.NewTextHandler(&log, nil))})
	}
	const n = 20
	for i := range n {
		var wg sync.WaitGroup
		var metas [2]tier.Meta
		for j, x := range both {
			wg.Go(func() {
				var b []byte
				b, metas[j] = tiertest.Object(100*j+i, 50_000)
				if err := x.Write(t.Context(), tiertest.Key(i), metas[j], b); err != nil && !errors.Is(err, tier.ErrNotKept) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		dst := make([]byte, 50_000)
		for _, x := range both {
			m, err := x.Read(t.Context(), tiertest.Key(i), dst)
			if err != nil || m != metas[0] && m != metas[1] || xxh3.Hash(dst) != m.Sum {
				t.Errorf("object %d: %+v, %v", i, m, err)
			}
		}
	}
	if sum := both[0].Space().Written + both[1].Space().Written; sum != n*50_000 || log.with("") != 0 {
		t.Errorf("%d bytes were taken, of %d; %q", sum, n*50_000, log.all)
	}
}

// trust returns the authorities of the file that AWS_CA_BUNDLE names; nil: those of the system.
func trust(t *testing.T) *tls.Config {
	t.Helper()
	ca := os.Getenv("AWS_CA_BUNDLE")
	if ca == "" {
		return nil
	}
	pem, err := os.ReadFile(ca)
	if err != nil {
		t.Fatal(err)
	}
	c := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	if !c.RootCAs.AppendCertsFromPEM(pem) {
		t.Fatalf("%s has no certificate", ca)
	}
	return c
}

// realKeys uses a store that verifies signatures (interop/s3 -verify, which knows these keys).
func realKeys(t *testing.T, url string) {
	b, meta := tiertest.Object(7, 5000)
	prefix := fmt.Sprintf("keys-%d/", time.Now().UnixNano())
	with := func(t *testing.T, log *lines, c aws.Static) *s3.Tier {
		return open(t, s3.Options{URL: url, Prefix: prefix, TLS: trust(t), Keys: aws.Keep(c), Log: slog.New(slog.NewTextHandler(log, nil))})
	}
	write(t, with(t, new(lines), aws.Static{ID: "id", Secret: "secret"}), tiertest.Key(1), meta, b)
	session := with(t, new(lines), aws.Static{ID: "session", Secret: "secret", Token: "token"})
	if stat(t, session, tiertest.Key(1)) != meta {
		t.Error("keys of a session do not see the object")
	}
	write(t, session, tiertest.Key(2), meta, b)

	for says, c := range map[string]aws.Static{
		"does not accept the credentials":         {ID: "id", Secret: "another"},
		"does not accept the credentials: look":   {ID: "nobody", Secret: "secret"},
		"InvalidToken":                            {ID: "session", Secret: "secret", Token: "another"},
		"have expired":                            {ID: "ended", Secret: "secret", Token: "token"},
		"clocks of this machine and of S3 differ": {ID: "skewed", Secret: "secret"},
	} {
		var log lines
		x := with(t, &log, c)
		for range 2 {
			if m, err := x.Read(t.Context(), tiertest.Key(1), make([]byte, len(b))); err == nil || m != (tier.Meta{}) {
				t.Errorf("%+v: %+v, %v", c, m, err)
			}
		}
		if log.with(says) != 1 || log.with("") != 1 {
			t.Errorf("%+v: %q", c, log.all)
		}
	}

	var log lines
	x := with(t, &log, aws.Static{ID: "readonly", Secret: "secret"})
	for range 2 {
		if err := x.Write(t.Context(), tiertest.Key(3), meta, b); !errors.Is(err, tier.ErrNotKept) {
			t.Errorf("a write with keys that may only read: %v", err)
		}
		if m, err := x.Read(t.Context(), tiertest.Key(1), make([]byte, len(b))); err != nil || m != meta {
			t.Errorf("a read with keys that may only read: %+v, %v", m, err)
		}
	}
	if log.with("refuses writes") != 1 || log.with("") != 1 {
		t.Errorf("%q", log.all)
	}
	if strings.HasPrefix(url, "https:") {
		var log lines
		x := open(t, s3.Options{URL: url, Prefix: prefix, TLS: &tls.Config{RootCAs: x509.NewCertPool()}, Keys: aws.Keep(aws.Static{ID: "id", Secret: "secret"}), Log: slog.New(slog.NewTextHandler(&log, nil))})
		if _, err := x.Read(t.Context(), tiertest.Key(1), make([]byte, len(b))); err == nil || log.with("certificate is not trusted") != 1 {
			t.Errorf("a store of an unknown authority: %v, %q", err, log.all)
		}
	}
}
