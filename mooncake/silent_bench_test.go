// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"context"
	"fmt"
	"net"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// Seven D's pull 2 MiB requests from a P, with and without two peers that accept
// connections and say nothing: a D with 24 pulls at that P, and a P of which each D
// waits for 4. Rounds are interleaved. Reported is the 99th percentile of a pull with
// them, divided by that without: the median of five.
func BenchmarkSilentPeers(b *testing.B) {
	for b.Loop() {
		var ratios, without, with []float64
		for range 5 {
			off := silentRound(b, false)
			on := silentRound(b, true)
			ratios = append(ratios, float64(on)/float64(off))
			without, with = append(without, float64(off.Microseconds())), append(with, float64(on.Microseconds()))
		}
		for _, l := range [][]float64{ratios, without, with} {
			slices.Sort(l)
		}
		b.ReportMetric(ratios[2], "p99-ratio")
		b.ReportMetric(without[2], "p99-without-us")
		b.ReportMetric(with[2], "p99-with-us")
	}
}

// silentRound returns the 99th percentile of a pull.
func silentRound(b *testing.B, silent bool) time.Duration {
	const ds, pulls = 7, 60
	x := newPair(b, testCache(2, 64, 64<<10), testCache(2, 64, 64<<10), SenderOptions{}, ReceiverOptions{Timeout: 60 * time.Second})
	receivers := []*Receiver{x.receiver}
	for range ds - 1 {
		target, err := transfer.Listen(transfer.TargetOptions{}, transfer.NewTable())
		if err != nil {
			b.Fatal(err)
		}
		defer target.Close()
		r, err := NewReceiver(testCache(2, 64, 64<<10), ReceiverOptions{Target: target, Log: testLog(b), Timeout: 60 * time.Second})
		if err != nil {
			b.Fatal(err)
		}
		defer r.Close()
		receivers = append(receivers, r)
	}
	ctx, cancel := context.WithCancel(b.Context())
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer cancel()
	if silent {
		host, port := silentD(b)
		for i := range 24 {
			id := fmt.Sprint("silent", i)
			x.sender.Offer("p"+id, id, [][]int{{0, 1, 2, 3}})
			ask(b, x.sender.Addr(), &wire.Pull{
				Host: host, Port: port, TPSize: 1, PPSize: 1, Regions: x.d.Regions, Wanted: map[string]wire.Wanted{"d" + id: {TransferID: id, Blocks: [][]int{{0, 1, 2, 3}}}},
			})
		}
		dead, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		defer dead.Close()
		dir := new(directory)
		dir.show("silent", "tcp://"+dead.Addr().String())
		web := httptest.NewServer(dir)
		defer web.Close()
		for d, r := range receivers {
			for i := range 4 {
				id := fmt.Sprint("never", d, i)
				waiting.Go(func() {
					_, _ = r.Pull(ctx, Source{EngineID: "silent", Bootstrap: web.URL}, map[string]wire.Wanted{id: {TransferID: id, Blocks: [][]int{{40 + i}}}})
				})
			}
		}
		time.Sleep(100 * time.Millisecond) // until they wait
	}
	var mu sync.Mutex
	var took []time.Duration
	var wg sync.WaitGroup
	blocks := []int{8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27, 28, 29, 30, 31}
	for d, r := range receivers {
		wg.Go(func() {
			for i := range pulls {
				id := fmt.Sprint("x", d, "-", i)
				x.sender.Offer("p"+id, id, [][]int{blocks})
				begin := time.Now()
				failed, err := r.Pull(b.Context(), x.from, map[string]wire.Wanted{"d" + id: {TransferID: id, Blocks: [][]int{blocks}}})
				if err != nil || failed["d"+id] != nil {
					b.Errorf("%s: %v, %v", id, failed, err)
					return
				}
				mu.Lock()
				took = append(took, time.Since(begin))
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if b.Failed() {
		b.FailNow()
	}
	slices.Sort(took)
	return took[len(took)*99/100]
}
