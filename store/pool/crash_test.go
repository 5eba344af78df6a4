// SPDX-License-Identifier: Apache-2.0

//go:build crashpoints

package pool

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
)

// A process is killed at each write that outlives it, in random lives of a pool:
// reserved, committed, held, dropped, opened again. What it had told before, it wrote
// into a journal: that is the truth, and it does not come from the pool. The next
// server must find all of it.

const crashChunk = 4096

func crashOptions(dir string) Options { return Options{Name: "p", Bytes: 6 * crashChunk, Dir: dir} }

func crashKey(i int) *kv.Key { return &kv.Key{Chunk: kv.Hash{byte(i), 0xfe}, Rank: 7} }

// crashContent is what the writer of a key writes.
func crashContent(i int) []byte { return bytes.Repeat([]byte{byte(i), 0xa5}, crashChunk/2) }

// TestCrashChild is the process that is killed.
func TestCrashChild(t *testing.T) {
	dir := os.Getenv("KVASIR_CRASH_DIR")
	if dir == "" {
		t.Skip("TestKilledAtEachWrite starts it")
	}
	var seed uint64
	fmt.Sscan(os.Getenv("KVASIR_CRASH_SEED"), &seed)
	journal, err := os.OpenFile(filepath.Join(dir, "journal"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer journal.Close()
	say := func(format string, a ...any) {
		if _, err := fmt.Fprintf(journal, format+"\n", a...); err != nil {
			t.Fatal(err)
		}
	}
	o := crashOptions(dir)
	p, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	rnd := rand.New(rand.NewPCG(seed, 9))
	for step := range 60 {
		i := rnd.IntN(5)
		k := crashKey(i)
		s, state := p.Find(k)
		switch op := rnd.IntN(8); {
		case op < 2 && state == Free:
			say("begin reserve %d", i)
			s, err := p.Reserve(k, crashChunk, Writer{Name: uint64(100 + i), Number: uint32(step)})
			if errors.Is(err, ErrIndexMemory) { // after a restart
				if err = p.BackIndex(); err == nil {
					s, err = p.Reserve(k, crashChunk, Writer{Name: uint64(100 + i), Number: uint32(step)})
				}
			}
			if errors.Is(err, ErrFull) {
				say("done none %d", i)
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			say("done reserve %d %d", i, p.Offset(s))
			copy(p.View(s), crashContent(i))
		case op < 4 && state == Staged:
			say("begin commit %d", i)
			p.Commit(s)
			p.Stamp(s)
			say("done commit %d", i)
		case op == 4 && state == Resident && p.Holds(s) == 0:
			say("begin hold %d", i)
			p.Hold(s)
			say("done hold %d", i)
		case op == 5 && state == Resident && p.Holds(s) > 0:
			say("begin unhold %d", i)
			p.Unhold(s)
			say("done unhold %d", i)
		case op == 6 && state == Resident:
			say("begin sum %d", i)
			p.SetSum(s, uint64(1000+i))
			say("done sum %d", i)
		case op == 7 && state != Free:
			held := p.Holds(s) > 0
			say("begin drop %d", i)
			p.Drop(s)
			if held {
				p.Unhold(s)
			}
			say("done drop %d", i)
		case op == 7:
			say("begin reopen 0")
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
			if p, err = Open(o); err != nil {
				t.Fatal(err)
			}
			say("done reopen 0")
		}
	}
	say("begin end 0")
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
}

// told is what the journal says of a key.
type told struct {
	offset   int64 // of the last reserve, -1 before
	reserved bool  // told to a writer that may not be done
	resident bool
	held     bool
	summed   bool
	begun    string // what was in progress at the end
}

// readJournal returns the truth by key, and whether the process came to its end.
func readJournal(t *testing.T, path string) (keys map[int]*told, quarantine map[int64]bool, ended bool) {
	t.Helper()
	keys, quarantine = map[int]*told{}, map[int64]bool{}
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return keys, quarantine, false
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var phase, op string
		var i int
		var off int64
		fmt.Sscan(lines.Text(), &phase, &op, &i, &off)
		k := keys[i]
		if k == nil {
			k = &told{offset: -1}
			keys[i] = k
		}
		if phase == "begin" {
			k.begun = op
			ended = op == "end"
			if op == "unhold" || op == "drop" { // the process ends the hold that it found there
				delete(quarantine, k.offset)
			}
			continue
		}
		k.begun = ""
		switch op {
		case "reserve":
			k.offset, k.reserved = off, true
		case "commit":
			k.reserved, k.resident = false, true
		case "hold":
			k.held = true
		case "unhold":
			k.held = false
		case "sum":
			k.summed = true
		case "drop":
			*k = told{offset: -1}
		case "reopen": // what was held is in quarantine from now on
			for _, k := range keys {
				if k.reserved || k.held {
					quarantine[k.offset] = true
				}
				if k.reserved {
					*k = told{offset: -1, begun: k.begun}
				}
			}
		}
	}
	return keys, quarantine, ended
}

func TestKilledAtEachWrite(t *testing.T) {
	for seed := range 5 {
		points := 0
		for ended := false; !ended; points++ {
			dir := t.TempDir()
			cmd := exec.Command(os.Args[0], "-test.run=^TestCrashChild$")
			cmd.Env = append(os.Environ(), "KVASIR_CRASH_DIR="+dir, fmt.Sprint("KVASIR_CRASH_SEED=", seed), fmt.Sprint("KVASIR_CRASH_AT=", points))
			timer := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
			out, err := cmd.CombinedOutput()
			timer.Stop()
			exit, killed := errors.AsType[*exec.ExitError](err)
			if err != nil && (!killed || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL) {
				t.Fatalf("seed %d, point %d: %v\n%s", seed, points, err, out)
			}
			ended = err == nil
			checkCrash(t, fmt.Sprintf("seed %d, point %d", seed, points), dir)
			if t.Failed() {
				b, _ := os.ReadFile(filepath.Join(dir, "journal"))
				t.Fatalf("journal:\n%s", b)
			}
		}
		if points < 50 {
			t.Errorf("seed %d: only %d points", seed, points)
		}
	}
}

func checkCrash(t *testing.T, where, dir string) {
	t.Helper()
	keys, quarantine, _ := readJournal(t, filepath.Join(dir, "journal"))
	p, err := Open(crashOptions(dir))
	if err != nil {
		t.Errorf("%s: the next server does not start: %v", where, err)
		return
	}
	defer p.Close()
	held := map[int64]Writer{}
	for _, h := range p.Restored().Held {
		held[p.Offset(h.Slot)] = h.Writer
	}
	dropped := func(k *told) bool { return k.begun == "drop" || k.begun == "unhold" || k.begun == "reopen" }
	for off := range quarantine {
		if _, ok := held[off]; !ok {
			t.Errorf("%s: offset %d may still be touched by a worker of two lives ago, and is free", where, off)
		}
	}
	for i, k := range keys {
		s, state := p.Find(crashKey(i))
		switch {
		case k.resident && k.begun != "drop":
			if state != Resident || p.Offset(s) != k.offset {
				t.Errorf("%s: key %d was committed at %d; it is in state %d", where, i, k.offset, state)
				continue
			}
			if !bytes.Equal(p.View(s), crashContent(i)) {
				t.Errorf("%s: key %d holds other bytes", where, i)
			}
			sum, ok := p.Sum(s)
			if k.summed && (!ok || sum != uint64(1000+i)) || ok && sum != uint64(1000+i) {
				t.Errorf("%s: key %d has the checksum %d, %v", where, i, sum, ok)
			}
		case state == Resident && k.begun != "commit" && k.begun != "drop":
			t.Errorf("%s: key %d is a hit and nobody committed it (%+v)", where, i, *k)
		case state == Staged:
			t.Errorf("%s: key %d is staged after a restart", where, i)
		}
		if (k.reserved || k.held) && !dropped(k) && k.begun != "commit" {
			if w, ok := held[k.offset]; !ok || k.reserved && w.Name != uint64(100+i) {
				t.Errorf("%s: offset %d of key %d may be touched by a worker; held by %+v, %v", where, k.offset, i, w, ok)
			}
		}
	}
}

// TestResizeChild is a server that resizes a pool and is killed.
func TestResizeChild(t *testing.T) {
	dir := os.Getenv("KVASIR_RESIZE_DIR")
	if dir == "" {
		t.Skip("TestKilledWhileResizing starts it")
	}
	var chunks int64
	fmt.Sscan(os.Getenv("KVASIR_RESIZE_TO"), &chunks)
	o := crashOptions(dir)
	o.Bytes = chunks * crashChunk
	p, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
}

// A server that is killed at any write of a resize leaves a pool that the next one takes over: each chunk that is
// served has its bytes, what a worker may touch is held, and at most the chunk that was moving is lost of
// those that fit.
func TestKilledWhileResizing(t *testing.T) {
	f := func(to int64, fit int) {
		t.Helper()
		points := 0
		for ended := false; !ended; points++ {
			dir := t.TempDir()
			p, err := Open(crashOptions(dir))
			if err != nil {
				t.Fatal(err)
			}
			held := map[int64]bool{}
			for i := range 6 {
				s, err := p.Reserve(crashKey(i), crashChunk, Writer{Name: uint64(100 + i)})
				if err != nil {
					t.Fatal(err)
				}
				copy(p.View(s), crashContent(i))
				if i == 5 {
					held[p.Offset(s)] = true
					break
				}
				p.Commit(s)
				p.Stamp(s)
				p.SetSum(s, uint64(1000+i))
				if i == 4 {
					p.Hold(s)
					held[p.Offset(s)] = true
				}
			}
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(os.Args[0], "-test.run=^TestResizeChild$")
			cmd.Env = append(os.Environ(), "KVASIR_RESIZE_DIR="+dir, fmt.Sprint("KVASIR_RESIZE_TO=", to), fmt.Sprint("KVASIR_CRASH_AT=", points))
			out, err := cmd.CombinedOutput()
			exit, killed := errors.AsType[*exec.ExitError](err)
			if err != nil && (!killed || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL) {
				t.Fatalf("to %d, point %d: %v\n%s", to, points, err, out)
			}
			ended = err == nil
			o := crashOptions(dir)
			o.Bytes = to * crashChunk
			p, err = Open(o)
			if err != nil {
				t.Fatalf("to %d, point %d: the next server does not start: %v", to, points, err)
			}
			for _, s := range p.Restored().Resident {
				k := p.KeyOf(s)
				i := int(k.Chunk[0])
				if sum, ok := p.Sum(s); !bytes.Equal(p.View(s), crashContent(i)) || ok && sum != uint64(1000+i) || p.Offset(s)+crashChunk > p.Bytes() {
					t.Errorf("to %d, point %d: chunk %d is at %d, with other bytes or checksum %d", to, points, i, p.Offset(s), sum)
				}
			}
			for _, h := range p.Restored().Held {
				delete(held, p.Offset(h.Slot))
			}
			if len(held) > 0 {
				t.Errorf("to %d, point %d: %v may be touched and is not held", to, points, held)
			}
			if n := len(p.Restored().Resident); n < fit-1 || ended && n != fit {
				t.Errorf("to %d, point %d: %d chunks are left of %d that fit, ended: %v", to, points, n, fit, ended)
			}
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
			if t.Failed() {
				return
			}
		}
		if points < 5 {
			t.Errorf("to %d: only %d points", to, points)
		}
	}
	f(3, 3)
	f(2, 2)
	f(9, 5)
}
