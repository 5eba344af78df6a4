// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/testkit"
)

func remote(addr string) peercred.Origin { return peercred.OriginOfAddr(netip.MustParseAddr(addr)) }

// flood registers from one origin until the registry refuses.
func flood(t *testing.T, r *Registry, from peercred.Origin, first int, engineID, addr string) {
	t.Helper()
	for dp := first; ; dp++ {
		if err := r.register(t.Context(), Registration{EngineID: engineID, DPRank: dp, Addr: addr}, from); err != nil {
			if !strings.Contains(err.Error(), "full") {
				t.Fatal(err)
			}
			return
		}
	}
}

// checkCounters compares the registry's counters with its entries.
func checkCounters(t *testing.T, r *Registry) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	workers, weight, held := 0, 0, map[peercred.Origin]int{}
	for _, e := range r.mu.engines {
		workers += len(e.byRank)
		for _, w := range e.byRank {
			weight += w.weight
			held[w.from] += w.weight
		}
		for _, v := range e.missing {
			weight += v.weight
			held[v.from] += v.weight
		}
	}
	if workers != r.mu.workers || weight != r.mu.weight || weight > maxDirectoryBytes || fmt.Sprint(held) != fmt.Sprint(r.mu.held) {
		t.Fatalf("%d workers of weight %d, counted %d and %d; held %v, counted %v", workers, weight, r.mu.workers, r.mu.weight, held, r.mu.held)
	}
}

// An address that fills the registry keeps no P of another address out, and the entries of other
// addresses stay, also over a restart of the registry. The registry can read back the longest texts
// that it accepts.
func TestFloodOfOneAddressLeavesRoomForOthers(t *testing.T) {
	f := func(name, id, addr string) {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "state")
			r := openAt(t, path)
			defer func() { r.Close() }()
			mustRegisterDirect(t, r, Registration{EngineID: "early", DPRank: -1, Addr: "tcp://10.0.0.7:1"}, remote("10.0.0.7"))
			flood(t, r, remote("10.66.6.6"), 0, id, addr)
			checkCounters(t, r)
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
			r = openAt(t, path)
			checkCounters(t, r)
			for tp := range 8 {
				mustRegisterDirect(t, r, Registration{EngineID: "late", DPRank: -2, TPRank: tp, TPSize: 8, Addr: fmt.Sprintf("tcp://10.0.0.8:%d", tp+1)}, remote("10.0.0.8"))
			}
			d, err := parseDirectory(r.current().body)
			if err != nil {
				t.Fatal(err)
			}
			if d[-1].ID != "early" || d[-2].ID != "late" || d[-2].TPSize() != 8 {
				t.Fatalf("%d engines, %+v, %+v", len(d), d[-1], d[-2])
			}
			if err := r.register(t.Context(), Registration{EngineID: id, DPRank: 1 << 20, TPRank: 1, Addr: addr}, remote("10.66.6.6")); err == nil {
				t.Fatal("who has most is let in beyond the limit")
			}
			checkCounters(t, r)
		})
	}
	f("long texts", strings.Repeat("<", maxEngineIDBytes), strings.Repeat("<", maxAddrBytes))
	testkit.LongAlone(t)
	f("short texts", "e", "a")
	f("texts of control characters", strings.Repeat("\x01", maxEngineIDBytes), strings.Repeat("\x01", maxAddrBytes))
	f("texts that encoders escape", strings.Repeat("\u2028", maxEngineIDBytes/3), strings.Repeat("\u2028", maxAddrBytes/3))
}

// A host that adds thousands of ranks to the engine of another host loses those ranks; the engine stays.
func TestFloodIntoAnEngineOfAnother(t *testing.T) {
	r := open(t, Options{MaxWorkers: 100})
	p, bad := remote("10.0.0.7"), remote("10.66.6.6")
	mustRegisterDirect(t, r, Registration{EngineID: "e", TPRank: 0, Addr: "a0"}, p)
	for tp := 2; ; tp++ {
		if r.register(t.Context(), Registration{EngineID: "e", TPRank: tp, Addr: "x"}, bad) != nil {
			break
		}
	}
	mustRegisterDirect(t, r, Registration{EngineID: "e", TPRank: 1, Addr: "a1"}, p)
	wantQuery(t, r, `{"0":{"engine_id":"e","worker_addr":{"0":{"0":"a0"},"1":{"0":"a1"}}}}`)
	checkCounters(t, r)
}

// A rank whose lease ended, and for which the registry waits, counts like a present rank. So leases that
// end again and again do not grow the registry.
func TestFloodOfLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := open(t, Options{MaxWorkers: 50})
		bad := remote("10.66.6.6")
		mustRegisterDirect(t, r, Registration{EngineID: "e", Addr: "x"}, bad)
		for tp := 1; tp < 500; tp++ {
			_ = r.register(t.Context(), Registration{EngineID: "e", TPRank: tp, Addr: "x", Lease: time.Second}, bad) // the last ones are refused
			time.Sleep(2 * time.Second)
			synctest.Wait()
		}
		checkCounters(t, r)
		r.mu.Lock()
		places := len(r.mu.engines[0].missing) + len(r.mu.engines[0].byRank)
		r.mu.Unlock()
		if places > 50 {
			t.Fatalf("%d places", places)
		}
		mustRegisterDirect(t, r, Registration{EngineID: "p", DPRank: 1, Addr: "a"}, remote("10.0.0.7"))
		checkCounters(t, r)
	})
}

// A full registry removes an engine of the host with the most workers: the one that registered longest ago.
func TestLongestSilentGivesWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := open(t, Options{MaxWorkers: 4})
		most := remote("10.66.6.6")
		for dp := range 4 {
			mustRegisterDirect(t, r, Registration{EngineID: fmt.Sprint("e", dp), DPRank: dp, Addr: "x"}, most)
			time.Sleep(time.Second)
		}
		mustRegisterDirect(t, r, Registration{EngineID: "e0", DPRank: 0, Addr: "x"}, most) // renews its registration
		mustRegisterDirect(t, r, Registration{EngineID: "p", DPRank: 9, Addr: "a"}, remote("10.0.0.7"))
		d, err := parseDirectory(r.current().body)
		if _, gone := d[1]; err != nil || gone || len(d) != 4 || d[0].ID != "e0" || d[9].ID != "p" {
			t.Fatal(d, err)
		}
	})
}

// One address has all places for waiting requests. A request of another address gets a place, and the
// oldest request of the first address is answered with 503.
func TestWaitersOfOneAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := open(t, Options{MaxWaiters: 3})
		ask := func(from string, n int) <-chan int {
			c := make(chan int, n)
			for range n {
				go func() {
					code, _ := call(r, "GET", "/query?wait=30", "", "From", from)
					c <- code
				}()
				synctest.Wait()
			}
			return c
		}
		bad := ask("10.66.6.6:1", 3)
		good := ask("10.0.0.7:1", 1)
		if len(bad) != 1 || <-bad != 503 || len(good) != 0 {
			t.Fatal("the oldest request of who has most did not give way")
		}
		if again := ask("10.66.6.6:1", 1); len(again) != 1 || <-again != 503 {
			t.Fatal("who has most is let in")
		}
		mustRegisterDirect(t, r, Registration{EngineID: "e", Addr: "a"}, local)
		if got := <-good; got != 200 {
			t.Fatal(got)
		}
	})
}

// Probes of one address that hang do not take the time of another's restart.
func TestProbesOfOneAddress(t *testing.T) {
	r := open(t, Options{MaxProbes: 4, ProbeTimeout: 5 * time.Second})
	r.prober.dial = func(ctx context.Context, host string) error {
		if strings.HasPrefix(host, "10.0.0.7:") {
			return syscall.ECONNREFUSED
		}
		<-ctx.Done()
		return ctx.Err()
	}
	mustRegisterDirect(t, r, Registration{EngineID: "old", DPRank: -1, Addr: "tcp://10.0.0.7:1"}, remote("10.0.0.7"))
	bad := remote("10.66.6.6")
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for dp := range 8 {
		mustRegisterDirect(t, r, Registration{EngineID: "x", DPRank: dp, Addr: fmt.Sprintf("tcp://10.66.6.6:%d", dp+1)}, bad)
		wg.Go(func() {
			_ = r.register(ctx, Registration{EngineID: "y", DPRank: dp, Addr: "z"}, bad) // refused at the end
		})
	}
	for r.prober.slots.Taken() < 4 {
		time.Sleep(time.Millisecond)
	}
	mustRegisterDirect(t, r, Registration{EngineID: "new", DPRank: -1, Addr: "tcp://10.0.0.7:2"}, remote("10.0.0.7"))
	cancel()
	wg.Wait()
}

// Where the flood and P come from one address, the registry removes engines whose side channel refuses
// connections, and keeps those whose side channel accepts them.
func TestFullOfDeadEngines(t *testing.T) {
	r := open(t, Options{MaxWorkers: 20})
	host := remote("10.0.0.7")
	r.prober.dial = func(_ context.Context, addr string) error {
		if strings.HasSuffix(addr, ":1") {
			return nil
		}
		return syscall.ECONNREFUSED
	}
	mustRegisterDirect(t, r, Registration{EngineID: "live", DPRank: -1, Addr: "tcp://10.0.0.7:1"}, host)
	for dp := range 200 {
		mustRegisterDirect(t, r, Registration{EngineID: "dead", DPRank: dp, Addr: "tcp://10.0.0.7:2"}, host)
	}
	mustRegisterDirect(t, r, Registration{EngineID: "p", DPRank: -2, Addr: "tcp://10.0.0.7:1"}, host)
	checkCounters(t, r)
	d, err := parseDirectory(r.current().body)
	if err != nil || len(d) != 20 || d[-1].ID != "live" || d[-2].ID != "p" {
		t.Fatal(d, err)
	}
	for dp := range 300 { // until all that are left live
		_ = r.register(t.Context(), Registration{EngineID: "p", DPRank: 1000 + dp, Addr: "tcp://10.0.0.7:1"}, host)
	}
	if err := r.register(t.Context(), Registration{EngineID: "one more", DPRank: 2000, Addr: "tcp://10.0.0.7:1"}, host); err == nil {
		t.Fatal("an engine that lives gave way")
	}
	if d, err = parseDirectory(r.current().body); err != nil || len(d) != 20 || d[-1].ID != "live" || d[-2].ID != "p" {
		t.Fatal(d, err)
	}
}
