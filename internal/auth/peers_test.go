// SPDX-License-Identifier: Apache-2.0

package auth_test

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

func openPeers(t *testing.T, stock string, lines ...string) *auth.PeerSecrets {
	t.Helper()
	path := filepath.Join(t.TempDir(), "peers")
	write(t, path, strings.Join(lines, "\n")+"\n")
	var networks []netip.Prefix
	if stock != "" {
		networks = append(networks, netip.MustParsePrefix(stock))
	}
	s, err := auth.OpenPeerSecrets(path, networks, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// A proof is valid only for its role, its session and a secret that both ends have. It counts until that secret is removed.
func TestPeerProofs(t *testing.T) {
	one, two, three := strings.Repeat("1", 32), strings.Repeat("2", 32), strings.Repeat("3", 32)
	a, b, c := openPeers(t, "", one, two), openPeers(t, "", "# old last", two, three), openPeers(t, "", three)
	session := []byte("session")
	f := func(by, of *auth.PeerSecrets, role, text string, want bool) {
		t.Helper()
		if _, ok := of.Verify("role", session, by.Prove(role, []byte(text))); ok != want {
			t.Errorf("%t, want %t", ok, want)
		}
	}
	f(a, b, "role", "session", true)
	f(b, a, "role", "session", true)
	f(b, c, "role", "session", true)
	f(a, c, "role", "session", false)
	f(a, b, "other", "session", false)
	f(a, b, "role", "session2", false)
	proof := a.Prove("role", session)
	for _, wrong := range [][]byte{nil, proof[:len(proof)-1], append(proof, 0), make([]byte, auth.ProofBytes)} {
		if _, ok := a.Verify("role", session, wrong); ok {
			t.Errorf("a proof of %d bytes", len(wrong))
		}
	}
	path := filepath.Join(t.TempDir(), "peers")
	write(t, path, one+"\n"+two+"\n")
	s, err := auth.OpenPeerSecrets(path, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	p, ok := s.Verify("role", session, b.Prove("role", session)) // by the second
	for _, step := range []struct {
		text string
		want bool
	}{{three + "\n" + two + "\n", true}, {three + "\n", false}} {
		write(t, path, step.text)
		if err := s.Reload(); err != nil {
			t.Fatal(err)
		}
		if !ok || s.Counts(&p) != step.want {
			t.Errorf("after %q: %t, want %t", step.text, !step.want, step.want)
		}
	}
}

// With secrets, a proof is demanded from all addresses outside the stock networks; without secrets from none.
func TestStockNetworks(t *testing.T) {
	s := openPeers(t, "10.0.0.0/8", strings.Repeat("s", 32))
	f := func(s *auth.PeerSecrets, ip string, want bool) {
		t.Helper()
		if got := s.Demands(&net.TCPAddr{IP: net.ParseIP(ip), Port: 1}); got != want {
			t.Errorf("%s: %t, want %t", ip, got, want)
		}
	}
	f(s, "10.1.2.3", false)
	f(s, "::ffff:10.1.2.3", false)
	f(s, "11.1.2.3", true)
	f(s, "::1", true)
	f(openPeers(t, "", strings.Repeat("s", 32)), "10.1.2.3", true)
	f(nil, "11.1.2.3", false)
}

// Files of peers' secrets follow the rules of files of secrets.
func TestFilesOfPeerSecrets(t *testing.T) {
	f := func(text string, mode os.FileMode, want string) {
		t.Helper()
		path := filepath.Join(t.TempDir(), "peers")
		write(t, path, text)
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		if _, err := auth.OpenPeerSecrets(path, nil, nil); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%q, %o: %v, want %q", text, mode, err, want)
		}
	}
	f("", 0o600, "empty")
	f("# nothing\n", 0o600, "no entry")
	f("short\n", 0o600, "fewer than 32")
	f(strings.Repeat(strings.Repeat("s", 32)+"\n", 5), 0o600, "more than 4")
	f(strings.Repeat("s", 32)+"\n", 0o604, "chmod o-rwx")
	if _, err := auth.OpenPeerSecrets(filepath.Join(t.TempDir(), "missing"), nil, nil); err == nil {
		t.Error("a missing file was opened")
	}
}
