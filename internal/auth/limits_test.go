// SPDX-License-Identifier: Apache-2.0

package auth_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

func plainName(name string) string { return name }

func openLimits(t *testing.T, lines ...string) (*auth.TenantLimits, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tenants")
	write(t, path, strings.Join(lines, "\n")+"\n")
	l, err := auth.OpenTenantLimits(path, plainName)
	if err != nil {
		t.Fatal(err)
	}
	return l, path
}

// A client may use only the tenants that all its lines allow. Without a line it may use all, unless its kind has a line for the others.
func TestTenantLimits(t *testing.T) {
	l, path := openLimits(t, "# comment", "", "listener zmq:5556 team-a team-b", "key router team-a", "key * -", "user 7 *", "cert CN=ops,O=Example%20Ltd team%20c", "user * team-b")
	f := func(salt string, want bool, of ...auth.Subject) {
		t.Helper()
		if got := l.For(of...).Allows(salt); got != want {
			t.Errorf("%v, %q: %t", of, salt, got)
		}
	}
	at, router := auth.Subject{Kind: "listener", Name: "zmq:5556"}, auth.Subject{Kind: "key", Name: "router"}
	f("team-a", true, at)
	f("team-b", true, at)
	f("team-c", false, at)
	f("", false, at)
	f("team-a", true, at, router)
	f("team-b", false, at, router)
	f("team-a", false, at, auth.Subject{Kind: "key", Name: "other"})
	f("anything", true, auth.Subject{Kind: "listener", Name: "zmq"}, auth.UserSubject(7, true))
	f("team-a", false, auth.UserSubject(8, true))
	f("team-b", true, auth.UserSubject(8, true))
	f("team-a", false, auth.UserSubject(7, false)) // it is not known which user that is
	f("team c", true, auth.Subject{Kind: "cert", Name: "CN=ops,O=Example Ltd"})
	f("team", false, auth.Subject{Kind: "cert", Name: "CN=ops,O=Example Ltd"})
	f("x", true, auth.Subject{Kind: "token", Name: "t"})
	f("x", true)
	if l.For(auth.UserSubject(7, true)).Limited() || !l.For(at).Limited() || (*auth.TenantLimits)(nil).For(at).Limited() || !(*auth.TenantLimits)(nil).For(at).Allows("x") {
		t.Error("who is limited")
	}
	open := l.For(router)
	write(t, path, "key router team-z\n")
	if err := l.Reload(); err != nil || open.Allows("team-a") || !open.Allows("team-z") {
		t.Errorf("an open connection does not follow the file: %v", err)
	}
	for _, bad := range []string{"", "# nothing\n", "key router\n", "keys router a\n", "listener * a\n", "user no-such-user-here a\n", "key a -\nkey a b\n", "key a - b\n", "key % a\n", "key a %zz\n"} {
		write(t, path, bad)
		if err := l.Reload(); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if !open.Allows("team-z") || open.Allows("team-a") {
		t.Error("a file that cannot be read changes what counts")
	}
	write(t, path, "key a b\n")
	if err := os.Chmod(path, 0o646); err != nil {
		t.Fatal(err)
	}
	if err := l.Reload(); err == nil || !strings.Contains(err.Error(), "every user of this machine may write it") {
		t.Errorf("a file that every user may write: %v", err)
	}
}

// No text of a file turns a limit to some tenants into one that allows all.
func FuzzTenantLimits(f *testing.F) {
	f.Add("listener zmq a b\nuser * -\nkey router *\n")
	f.Add("cert CN=a,O=b%20c _default\ntoken t %2A")
	f.Add("user 1 a\nuser 01 b")
	path := filepath.Join(f.TempDir(), "tenants")
	if err := os.WriteFile(path, []byte("key a b\n"), 0o600); err != nil {
		f.Fatal(err)
	}
	l, err := auth.OpenTenantLimits(path, plainName)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if l.Reload() != nil {
			return
		}
		for line := range strings.Lines(text) {
			words := strings.Fields(line)
			if len(words) < 3 || strings.HasPrefix(words[0], "#") || strings.Contains(line, "%") || words[0] == "user" && words[1] != "*" {
				continue
			}
			name := words[1]
			if name == "*" {
				name = "\x00nobody"
			}
			of := l.For(auth.Subject{Kind: words[0], Name: name})
			all := false
			for _, w := range words[2:] {
				all = all || w == "*"
				if w != "*" && w != "-" && !of.Allows(w) {
					t.Fatalf("%q: %q is not allowed", line, w)
				}
			}
			if of.Limited() == all || of.Allows("\x00none") != all {
				t.Fatalf("%q: limited %t, all %t", line, of.Limited(), all)
			}
		}
	})
}
