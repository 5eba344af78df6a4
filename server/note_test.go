// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/tier"
)

func pings(s *server.Server, id int64) bool {
	reply := s.Answer([][]byte{{0}, lmcache.AppendOp(nil, lmcache.OpPing), lmcache.AppendInt(nil, id)})
	ok, err := lmcache.DecodeBool(reply[2])
	return err == nil && ok
}

// Registrations that come quickly are not written one by one, and none is lost: not
// by a server that ends, and not by one that is killed a little later.
func TestNoteIsWrittenAFewTimesASecond(t *testing.T) {
	dir := t.TempDir()
	n, stop := startNode(t, dir, 16, server.Options{})
	path := filepath.Join(dir, "pool.workers")
	writes, last, began := 0, uint64(0), time.Now()
	for id := range int64(200) {
		register(t, n.Server, 1000+id, smallLayout)
		if now, err := shm.InodeOf(path); err == nil && now != last {
			writes, last = writes+1, now
		}
	}
	if most := 2 + int(time.Since(began)/(100*time.Millisecond)); writes < 1 || writes > most {
		t.Errorf("%d writes in %v, want 1 to %d", writes, time.Since(began), most)
	}
	stop()
	n, stop = startNode(t, dir, 16, server.Options{})
	defer stop()
	for id := range int64(200) {
		if !pings(n.Server, 1000+id) {
			t.Fatalf("worker %d is not known after the restart", 1000+id)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		n.Run(ctx)
	}()
	defer func() { cancel(); <-ended }()
	for id := range int64(50) {
		register(t, n.Server, 2000+id, smallLayout)
	}
	testkit.Eventually(t, "the last registration is written while the server runs", func() bool {
		b, err := os.ReadFile(path)
		return err == nil && bytes.Contains(b, []byte(`"ID":2049,`))
	})
}

// That a worker pings is kept: after a restart it falls asleep as one that does, not
// an hour later.
func TestPingedIsKept(t *testing.T) {
	dir := t.TempDir()
	o := server.Options{WorkerReap: 50 * time.Millisecond}
	n, stop := startNode(t, dir, 16, o)
	register(t, n.Server, 1, smallLayout)
	register(t, n.Server, 2, smallLayout)
	for range 2 { // the second time there is nothing left to write but the ping
		time.Sleep(150 * time.Millisecond)
		register(t, n.Server, 2, smallLayout)
	}
	time.Sleep(150 * time.Millisecond)
	if !pings(n.Server, 2) {
		t.Fatal("not known")
	}
	stop()
	n, stop = startNode(t, dir, 16, o)
	defer func() { stop() }()
	time.Sleep(60 * time.Millisecond)
	n.Tick(time.Now())
	if w := n.Status().Workers; w[0].Asleep || !w[1].Asleep {
		t.Errorf("after the restart only the worker that had pinged is asleep: %+v", w)
	}
	stop()
	n, stop = startNode(t, dir, 16, o)
	if w := n.Status().Workers; w[0].Asleep || !w[1].Asleep {
		t.Errorf("after a second restart: %+v", w)
	}
}

// A note is never longer than what a start reads: the largest registrations are
// left out, and all others are known after a restart.
func TestLargestRegistrationsAreLeftOutOfTheNote(t *testing.T) {
	testkit.LongAlone(t)
	n := startDriven(t, t.TempDir(), "pool", server.Options{})
	var large []*engine
	for range 9 {
		e := n.newEngine()
		d := e.reg.Descriptors[0]
		d.Device = strings.Repeat("x", 250)
		e.reg.Descriptors = nil
		for range 8000 {
			e.reg.Descriptors = append(e.reg.Descriptors, d)
		}
		e.register()
		large = append(large, e)
	}
	for id := range int64(20) {
		p := lmcache.EngineDriven{
			InstanceID: 1 + id, Model: "m", WorldSize: 1, BlockSize: 16, Layers: 1, Hidden: 64, DType: "bfloat16", SinglePlane: true, PhysicalSlots: drivenChunk,
		}
		n.call(lmcache.OpRegisterEngineDriven, p.Append(nil))
	}
	n.stop()
	b, err := os.ReadFile(filepath.Join(n.dir, "pool.workers"))
	if err != nil || len(b) > pool.MaxNote || len(b) < pool.MaxNote/2 {
		t.Errorf("a note of %d bytes, %v; %s", len(b), err, n.log.String()[:1000])
	}
	if !strings.Contains(n.log.String(), "do not fit into the note") {
		t.Error("it is not said")
	}
	n = startDriven(t, n.dir, "pool", server.Options{})
	defer n.stop()
	for id := range int64(20) {
		if !pings(n.Server, 1+id) {
			t.Errorf("small worker %d is not known after the restart", 1+id)
		}
	}
	known := 0
	for _, e := range large {
		if pings(n.Server, e.reg.InstanceID) {
			known++
		}
	}
	if known == 0 || known == len(large) {
		t.Errorf("%d of %d large workers are known after the restart", known, len(large))
	}
}

// Numbers of processes mean nothing in another PID namespace: a server that starts
// in one does not take a living engine for dead.
func TestNoteOfAnotherPIDNamespace(t *testing.T) {
	dir := t.TempDir()
	n := startDriven(t, dir, "pool", server.Options{})
	name, end := lender(t, dir)
	e := &engine{drivenNode: n, reg: lmcache.KVCache{
		InstanceID: 9, Model: "m", WorldSize: 1, EngineType: "vllm", KVLayout: "NHD", Descriptors: []lmcache.Descriptor{descriptor("/" + name)},
	}}
	e.register()
	n.stop()
	path := filepath.Join(dir, "pool.workers")
	var note map[string]any
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &note)
	}
	if err != nil || note["PIDs"] == "" {
		t.Fatalf("%v, %s", err, b)
	}
	note["PIDs"] = "pid:[1]"
	if b, err = json.Marshal(note); err == nil {
		err = os.WriteFile(path, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	end() // here its number is nobody's; elsewhere it may live
	n = startDriven(t, dir, "pool", server.Options{RegistrationGrace: time.Millisecond})
	defer n.stop()
	time.Sleep(5 * time.Millisecond)
	n.Tick(time.Now())
	if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
		t.Errorf("the memory of an engine of another PID namespace was removed: %v", err)
	}
}

// What a note names is removed only if it is a segment that engines lend.
func TestSweepRemovesLentSegmentsOnly(t *testing.T) {
	dir := t.TempDir()
	n, stop := startNode(t, dir, 16, server.Options{ShmDir: dir})
	precious, lent := filepath.Join(dir, "precious"), filepath.Join(dir, "lmcache_kv_1_0")
	var remains []map[string]any
	for _, path := range []string{precious, lent} {
		if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		inode, err := shm.InodeOf(path)
		if err != nil {
			t.Fatal(err)
		}
		remains = append(remains, map[string]any{"Name": filepath.Base(path), "Inode": inode, "Owner": map[string]any{"PID": 1 << 22, "Started": 1}})
	}
	ns, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(map[string]any{"Remains": remains, "PIDs": ns})
	if err == nil {
		err = n.store.Files().SetNote(b)
	}
	if err != nil {
		t.Fatal(err)
	}
	stop()
	n, stop = startNode(t, dir, 16, server.Options{ShmDir: dir})
	defer stop()
	n.Tick(time.Now())
	if _, err := os.Stat(lent); err == nil {
		t.Error("a dead engine's segment stays")
	}
	if _, err := os.Stat(precious); err != nil {
		t.Error("another file was removed")
	}
}

// After a restart tiers know the model names of the chunks that were kept, although no request has
// named them yet: else what was not written below could not be.
func TestNamesAreKnownAfterARestart(t *testing.T) {
	dir := t.TempDir()
	n, stop := startNode(t, dir, 16, server.Options{})
	register(t, n.Server, 1000, smallLayout)
	stop()
	names := tier.NewNames()
	n, stop = startNode(t, dir, 16, server.Options{Names: names})
	defer stop()
	all := n.Server.Namespaces()
	if len(all) != 1 {
		t.Fatalf("%d workers were taken over", len(all))
	}
	if name, ok := names.Of(all[0]); !ok || name.Model == "" {
		t.Errorf("the namespace is known as %+v, %v", name, ok)
	}
}
