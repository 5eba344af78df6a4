// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/statefile"
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
	r.unregisterMatching("lost", nil, &one, nil)
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

// The registry writes its state soon after a change, not only at the end. After a restart leases run from the start again.
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

// A file that the registry could not have written is an error that names it.
func TestStateRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	f := func(doc, why string) {
		t.Helper()
		file, _, err := statefile.Open(path, stateMagic, maxStateBytes)
		if err == nil {
			err = errors.Join(file.Write([]byte(doc)), file.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
		r, err := Open(Options{StateFile: path})
		if e, ok := errors.AsType[*statefile.Error](err); !ok || e.Path != path || !strings.Contains(err.Error(), why) {
			_ = r.Close()
			t.Fatalf("%.100s: %v", doc, err)
		}
	}
	odd := func(why string, engines ...savedEngine) {
		t.Helper()
		st := savedState{Engines: engines}
		f(string(st.encode()), why)
	}
	w := savedWorker{Addr: "a"}
	odd("has no workers", savedEngine{ID: "e"})
	odd("is there twice", savedEngine{Workers: []savedWorker{w, w}})
	odd("another engine has its dp_rank 0", savedEngine{Workers: []savedWorker{w}}, savedEngine{Workers: []savedWorker{w}})
	odd("its id is longer than", savedEngine{ID: strings.Repeat("e", maxEngineIDBytes+1), Workers: []savedWorker{w}})
	odd("outside 0 to", savedEngine{Workers: []savedWorker{{Addr: "a", Lease: -1}}})
	odd("has an address longer than", savedEngine{Workers: []savedWorker{{Addr: strings.Repeat("a", maxAddrBytes+1)}}})
	f("", "")
	f("[]", "")
	f(`{"engines":`, "")
}

// A folder into which the registry cannot write any more does not stop the registry; the log says so.
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

// Killed at any moment, it starts again with what was saved: never a damaged file.
func TestStateKilled(t *testing.T) {
	if path := os.Getenv("KVASIR_TEST_STATE"); path != "" {
		r := openAt(t, path)
		for dp := 0; ; dp++ {
			mustRegisterDirect(t, r, Registration{EngineID: "e", DPRank: dp % 500, TPRank: dp / 500, Addr: "tcp://h:1"}, local)
			r.write() // also while the saving goroutine is at rest
		}
	}
	path := filepath.Join(t.TempDir(), "state")
	workers := 0
	for i := range 8 {
		c := exec.Command(os.Args[0], "-test.run", "^TestStateKilled$")
		c.Env = append(os.Environ(), "KVASIR_TEST_STATE="+path)
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		for begin := time.Now(); time.Since(begin) < time.Minute; time.Sleep(time.Millisecond) {
			if _, err := os.Stat(path); err == nil {
				break
			}
		}
		time.Sleep(time.Duration(rand.IntN(30)) * time.Millisecond)
		_ = c.Process.Kill()
		_ = c.Wait() // it was killed
		r := openAt(t, path)
		n := r.mu.workers
		if err := r.Close(); err != nil || n < workers || n == 0 {
			t.Fatalf("after kill %d: %d workers, before %d, %v", i, n, workers, err)
		}
		workers = n
	}
}

// A file of an earlier release, which does not say who registered, is read.
func TestStateWithoutOrigins(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	file, _, err := statefile.Open(path, stateMagic, maxStateBytes)
	if err == nil {
		err = errors.Join(file.Write([]byte(`{"generation":7,"engines":[{"engine_id":"e","dp_rank":0,"workers":[{"tp_rank":0,"pp_rank":0,"addr":"tcp://10.0.0.7:1"},`+
			`{"tp_rank":1,"pp_rank":0,"addr":"tcp://10.0.0.7:2","remote":true}]}]}`)), file.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	r := openAt(t, path)
	defer r.Close()
	wantQuery(t, r, `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"tcp://10.0.0.7:1"},"1":{"0":"tcp://10.0.0.7:2"}}}}`)
	checkCounters(t, r)
}
