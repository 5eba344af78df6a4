// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"bytes"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// Secrets of files, old and new.
var oldSecret, newSecret, otherSecret = strings.Repeat("o", 32), strings.Repeat("n", 32), strings.Repeat("x", 40)

func secretFile(t testing.TB, lines ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secrets")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func peerSecrets(t testing.TB, stock string, lines ...string) *auth.PeerSecrets {
	t.Helper()
	var networks []netip.Prefix
	if stock != "" {
		networks = append(networks, netip.MustParsePrefix(stock))
	}
	s, err := auth.OpenPeerSecrets(secretFile(t, lines...), networks, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

const everyone = "127.0.0.0/8"

// Two ends transfer only where each has proved the secret that the other demands. Otherwise no byte and no descriptor passes.
func TestPeersProveTheirSecrets(t *testing.T) {
	old, fresh, both := func(stock string) *auth.PeerSecrets { return peerSecrets(t, stock, oldSecret) },
		func(stock string) *auth.PeerSecrets { return peerSecrets(t, stock, newSecret) },
		func(stock string) *auth.PeerSecrets { return peerSecrets(t, stock, newSecret, oldSecret) }
	none := func(string) *auth.PeerSecrets { return nil }
	f := func(what string, target, initiator *auth.PeerSecrets, want bool) {
		t.Helper()
		at, mem := listen(t, 8192, TargetOptions{Secrets: target})
		copy(mem[4096:], pattern(4096, 7))
		c := client(t, Options{Secrets: initiator})
		ctx := timeout(t, 30*time.Second)
		got := make([]byte, 4096)
		werr := c.Write(ctx, at.Name(), []Entry{{pattern(4096, 1), testBase}})
		rerr := c.Read(ctx, at.Name(), []Entry{{got, testBase + 4096}})
		d, derr := c.Describe(ctx, at.Name())
		at.Table().Observe()
		s := at.Stats()
		if !want {
			if werr == nil || rerr == nil || derr == nil || d != nil || s.Writes+s.Reads != 0 || bytes.ContainsFunc(mem[:4096], nonzero) || bytes.ContainsFunc(got, nonzero) {
				t.Errorf("%s: write %v, read %v, describe %v, %+v", what, werr, rerr, derr, s)
			}
			if initiator != nil && !errors.Is(werr, ErrUnproven) {
				t.Errorf("%s: %v does not say that nothing was proved", what, werr)
			}
			if demands := target.Demands(at.hs.Addr()); demands && (s.Unproven == 0 || target.Refused() != uint64(s.Unproven)) {
				t.Errorf("%s: %d refusals, %d of the secrets", what, s.Unproven, target.Refused())
			}
			return
		}
		if werr != nil || rerr != nil || derr != nil || !bytes.Equal(mem[:4096], pattern(4096, 1)) || !bytes.Equal(got, pattern(4096, 7)) || s.Unproven != 0 {
			t.Errorf("%s: write %v, read %v, describe %v, %+v", what, werr, rerr, derr, s)
		}
	}
	f("no secrets", nil, nil, true)
	f("one secret", old(""), old(""), true)
	f("old and new, initiator first", old(""), both(""), true)
	f("old and new, target first", both(""), old(""), true)
	f("the new one remains", both(""), fresh(""), true)
	f("stock initiator", old(everyone), none(""), true)
	f("stock target", none(""), old(everyone), true)
	f("both may be stock", old(everyone), old(everyone), true)
	f("initiator without a secret", old(""), none(""), false)
	f("initiator of elsewhere", old("10.0.0.0/8"), none(""), false)
	f("target without a secret", none(""), old(""), false)
	f("another secret", old(""), fresh(""), false)
	f("another secret, target also of stock peers", old(everyone), fresh(""), false)
	f("another secret, initiator also of stock peers", old(""), fresh(everyone), false)
}

// A C++ engine of before acknowledgements, and one of now, keep working in the stock networks, and are refused elsewhere.
func TestStockTargetsNeedTheirNetwork(t *testing.T) {
	for _, version := range []int{0, 2} {
		peer := fakeTarget(t, version, Range{testBase, 4096})
		peer.each(func(_ int, c *net.TCPConn) {
			b := make([]byte, headerBytes+16)
			if _, err := io.ReadFull(c, b); err == nil && version == 2 {
				c.Write(ackFrame)
				io.Copy(io.Discard, c)
			}
		})
		for stock, want := range map[string]error{everyone: nil, "10.0.0.0/8": ErrUnproven} {
			c := client(t, Options{Secrets: peerSecrets(t, stock, oldSecret)})
			if err := c.Write(timeout(t, 30*time.Second), peer.name, []Entry{{make([]byte, 16), testBase}}); !errors.Is(err, want) {
				t.Errorf("version %d, stock %s: %v", version, stock, err)
			}
		}
	}
}

// overheard returns the bytes that an honest initiator sent and received on a data connection.
func overheard(t *testing.T, target *Target, s *auth.PeerSecrets, name string) (sent, heard []byte, err error) {
	t.Helper()
	c := dialData(t, target)
	tap := &tapped{Conn: c}
	_, err = proveOn(tap, name, s)
	c.Close()
	return tap.sent, tap.heard, err
}

type tapped struct {
	net.Conn
	sent, heard []byte
}

func (c *tapped) Write(b []byte) (int, error) {
	c.sent = append(c.sent, b...)
	return c.Conn.Write(b)
}

func (c *tapped) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.heard = append(c.heard, b[:n]...)
	return n, err
}

// A proof holds for one connection. A recorded proof of the initiator opens neither a second connection nor another target. The target's
// answer opens none either, nor does a proof for another target name, which a process in the middle could record.
func TestProofsAreOfOneConnection(t *testing.T) {
	s := peerSecrets(t, "", oldSecret)
	first, _ := listen(t, 64, TargetOptions{Secrets: s})
	second, _ := listen(t, 64, TargetOptions{Secrets: s})
	sent, heard, err := overheard(t, first, s, first.Name())
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := overheard(t, second, s, first.Name()); !errors.Is(err, ErrUnproven) {
		t.Errorf("a proof for another name: %v", err)
	}
	request := header{8, testBase, opRead | opAcked}.appendTo(nil)
	f := func(what string, target *Target, play ...[]byte) {
		t.Helper()
		before := target.Stats()
		c := dialData(t, target)
		defer c.Close()
		for _, b := range play {
			c.Write(b)
		}
		c.Write(request)
		got, _ := io.ReadAll(c) // ends: the target closes
		if after := target.Stats(); after.Reads != before.Reads || after.Unproven != before.Unproven+1 || len(got) > 2*statusBytes+nonceBytes {
			t.Errorf("%s: %d bytes, %+v", what, len(got), after)
		}
	}
	hello, proof := sent[:headerBytes+nonceBytes], sent[headerBytes+nonceBytes:]
	theirs := heard[2*statusBytes+nonceBytes:]
	for _, target := range []*Target{first, second} {
		f("a connection that is sent again", target, sent)
		f("the target's own proof", target, hello, theirs)
		f("no hello", target, proof)
		f("no proof", target)
		f("a proof of zeroes", target, hello, make([]byte, auth.ProofBytes))
	}
	// A hello that the target made: the same nonces, reflected on a second connection.
	f("a reflected hello", first, header{nonceBytes, helloAddr, opHello}.appendTo(nil), heard[statusBytes:][:nonceBytes], proof)
}

// A connection that says nothing, or half of a proof, ends after the handshake timeout, and is counted. It holds no handshake:
// others are served meanwhile.
func TestHalfOpenProofsEnd(t *testing.T) {
	s := peerSecrets(t, "", oldSecret)
	target, _ := listen(t, 64, TargetOptions{Secrets: s, HandshakeTimeout: 100 * time.Millisecond, MaxHandshakes: 1})
	hello := append(header{nonceBytes, helloAddr, opHello}.appendTo(nil), newNonce()...)
	frame, err := appendFrame(nil, frameMetadata, proving{Hello: hex.EncodeToString(newNonce())})
	if err != nil {
		t.Fatal(err)
	}
	want := int64(0)
	for _, half := range [][]byte{nil, hello[:1], hello[:headerBytes], hello, append(bytes.Clone(hello), 1, 2, 3)} {
		c := dialData(t, target)
		c.Write(half)
		if _, err := io.Copy(io.Discard, c); err != nil && !broken(err) {
			t.Fatal(err)
		}
		c.Close()
		want++
	}
	half, err := net.Dial("tcp", target.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer half.Close()
	half.SetDeadline(time.Now().Add(60 * time.Second)) // a hang fails
	half.Write(frame)
	if _, err := io.Copy(io.Discard, half); err != nil && !broken(err) {
		t.Fatal(err)
	}
	want++
	testkit.Eventually(t, "all half-open connections are refused", func() bool { return target.Stats().Unproven == want })

	// A late machine may need more than that time for a whole proof.
	patient, _ := listen(t, 64, TargetOptions{Secrets: s, HandshakeTimeout: time.Minute, MaxHandshakes: 1})
	held, err := net.Dial("tcp", patient.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	held.Write(frame) // takes the one place, and never proves
	c := client(t, Options{Secrets: s, HandshakeTimeout: 30 * time.Second})
	if err := c.Read(timeout(t, 30*time.Second), patient.Name(), []Entry{{make([]byte, 8), testBase}}); err != nil {
		t.Fatal(err)
	}
	io.Copy(io.Discard, held)
	testkit.Eventually(t, "the connection that was held is refused", func() bool { return patient.Stats().Unproven == 1 })
}

// An open connection ends with the secret that opened it, on the side that removes it first.
func TestRemovedSecretsEndConnections(t *testing.T) {
	for _, where := range []string{"target", "initiator"} {
		path := secretFile(t, oldSecret, newSecret)
		watched, err := auth.OpenPeerSecrets(path, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		still := peerSecrets(t, "", oldSecret)
		of := map[string]*auth.PeerSecrets{"target": watched, "initiator": still}
		if where == "initiator" {
			of["target"], of["initiator"] = still, watched
		}
		target, _ := listen(t, 64, TargetOptions{Secrets: of["target"]})
		c := client(t, Options{Secrets: of["initiator"], Conns: 1})
		read := func() error {
			return c.Read(timeout(t, 30*time.Second), target.Name(), []Entry{{make([]byte, 8), testBase}})
		}
		if err := errors.Join(read(), read()); err != nil || c.Stats().Dials != 1 {
			t.Fatalf("%v after %d dials", err, c.Stats().Dials)
		}
		if err := os.WriteFile(path, []byte(newSecret+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := watched.Reload(); err != nil {
			t.Fatal(err)
		}
		if err := read(); !errors.Is(err, ErrUnproven) {
			t.Errorf("%s: the removed secret: %v", where, err)
		}
	}
}

// Refusals are one line of the log.
func TestRefusedPeersAreLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	s, err := auth.OpenPeerSecrets(secretFile(t, oldSecret), nil, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	target, _ := listen(t, 64, TargetOptions{Secrets: s})
	for range 5 {
		c := client(t, Options{})
		if err := c.Read(timeout(t, 30*time.Second), target.Name(), []Entry{{make([]byte, 8), testBase}}); err == nil {
			t.Fatal("a read without a proof")
		}
	}
	target.Close() // nothing writes to the log any more
	if n := strings.Count(log.String(), "level=WARN"); n != 1 || strings.Contains(log.String(), oldSecret) || s.Refused() != 5 {
		t.Errorf("%d warnings, %d refusals: %s", n, s.Refused(), log.String())
	}
}

// Any bytes without a secret, on either port, read and write nothing, and the connection ends.
func FuzzUnproven(f *testing.F) {
	s := peerSecrets(f, "", oldSecret)
	target, mem := listen(f, 256, TargetOptions{Secrets: s})
	copy(mem, pattern(256, 9))
	hello := append(header{nonceBytes, helloAddr, opHello}.appendTo(nil), newNonce()...)
	f.Add(hello, false)
	f.Add(append(hello, make([]byte, auth.ProofBytes+headerBytes)...), false)
	f.Add(header{16, testBase, opRead | opAcked}.appendTo(nil), false)
	f.Add(append(header{8, testBase, opWrite}.appendTo(nil), make([]byte, 8)...), false)
	for _, q := range []any{proving{Hello: strings.Repeat("ab", nonceBytes)}, proving{Hello: "zz"}, proving{Proof: "00"}, struct{}{}} {
		frame, err := appendFrame(nil, frameMetadata, q)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(frame, true)
		f.Add(append(frame, frame...), true)
	}
	f.Fuzz(func(t *testing.T, b []byte, handshake bool) {
		at, most := target.data.Addr().String(), 2*statusBytes+nonceBytes
		if handshake {
			at, most = target.Name(), 256
		}
		c, err := net.Dial("tcp", at)
		if err != nil {
			t.Skip("no connection to be had: ", err)
		}
		defer c.Close()
		c.(*net.TCPConn).SetLinger(0) // spares the fuzzer's ports
		c.SetDeadline(time.Now().Add(60 * time.Second))
		c.Write(b)
		c.(*net.TCPConn).CloseWrite()
		got, _ := io.ReadAll(c) // a reset is an end, too
		target.Table().Observe()
		if s := target.Stats(); len(got) > most || bytes.Contains(got, []byte("buffers")) || s.Writes+s.Reads > 0 || !bytes.Equal(mem, pattern(256, 9)) {
			t.Fatalf("%d bytes came back, %+v", len(got), s)
		}
	})
}

// An initiator sends nothing to a target that has no secret in common: one that makes a proof up, gives the initiator's own back, or says yes
// without one.
func TestTargetsProveTheirSecret(t *testing.T) {
	s := peerSecrets(t, "", oldSecret)
	for what, answer := range map[string]func(proof []byte) []byte{
		"made up":   func([]byte) []byte { return append(bytes.Clone(okFrame[:]), make([]byte, auth.ProofBytes)...) },
		"reflected": func(proof []byte) []byte { return append(bytes.Clone(okFrame[:]), proof...) },
		"other": func([]byte) []byte {
			return append(bytes.Clone(okFrame[:]), peerSecrets(t, "", otherSecret).Prove(roleTarget, nil)...)
		},
		"none":     func([]byte) []byte { return okFrame[:] },
		"nonsense": func([]byte) []byte { return make([]byte, statusBytes) },
	} {
		ours, theirs := net.Pipe()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			defer theirs.Close()
			hello, proof := make([]byte, headerBytes+nonceBytes), make([]byte, auth.ProofBytes)
			if _, err := io.ReadFull(theirs, hello); err != nil {
				return
			}
			theirs.Write(append(bytes.Clone(okFrame[:]), newNonce()...))
			if _, err := io.ReadFull(theirs, proof); err == nil {
				theirs.Write(answer(proof))
			}
		}()
		if _, err := proveOn(ours, "127.0.0.1:1", s); err == nil {
			t.Errorf("%s: the target is believed", what)
		}
		ours.Close()
		<-ended
	}
}
