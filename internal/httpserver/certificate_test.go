// SPDX-License-Identifier: Apache-2.0

package httpserver_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/httpserver"
)

// write writes a new certificate and its key.
func write(t *testing.T, serial int64, cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "x"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "EC PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// A replaced certificate is used without a restart. A certificate without its new key is not.
func TestAChangedCertificateIsUsed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		cert, key := filepath.Join(dir, "c.pem"), filepath.Join(dir, "k.pem")
		if _, err := httpserver.OpenCertificate(cert, key); err == nil {
			t.Error("no file is a certificate")
		}
		write(t, 1, cert, key)
		p, err := httpserver.OpenCertificate(cert, key)
		if err != nil {
			t.Fatal(err)
		}
		serial := func() int64 {
			t.Helper()
			c, err := p.Get(nil)
			if err != nil {
				t.Fatal(err)
			}
			return c.Leaf.SerialNumber.Int64()
		}
		write(t, 2, cert, filepath.Join(dir, "other"))
		time.Sleep(10 * time.Second)
		if serial() != 1 {
			t.Error("half of a change")
		}
		write(t, 3, cert, key)
		time.Sleep(10 * time.Second)
		if serial() != 3 {
			t.Error("the former certificate is used")
		}
	})
}

// If a link leads to another certificate, that one is used, also if all files have the same time.
func TestALinkedCertificateIsUsed(t *testing.T) {
	dir, day := t.TempDir(), time.Unix(1, 0)
	at := func(name string) string { return filepath.Join(dir, name) }
	for serial, name := range map[int64]string{1: "old", 2: "new"} {
		if err := os.Mkdir(at(name), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, serial, at(name+"/c"), at(name+"/k"))
		for _, file := range []string{"/c", "/k"} {
			if err := os.Chtimes(at(name+file), day, day); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := os.Symlink("old", at("now")); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		p, err := httpserver.OpenCertificate(at("now/c"), at("now/k"))
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(os.Symlink("new", at("next")), os.Rename(at("next"), at("now"))); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Second)
		c, err := p.Get(nil)
		if err != nil || c.Leaf.SerialNumber.Int64() != 2 {
			t.Errorf("the former certificate is used: %v", err)
		}
	})
}

// A key that every user of this machine may read is refused by name; the group may read it.
func TestPublicKeyFileIsRefused(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "c.pem"), filepath.Join(dir, "k.pem")
	write(t, 1, cert, key)
	for mode, ok := range map[os.FileMode]bool{0o640: true, 0o644: false} {
		if err := os.Chmod(key, mode); err != nil {
			t.Fatal(err)
		}
		if _, err := httpserver.OpenCertificate(cert, key); (err == nil) != ok || err != nil && !strings.Contains(err.Error(), key) {
			t.Errorf("mode %o: %v", mode, err)
		}
	}
}
