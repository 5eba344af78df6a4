// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// silence is how long the workers of TestNoHitIsPromisedThatCannotBeLoaded may be silent.
const silence = 2 * time.Millisecond

// lives plays engines of one model. The chunks of the model are read by two ranks (MLA).
type lives struct {
	t      *testing.T
	n      *node
	rng    *rand.Rand
	number int64
	asked  int
	counts map[string]int
}

// lifeEngine is an engine with a scheduler and two ranks.
type lifeEngine struct {
	*lives
	seen      bool // its processes are seen; else it is a container with process numbers of its own
	cmd       *exec.Cmd
	pids      [2]int // of the ranks; the scheduler has that of rank 0
	ids       [2]int64
	loads     [2]bool // the rank is registered and its process runs
	stopped   bool
	scheduler func(m [][]byte) [][]byte
}

// begin starts an engine: one process, or one whose rank 1 is a child.
func (l *lives) begin(seen bool) *lifeEngine {
	l.t.Helper()
	e := &lifeEngine{lives: l, seen: seen}
	l.number += 10
	e.ids = [2]int64{l.number, l.number + 1}
	if seen {
		child := l.rng.IntN(2) == 0
		e.cmd = exec.Command("sleep", "1000")
		if child {
			e.cmd = exec.Command("sh", "-c", "sleep 1000 & echo $!; wait; exec sleep 1000")
		}
		out, err := e.cmd.StdoutPipe()
		if err == nil {
			err = e.cmd.Start()
		}
		if err != nil {
			l.t.Fatal(err)
		}
		e.pids = [2]int{e.cmd.Process.Pid, e.cmd.Process.Pid}
		if child {
			line, err := bufio.NewReader(out).ReadString('\n')
			if err == nil {
				e.pids[1], err = strconv.Atoi(strings.TrimSpace(line))
			}
			if err != nil {
				l.t.Fatal(err)
			}
		}
	}
	e.scheduler = l.n.ConnectAs(e.peer(0))
	e.register(0)
	e.register(1)
	e.lookup()
	return e
}

func (e *lifeEngine) peer(rank int) peercred.Peer {
	return peercred.Peer{UID: os.Geteuid(), PID: e.pids[rank]}
}

func (e *lifeEngine) as(rank int, op lmcache.Op, payloads ...[]byte) []byte {
	return last(e.n.AnswerAs(e.peer(rank), append([][]byte{{1}, lmcache.AppendOp(nil, op)}, payloads...)))
}

func last(reply [][]byte) []byte { return reply[len(reply)-1] }

func (e *lifeEngine) register(rank int) {
	reg := lmcache.EngineDriven{
		InstanceID: e.ids[rank], Model: "m", WorldSize: 1, BlockSize: 16, Layers: smallLayout.Layers, Hidden: smallLayout.Hidden,
		DType: smallLayout.DType, SinglePlane: true, PhysicalSlots: 16,
	}
	if p, err := lmcache.DecodePool(e.as(rank, lmcache.OpRegisterEngineDriven, reg.Append(nil))); err != nil || p.ShmName == "" {
		e.t.Fatalf("rank %d is not registered: %v", rank, err)
	}
	e.loads[rank] = true
}

func (e *lifeEngine) unregister(rank int) {
	e.as(rank, lmcache.OpUnregisterEngineDriven, lmcache.AppendInt(nil, e.ids[rank]))
	e.loads[rank] = false
}

func (e *lifeEngine) ping(rank int) {
	ok, err := lmcache.DecodeBool(e.as(rank, lmcache.OpPing, lmcache.AppendInt(nil, e.ids[rank])))
	if err != nil || !ok {
		e.t.Fatalf("the ping of a registered worker was answered %v, %v", ok, err)
	}
}

// lookup looks up the prompt. Each rank must load what it promises.
func (e *lifeEngine) lookup() (hit int64) {
	e.asked++
	k := lmcache.Key{Model: "m", WorldSize: 1, Worker: lmcache.AllWorkers, Tokens: tokens(32, 1), End: 32, RequestID: fmt.Sprint("r", e.asked), Readers: 2}
	e.scheduler([][]byte{{1}, lmcache.AppendOp(nil, lmcache.OpLookup), k.Append(nil), lmcache.AppendInt(nil, 1)})
	reply := e.scheduler([][]byte{{1}, lmcache.AppendOp(nil, lmcache.OpQueryPrefetchStatus), lmcache.AppendString(nil, k.RequestID)})
	hit, err := lmcache.DecodeInt(last(reply))
	if err != nil {
		e.t.Fatal(err)
	}
	for rank := range 2 {
		if hit == 0 {
			break
		}
		if !e.loads[rank] {
			e.t.Fatalf("a lookup promised %d chunks, and rank %d (%d) cannot load\n%s", hit, rank, e.ids[rank], e.n.log)
		}
		own := k
		own.Worker = 0
		id := lmcache.AppendInt(nil, e.ids[rank])
		got, err := lmcache.DecodePrepareRetrieve(e.as(rank, lmcache.OpPrepareRetrieve, own.Append(nil), id))
		if err != nil || !got.Success || len(got.Slots) != int(hit) {
			e.t.Fatalf("rank %d (%d) got %+v, %v of %d chunks\n%s", rank, e.ids[rank], got, err, hit, e.n.log)
		}
		e.as(rank, lmcache.OpCommitRetrieve, own.Append(nil), id)
	}
	e.scheduler([][]byte{{1}, lmcache.AppendOp(nil, lmcache.OpEndSession), lmcache.AppendString(nil, k.RequestID)})
	return hit
}

// check looks up and compares what is not promised, too.
func (e *lifeEngine) check() {
	hit := e.lookup()
	if hit == 0 && e.loads[0] && e.loads[1] {
		if e.seen {
			e.t.Fatalf("no hit of an engine whose processes run\n%s", e.n.log)
		}
		e.counts["asleep"]++
		e.ping(0)
		e.ping(1)
		if hit = e.lookup(); hit == 0 {
			e.t.Fatalf("no hit after both ranks have pinged\n%s", e.n.log)
		}
	}
	if hit > 0 {
		e.counts["hits"]++
	} else {
		e.counts["misses"]++
	}
}

func (e *lifeEngine) signal(rank int, s syscall.Signal) {
	if err := syscall.Kill(e.pids[rank], s); err != nil {
		e.t.Fatal(err)
	}
}

// end ends the engine: in order, or killed.
func (e *lifeEngine) end() {
	if !e.seen || e.rng.IntN(2) == 0 {
		for rank := range 2 {
			if e.loads[rank] {
				e.unregister(rank)
			}
		}
	}
	e.kill()
}

func (e *lifeEngine) kill() {
	if e.cmd == nil {
		return
	}
	if e.pids[1] != e.pids[0] { // a child that runs, registered or not
		_ = syscall.Kill(e.pids[1], syscall.SIGKILL)
	}
	_ = e.cmd.Process.Kill()
	_ = e.cmd.Wait()
	e.cmd = nil
}

// step does something with an engine; false when its life is over.
func (e *lifeEngine) step() bool {
	switch op := e.rng.IntN(12); {
	case op == 0:
		e.end()
		e.n.Tick(time.Now())
		return false
	case op == 1: // idle for longer than any grace
		time.Sleep(silence + time.Millisecond)
		e.n.Tick(time.Now())
	case op == 2 && e.seen:
		if e.stopped = !e.stopped; e.stopped {
			e.signal(0, syscall.SIGSTOP)
		} else {
			e.signal(0, syscall.SIGCONT)
		}
		e.n.Tick(time.Now())
	case e.stopped:
	case op == 3 && e.seen && e.loads[1]:
		e.unregister(1)
	case op == 4 && e.seen && e.pids[0] != e.pids[1] && e.loads[1]:
		killed, ok := peercred.Running(e.pids[1])
		e.signal(1, syscall.SIGKILL)
		e.loads[1] = false
		for ok && !killed.Gone() {
			time.Sleep(time.Millisecond)
		}
		e.n.Tick(time.Now())
		e.pids[1] = e.pids[0] // it registers again from the scheduler's process
	case op == 5 && !e.loads[1]:
		e.register(1)
	case op == 6:
		e.register(0) // again
	case op == 7:
		e.ping(0)
	default:
		e.check()
	}
	return true
}

// A lookup never promises what a rank cannot load, over 1,000 lives of engines that are idle,
// stopped, killed, unregistered and started again, whose workers are silent for longer than
// any grace. An engine whose processes run hits whatever its silence.
func TestNoHitIsPromisedThatCannotBeLoaded(t *testing.T) {
	total := testkit.Volume(1000)
	if testing.Short() {
		total = 100
	}
	seed := rand.Uint64()
	t.Log("seed", seed)
	n, stop := startNode(t, t.TempDir(), 64, server.Options{WorkerReap: silence, RegistrationGrace: silence})
	defer stop()
	l := &lives{t: t, n: n, rng: rand.New(rand.NewPCG(seed, 1)), counts: map[string]int{}}
	var engines [3]*lifeEngine // the last is not seen
	defer func() {
		for _, e := range engines {
			if e != nil {
				e.kill()
			}
		}
	}()
	engines[0] = l.begin(true)
	k := lmcache.Key{Model: "m", WorldSize: 1, Tokens: tokens(32, 1), End: 32, RequestID: "s", Readers: 1}
	id := lmcache.AppendInt(nil, engines[0].ids[0])
	engines[0].as(0, lmcache.OpPrepareStore, k.Append(nil), id)
	if ok, err := lmcache.DecodeBool(engines[0].as(0, lmcache.OpCommitStore, k.Append(nil), id, lmcache.AppendBytes(nil, nil))); err != nil || !ok {
		t.Fatal("not stored", err)
	}
	for begun := 1; begun < total; {
		i := l.rng.IntN(len(engines))
		if engines[i] == nil {
			engines[i] = l.begin(i < 2)
			begun++
		} else if !engines[i].step() {
			engines[i] = nil
		}
	}
	t.Log(l.counts)
	for _, what := range []string{"hits", "misses", "asleep"} {
		if l.counts[what] < total/100 {
			t.Errorf("%d %s in %d lives", l.counts[what], what, total)
		}
	}
}

// Two engines of one model, in processes of their own: the one that was idle for longer than
// any grace hits and loads. Where its worker is gone, the other one's does not stand in for it.
func TestIdleEngineOfTwoLoads(t *testing.T) {
	dir := t.TempDir()
	n, stop := startNode(t, dir, 64, server.Options{WorkerReap: silence, RegistrationGrace: silence})
	defer stop()
	ipc := "ipc://" + filepath.Join(dir, "socket")
	if _, err := n.Listen(t.Context(), ipc); err != nil {
		t.Fatal(err)
	}
	pid, end := start(t, stayURL+"="+ipc)
	start(t, stayURL+"="+ipc)
	time.Sleep(2 * silence)
	n.Tick(time.Now())
	if got := len(workersOf(n)); got != 2 || n.Awake() != 2 {
		t.Fatalf("%d workers, %d awake\n%s", got, n.Awake(), n.log)
	}
	end()
	n.Tick(time.Now())
	if workersOf(n)[int64(pid)] || n.Awake() != 1 {
		t.Errorf("a killed worker is registered\n%s", n.log)
	}
}
