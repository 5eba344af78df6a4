// SPDX-License-Identifier: Apache-2.0

package auth_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

func saltSecrets(t *testing.T, path string, lines ...string) *auth.SaltSecrets {
	t.Helper()
	write(t, path, strings.Join(lines, "\n")+"\n")
	s, err := auth.OpenSaltSecrets(path)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// A salt is valid for its tenant alone. Forged, cut, extended, exchanged and hashed salts are valid for no tenant.
func TestSignedSalts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "salts")
	secret := strings.Repeat("s", 32)
	s := saltSecrets(t, path, "# of May", secret)
	for _, tenant := range []string{"a", "team-a", "team.a.b", strings.Repeat("ü", 42), strings.Repeat("x", auth.MaxTenant)} {
		salt, err := s.Sign(tenant)
		if err != nil || len(salt) > 128 {
			t.Fatal(salt, err)
		}
		if got, ok := s.Tenant([]byte(salt)); !ok || string(got) != tenant {
			t.Errorf("%q: %q, %t", salt, got, ok)
		}
	}
	for _, tenant := range []string{"", strings.Repeat("x", auth.MaxTenant+1)} {
		if salt, err := s.Sign(tenant); err == nil {
			t.Errorf("%q is signed: %s", tenant, salt)
		}
	}
	a, _ := s.Sign("team-a")
	hashed := sha256.Sum256([]byte(a + "\x00extra")) // SGLang's client sends it so
	other := saltSecrets(t, path+"2", strings.Repeat("o", 32))
	forged, _ := other.Sign("team-a")
	mac := a[len("team-a"):]
	for _, salt := range []string{
		"", ".", "team-a", "team-a.", mac, mac[1:], "team-b" + mac, "team-" + mac, "team-aa" + mac, a[:len(a)-1], a + "x", a + "=", "x" + a, strings.ToUpper(a), strings.Replace(a, ".", "-", 1),
		forged, hex.EncodeToString(hashed[:]), a + "." + a[len("team-a."):], strings.Repeat("x", auth.MaxTenant+1) + mac,
	} {
		if got, ok := s.Tenant([]byte(salt)); ok {
			t.Errorf("%q is of %q", salt, got)
		}
	}
}

// Two secrets are for a rotation: the first signs, both verify, until the old one is removed from the file.
func TestSecretsOfSaltsRotate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "salts")
	older, newer := strings.Repeat("o", 32), strings.Repeat("n", 40)
	synctest.Test(t, func(t *testing.T) {
		s := saltSecrets(t, path, older)
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { s.Watch(ctx, slog.New(slog.DiscardHandler)) })
		first, _ := s.Sign("a")
		valid := func(salt string, want bool) {
			t.Helper()
			if _, ok := s.Tenant([]byte(salt)); ok != want {
				t.Errorf("%s: %t, want %t", salt, ok, want)
			}
		}
		write(t, path, newer+"\n"+older+"\n")
		time.Sleep(time.Minute)
		synctest.Wait()
		second, _ := s.Sign("a")
		if first == second {
			t.Error("the new secret does not sign")
		}
		valid(first, true)
		valid(second, true)
		write(t, path, "")
		time.Sleep(time.Minute)
		synctest.Wait()
		valid(first, true)
		write(t, path, newer+"\n")
		time.Sleep(time.Minute)
		synctest.Wait()
		valid(first, false)
		valid(second, true)
		stop()
		wg.Wait()
	})
	for _, bad := range []string{"", "# none\n", "short\n", strings.Repeat(strings.Repeat("x", 32)+"\n", 5)} {
		write(t, path, bad)
		if _, err := auth.OpenSaltSecrets(path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%q is taken: %v", bad, err)
		}
	}
}
