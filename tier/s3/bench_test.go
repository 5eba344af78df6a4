// SPDX-License-Identifier: Apache-2.0

package s3_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/s3"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// BenchmarkRead reads 64 chunks of 4 MiB, 16 at once, and beside it gets the same objects
// with net/http, plainly and in parallel. MB/s is the rate of all together.
func BenchmarkRead(b *testing.B) {
	const chunks, size, width = 64, 4 << 20, 16
	data, meta := tiertest.Object(1, size)
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(size))
		w.Header().Set("X-Amz-Meta-Kvasir", fmt.Sprintf("1.%s.%016x.%d", tiertest.Key(0).Namespace, meta.Sum, size))
		_, _ = w.Write(data)
	}))
	defer store.Close()
	bench := func(name string, read func(i int, dst []byte) error) {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(chunks * size)
			slots := make([][]byte, width)
			for i := range slots {
				slots[i] = make([]byte, size)
			}
			for b.Loop() {
				var wg sync.WaitGroup
				for w := range width {
					wg.Go(func() {
						for i := w; i < chunks; i += width {
							if err := read(i, slots[w]); err != nil {
								b.Error(err)
							}
						}
					})
				}
				wg.Wait()
			}
		})
	}
	x, err := s3.Open(s3.Options{URL: store.URL + "/bucket", Keys: keys()})
	if err != nil {
		b.Fatal(err)
	}
	defer x.Close()
	bench("tier", func(i int, dst []byte) error {
		m, err := x.Read(b.Context(), tiertest.Key(i), dst)
		if err == nil && m != (tier.Meta{Len: size, Sum: meta.Sum}) {
			err = fmt.Errorf("%+v", m)
		}
		return err
	})
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: width, DisableCompression: true}}
	defer client.CloseIdleConnections()
	bench("plain", func(i int, dst []byte) error {
		a, err := client.Get(fmt.Sprintf("%s/bucket/%d", store.URL, i))
		if err != nil {
			return err
		}
		defer a.Body.Close()
		_, err = io.ReadFull(a.Body, dst)
		return err
	})
}

// BenchmarkSealed compares encrypted objects with plain ones, in a store of this process.
func BenchmarkSealed(b *testing.B) { raceSealed(b, 0) }

// BenchmarkOverLink is BenchmarkSealed with a store behind a link of 10 Gbit/s. Each connection has that whole rate.
func BenchmarkOverLink(b *testing.B) { raceSealed(b, 10e9/8) }

// raceSealed compares encrypted objects with plain ones. rate limits the bodies of the store, bytes/s; 0: no limit.
func raceSealed(b *testing.B, rate float64) {
	tiertest.RaceSealed(b, func(b *testing.B) (one, other tier.Tier) {
		place := func() tier.Tier {
			f := startFake(b, httptest.NewServer, "/bucket")
			f.rate = rate
			x, err := s3.Open(s3.Options{URL: f.url, Keys: keys()})
			if err != nil {
				b.Fatal(err)
			}
			return x
		}
		return place(), place()
	})
}

// paced writes at a rate, piece by piece. No piece is early.
type paced struct {
	to    io.Writer
	rate  float64 // bytes/s
	began time.Time
	sent  int
}

const pacedPiece = 64 << 10

func (p *paced) Write(b []byte) (n int, err error) {
	for len(b) > 0 && err == nil {
		piece := b[:min(len(b), pacedPiece)]
		if p.began.IsZero() {
			p.began = time.Now()
		}
		p.sent += len(piece)
		time.Sleep(time.Until(p.began.Add(time.Duration(float64(p.sent) / p.rate * 1e9))))
		var wrote int
		wrote, err = p.to.Write(piece)
		n, b = n+wrote, b[len(piece):]
	}
	return n, err
}
