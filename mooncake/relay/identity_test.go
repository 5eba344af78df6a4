// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/relay"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// rewrite gives P other weights: every byte of its KV is another.
func (w *world) rewrite() {
	for _, s := range w.p.Storages {
		for j := range s.Mem {
			s.Mem[j] ^= 0xff
		}
	}
}

// restart ends P and starts it again, with other weights and a given engine id.
func (w *world) restart(id string) {
	w.sender.Close()
	w.rewrite()
	w.startP(id)
	time.Sleep(5 * time.Millisecond) // RefreshEvery
}

// A transfer id that comes again is another prompt's: from the same P, from a P that
// restarted with other weights, and from one that kept its engine id. D gets what P
// has, and P gets its blocks back.
func TestSameIDAgainIsAskedOfP(t *testing.T) {
	w := newWorld(t, relay.Options{})
	for round, life := range []string{"", "", "e2", "e2", "e1"} {
		if life != "" {
			w.restart(life)
		}
		p := 1 + round
		w.sender.Offer(fmt.Sprint("p", round), "xfer-1", [][]int{{p}, {p + 20}})
		if err := w.pull("xfer-1", []int{1}, []int{2}); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		w.check(0, []int{1}, []int{p})
		w.check(1, []int{2}, []int{p + 20})
		if got := w.sender.Finished(); len(got) != 1 {
			t.Fatalf("round %d: P finished %v", round, got)
		}
		if err := w.pull("xfer-1#2", []int{3}, []int{4}); err != nil {
			t.Fatalf("round %d: again: %v", round, err)
		}
		w.check(0, []int{3}, []int{p})
	}
	if s := w.relay.Stats(); s.FromMemory != 5 || s.Pulled != 5 {
		t.Fatalf("%+v", s)
	}
}

// What P sent in a life that has ended is not served any more: its side channel broke,
// under the same engine id and address as ever, or it left the registry.
func TestKeptKVEndsWithItsP(t *testing.T) {
	w := newWorld(t, relay.Options{Timeout: 20 * time.Second})
	offer := func(id string, b int) {
		t.Helper()
		w.sender.Offer("p"+id, id, [][]int{{b}, {b}})
		if err := w.pull(id, []int{1}, []int{2}); err != nil {
			t.Fatal(err)
		}
	}
	offer("x", 5)
	w.sender.Close()
	testkit.Eventually(t, "the relay notices", func() bool { return w.relay.Stats().Kept == 0 })
	w.rewrite()
	w.startP("e1")
	time.Sleep(5 * time.Millisecond)
	// P has no such transfer, so the pull ends when this D gives it up.
	short, err := mooncake.NewReceiver(w.d, mooncake.ReceiverOptions{Target: w.target, Log: logger(), Timeout: 3 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer short.Close()
	failed, err := short.Pull(t.Context(), w.source(), map[string]wire.Wanted{"d-x#2": {TransferID: "x#2", Blocks: [][]int{{1}, {2}}}})
	if err != nil {
		t.Fatal(err)
	}
	if failed["d-x#2"] == nil {
		t.Fatal("an earlier life's KV was served")
	}
	offer("y", 6)
	from := w.source()
	w.mu.Lock()
	w.dir = "{}"
	w.mu.Unlock()
	testkit.Eventually(t, "the relay notices", func() bool { return w.relay.Stats().Kept == 0 && w.relay.Stats().Engines == 0 })
	failed, err = w.receiver.Pull(t.Context(), from, map[string]wire.Wanted{"d": {TransferID: "y#2", Blocks: [][]int{{3}, {4}}}})
	if err != nil || failed["d"] == nil || !strings.Contains(failed["d"].Error(), "not registered any more") {
		t.Fatal(err, failed)
	}
}

// With KeepAcrossRestarts memory is reachable without P, for a D that knows the side
// channel, and under another engine of P.
func TestKeepAcrossRestarts(t *testing.T) {
	w := newWorld(t, relay.Options{KeepAcrossRestarts: true, Timeout: 20 * time.Second})
	w.sender.Offer("p", "x", [][]int{{5}, {6}})
	from := w.source()
	if err := w.pull("x", []int{1}, []int{2}); err != nil {
		t.Fatal(err)
	}
	kept := bytes.Clone(block(w.p, 0, 5))
	w.sender.Close()
	w.mu.Lock()
	w.dir = "{}"
	w.mu.Unlock()
	testkit.Eventually(t, "the relay notices", func() bool { return w.relay.Stats().Engines == 0 })
	failed, err := w.receiver.Pull(t.Context(), from, map[string]wire.Wanted{"d": {TransferID: "x#2", Blocks: [][]int{{3}, {4}}}})
	if err != nil || len(failed) > 0 {
		t.Fatal(err, failed)
	}
	w.restart("e2")
	if err := w.pull("x#3", []int{7}, []int{8}); err != nil {
		t.Fatal(err)
	}
	w.target.Table().Observe()
	if !bytes.Equal(block(w.d, 0, 3), kept) || !bytes.Equal(block(w.d, 0, 7), kept) {
		t.Fatal("wrong bytes")
	}
}

// Another worker of P registers: the side channel that D knows stays where it is.
func TestSideChannelStays(t *testing.T) {
	w := newWorld(t, relay.Options{})
	from, addr := w.source(), w.sideChannel()
	for i := range 3 {
		id := fmt.Sprint("x", i)
		w.sender.Offer("p"+id, id, [][]int{{1}, {2}})
		failed, err := w.receiver.Pull(t.Context(), from, map[string]wire.Wanted{"d" + id: {TransferID: id, Blocks: [][]int{{1}, {2}}}})
		if err != nil || len(failed) > 0 {
			t.Fatal(err, failed)
		}
		if got := w.sideChannel(); got != addr {
			t.Fatalf("moved from %s to %s", addr, got)
		}
		w.mu.Lock()
		w.dir = fmt.Sprintf(`{"0":{"engine_id":"e1","worker_addr":{"0":{"0":%q},"%d":{"0":"tcp://127.0.0.1:1"}}}}`, w.sender.Addr(), i+1)
		w.mu.Unlock()
		time.Sleep(5 * time.Millisecond)
		w.source()
		w.mu.Lock()
		w.dir = fmt.Sprintf(`{"0":{"engine_id":"e1","worker_addr":{"0":{"0":%q}}}}`, w.sender.Addr())
		w.mu.Unlock()
		time.Sleep(5 * time.Millisecond)
		w.source()
	}
}

// ranks starts a P of several TP ranks, and offers one transfer.
func (w *world) ranks(n int, ids ...string) (caches []*mooncake.Cache) {
	w.sender.Close()
	addrs := ""
	for rank := range n {
		c := memory(payload / uint64(n))
		for i := range c.Regions {
			c.Regions[i].Payload = payload / uint64(n)
			rand.NewChaCha8([32]byte{byte(rank), byte(i), 9}).Read(c.Storages[i].Mem)
		}
		s, err := mooncake.NewSender(c, mooncake.SenderOptions{
			Engine: mooncake.Engine{ID: "tp"}, Self: mooncake.Peer{TPRank: rank, TPSize: n}, Transfer: w.client, Log: logger(),
		})
		if err != nil {
			w.t.Fatal(err)
		}
		if err := s.Start(w.t.Context()); err != nil {
			w.t.Fatal(err)
		}
		w.t.Cleanup(func() { s.Close() })
		for i, id := range ids {
			s.Offer("p"+id, id, [][]int{{4 + i}, {5 + i}})
		}
		caches = append(caches, c)
		addrs += fmt.Sprintf(`,"%d":{"0":%q}`, rank, s.Addr())
	}
	w.mu.Lock()
	w.dir = `{"0":{"engine_id":"tp","worker_addr":{` + addrs[1:] + `}}}`
	w.mu.Unlock()
	time.Sleep(5 * time.Millisecond) // RefreshEvery
	return caches
}

// D gets each byte once, however many ranks P has, for two transfers in one pull and
// again from memory.
func TestOnePushPerRankOfD(t *testing.T) {
	w := newWorld(t, relay.Options{})
	caches := w.ranks(4, "x", "y")
	for round, suffix := range []string{"", "#2"} {
		failed, err := w.receiver.Pull(t.Context(), w.source(), map[string]wire.Wanted{
			"dx" + suffix: {TransferID: "x" + suffix, Blocks: [][]int{{1}, {2}}},
			"dy" + suffix: {TransferID: "y" + suffix, Blocks: [][]int{{3}, {4}}},
		})
		if err != nil || len(failed) > 0 {
			t.Fatal(err, failed)
		}
		s := w.relay.Stats()
		if want := int64(round+1) * s.PulledBytes; s.PushedBytes != want || s.Pulled != 2 {
			t.Fatalf("pushed %d bytes, want %d: %+v", s.PushedBytes, want, s)
		}
		w.target.Table().Observe()
		for i, r := range w.d.Regions {
			for k, at := range []int{1 + i%2, 3 + i%2} { // D's blocks of x and y
				var want []byte
				for _, c := range caches {
					q := c.Regions[i]
					want = append(want, c.Bytes(q.Base+uint64(4+k+i%2)*q.Stride, q.Payload)...)
				}
				if got := w.d.Bytes(r.Base+uint64(at)*r.Stride, r.Payload); !bytes.Equal(got, want) {
					t.Fatalf("layer %d, transfer %d differs", i, k)
				}
			}
		}
	}
}

// A D that has the first blocks itself leaves a copy without them. A second D that
// wants all gets them from P, and the copy is whole from then on.
func TestPrefixHitOfTheFirstD(t *testing.T) {
	w := newWorld(t, relay.Options{})
	all := [][]int{{1, 2, 3, 4}, {5, 6, 7, 8}}
	w.sender.Offer("p", "x", all)
	if err := w.pull("x", []int{9}, []int{9}); err != nil {
		t.Fatal(err)
	}
	w.check(0, []int{9}, []int{4})
	w.sender.Offer("p2", "x", all)
	for i, id := range []string{"x#2", "x#3"} {
		if err := w.pull(id, []int{11, 12, 13, 14}, []int{15, 16, 17, 18}); err != nil {
			t.Fatal(err)
		}
		w.check(0, []int{11, 12, 13, 14}, all[0])
		w.check(1, []int{15, 16, 17, 18}, all[1])
		if s := w.relay.Stats(); s.Pulled != 2 || s.FromMemory != int64(i) {
			t.Fatalf("%+v", s)
		}
	}
}

// The answer to D is lost with its connection; D asks again under the same request
// id. P has forgotten the transfer, and D gets it all the same.
func TestLostAnswerOfTheRelay(t *testing.T) {
	w := newWorld(t, relay.Options{Timeout: 20 * time.Second})
	w.sender.Offer("p", "x", [][]int{{5}, {6}})
	regions := memory(2 * payload)
	published, err := w.target.Table().Publish(regions.Storages[0].Mem, regions.Storages[1].Mem, regions.Storages[2].Mem, regions.Storages[3].Mem)
	if err != nil {
		t.Fatal(err)
	}
	for i, g := range published {
		regions.Regions[i].Base = g.Range().Addr
	}
	var port int
	fmt.Sscanf(w.target.Name(), "127.0.0.1:%d", &port)
	pull := &wire.Pull{
		Host: "127.0.0.1", Port: port, TPSize: 1, Regions: regions.Regions,
		Wanted: map[string]wire.Wanted{"d": {TransferID: "x", Blocks: [][]int{{1}, {2}}}},
	}
	for round := range 2 {
		c := w.channel()
		c.send(pull)
		if y := c.next(60 * time.Second); y == nil || !slices.Equal(y.OK, []string{"d"}) {
			t.Fatalf("round %d: %+v", round, y)
		}
		c.dealer.Close()
	}
	other := *pull
	other.Wanted = map[string]wire.Wanted{"stranger": {TransferID: "x", Blocks: [][]int{{3}, {4}}}}
	c := w.channel()
	c.send(&other)
	if y := c.next(60 * time.Second); y == nil || !slices.Equal(y.Failed, []string{"stranger"}) {
		t.Fatalf("another request got the KV of an exact id from memory: %+v", y)
	}
}

// A D reserves all of the relay's memory for transfers that P does not know. The relay takes
// memory from it for other D's, and frees the rest when that D disconnects.
func TestMemoryShares(t *testing.T) {
	w := newWorld(t, relay.Options{Timeout: 60 * time.Second, MemoryBytes: 64 << 10})
	wanted := map[string]wire.Wanted{}
	for i := range 16 { // a page each, and all of the memory
		wanted[fmt.Sprint("r", i)] = wire.Wanted{TransferID: fmt.Sprint("never", i), Blocks: [][]int{{1, 2}, {3, 4}}}
	}
	greedy := w.channel()
	greedy.send(&wire.Pull{Host: "127.0.0.1", Port: 9, TPSize: 1, Regions: memory(payload).Regions, Wanted: wanted})
	testkit.Eventually(t, "all memory is reserved", func() bool { return w.relay.Stats().KeptBytes == 64<<10 })
	for i := range 4 {
		id := fmt.Sprint("x", i)
		w.sender.Offer("p"+id, id, [][]int{{1, 2}, {3, 4}})
		if err := w.pull(id, []int{1, 2}, []int{3, 4}); err != nil {
			t.Fatal(err)
		}
	}
	greedy.dealer.Close()
	testkit.Eventually(t, "loads that nobody waits for end", func() bool {
		s := w.relay.Stats()
		return s.Kept <= 4 && s.KeptBytes <= 4*4096
	})
}

// Requests that come from web pages are refused, with D's own beside them answered.
func TestWebPagesAreRefused(t *testing.T) {
	w := newWorld(t, relay.Options{})
	f := func(want int, set func(*http.Request)) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), "GET", w.web.URL+"/query", nil)
		if err != nil {
			t.Fatal(err)
		}
		set(req)
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != want {
			t.Errorf("%+v, Host %s: %s", req.Header, req.Host, res.Status)
		}
	}
	f(200, func(*http.Request) {})
	f(200, func(r *http.Request) { r.Host = "localhost:8999" })
	f(200, func(r *http.Request) { r.Host = "[::1]:8999" })
	f(403, func(r *http.Request) { r.Host = "attacker.example:8999" })
	f(403, func(r *http.Request) { r.Header.Set("Origin", "https://attacker.example") })
	f(403, func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "cross-site") })
	f(200, func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "none") })
}

// An answer of the registry has the age of its question. A caller that asks after a change must not get a slow answer to an earlier question.
func TestSlowAnswerOfTheRegistryIsOld(t *testing.T) {
	w := newWorld(t, relay.Options{})
	before, hold := w.source(), make(chan bool)
	w.mu.Lock()
	w.hold = hold
	w.mu.Unlock()
	<-hold // an answer without the change is under way
	w.mu.Lock()
	w.hold = nil
	w.mu.Unlock()
	w.sender.Close()
	w.startP("e2")
	time.Sleep(5 * time.Millisecond) // RefreshEvery
	after := make(chan string)
	go func() { after <- w.source().EngineID }()
	time.Sleep(20 * time.Millisecond) // w.source waits for the slow answer
	hold <- true
	if got := <-after; got == before.EngineID {
		t.Errorf("still %s", got)
	}
}
