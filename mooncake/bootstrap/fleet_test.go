// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// A thousand workers register at once over real connections while others query:
// no answer is lost, and no directory shows half an engine.
func TestThousandWorkers(t *testing.T) {
	r := open(t, Options{})
	base := serve(t, r)
	const engines, tp = 25, 40
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 50, MaxConnsPerHost: 50}}
	defer client.CloseIdleConnections()
	var wg sync.WaitGroup
	for dp := range engines {
		for rank := range tp {
			wg.Go(func() {
				body, _ := Registration{EngineID: "e" + strconv.Itoa(dp), DPRank: dp, TPRank: rank, TPSize: tp, Addr: fmt.Sprintf("tcp://h%d:%d", dp, rank)}.body()
				resp, err := client.Post(base+"/register", "application/json", bytes.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				resp.Body.Close()
				if resp.StatusCode != 200 {
					t.Error(resp.Status)
				}
			})
		}
	}
	asker, err := NewClient(base, ClientOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer asker.Close()
	for range 20 {
		d, err := asker.Query(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range d {
			if e.TPSize() != tp {
				t.Fatalf("engine %s is shown with %d of %d ranks", e.ID, e.TPSize(), tp)
			}
		}
	}
	wg.Wait()
	d, err := asker.Query(t.Context())
	if err != nil || len(d) != engines {
		t.Fatal(len(d), err)
	}
	for dp, e := range d {
		for rank, pps := range e.Workers {
			if want := fmt.Sprintf("tcp://h%d:%d", dp, rank); pps[0] != want {
				t.Fatalf("dp %d tp %d: %s", dp, rank, pps[0])
			}
		}
	}
}

// serve runs r on a real port until the test ends.
func serve(t *testing.T, r *Registry) (base string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return (&url.URL{Scheme: "http", Host: l.Addr().String()}).String()
}

// Random starts, deaths, restarts and registrations of engines. An address names
// its incarnation, so the directory can be checked: every engine shown is one
// incarnation, the last that registered in its place, and whole if it says how
// large it is or is no wider than the one before.
func TestRandomRestarts(t *testing.T) {
	for range 200 {
		seed := rand.Uint64()
		rnd := rand.New(rand.NewPCG(seed, 1))
		r := open(t, Options{Settle: time.Hour, ProbeTimeout: 5 * time.Second})
		type incarnation struct {
			n, tp int
			dead  bool
			told  bool // states its size
		}
		var mu sync.Mutex
		live := map[int]*incarnation{} // by n
		r.prober.dial = func(_ context.Context, host string) error {
			mu.Lock()
			defer mu.Unlock()
			name, _, _ := strings.Cut(host, ":")
			n, _ := strconv.Atoi(name[1:])
			if live[n].dead {
				return syscall.ECONNREFUSED
			}
			return nil
		}
		at := map[int]*incarnation{} // by dp
		widest := map[int]int{}      // by n: the width of the engine that it replaced
		last := map[int]int{}        // dp → n of the last accepted
		width := map[int]map[int]bool{}
		for n := range 60 {
			dp := rnd.IntN(2)
			if at[dp] == nil || at[dp].dead || rnd.IntN(6) == 0 {
				at[dp] = &incarnation{n: n, tp: 1 + rnd.IntN(3), told: rnd.IntN(2) == 0}
				mu.Lock()
				live[n] = at[dp]
				mu.Unlock()
				width[n] = map[int]bool{}
			} else if rnd.IntN(5) == 0 {
				mu.Lock()
				at[dp].dead = true
				mu.Unlock()
				continue
			}
			in := at[dp]
			reg := Registration{EngineID: "e" + strconv.Itoa(in.n), DPRank: dp, TPRank: rnd.IntN(in.tp)}
			reg.Addr = fmt.Sprintf("tcp://n%d:%d", in.n, reg.TPRank+1)
			if in.told {
				reg.TPSize = in.tp
			}
			if err := r.register(t.Context(), reg, local); err == nil {
				if old, ok := last[dp]; ok && old != in.n {
					widest[in.n] = max(len(width[old]), widest[old])
				}
				last[dp] = in.n
				width[in.n][reg.TPRank] = true
			} else if live[last[dp]].dead {
				t.Fatalf("seed %d: refused though the old one is dead: %v", seed, err)
			}
			d, err := parseDirectory(r.current().body)
			if err != nil {
				t.Fatal(err)
			}
			for dp, e := range d {
				have := live[last[dp]]
				if e.ID != "e"+strconv.Itoa(have.n) || (have.told && e.TPSize() != have.tp) || (!have.told && e.TPSize() < widest[have.n]) {
					t.Fatalf("seed %d: dp %d shows %+v, registered last: %+v, the one before had %d", seed, dp, e, have, widest[have.n])
				}
				for tp, pps := range e.Workers {
					if want := fmt.Sprintf("tcp://n%d:%d", have.n, tp+1); pps[0] != want {
						t.Fatalf("seed %d: dp %d tp %d is at %s, want %s", seed, dp, tp, pps[0], want)
					}
				}
			}
		}
	}
}
