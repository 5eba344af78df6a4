// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// ParseKey reads the keys of RFC 26's and libzmq's examples, and refuses texts of other lengths or letters.
func TestKeysAreZ85(t *testing.T) {
	const public, secret = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID", "D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"
	k, err := ParseKey(secret)
	if err != nil || k.Z85() != secret {
		t.Fatalf("%v", err)
	}
	if got := k.Public().Z85(); got != public {
		t.Errorf("the public key is %s, want %s", got, public)
	}
	for _, text := range []string{"", public[:39], public + "0", strings.Repeat("#", 40), strings.Replace(public, "Y", "~", 1)} {
		if _, err := ParseKey(text); !errors.Is(err, errKey) {
			t.Errorf("%q is read as a key: %v", text, err)
		}
	}
}

// A key file has the secret key alone, or is a certificate (of Kvasir or pyzmq) with the public key before the secret one.
func TestKeyFileHasTheSecretKey(t *testing.T) {
	secret := NewKey()
	path := filepath.Join(t.TempDir(), "key")
	f := func(text string, right bool) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := ReadKeyFile(path); (err == nil) != right || right && got != secret || !right && strings.Contains(err.Error(), secret.Z85()) {
			t.Errorf("%q: %v", text, err)
		}
	}
	public := fmt.Sprintf("    public-key = %q\n", secret.Public().Z85())
	f(secret.Z85(), true)
	f(secret.Z85()+"\n", true)
	f(FormatKeyFile(secret), true)
	f("#   ****  Generated on 2026-11-27 by pyzmq  ****\n# a = b\n\nmetadata\n    user = \"ann\"\ncurve\n"+public+fmt.Sprintf("    secret-key = %q\n", secret.Z85()), true)
	f("curve\n"+public, false)
	f("", false)
}

// A side of PLAIN accepts each command only in its step, and WELCOME only without data. Otherwise the connection ends.
func TestPlainTakesCommandsInTheirSteps(t *testing.T) {
	type command struct{ name, data string }
	hello := command{"HELLO", "\x03ann\x06secret"}
	f := func(client, right bool, commands ...command) {
		t.Helper()
		m := &plain{check: func(u, p string) bool { return u == "ann" && p == "secret" }}
		if client {
			m = &plain{account: &PlainClient{"ann", "secret"}}
		}
		for i, c := range commands {
			last := i == len(commands)-1
			_, done, err := m.handle([]byte(c.name), []byte(c.data))
			if want := right || !last; (err == nil) != want || done != (right && last) || !want && !errors.Is(err, errProtocol) {
				t.Errorf("client %v, %v, command %d: done %v, %v", client, commands, i, done, err)
			}
		}
	}
	f(false, true, hello, command{"INITIATE", ""})
	f(false, true, hello, command{"INITIATE", "properties"})
	f(true, true, command{"WELCOME", ""}, command{"READY", ""})
	f(true, true, command{"WELCOME", ""}, command{"READY", "properties"})
	f(true, false, command{"WELCOME", "data"})
	for _, name := range []string{"OTHER", "READY", "INITIATE", "ERROR", "WELCOME"} {
		for _, data := range []string{"", "data"} {
			f(false, false, command{name, data})
			if name != "WELCOME" {
				f(true, false, command{name, data})
			}
			if name != "INITIATE" {
				f(false, false, hello, command{name, data})
			}
			if name != "READY" {
				f(true, false, command{"WELCOME", ""}, command{name, data})
			}
		}
	}
	f(false, false, hello, hello)
}

// keyring is a server that lets named clients in.
type keyring struct {
	server CurveServer
	public Key // the server's
	ann    Key // secret of a client on the list
}

func newKeyring() keyring {
	r := keyring{ann: NewKey()}
	r.server = CurveServer{Secret: NewKey(), Client: func(public Key) (string, bool) { return "ann", public == r.ann.Public() }}
	r.public = r.server.Secret.Public()
	return r
}

// Frames of all sizes pass both ways under each mechanism, and the server knows who the client is.
func TestSecureEcho(t *testing.T) {
	r := newKeyring()
	f := func(name string, ro RouterOptions, do DealerOptions) {
		t.Run(name, func(t *testing.T) {
			var who atomic.Value
			router, addr, _ := startRouter(t, func(p *Peer, m Message) {
				who.Store(p.Client() + " " + p.identity())
				echo(p, m)
			}, ro)
			do.Identity = []byte("id-1")
			do.HeartbeatInterval, do.HeartbeatTimeout = 50*time.Millisecond, 20*time.Second
			d, in, _ := startDealer(t, "tcp://"+addr.String(), do)
			for _, m := range [][]string{{"a"}, {""}, {"", "b", ""}, {strings.Repeat("x", 255), strings.Repeat("y", 256)}, {"n", strings.Repeat("z", 5<<20), "m"}} {
				var b [][]byte
				for _, f := range m {
					b = append(b, []byte(f))
				}
				if err := d.Send(b...); err != nil {
					t.Fatal(err)
				}
				if got := recv(t, in); got != strings.Join(m, "|") {
					t.Fatalf("%d bytes came back as %d", len(strings.Join(m, "|")), len(got))
				}
			}
			for range 2000 { // as many as meet the writer's batches
				if err := d.Send([]byte("uid"), []byte("body")); err != nil {
					t.Fatal(err)
				}
			}
			for range 2000 {
				if got := recv(t, in); got != "uid|body" {
					t.Fatalf("%q", got)
				}
			}
			if err := d.Ping(t.Context()); err != nil {
				t.Error(err)
			}
			if got := who.Load(); got != "ann id-1" {
				t.Errorf("the client is %q", got)
			}
			if s := router.Stats(); s.Handshakes != 1 {
				t.Errorf("%+v", s)
			}
		})
	}
	f("curve", RouterOptions{Authentication: Authentication{Curve: &r.server}}, DealerOptions{Curve: &CurveClient{Secret: r.ann, Server: r.public}})
	f("plain", RouterOptions{Authentication: Authentication{Plain: func(u, p string) bool { return u == "ann" && p == "secret" }}}, DealerOptions{Plain: &PlainClient{"ann", "secret"}})
}

// A client without the right gets no connection, and the handler gets no message. Both ends report the reason.
func TestSecureRefusals(t *testing.T) {
	r := newKeyring()
	curve := RouterOptions{Authentication: Authentication{Curve: &r.server}}
	plain := RouterOptions{Authentication: Authentication{Plain: func(u, p string) bool { return u == "ann" && p == "secret" }}}
	f := func(name string, ro RouterOptions, do DealerOptions, server, client string) {
		t.Run(name, func(t *testing.T) {
			var handled atomic.Int64
			router, addr, _ := startRouter(t, func(*Peer, Message) { handled.Add(1) }, ro)
			d, _, states := startDealer(t, "tcp://"+addr.String(), do)
			_ = d.Send([]byte("a")) // waits for a connection
			err := recv(t, states)
			if got := Reason(err); got != client && got != "eof" {
				t.Errorf("the client's connection ended with %s (%v), want %s", got, err, client)
			}
			testkit.Eventually(t, "the server's reason", func() bool { return router.Stats().Closed[server] > 0 })
			if n := handled.Load(); n != 0 || router.Stats().Handshakes != 0 {
				t.Errorf("%d messages, %d handshakes", n, router.Stats().Handshakes)
			}
		})
	}
	f("another client", curve, DealerOptions{Curve: &CurveClient{Secret: NewKey(), Server: r.public}}, "auth", "auth")
	f("another server", curve, DealerOptions{Curve: &CurveClient{Secret: r.ann, Server: NewKey().Public()}}, "auth", "eof")
	f("no key", curve, DealerOptions{}, "mechanism", "mechanism")
	f("a key where none is wanted", RouterOptions{}, DealerOptions{Curve: &CurveClient{Secret: r.ann, Server: r.public}}, "mechanism", "mechanism")
	f("another password", plain, DealerOptions{Plain: &PlainClient{"ann", "Secret"}}, "auth", "auth")
	f("another user", plain, DealerOptions{Plain: &PlainClient{"bob", "secret"}}, "auth", "auth")
	f("no password", plain, DealerOptions{}, "mechanism", "mechanism")
	f("a key for a password", plain, DealerOptions{Curve: &CurveClient{Secret: r.ann, Server: r.public}}, "mechanism", "mechanism")
}

// Readers of a PUB prove their keys, and nobody else gets what is published.
func TestSecurePub(t *testing.T) {
	r := newKeyring()
	p, endpoint, changes := startPub(t, "tcp://127.0.0.1:*", PubOptions{Authentication: Authentication{Curve: &r.server}})
	in := make(chan string, 10)
	start := func(o DealerOptions) *Sub {
		o.Handler = func(m Message) { in <- string(bytes.Join(m, []byte("|"))) }
		s := NewSub(endpoint, o)
		t.Cleanup(func() { _ = s.Close() })
		if err := errors.Join(s.Subscribe("a"), s.Start()); err != nil {
			t.Fatal(err)
		}
		return s
	}
	stranger := start(DealerOptions{Curve: &CurveClient{Secret: NewKey(), Server: r.public}})
	start(DealerOptions{Curve: &CurveClient{Secret: r.ann, Server: r.public}})
	if got := next(t, changes); got != "+a" {
		t.Fatal(got)
	}
	testkit.Eventually(t, "the stranger was refused", func() bool { return p.Stats().Closed["auth"] > 0 })
	if n := p.Publish([]byte("a1"), bytes.Repeat([]byte("x"), 1<<20)); n != 1 {
		t.Errorf("%d subscribers took a message", n)
	}
	if got := next(t, in); got != "a1|"+strings.Repeat("x", 1<<20) {
		t.Errorf("%d bytes", len(got))
	}
	if s := stranger.Stats(); s.MessagesIn != 0 || s.Handshakes != 0 {
		t.Errorf("the stranger has %+v", s)
	}
}

// meddler forwards connections and changes the bytes that the client sends.
type meddler struct {
	l      net.Listener
	change func(conn, at int, b []byte) []byte // at: bytes before b
}

func (m *meddler) run(to string) {
	for n := 0; ; n++ {
		c, err := m.l.Accept()
		if err != nil {
			return
		}
		s, err := net.Dial("tcp", to)
		if err != nil {
			_ = c.Close()
			continue
		}
		go func() {
			defer s.Close()
			b := make([]byte, 4096)
			for at := 0; ; {
				k, err := c.Read(b)
				if k > 0 {
					if _, err := s.Write(m.change(n, at, bytes.Clone(b[:k]))); err != nil {
						return
					}
					at += k
				}
				if err != nil {
					return
				}
			}
		}()
		go func() {
			defer c.Close()
			_, _ = io.Copy(c, s)
		}()
	}
}

// No byte of a CURVE connection can be changed or repeated on the way: the connection ends, and nothing wrong is delivered.
// The plain text of the messages is nowhere in the bytes of the connection.
func TestCurveOnTheWay(t *testing.T) {
	r := newKeyring()
	got := make(chan string, 4096)
	router, addr, _ := startRouter(t, func(_ *Peer, m Message) { got <- string(bytes.Join(m, []byte("|"))) }, RouterOptions{Authentication: Authentication{Curve: &r.server}})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	const secret, greetings = "the prompt of ann", greetingBytes
	hello := 2 + 6 + 194
	var seen bytes.Buffer
	m := &meddler{l: l, change: func(conn, at int, b []byte) []byte {
		flip := func(where int) {
			if where >= at && where < at+len(b) {
				b[where-at] ^= 1
			}
		}
		switch {
		case conn == 0: // the public key of the connection
			flip(greetings + 8 + 74)
		case conn == 1: // the seal of HELLO
			flip(greetings + hello - 1)
		case conn == 2: // the cookie
			flip(greetings + hello + 2 + 9)
		case conn < 6: // the vouch, the properties, a message
			if at >= greetings+hello {
				b[len(b)/(conn-1)] ^= 1
			}
		case conn == 6: // everything after the handshake comes twice
			if at > greetings+hello+200 {
				b = append(b, b...)
			}
		default:
			_, _ = seen.Write(b)
		}
		return b
	}}
	go m.run(addr.String())
	d, _, states := startDealer(t, "tcp://"+l.Addr().String(), DealerOptions{Curve: &CurveClient{Secret: r.ann, Server: r.public}})
	for conn := range 7 {
		for up := false; ; { // a connection that reaches READY gets a message
			err := recv(t, states)
			if err == nil {
				up = true
				_ = d.Send([]byte("first"))
				continue
			}
			if conn < 5 && up {
				t.Errorf("connection %d was ready although its handshake was changed", conn)
			}
			break
		}
	}
	if err := recv(t, states); err != nil {
		t.Fatal(err)
	}
	if err := d.Send([]byte(secret)); err != nil {
		t.Fatal(err)
	}
	for text := recv(t, got); text != secret; text = recv(t, got) {
		if text != "first" {
			t.Fatalf("%q was delivered", text)
		}
	}
	if len(seen.Bytes()) < 200 || bytes.Contains(seen.Bytes(), []byte(secret)) {
		t.Errorf("%d bytes on the way, the message is among them: %v", seen.Len(), bytes.Contains(seen.Bytes(), []byte(secret)))
	}
	if s := router.Stats(); s.Closed["auth"]+s.Closed["protocol"] == 0 {
		t.Errorf("%v", s.Closed)
	}
}

// A sealed frame that only claims its length takes no memory, and one above the limit is refused by its header.
func TestSealedFramesAreBounded(t *testing.T) {
	c := &secureConn{mech: &curve{from: &CurveServer{}}, peer: &Peer{role: &role{}}, phase: traffic}
	c.peer.in.maxFrame = 1 << 20
	c.in = append(c.space()[:0], appendHeader(nil, 0, 1<<20)...)
	if more, err := c.step(); more || err != nil {
		t.Fatalf("%v, %v", more, err)
	}
	if n := c.held(); n > 2*firstBuffer {
		t.Errorf("a header takes %d bytes", n)
	}
	c.in = append(c.in[:0], appendHeader(nil, 0, 1<<20+sealedBytes+1)...)
	if _, err := c.step(); !errors.Is(err, errTooLarge) {
		t.Errorf("%v", err)
	}
	c.phase = wantReady
	c.in = append(c.in[:0], appendHeader(nil, flagCommand, maxCommandBytes+1)...)
	if _, err := c.step(); !errors.Is(err, errTooLarge) {
		t.Errorf("%v", err)
	}
}

// Whatever a peer sends, in whatever pieces, before and after the handshake: nothing panics.
func FuzzSecure(f *testing.F) {
	hello := (&curve{to: &CurveClient{Secret: NewKey(), Server: NewKey().Public()}}).begin()
	f.Add(true, true, append(appendGreetingOf(nil, mechanismCurve, false), hello...))
	f.Add(false, true, append(appendGreetingOf(nil, mechanismCurve, true), appendCommand(nil, "WELCOME", make([]byte, 160))...))
	f.Add(true, false, append(appendGreetingOf(nil, mechanismPlain, false), appendCommand(nil, "HELLO", []byte("\x01a\x01b"))...))
	f.Add(false, false, append(appendGreetingOf(nil, mechanismPlain, true), appendCommand(nil, "ERROR", []byte("\x03400"))...))
	f.Add(true, true, append(appendGreetingOf(nil, mechanismCurve, false), appendHeader(nil, 0, 40)...))
	f.Fuzz(func(t *testing.T, server, isCurve bool, b []byte) {
		var m mechanism
		switch {
		case server && isCurve:
			m = &curve{from: &CurveServer{Secret: NewKey(), Client: func(Key) (string, bool) { return "", true }}}
		case isCurve:
			m = &curve{to: &CurveClient{Secret: NewKey(), Server: NewKey().Public()}}
		case server:
			m = &plain{check: func(string, string) bool { return true }}
		default:
			m = &plain{account: &PlainClient{"a", "b"}}
		}
		for _, begun := range []phase{wantGreeting, traffic} {
			ours, theirs := net.Pipe()
			go func() {
				_, _ = io.Copy(io.Discard, theirs)
			}()
			c := &secureConn{Conn: ours, mech: m, peer: &Peer{role: &role{}}, phase: begun}
			c.peer.in.maxFrame = 1 << 16
			for rest := b; len(rest) > 0; {
				n := min(len(rest), 1+len(rest)/3)
				space := c.space()
				n = copy(space[:min(n, len(space))], rest)
				c.in, rest = c.in[:len(c.in)+n], rest[n:]
				for more := true; more; {
					var err error
					if more, err = c.step(); err != nil {
						more, rest = false, nil
					}
				}
			}
			_, _ = ours.Close(), theirs.Close()
		}
	})
}

// The commands of a CURVE handshake have the lengths that libzmq asks for.
func TestCurveCommandLengths(t *testing.T) {
	r := newKeyring()
	own := properties(typeDealer, nil)
	c, s := &curve{to: &CurveClient{Secret: r.ann, Server: r.public}, own: own}, &curve{from: &r.server, own: own}
	f := func(b []byte, name string, want int) []byte {
		t.Helper()
		_, body, n := ownFrame(b)
		got, data, err := splitCommand(body)
		if n != len(b) || err != nil || string(got) != name || len(body) != want {
			t.Fatalf("%s of %d bytes (%v), want %s of %d: %s", got, len(body), err, name, want, hex.EncodeToString(b))
		}
		return data
	}
	step := func(m *curve, name string, data []byte, finished bool) []byte {
		t.Helper()
		b, done, err := m.handle([]byte(name), data)
		if err != nil || done != finished {
			t.Fatalf("%s: %v, %v", name, done, err)
		}
		return b
	}
	hello := f(c.begin(), "HELLO", 200)
	welcome := f(step(s, "HELLO", hello, false), "WELCOME", 168)
	initiate := f(step(c, "WELCOME", welcome, false), "INITIATE", 113+128+16+len(own))
	ready := f(step(s, "INITIATE", initiate, true), "READY", 30+len(own))
	step(c, "READY", ready, true)
	if !bytes.Equal(c.peer, own) || !bytes.Equal(s.peer, own) || s.user != "ann" {
		t.Errorf("%q, %q, %q", c.peer, s.peer, s.user)
	}
}

// libzmq's sockets use CURVE and PLAIN with this package, as clients and as servers, in every scenario of the tests without them.
func TestSecurePyzmq(t *testing.T) {
	r := newKeyring()
	accounts := func(u, p string) bool { return u == "ann" && p == "secret" }
	curveClient := map[string]any{"curve_serverkey": r.public.Z85(), "curve_publickey": r.ann.Public().Z85(), "curve_secretkey": r.ann.Z85()}
	plainClient := map[string]any{"plain_username": "ann", "plain_password": "secret"}
	for name, c := range map[string]struct {
		security map[string]any
		o        RouterOptions
	}{"curve": {curveClient, RouterOptions{Authentication: Authentication{Curve: &r.server}}}, "plain": {plainClient, RouterOptions{Authentication: Authentication{Plain: accounts}}}} {
		for _, scenario := range []string{"frames", "identity", "req", "pipeline", "heartbeat"} {
			t.Run(name+"/"+scenario, func(t *testing.T) {
				router, addr, _ := startRouter(t, echoWho, c.o)
				startSecurePython(t, c.security, scenario, "tcp://"+addr.String()).end()
				testkit.Eventually(t, "the peers are gone", func() bool { return router.Stats().Peers == 0 })
				if s := router.Stats(); s.Handshakes == 0 || s.Handshakes != s.Accepted || s.MessagesIn != s.MessagesOut {
					t.Fatalf("%+v", s)
				}
			})
		}
		for _, kind := range []string{"SUB", "XSUB"} {
			t.Run(name+"/"+kind, func(t *testing.T) {
				p, endpoint, changes := startPub(t, "tcp://127.0.0.1:*", PubOptions{Authentication: c.o.Authentication})
				child := startSecurePython(t, c.security, "subscribes", endpoint, kind)
				_, _ = next(t, changes), next(t, changes)
				for _, m := range [][]string{{"a1", ""}, {"b", strings.Repeat("x", 1<<20)}, {"a end"}} {
					var b [][]byte
					for _, f := range m {
						b = append(b, []byte(f))
					}
					p.Publish(b...)
				}
				if got := next(t, changes); got != "-a" {
					t.Fatal(got)
				}
				p.Publish([]byte("b end"))
				child.end()
			})
		}
	}
	server := NewKey()
	dealers := map[string]struct {
		security map[string]any
		o        DealerOptions
	}{
		"curve": {
			map[string]any{"curve_server": true, "curve_publickey": server.Public().Z85(), "curve_secretkey": server.Z85()},
			DealerOptions{Curve: &CurveClient{Secret: r.ann, Server: server.Public()}},
		},
		"plain": {map[string]any{"plain_server": true}, DealerOptions{Plain: &PlainClient{"ann", "secret"}}},
	}
	for name, c := range dealers {
		t.Run(name+"/router", func(t *testing.T) {
			p := startSecurePython(t, c.security, "router_heartbeat", "tcp://127.0.0.1:*")
			c.o.Identity = []byte("go-1")
			d, in, _ := startDealer(t, p.line(), c.o)
			for _, size := range []int{0, 1, 255, 256, 8 << 20} {
				big := strings.Repeat("z", size)
				if err := d.Send([]byte("uid"), []byte(big), nil); err != nil {
					t.Fatal(err)
				}
				if got := recv(t, in); got != "uid|"+big+"|" {
					t.Fatalf("%d bytes came back as %d", size, len(got))
				}
			}
			if err := errors.Join(d.Send([]byte("who")), d.Ping(t.Context())); err != nil {
				t.Fatal(err)
			}
			if got := recv(t, in); got != "who|go-1" {
				t.Fatal(got)
			}
			p.end()
		})
	}
	for name, c := range map[string]struct {
		security map[string]any
		o        RouterOptions
	}{
		"another client":   {map[string]any{"curve_serverkey": r.public.Z85(), "curve_publickey": server.Public().Z85(), "curve_secretkey": server.Z85()}, RouterOptions{Authentication: Authentication{Curve: &r.server}}},
		"another password": {map[string]any{"plain_username": "ann", "plain_password": "other"}, RouterOptions{Authentication: Authentication{Plain: accounts}}},
	} {
		t.Run(name, func(t *testing.T) {
			router, addr, _ := startRouter(t, echo, c.o)
			p := startSecurePython(t, c.security, "denied", "tcp://"+addr.String())
			if got := p.line(); got != "HANDSHAKE_FAILED_AUTH" && got != "HANDSHAKE_FAILED_PROTOCOL" { // the second one from its PLAIN
				t.Errorf("libzmq's event is %s", got)
			}
			p.end()
			testkit.Eventually(t, "the refusal is counted", func() bool { return router.Stats().Closed["auth"] > 0 })
			if s := router.Stats(); s.Handshakes != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// A command of the handshake never comes before the greeting, also where the goroutine that writes for the Peer comes late.
func TestGreetingComesFirst(t *testing.T) {
	r := newKeyring()
	ours, theirs := net.Pipe()
	defer theirs.Close()
	c := &secureConn{Conn: ours, mech: &curve{to: &CurveClient{Secret: r.ann, Server: r.public}}, peer: &Peer{role: &role{}}}
	read := make(chan error, 1)
	go func() {
		_, err := c.Read(make([]byte, greetingBytes))
		read <- err
	}()
	if _, err := theirs.Write(appendGreetingOf(nil, mechanismCurve, true)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, greetingBytes+2+200)
	if _, err := io.ReadFull(theirs, got); err != nil {
		t.Fatal(err)
	}
	if _, err := checkGreeting(got[:greetingBytes], mechanismCurve); err != nil || !bytes.HasPrefix(got[greetingBytes+2:], []byte("\x05HELLO")) {
		t.Errorf("%v, %q", err, got[:80])
	}
	if err := recv(t, read); err != nil {
		t.Error(err)
	}
	if _, err := c.Write(appendGreeting(nil)); err != nil { // it is not sent again: nobody reads now
		t.Error(err)
	}
}
