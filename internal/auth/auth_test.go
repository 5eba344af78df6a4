// SPDX-License-Identifier: Apache-2.0

package auth_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// token returns a new secret, and its line with a newline.
func token(t *testing.T, name string, scope auth.Scope, until time.Time) (secret, line string) {
	t.Helper()
	secret, line, err := auth.NewToken(name, scope, until)
	if err != nil {
		t.Fatal(err)
	}
	return secret, line + "\n"
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// A secret is found with its scope until its time is over. No other text is found, its hash included.
func TestTokens(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens")
	now := time.Unix(1_800_000_000, 0)
	a, lineA := token(t, "a", auth.Read, time.Time{})
	b, lineB := token(t, "b", auth.Admin, now.Add(time.Hour))
	write(t, path, "# who may\n\n"+lineA+lineB)
	tokens, err := auth.OpenTokens(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := tokens.Find(a, now); got == nil || got.Name != "a" || got.Scope != auth.Read {
		t.Errorf("%+v", got)
	}
	if got := tokens.Find(b, now.Add(time.Hour-1)); got == nil || got.Scope != auth.Admin {
		t.Errorf("%+v", got)
	}
	if tokens.Find(b, now.Add(time.Hour)) != nil {
		t.Error("a token is found after its end")
	}
	for _, no := range []string{"", a + "x", a[:len(a)-1], strings.Fields(lineA)[1], "a"} {
		if tokens.Find(no, now) != nil {
			t.Errorf("%q is a token", no)
		}
	}
}

// Files that cannot be used are refused by name: every kind of bad line, empty files, files for every user, FIFOs, files that are too long.
func TestBadFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens")
	f := func(want string) {
		t.Helper()
		if _, err := auth.OpenTokens(path); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	_, line := token(t, "a", auth.Read, time.Time{})
	f("no such file")
	for text, want := range map[string]string{
		"": "it is empty", "# nothing\n": "it has no entry", "a\n": "line 1: want NAME SHA256", "a 12 read\n": "64 digits",
		strings.Replace(line, "read", "root", 1): "is not read, write or admin", strings.TrimSpace(line) + " until=soon\n": "no date",
		strings.TrimSpace(line) + " x=1\n": "unknown", line + line: "line 2", strings.Repeat("#\n", 1<<19+1): "more than 1048576 bytes",
	} {
		write(t, path, text)
		f(want)
	}
	write(t, path, line)
	for _, mode := range []os.FileMode{0o644, 0o604, 0o602, 0o666} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		f("every user of this machine may read or write it")
	}
	for _, mode := range []os.FileMode{0o600, 0o640, 0o660, 0o400, 0o440} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		if _, err := auth.OpenTokens(path); err != nil {
			t.Errorf("mode %o: %v", mode, err)
		}
	}
	// The mode of a link's target counts, not the link's, which is 0777.
	target := path + ".target"
	if err := errors.Join(os.Rename(path, target), os.Symlink(target, path)); err != nil {
		t.Fatal(err)
	}
	if _, err := auth.OpenTokens(path); err != nil {
		t.Error(err)
	}
	if err := os.Chmod(target, 0o644); err != nil {
		t.Fatal(err)
	}
	f("mode 0644")
	if err := errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600)); err != nil {
		t.Fatal(err)
	}
	f("not a regular file")
}

// A file that changes is read again. While it is half written, empty, or open to every user, its former entries count.
func TestTokensAreReadAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens")
	a, lineA := token(t, "a", auth.Read, time.Time{})
	b, lineB := token(t, "b", auth.Read, time.Time{})
	c, lineC := token(t, "c", auth.Read, time.Time{})
	synctest.Test(t, func(t *testing.T) {
		write(t, path, lineA+lineB)
		tokens, err := auth.OpenTokens(path)
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { tokens.Watch(ctx, slog.New(slog.DiscardHandler)) })
		step := func(wait time.Duration, want string) {
			t.Helper()
			time.Sleep(wait)
			synctest.Wait()
			got := ""
			for name, secret := range map[string]string{"a": a, "b": b, "c": c} {
				if tokens.Find(secret, time.Now()) != nil {
					got += name
				}
			}
			if len(got) != len(want) || strings.Trim(want, got) != "" {
				t.Errorf("tokens %q count, want %q", got, want)
			}
		}
		write(t, path, "")
		step(time.Minute, "ab")
		write(t, path, lineA)
		step(4*time.Second, "ab") // cut between lines
		write(t, path, lineA+lineB+strings.TrimSpace(lineC))
		step(time.Minute, "ab") // the last line does not end
		write(t, path, lineA+lineB+lineC)
		step(5*time.Second, "abc")
		write(t, path, lineC)
		if err := os.Chmod(path, 0o644); err != nil {
			t.Fatal(err)
		}
		step(time.Minute, "abc")
		if err := os.Chmod(path, 0o600); err != nil {
			t.Fatal(err)
		}
		step(12*time.Second, "c") // a and b are revoked
		stop()
		wg.Wait()
	})
}

// The needs of the test's routes.
func need(r *http.Request) auth.Need {
	return map[string]auth.Need{"/read": auth.NeedRead, "/write": auth.NeedWrite, "/admin": auth.NeedAdmin, "/peer": auth.NeedPeer}[r.URL.Path]
}

// gateAnswers asks a gate for each route from an address, and returns the codes.
func gateAnswers(h http.Handler, from, secret string) (codes string) {
	for _, path := range []string{"/health", "/read", "/write", "/admin", "/peer"} {
		r := httptest.NewRequest(http.MethodGet, path, nil)
		r.RemoteAddr = from
		if secret != "" {
			r.Header.Set("Authorization", "bearer "+secret)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		codes += " " + map[int]string{200: "ok", 401: "401", 403: "403"}[w.Code]
		if w.Code != 200 && (strings.Contains(w.Body.String(), secret) && secret != "" || w.Header().Get("Connection") != "close") {
			codes += "?"
		}
	}
	return codes[1:]
}

// Scopes include the ones below. Addresses outside the networks get health alone, with every token. Peers need no token inside the networks.
func TestGate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens")
	secrets := map[string]string{"none": "", "wrong": "kv-wrong", "key": "lmcache"}
	lines := ""
	for _, s := range []auth.Scope{auth.Read, auth.Write, auth.Admin} {
		secret, line := token(t, s.String(), s, time.Time{})
		secrets[s.String()] = secret
		lines += line
	}
	var line string
	secrets["ended"], line = token(t, "ended", auth.Admin, time.Now().Add(-time.Second))
	write(t, path, lines+line)
	tokens, err := auth.OpenTokens(path)
	if err != nil {
		t.Fatal(err)
	}
	inside := auth.NewNetworks([]netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}, nil)
	ok := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	f := func(o auth.Options, from, who, want string) {
		t.Helper()
		o.Need = need
		if got := gateAnswers(auth.New(o).Handler(ok), from, secrets[who]); got != want {
			t.Errorf("from %s with %s: %s, want %s", from, who, got, want)
		}
	}
	only := auth.Options{Tokens: tokens}
	f(only, "192.0.2.1:1", "none", "ok 401 401 401 ok")
	f(only, "192.0.2.1:1", "wrong", "ok 401 401 401 ok")
	f(only, "192.0.2.1:1", "ended", "ok 401 401 401 ok")
	f(only, "192.0.2.1:1", "read", "ok ok 403 403 ok")
	f(only, "192.0.2.1:1", "write", "ok ok ok 403 ok")
	f(only, "192.0.2.1:1", "admin", "ok ok ok ok ok")
	f(auth.Options{Keys: []string{"other", "lmcache"}}, "192.0.2.1:1", "key", "ok ok ok ok ok")
	f(auth.Options{Keys: []string{"other", "lmcache"}}, "192.0.2.1:1", "wrong", "ok 401 401 401 ok")
	f(auth.Options{}, "192.0.2.1:1", "none", "ok ok ok ok ok")
	both := auth.Options{Tokens: tokens, Networks: inside}
	f(both, "192.0.2.1:1", "admin", "ok 401 401 401 401")
	f(both, "10.1.1.1:1", "none", "ok 401 401 401 ok")
	f(both, "[::ffff:10.1.1.1]:1", "read", "ok ok 403 403 ok")
	f(auth.Options{Networks: inside}, "[fd00::1%eth0]:1", "none", "ok ok ok ok ok")
	f(auth.Options{Networks: inside}, "[fe80::1%eth0]:1", "none", "ok 401 401 401 401")
}

// A refusal is counted by its reason.
func TestRefusalsAreCounted(t *testing.T) {
	g := auth.New(auth.Options{Keys: []string{"k"}, Need: need})
	h := g.Handler(http.NotFoundHandler())
	gateAnswers(h, "10.0.0.1:1", "")
	if got := g.Stats().Refused["credential"]; got != 3 {
		t.Errorf("%d refusals are counted, want 3", got)
	}
}

// Connections from other networks are closed before a byte is read, and counted; UNIX sockets have no network.
func TestNetworksListener(t *testing.T) {
	n := auth.NewNetworks([]netip.Prefix{netip.MustParsePrefix("127.0.0.1/32")}, nil)
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := n.Listener(inner)
	defer l.Close()
	accepted := make(chan net.Conn, 1)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				close(accepted)
				return
			}
			accepted <- c
		}
	}()
	dial := func(from string) net.Conn {
		t.Helper()
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		c, err := d.Dial("tcp", inner.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		return c
	}
	if n, err := dial("127.0.0.2").Read(make([]byte, 1)); n != 0 || err == nil || os.IsTimeout(err) {
		t.Errorf("an address outside reads %d bytes, %v", n, err)
	}
	dial("127.0.0.1")
	c := <-accepted
	if got := c.RemoteAddr().(*net.TCPAddr).IP.String(); got != "127.0.0.1" || n.Refused() != 1 {
		t.Errorf("%s is accepted, %d are refused", got, n.Refused())
	}
	_ = c.Close()
	socket, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	limited := n.Listener(socket)
	defer limited.Close()
	u, err := net.Dial("unix", socket.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	if c, err := limited.Accept(); err != nil {
		t.Error(err)
	} else {
		_ = c.Close()
	}
}

func TestParseNetwork(t *testing.T) {
	for text, want := range map[string]string{"10.1.2.3/8": "10.0.0.0/8", "10.1.2.3": "10.1.2.3/32", "::1": "::1/128", "fd00::/8": "fd00::/8"} {
		if got, err := auth.ParseNetwork(text); err != nil || got.String() != want {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
	for _, bad := range []string{"", "10.0.0.0/33", "node", "fe80::1%eth0", "10.0.0"} {
		if got, err := auth.ParseNetwork(bad); err == nil {
			t.Errorf("%q is %v", bad, got)
		}
	}
}

// With TLS a request needs a certificate for clients of an authority of the file, which is in time and not revoked.
func TestClientCertificates(t *testing.T) {
	dir := t.TempDir()
	ours, others := newAuthority(t, "ours"), newAuthority(t, "others")
	path := filepath.Join(dir, "ca.pem")
	write(t, path, ours.pem)
	a, err := auth.OpenAuthorities(path)
	if err != nil {
		t.Fatal(err)
	}
	server := ours.issue(t, certOf{server: true})
	s := httptest.NewUnstartedServer(auth.New(auth.Options{Authorities: a, Need: need}).Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
	s.TLS = auth.TLSConfig(func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &server, nil }, a)
	s.StartTLS()
	defer s.Close()
	now := time.Now()
	f := func(name, path string, want int, certs ...tls.Certificate) {
		t.Helper()
		client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{
			Certificates: certs, InsecureSkipVerify: true, // the server's certificate is not tested here
		}}}
		defer client.CloseIdleConnections()
		answer, err := client.Get(s.URL + path)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		defer answer.Body.Close()
		if answer.StatusCode != want {
			t.Errorf("%s: %d, want %d", name, answer.StatusCode, want)
		}
	}
	good := ours.issue(t, certOf{serial: 7})
	f("none", "/admin", 401)
	f("none, health", "/health", 200)
	f("good", "/admin", 200, good)
	// Clients leave out a certificate that no authority of the server's list signed: the Gate is asked itself below.
	f("of others", "/admin", 401, others.issue(t, certOf{}))
	f("ended", "/admin", 401, ours.issue(t, certOf{until: now.Add(-time.Minute)}))
	f("not yet", "/admin", 401, ours.issue(t, certOf{from: now.Add(time.Minute)}))
	f("for servers alone", "/admin", 401, ours.issue(t, certOf{server: true}))
	if err := a.Verify(leafOf(t, others.issue(t, certOf{})), now); err == nil {
		t.Error("a certificate of another authority is taken")
	}
}

// With entries for subjects, a certificate has the scope of its entry until the entry's end; others have the scope for the rest, or none.
// A token beside a certificate adds its scope. The name in the log is the entry's.
func TestScopesOfCertificates(t *testing.T) {
	dir := t.TempDir()
	ours := newAuthority(t, "ours")
	write(t, filepath.Join(dir, "ca.pem"), ours.pem)
	a, err := auth.OpenAuthorities(filepath.Join(dir, "ca.pem"))
	if err != nil {
		t.Fatal(err)
	}
	admin, line := token(t, "admin-token", auth.Admin, time.Time{})
	path := filepath.Join(dir, "tokens")
	write(t, path, line+"reader cert:CN=one read\nops cert:CN=ops,O=Example%20Ltd admin\nended cert:CN=ended admin until=2020-01-01\n")
	tokens, err := auth.OpenTokens(path)
	if err != nil || !tokens.HasSubjects() {
		t.Fatal(err)
	}
	one := leafOf(t, ours.issue(t, certOf{}))
	ops := leafOf(t, ours.issue(t, certOf{name: pkix.Name{CommonName: "ops", Organization: []string{"Example Ltd"}}}))
	ended := leafOf(t, ours.issue(t, certOf{name: pkix.Name{CommonName: "ended"}}))
	other := leafOf(t, ours.issue(t, certOf{name: pkix.Name{CommonName: "ops"}}))
	f := func(name string, unlisted auth.Scope, chain []*x509.Certificate, secret, want string) {
		t.Helper()
		h := auth.New(auth.Options{Tokens: tokens, Authorities: a, Certificates: tokens, Unlisted: unlisted, Need: need}).Handler(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		got := ""
		for _, path := range []string{"/read", "/write", "/admin"} {
			r := httptest.NewRequest(http.MethodGet, path, nil)
			r.TLS = &tls.ConnectionState{PeerCertificates: chain}
			if secret != "" {
				r.Header.Set("Authorization", "Bearer "+secret)
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			got += fmt.Sprint(" ", w.Code)
		}
		if got[1:] != want {
			t.Errorf("%s: %s, want %s", name, got[1:], want)
		}
	}
	f("an entry", 0, one, "", "200 403 403")
	f("an entry, more for others", auth.Admin, one, "", "200 403 403")
	f("a subject with a blank", 0, ops, "", "200 200 200")
	f("another subject of the same common name", 0, other, "", "401 401 401")
	f("its time is over", 0, ended, "", "401 401 401")
	f("no entry", auth.Write, other, "", "200 200 403")
	f("a token beside", 0, one, admin, "200 200 200")
	f("a wrong token beside", 0, one, "kv-x", "200 403 403")
	f("the line as a token", 0, nil, "cert:CN=one", "401 401 401")
	f("no certificate", auth.Admin, nil, "", "401 401 401")
	for _, bad := range []string{"a cert: read\n", "a cert:%zz read\n", "a cert:CN=x read\nb cert:CN=x admin\n"} {
		write(t, path, bad)
		if _, err := auth.OpenTokens(path); err == nil {
			t.Errorf("%q is taken", bad)
		}
	}
}

// A certificate that is remembered as good fails after its end, after a revocation, and after a change of the authorities; a list of
// revoked certificates that is signed by no authority of the file is refused.
func TestCertificatesThatCountNoMore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ca.pem")
	ours, others := newAuthority(t, "ours"), newAuthority(t, "others")
	first, second := leafOf(t, ours.issue(t, certOf{serial: 7, until: time.Now().Add(90 * time.Minute)})), leafOf(t, ours.issue(t, certOf{serial: 8}))
	write(t, path, ours.pem+others.revoke(t, 7))
	if _, err := auth.OpenAuthorities(path); err == nil || !strings.Contains(err.Error(), "signed by no authority") {
		t.Errorf("%v", err)
	}
	write(t, path, "")
	if _, err := auth.OpenAuthorities(path); err == nil {
		t.Error("an empty file has authorities")
	}
	write(t, path, ours.pem)
	a, err := auth.OpenAuthorities(path)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	if err := errors.Join(a.Verify(first, now), a.Verify(second, now), a.Verify(first, now.Add(time.Hour))); err != nil {
		t.Fatal(err)
	}
	for _, jump := range []time.Duration{2 * time.Hour, -48 * time.Hour} { // the clock jumps over an end of the certificate
		if a.Verify(first, now.Add(jump)) == nil {
			t.Errorf("%v from now the certificate counts", jump)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { a.Watch(ctx, slog.New(slog.DiscardHandler)) })
		change := func(text string, want1, want2 bool) {
			t.Helper()
			write(t, path, text)
			time.Sleep(20 * time.Second)
			synctest.Wait()
			if got1, got2 := a.Verify(first, now) == nil, a.Verify(second, now) == nil; got1 != want1 || got2 != want2 {
				t.Errorf("the certificates count: %v %v, want %v %v", got1, got2, want1, want2)
			}
		}
		change(ours.pem+ours.revoke(t, 7), false, true)
		change(ours.pem[:len(ours.pem)/2], false, true) // half written
		change(others.pem, false, false)
		change(others.pem+ours.pem, true, true)
		stop()
		wg.Wait()
	})
}

// Every user of the machine may read a file that lists whom to let in, but not every user may write it.
func TestPublicFilesThatEveryUserMayWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "clients")
	if err := os.WriteFile(path, []byte("ann\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for mode, refused := range map[os.FileMode]bool{0o600: false, 0o644: false, 0o664: false, 0o646: true, 0o602: true, 0o666: true} {
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		_, err := auth.OpenFile(auth.FileOptions{Path: path, MaxBytes: 100, Public: true, Parse: func([]byte) (auth.Change, error) {
			return auth.Change{Take: func() {}, Entries: 1}, nil
		}})
		if refused != (err != nil) || refused && !strings.Contains(err.Error(), "chmod o-w") {
			t.Errorf("mode %04o: %v", mode, err)
		}
	}
}
