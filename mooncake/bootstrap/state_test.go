package bootstrap

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func openAt(t *testing.T, path string) *Registry {
	t.Helper()
	r, err := Open(Options{StateFile: path})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// A registry that starts again shows what it showed, in the same order, waits
// for the same ranks, and counts generations on.
func TestStateRestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	r := openAt(t, path)
	for _, in := range []Registration{
		{EngineID: "é\"", DPRank: 3, TPRank: 1, Addr: "tcp://h:1"},
		{EngineID: "é\"", DPRank: 3, TPRank: 0, Addr: "tcp://h:2"},
		{EngineID: "told", DPRank: 1, TPRank: 0, TPSize: 2, PPSize: 1, Addr: "tcp://h:3"},
		{EngineID: "lost", DPRank: 0, TPRank: 0, Addr: "tcp://h:4"},
		{EngineID: "lost", DPRank: 0, TPRank: 1, Addr: "tcp://h:5", Lease: time.Hour},
	} {
		mustRegister(t, r, in)
	}
	one := 1
	r.Unregister("lost", nil, &one, nil)
	before := r.current()
	if _, err := Open(Options{StateFile: path}); err == nil || !strings.Contains(err.Error(), path+" is in use") {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	r = openAt(t, path)
	defer r.Close()
	if d := r.current(); !bytes.Equal(d.body, before.body) || d.gen <= before.gen || len(d.body) < 20 {
		t.Fatalf("%s %d, was %s %d", d.body, d.gen, before.body, before.gen)
	}
	mustRegister(t, r, Registration{EngineID: "told", DPRank: 1, TPRank: 1, Addr: "tcp://h:6"})
	mustRegister(t, r, Registration{EngineID: "lost", DPRank: 0, TPRank: 1, Addr: "tcp://h:7"})
	for _, want := range []string{"told", "lost"} {
		if !strings.Contains(string(r.current().body), want) {
			t.Fatalf("%s is whole and not shown: %s", want, r.current().body)
		}
	}
}

// Written soon after a change, not only at the end; a lease begins anew.
func TestStateWhileRunning(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	synctest.Test(t, func(t *testing.T) {
		r := openAt(t, path)
		mustRegister(t, r, Registration{EngineID: "e", Addr: "a", Lease: time.Minute})
		time.Sleep(time.Second)
		b, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(b), `"addr":"a"`) {
			t.Fatal(string(b), err)
		}
		r.Close()
		time.Sleep(time.Hour)
		r = openAt(t, path)
		wantQuery(t, r, `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"a"}}}}`)
		time.Sleep(time.Minute)
		synctest.Wait()
		wantQuery(t, r, `{}`)
		r.Close()
	})
}

// A damaged file is an error that names it, wherever the damage is.
func TestStateDamaged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	r := openAt(t, path)
	mustRegister(t, r, Registration{EngineID: "e", Addr: "a"})
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	f := func(b []byte) {
		t.Helper()
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := Open(Options{StateFile: path})
		if err == nil {
			r.Close()
			t.Fatalf("opened %q", b)
		}
		se, ok := errors.AsType[*StateError](err)
		if !ok || se.Path != path || !strings.Contains(err.Error(), path) {
			t.Fatal(err)
		}
	}
	for n := range len(good) - 1 { // without the last byte, a newline, it is whole
		f(good[:n])
	}
	for i := range len(good) - 1 {
		b := bytes.Clone(good)
		b[i] ^= 0x10
		f(b)
	}
	odd := func(engines ...savedEngine) {
		t.Helper()
		b, err := encodeState(savedState{Engines: engines})
		if err != nil {
			t.Fatal(err)
		}
		f(b)
	}
	w := savedWorker{Addr: "a"}
	odd(savedEngine{ID: "no workers"})
	odd(savedEngine{Workers: []savedWorker{w, w}})
	odd(savedEngine{Workers: []savedWorker{w}}, savedEngine{Workers: []savedWorker{w}})
	odd(savedEngine{Workers: []savedWorker{{Addr: "a", Lease: -1}}})
	odd(savedEngine{Workers: []savedWorker{{Addr: strings.Repeat("a", MaxAddrBytes+1)}}})
}

// A folder that takes no file any more does not stop the registry, and is told.
func TestStateUnwritable(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "state")
	synctest.Test(t, func(t *testing.T) {
		r := openAt(t, path)
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		mustRegister(t, r, Registration{EngineID: "e", Addr: "a"})
		time.Sleep(time.Second)
		wantQuery(t, r, `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"a"}}}}`)
		if _, text := call(r, "GET", "/healthz", ""); !strings.Contains(text, `"state_saved":false`) {
			t.Fatal(text)
		}
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		time.Sleep(saveRetry)
		synctest.Wait()
		if _, text := call(r, "GET", "/healthz", ""); !strings.Contains(text, `"state_saved":true`) {
			t.Fatal(text)
		}
		r.Close()
	})
	r := openAt(t, path)
	defer r.Close()
	wantQuery(t, r, `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"a"}}}}`)
}
