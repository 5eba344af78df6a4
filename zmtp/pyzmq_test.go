// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// python is a child that runs testdata/peer.py.
type python struct {
	t      testing.TB
	stdin  io.WriteCloser
	stdout *bufio.Reader
	stderr bytes.Buffer
	cmd    *exec.Cmd
	wait   func() error // once
}

// startPython skips the test unless KVASIR_PYTHON names a Python that imports
// zmq. The child lives for 30 s at most.
func startPython(t testing.TB, args ...string) *python {
	t.Helper()
	return startSecurePython(t, nil, args...)
}

// startSecurePython is startPython with options for all sockets of the child.
func startSecurePython(t testing.TB, security map[string]any, args ...string) *python {
	t.Helper()
	name := os.Getenv("KVASIR_PYTHON")
	if name == "" {
		t.Skip("KVASIR_PYTHON names no Python with pyzmq")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	p := &python{t: t, cmd: exec.CommandContext(ctx, name, append([]string{"testdata/peer.py"}, args...)...)}
	p.cmd.WaitDelay = time.Second
	if security != nil {
		text, err := json.Marshal(security)
		if err != nil {
			t.Fatal(err)
		}
		p.cmd.Env = append(os.Environ(), "ZMQ_SECURITY="+string(text))
	}
	p.cmd.Stderr = &p.stderr
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.stdin, p.stdout = stdin, bufio.NewReader(stdout)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waited := false
	p.wait = func() error {
		if waited {
			return nil
		}
		waited = true
		defer cancel()
		_ = p.stdin.Close()
		return p.cmd.Wait()
	}
	t.Cleanup(func() {
		cancel()
		_ = p.wait()
	})
	return p
}

// line is the child's next line of output.
func (p *python) line() string {
	p.t.Helper()
	s, err := p.stdout.ReadString('\n')
	if err != nil {
		_ = p.wait()
		p.t.Fatalf("%v: %v\n%s", p.cmd.Args[2:], err, p.stderr.String())
	}
	return strings.TrimSpace(s)
}

// end waits until the child ends well.
func (p *python) end() {
	p.t.Helper()
	if err := p.wait(); err != nil {
		p.t.Fatalf("%v: %v\n%s", p.cmd.Args[2:], err, p.stderr.String())
	}
}

// echoWho echoes, and appends the identity if the message asks for it.
func echoWho(p *Peer, m Message) {
	if string(m[0]) == "who" {
		m = append(m, []byte(p.identity()))
	}
	_ = p.Send(m...)
}

func TestRouterPyzmq(t *testing.T) {
	f := func(scenario, endpoint string, o RouterOptions) {
		t.Run(scenario, func(t *testing.T) {
			t.Parallel()
			o.Log = quietLog
			r := NewRouter(echoWho, o)
			defer r.Close()
			addr, err := r.Listen(t.Context(), endpoint)
			if err != nil {
				t.Fatal(err)
			}
			if addr.Network() == "tcp" {
				endpoint = "tcp://" + addr.String()
			}
			startPython(t, scenario, endpoint).end()
			testkit.Eventually(t, "the peers are gone", func() bool { return r.Stats().Peers == 0 })
			s := r.Stats()
			if s.Handshakes == 0 || s.Handshakes != s.Accepted || s.Closed["eof"] != s.Accepted || s.MessagesIn != s.MessagesOut {
				t.Fatalf("%+v", s)
			}
		})
	}
	tcp := "tcp://127.0.0.1:*"
	f("frames", tcp, RouterOptions{})
	f("identity", "ipc://"+filepath.Join(t.TempDir(), "s"), RouterOptions{})
	f("req", "ipc://@kvasir-zmtp-"+t.TempDir(), RouterOptions{})
	f("pipeline", tcp, RouterOptions{})
	f("heartbeat", tcp, RouterOptions{HeartbeatInterval: 50 * time.Millisecond, HeartbeatTimeout: 20 * time.Second})
}

// A pyzmq DEALER finds the ROUTER that took the place of the one it knew.
func TestRouterRestartPyzmq(t *testing.T) {
	r := NewRouter(echo, RouterOptions{Log: quietLog})
	defer r.Close()
	addr, err := r.Listen(t.Context(), fmt.Sprint("tcp://127.0.0.1:", testkit.FreePort(t)))
	if err != nil {
		t.Fatal(err)
	}
	p := startPython(t, "restart", "tcp://"+addr.String())
	if got := p.line(); got != "up" {
		t.Fatal(got)
	}
	_ = r.Close()
	next := NewRouter(echo, RouterOptions{Log: quietLog})
	defer next.Close()
	if _, err := next.Listen(t.Context(), "tcp://"+addr.String()); err != nil {
		t.Fatal(err)
	}
	p.end() // closes its input, which tells it
	if s := next.Stats(); s.Handshakes != 1 || s.MessagesIn == 0 {
		t.Fatalf("%+v", s)
	}
}

// Sockets that cannot talk to a ROUTER never become peers. Who refuses whom
// first is a race: libzmq may hang up when it reads our READY.
func TestRouterRefusesPyzmq(t *testing.T) {
	for _, kind := range []string{"PUB", "SUB", "PUSH", "PULL", "PAIR", "REP"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			var handled atomic.Int64
			r, addr, _ := startRouter(t, func(*Peer, Message) { handled.Add(1) }, RouterOptions{})
			p := startPython(t, "refused", "tcp://"+addr.String(), kind)
			p.end()
			testkit.Eventually(t, "the peers are gone", func() bool { return r.Stats().Peers == 0 })
			s := r.Stats()
			if handled.Load() != 0 || s.Handshakes != 0 || s.Closed["socket_type"]+s.Closed["eof"]+s.Closed["refused"] != s.Accepted || s.Accepted == 0 {
				t.Fatalf("%d handled, %+v", handled.Load(), s)
			}
		})
	}
}

func TestDealerPyzmq(t *testing.T) {
	p := startPython(t, "router", "tcp://127.0.0.1:*")
	d, in, _ := startDealer(t, p.line(), DealerOptions{Identity: []byte("go-1")})
	ask := func(want string, frames ...[]byte) {
		t.Helper()
		if err := d.Send(frames...); err != nil {
			t.Fatal(err)
		}
		if got := recv(t, in); got != want {
			t.Fatalf("got %d bytes %.40q, want %d bytes %.40q", len(got), got, len(want), want)
		}
	}
	ask("who|go-1", []byte("who"))
	if err := d.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	ask("", nil)
	ask("|", nil, nil)
	ask("a||c|", []byte("a"), nil, []byte("c"), nil)
	for _, size := range []int{255, 256, 160 << 10, 40_000_000} {
		big := bytes.Repeat([]byte("0123456789abcde\n"), size/16+1)[:size]
		ask("uid|"+string(big), []byte("uid"), big)
		if err := d.SendOwned([]byte("o"), big, nil); err != nil {
			t.Fatal(err)
		}
		if got := recv(t, in); got != "o|"+string(big)+"|" {
			t.Fatalf("%d bytes came back as %d", size, len(got))
		}
	}
	const n = 1000
	for i := range n {
		if err := d.Send(binary.BigEndian.AppendUint32(nil, uint32(i)), nil); err != nil {
			t.Fatal(err)
		}
	}
	for i := range n {
		if got := recv(t, in); got != string(binary.BigEndian.AppendUint32(nil, uint32(i)))+"|" {
			t.Fatalf("reply %d: %q", i, got)
		}
	}
	p.end()
}

// Heartbeats both ways keep a quiet connection, and our Dealer finds the
// ROUTER that a new process bound in the place of a killed one.
func TestDealerHeartbeatRestartPyzmq(t *testing.T) {
	endpoint := "ipc://" + filepath.Join(t.TempDir(), "s")
	first := startPython(t, "router_heartbeat", endpoint)
	first.line()
	d, in, states := startDealer(t, endpoint, DealerOptions{HeartbeatInterval: 50 * time.Millisecond, HeartbeatTimeout: 20 * time.Second})
	if err := recv(t, states); err != nil {
		t.Fatal(err)
	}
	quiet := time.NewTimer(600 * time.Millisecond)
	select {
	case err := <-states:
		t.Fatal(err)
	case <-quiet.C:
	}
	_ = d.Send([]byte("1"))
	if got := recv(t, in); got != "1" {
		t.Fatal(got)
	}
	_ = first.cmd.Process.Kill()
	_ = first.wait()
	if err := recv(t, states); Reason(err) != "eof" {
		t.Fatal(err)
	}
	_ = d.Send([]byte("2"))
	second := startPython(t, "router", endpoint)
	second.line()
	if got := recv(t, in); got != "2" {
		t.Fatal(got)
	}
	second.end()
}

// Our Dealer gets no connection to a socket that is no ROUTER, REP or DEALER.
func TestDealerRefusesPyzmq(t *testing.T) {
	for _, kind := range []string{"PUB", "PULL"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			p := startPython(t, "bound", "tcp://127.0.0.1:*", kind)
			_, _, states := startDealer(t, p.line(), DealerOptions{})
			err := recv(t, states)
			if _, refused := errors.AsType[*peerError](err); !refused && !errors.Is(err, errSocketType) && Reason(err) != "eof" {
				t.Fatal(err)
			}
			p.end()
		})
	}
}
