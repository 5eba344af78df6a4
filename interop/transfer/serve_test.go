// SPDX-License-Identifier: Apache-2.0

package transfer_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/transfer/bench"
)

// serveVariable makes the test binary a target, so that it can be killed. It
// holds the two ports.
const serveVariable = "KVASIR_INTEROP_SERVE"

func serveMain() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	hs, data, _ := strings.Cut(os.Getenv(serveVariable), ",")
	o := bench.ServeOptions{Bytes: room, Base: testBase, Out: os.Stdout}
	o.Target.HandshakePort, _ = strconv.Atoi(hs)
	o.Target.DataPort, _ = strconv.Atoi(data)
	if err := bench.Serve(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// child is a target in a process of its own.
type child struct {
	cmd     *exec.Cmd
	segment string
}

func startChild(t *testing.T, hs, data int) *child {
	t.Helper()
	c := &child{cmd: exec.Command(os.Args[0])}
	c.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d,%d", serveVariable, hs, data))
	c.cmd.Stderr = os.Stderr
	out, err := c.cmd.StdoutPipe()
	if err == nil {
		err = c.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.kill)
	s := bufio.NewScanner(out)
	if !s.Scan() {
		t.Fatal("the target does not start")
	}
	c.segment = s.Text()[strings.LastIndex(s.Text(), " ")+1:]
	return c
}

func (c *child) kill() {
	c.cmd.Process.Kill()
	c.cmd.Wait()
}

// The engine's target is killed under our write: the call ends, says which
// entries it lost, and the next engine is served.
func TestEngineKilled(t *testing.T) {
	eachEngine(t, func(t *testing.T, python string) {
		e := startEngine(t, python, room)
		c := transfer.New(transfer.Options{})
		defer c.Close()
		src := pattern(room, 1)
		var list []transfer.Entry
		for i := range 512 {
			list = append(list, transfer.Entry{Local: src[i<<16:][:60000], Remote: e.Base + uint64(i<<16)})
		}
		var err error
		time.AfterFunc(100*time.Millisecond, e.kill)
		start, ctx := time.Now(), limited(t)
		for err == nil {
			err = c.Write(ctx, e.Segment, list)
		}
		if ctx.Err() != nil {
			t.Fatalf("after %v: %v", time.Since(start), err)
		}
		t.Logf("engine %s: after %v: %.90s", e.Version, time.Since(start).Round(time.Millisecond), err)
		again := startEngine(t, python, room)
		if err := c.Write(limited(t), again.Segment, []transfer.Entry{{Local: src, Remote: again.Base}}); err != nil {
			t.Fatal(err)
		}
		if again.hash([]piece{{0, 0, room}}) != hashOf(src) {
			t.Error("the engine's memory differs")
		}
	})
}

// Our target is killed under an engine's write; the engine's next batch, to the
// target restarted on the same ports, arrives.
func TestKvasirKilled(t *testing.T) {
	eachEngine(t, func(t *testing.T, python string) {
		e := startEngine(t, python, room)
		hs, data := testkit.FreePort(t), testkit.FreePort(t)
		first := startChild(t, hs, data)
		list := shape{60000, 512, true}.pieces()
		e.fill(3)
		time.AfterFunc(100*time.Millisecond, first.kill)
		rc, start := 0, time.Now()
		for rc == 0 && time.Since(start) < 60*time.Second {
			e.send(e.order("write", first.segment, testBase, list))
			var r struct{ RC int }
			if !e.answer(&r) { // 0.3.7 may die of a refused connection
				t.Logf("engine %s died with its peer", e.Version)
				e = startEngine(t, python, room)
				e.fill(3)
				break
			}
			rc = r.RC
		}
		second := startChild(t, hs, data)
		for rc = 1; rc != 0; { // 0.3.13 cools down for a second after failures
			if rc = e.run("write", second.segment, testBase, list); rc != 0 && time.Since(start) > 120*time.Second {
				t.Fatalf("write to the restarted target returned %d", rc)
			}
		}
		e.fill(4)
		want := pattern(room, 3)
		if rc := e.run("read", second.segment, testBase, list); rc != 0 || e.hash(list) != hashOf(want[:60000*512]) {
			t.Errorf("engine %s: bytes read back differ, %d", e.Version, rc)
		}
	})
}

// An initiating engine is killed in its write: the target lets go of the
// region at once, and the fence returns.
func TestInitiatorKilled(t *testing.T) {
	eachEngine(t, func(t *testing.T, python string) {
		e := startEngine(t, python, room)
		target, _ := listen(t, transfer.TargetOptions{})
		list := shape{1 << 20, 60, true}.pieces()
		e.send(e.order("write", target.Name(), testBase, list))
		for end := time.Now().Add(60 * time.Second); target.Stats().BytesIn == 0; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%+v", target.Stats())
			}
		}
		e.kill()
		target.Table().Fence(limited(t), transfer.Range{Addr: testBase, Len: room})
		for end := time.Now().Add(60 * time.Second); target.Stats().DataConns > 0; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%+v", target.Stats())
			}
		}
		target.Table().Reopen(transfer.Range{Addr: testBase, Len: room})
		again := startEngine(t, python, room)
		if rc := again.run("write", target.Name(), testBase, list); rc != 0 {
			t.Errorf("the next engine's write returned %d", rc)
		}
	})
}

// A batch to closed ranges fails at the engine, and no byte arrives.
func TestEngineMeetsFence(t *testing.T) {
	eachEngine(t, func(t *testing.T, python string) {
		e := startEngine(t, python, room)
		target, mem := listen(t, transfer.TargetOptions{})
		closed := transfer.Range{Addr: testBase + 8<<20, Len: 1 << 20}
		list := shape{256 << 10, 64, false}.pieces()
		e.fill(5)
		if rc := e.run("write", target.Name(), testBase, list); rc != 0 {
			t.Fatal(rc)
		}
		settle(t, target, 64*256<<10)
		target.Table().Fence(limited(t), closed)
		own := mem[8<<20:][:1<<20]
		clear(own)
		e.fill(6)
		rc := e.run("write", target.Name(), testBase, list)
		if rc == 0 && e.Version != "0.3.7.post2" { // which hears of no refusal
			t.Error("the engine noticed nothing")
		}
		time.Sleep(200 * time.Millisecond)
		for i, b := range own {
			if b != 0 {
				t.Fatalf("byte %d of the closed range changed", i)
			}
		}
		target.Table().Reopen(closed)
	})
}
