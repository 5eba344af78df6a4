// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/lmcache"
)

// restart is a server process whose pool is full of chunks of 8 MiB.
type restart struct {
	testing.TB
	*serving
	args    []string
	prompts int // of 8 chunks
}

func (r *restart) key(prompt int, request string, worker int) *lmcache.Key {
	t := make([]uint32, 8*256)
	for i := range t {
		t[i] = uint32(prompt)
	}
	return &lmcache.Key{Model: "m", WorldSize: 1, Worker: worker, Tokens: t, End: len(t), RequestID: request, Readers: 1}
}

func (r *restart) client() *lmcache.Client {
	c, err := lmcache.NewClient(fmt.Sprintf("tcp://127.0.0.1:%d", r.port))
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { _ = c.Close() })
	return c
}

func (r *restart) metric(name string) float64 {
	res, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", r.http))
	if err != nil {
		r.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		r.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^` + name + ` (\S+)$`).FindSubmatch(text)
	if m == nil {
		r.Fatalf("no %s", name)
	}
	v, err := strconv.ParseFloat(string(m[1]), 64)
	if err != nil {
		r.Fatal(err)
	}
	return v
}

// fill stores the prompts, and waits for their checksums.
func (r *restart) fill() {
	ctx := context.Background()
	c := r.client()
	p := lmcache.EngineDriven{InstanceID: 7, Model: "m", WorldSize: 1, BlockSize: 16, Layers: 8, Hidden: 1024, DType: "float16"}
	if _, err := c.RegisterEngineDriven(ctx, &p); err != nil {
		r.Fatal(err)
	}
	for i := range r.prompts {
		k := r.key(i, fmt.Sprint("store ", i), 0)
		got, err := c.PrepareStore(ctx, k, 7, nil)
		if err != nil || len(got.Slots) != 8 {
			r.Fatal(len(got.Slots), err)
		}
		if ok, err := c.CommitStore(ctx, k, 7); err != nil || !ok {
			r.Fatal(ok, err)
		}
	}
	for r.metric("kvasir_checksummed_chunks_total") < float64(8*r.prompts) {
		time.Sleep(100 * time.Millisecond)
	}
}

// kill ends the server with SIGKILL and starts it again. It returns the time from the
// start of the process to its first answer.
func (r *restart) kill() time.Duration {
	if err := r.cmd.Process.Kill(); err != nil {
		r.Fatal(err)
	}
	_ = r.cmd.Wait() // killed
	began := time.Now()
	r.cmd = command(r.args...)
	if err := r.cmd.Start(); err != nil {
		r.Fatal(err)
	}
	c := r.client()
	for {
		if _, err := c.Ping(context.Background(), 7); err == nil {
			return time.Since(began)
		}
		if time.Since(began) > time.Minute {
			r.Fatal("the server does not come back")
		}
		time.Sleep(time.Millisecond)
	}
}

// requests measures small requests of another client: pings, and lookups of prompts
// that are not stored. It continues until done returns true.
func (r *restart) requests(done func(n int) bool) (p50, p99 time.Duration, n int) {
	ctx := context.Background()
	c := r.client()
	var took []time.Duration
	for !done(len(took)) {
		began := time.Now()
		if _, err := c.Ping(ctx, 7); err != nil {
			r.Fatal(err)
		}
		took = append(took, time.Since(began))
		began = time.Now()
		k := r.key(1_000_000+len(took), "other", lmcache.AllWorkers)
		if _, err := c.Lookup(ctx, k); err != nil {
			r.Fatal(err)
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took[len(took)/2], took[len(took)*99/100], len(took)
}

// BenchmarkRestartUncompared restarts a server over a pool whose chunks must all be compared, 1 GiB of them or
// KVASIR_RESTART_GIB. It reports the time to the first answer, and the latency of other clients' requests while
// all chunks are looked up and compared, beside the latency at the same server at rest.
func BenchmarkRestartUncompared(b *testing.B) {
	gib := 1
	if s := os.Getenv("KVASIR_RESTART_GIB"); s != "" {
		var err error
		if gib, err = strconv.Atoi(s); err != nil {
			b.Fatal(err)
		}
	}
	s := serve(b, "--l1-size-gb", fmt.Sprint(gib), "--checksum-mib-per-second", "8192", "--populate-mib-per-second", "8192")
	r := &restart{TB: b, serving: s, prompts: gib << 10 / 64}
	r.args = s.cmd.Args[1:]
	r.fill()
	ctx := context.Background()
	for b.Loop() {
		first := r.kill()
		asker := r.client()
		for i := range r.prompts {
			if _, err := asker.Call(ctx, lmcache.OpLookup, r.key(i, fmt.Sprint("p", i), lmcache.AllWorkers).Append(nil), lmcache.AppendInt(nil, 1)); err != nil {
				b.Fatal(err)
			}
		}
		pending := make(chan struct{})
		hits := 0
		go func() {
			defer close(pending)
			for i := range r.prompts {
				got, err := asker.Call(ctx, lmcache.OpWaitPrefetchStatus, lmcache.AppendString(nil, fmt.Sprint("p", i)), msgp.AppendFloat64(nil, 60))
				if n, derr := lmcache.DecodeInt(got); err == nil && derr == nil {
					hits += int(n)
				}
			}
		}()
		p50, p99, n := r.requests(func(int) bool {
			select {
			case <-pending:
				return true
			default:
				return false
			}
		})
		for r.metric("kvasir_verified_chunks_total") < float64(8*r.prompts) {
			time.Sleep(100 * time.Millisecond)
		}
		idle50, idle99, _ := r.requests(func(have int) bool { return have >= max(n, 2000) })
		b.ReportMetric(float64(first.Milliseconds()), "first-answer-ms")
		b.ReportMetric(float64(p99.Microseconds()), "p99-us")
		b.ReportMetric(float64(idle99.Microseconds()), "idle-p99-us")
		b.ReportMetric(float64(p99)/float64(idle99), "p99-ratio")
		b.ReportMetric(float64(p50)/float64(idle50), "p50-ratio")
		b.ReportMetric(100*float64(hits)/float64(8*r.prompts), "%-hit")
		b.Logf("%d requests while %d GiB were compared: p50 %v, p99 %v; at rest %v, %v", n, gib, p50, p99, idle50, idle99)
	}
}
