// SPDX-License-Identifier: Apache-2.0

// Package transfer_test plays package transfer against Mooncake's C++ engine.
package transfer_test

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

func TestMain(m *testing.M) {
	if os.Getenv(serveVariable) != "" {
		serveMain()
		return
	}
	testkit.Main(m)
}

// interpreters name the Pythons that hold the engine; unset ones skip.
var interpreters = []string{"KVASIR_PYTHON_TE", "KVASIR_PYTHON_TE_OLD"}

// eachEngine runs f with every engine that is there.
func eachEngine(t *testing.T, f func(t *testing.T, python string)) {
	for _, name := range interpreters {
		t.Run(name, func(t *testing.T) {
			python := os.Getenv(name)
			if python == "" {
				t.Skipf("%s names no Python with mooncake-transfer-engine-non-cuda", name)
			}
			f(t, python)
		})
	}
}

// engine is a C++ engine in a process of its own.
type engine struct {
	t       *testing.T
	cmd     *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Scanner
	Segment string
	Base    uint64
	Len     int
	Version string
}

func startEngine(t *testing.T, python string, n int, env ...string) *engine {
	t.Helper()
	return startEngineAt(t, python, "127.0.0.1", n, env...)
}

func startEngineAt(t *testing.T, python, host string, n int, env ...string) *engine {
	t.Helper()
	e := &engine{t: t, cmd: exec.Command(python, "engine.py", itoa(n), host)}
	e.cmd.Env = append(os.Environ(), append([]string{"MC_FORCE_TCP=1", "MC_LOG_LEVEL=ERROR"}, env...)...)
	var err error
	if e.in, err = e.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := e.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	e.out = bufio.NewScanner(out)
	if err := e.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.kill)
	e.ask(map[string]any{"do": "ready"}, e)
	return e
}

func (e *engine) kill() {
	e.cmd.Process.Kill()
	e.in.Close()
	e.cmd.Wait()
}

// send gives an order; answer waits for its end. false: the engine is gone.
func (e *engine) send(order any) {
	b, err := json.Marshal(order)
	if err != nil {
		e.t.Fatal(err)
	}
	e.in.Write(append(b, '\n'))
}

func (e *engine) answer(into any) bool {
	watch := time.AfterFunc(180*time.Second, func() { e.cmd.Process.Kill() })
	defer watch.Stop()
	return e.out.Scan() && json.Unmarshal(e.out.Bytes(), into) == nil
}

func (e *engine) ask(order, into any) {
	e.t.Helper()
	e.send(order)
	if !e.answer(into) {
		e.t.Fatal("the engine is gone")
	}
}

func (e *engine) fill(seed uint64) {
	e.t.Helper()
	e.ask(map[string]any{"do": "fill", "seed": seed}, &struct{}{})
}

// hash covers the pieces of the engine's memory, given by address.
func (e *engine) hash(list []piece) string {
	e.t.Helper()
	var r struct{ SHA256 string }
	places := make([][2]uint64, len(list))
	for i, p := range list {
		places[i] = [2]uint64{p.local, uint64(p.n)}
	}
	e.ask(map[string]any{"do": "hash", "places": places}, &r)
	return r.SHA256
}

// piece is one entry: an offset in the initiator's memory, one in the target's.
type piece struct {
	local, remote uint64
	n             int
}

// run performs the batch and returns the engine's code.
func (e *engine) run(op, peer string, base uint64, list []piece) int {
	e.t.Helper()
	e.send(e.order(op, peer, base, list))
	var r struct{ RC int }
	if !e.answer(&r) {
		e.t.Fatal("the engine is gone")
	}
	return r.RC
}

func (e *engine) order(op, peer string, base uint64, list []piece) any {
	rows := make([][3]uint64, len(list))
	for i, p := range list {
		rows[i] = [3]uint64{p.local, base + p.remote, uint64(p.n)}
	}
	return map[string]any{"do": op, "peer": peer, "list": rows}
}

// pattern is engine.py's.
func pattern(n int, seed uint64) []byte {
	b := make([]byte, (n+7)/8*8)
	for i := range len(b) / 8 {
		v := (uint64(i) + seed*0x100000001) * 0x9E3779B97F4A7C15
		binary.LittleEndian.PutUint64(b[i*8:], v^v>>29)
	}
	return b[:n]
}

func hashOf(parts ...[]byte) string {
	h := sha256.New()
	for _, p := range parts {
		h.Write(p)
	}
	return hex.EncodeToString(h.Sum(nil))
}
