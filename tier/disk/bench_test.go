// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// benchBytes are the objects of a benchmark, all together. KVASIR_BENCH_DIR names the
// file system.
const benchBytes = 1 << 30

func benchDir(b *testing.B) string {
	dir, err := os.MkdirTemp(os.Getenv("KVASIR_BENCH_DIR"), "kvasir-disk-")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func benchKey(i int64) (k kv.Key) {
	binary.LittleEndian.PutUint64(k.Chunk[:], mix(uint64(i)))
	binary.LittleEndian.PutUint64(k.Chunk[8:], uint64(i))
	return k
}

// plainFile is the file that the tier is compared with: one file, reserved, direct I/O.
func plainFile(b *testing.B) file {
	b.Helper()
	path := filepath.Join(benchDir(b), "plain")
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_DIRECT, 0o600)
	if err == nil {
		err = unix.Fallocate(fd, 0, 0, benchBytes)
	}
	if err != nil {
		b.Skip(err)
	}
	b.Cleanup(func() { _ = unix.Close(fd) })
	return osFile{fd: fd}
}

// plainWriter fills files of 256 MiB, as a segment is filled: reserved, direct I/O, and
// removed when there are 2 GiB of them; but without headers, indexes or syncs.
func plainWriter(b *testing.B, n int64) func(i int64, buf []byte) error {
	files, err := openFiles(benchDir(b), false)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = files.close() })
	const each = 256 << 20
	var mu sync.Mutex
	open := map[int64]file{}
	get := func(k int64) (file, error) {
		mu.Lock()
		defer mu.Unlock()
		if f := open[k]; f != nil {
			return f, nil
		}
		if old := k - 2*benchBytes/each; old >= 0 {
			if err := errors.Join(open[old].close(), files.remove(fmt.Sprint(old))); err != nil {
				return nil, err
			}
		}
		var err error
		open[k], err = files.create(fmt.Sprint(k), each)
		return open[k], err
	}
	return func(i int64, buf []byte) error {
		f, err := get(i * n / each)
		if err != nil {
			return err
		}
		return f.writev([][]byte{buf}, i*n%each)
	}
}

func benchDisk(b *testing.B, n int) (*Disk, func(i int64, buf []byte) error) {
	b.Helper()
	d := open(b, Options{Dirs: []Dir{{benchDir(b), 2 * benchBytes}}, SegmentBytes: 256 << 20, MinFree: 1, FirstTouch: true})
	b.Cleanup(func() { closeDisk(b, d) })
	sum := hashOf(make([]byte, n))
	return d, func(i int64, buf []byte) error {
		return d.Write(b.Context(), benchKey(i), tier.Meta{Len: int64(n), Sum: sum}, buf)
	}
}

// parallel runs f in some goroutines, each with memory of its own, as a pool has it.
func parallel(b *testing.B, workers, n int, f func(i int64, buf []byte) error) {
	each := (workers + runtime.GOMAXPROCS(0) - 1) / runtime.GOMAXPROCS(0)
	path, err := shm.Path("", fmt.Sprintf("kvasir-bench-%d", os.Getpid()))
	if err != nil {
		b.Fatal(err)
	}
	all := int64(n * each * runtime.GOMAXPROCS(0))
	memory, err := shm.Create(path, all)
	if err != nil {
		b.Skip(err)
	}
	defer memory.Close()
	if err := errors.Join(memory.Unlink(), memory.Populate(0, all, true)); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(n))
	b.SetParallelism(each)
	var next, worker atomic.Int64
	used := processorTime()
	b.ResetTimer()
	b.RunParallel(func(pb *testing.PB) {
		buf := memory.Bytes((worker.Add(1)-1)*int64(n), int64(n))
		for pb.Next() {
			if err := f(next.Add(1), buf); err != nil {
				b.Error(err)
				return
			}
		}
	})
	b.ReportMetric((processorTime()-used).Seconds()/(float64(b.N)*float64(n)/1e9), "cpu-s/GB")
}

func BenchmarkWrite(b *testing.B) {
	for _, n := range []int{1 << 20, 4 << 20} {
		b.Run(fmt.Sprintf("%dMiB/plain", n>>20), func(b *testing.B) {
			parallel(b, 4, n, plainWriter(b, int64(n)))
		})
		b.Run(fmt.Sprintf("%dMiB/disk", n>>20), func(b *testing.B) {
			_, write := benchDisk(b, n)
			parallel(b, 4, n, write)
		})
	}
}

func BenchmarkRead(b *testing.B) {
	for _, n := range []int{1 << 20, 4 << 20} {
		objects := int64(benchBytes / n)
		random := func() int64 { return rand.Int64N(objects) }
		b.Run(fmt.Sprintf("%dMiB/plain", n>>20), func(b *testing.B) {
			f := plainFile(b)
			for i := range objects {
				if err := f.writev([][]byte{shm.MakeAligned(n, block)}, i*int64(n)); err != nil {
					b.Fatal(err)
				}
			}
			parallel(b, 8, n, func(_ int64, buf []byte) error { return f.readv([][]byte{buf}, random()*int64(n)) })
		})
		b.Run(fmt.Sprintf("%dMiB/disk", n>>20), func(b *testing.B) {
			d, write := benchDisk(b, n)
			zero := shm.MakeAligned(n, block)
			for i := range objects {
				if err := write(i, zero); err != nil {
					b.Fatal(err)
				}
			}
			parallel(b, 8, n, func(_ int64, buf []byte) error {
				_, err := d.Read(b.Context(), benchKey(random()), buf)
				return err
			})
		})
	}
}

// processorTime is what this process has used so far.
func processorTime() time.Duration {
	var r unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &r) // never fails
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// BenchmarkOpen opens a directory of a million objects of 1 MiB, with and without its
// checkpoint. The segments' records are holes.
func BenchmarkOpen(b *testing.B) {
	const segments, each, n = 1000, 1000, 1 << 20
	dir := benchDir(b)
	o := Options{Dirs: []Dir{{dir, 4 << 40}}, MinFree: 1, FirstTouch: true, ScrubRate: 1} // the scrub forgets one object each time
	d := open(b, o)
	closeDisk(b, d)
	rec := recordBytes(n)
	for s := range uint32(segments) {
		id := uint64(s) + 1
		records := make([]record, each)
		for i := range records {
			records[i] = record{benchKey(int64(s)*each + int64(i)), uint32((block + int64(i)*rec) / block), n, 1, false, 0, 0}
		}
		end := block + each*rec
		buf := shm.MakeAligned(int(indexBytes(each)), block)
		t := putIndex(buf, trailer{seq: s + 1, id: id, end: end, bytes: end + int64(len(buf))}, records)
		putTrailer(buf[len(buf)-block:], t)
		f, err := os.OpenFile(filepath.Join(dir, segmentName(s+1, id)), os.O_CREATE|os.O_WRONLY, 0o600)
		if err == nil {
			_, err = f.WriteAt(buf, end)
		}
		if err != nil {
			b.Fatal(err)
		}
		_ = f.Close()
	}
	for _, name := range []string{"indexes", "checkpoint"} {
		b.Run(name, func(b *testing.B) {
			var first, all, processor time.Duration
			var heap uint64
			for b.Loop() {
				if name == "indexes" {
					_ = os.Remove(filepath.Join(dir, checkName))
				}
				var before, after runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&before)
				began, used := time.Now(), processorTime()
				d, err := Open(o)
				if err != nil {
					b.Fatal(err)
				}
				var metas [1]tier.Meta
				for k := []kv.Key{benchKey(segments*each - 1)}; metas[0].Len == 0; time.Sleep(100 * time.Microsecond) {
					_ = d.Stat(b.Context(), k, metas[:])
				}
				first += time.Since(began)
				<-d.Opened()
				all += time.Since(began)
				processor += processorTime() - used
				runtime.GC()
				runtime.ReadMemStats(&after)
				heap = after.HeapAlloc - before.HeapAlloc
				if got := d.Space().Objects; got < segments*each*9/10 {
					b.Fatalf("%d objects", got)
				}
				d.volumes[0].mu.Lock()
				d.volumes[0].mu.all++ // so that there is something to write a checkpoint for
				d.volumes[0].mu.Unlock()
				closeDisk(b, d)
			}
			b.ReportMetric(float64(first.Milliseconds())/float64(b.N), "ms/first-hit")
			b.ReportMetric(float64(all.Milliseconds())/float64(b.N), "ms/open")
			b.ReportMetric(float64(processor.Milliseconds())/float64(b.N), "cpu-ms/open")
			b.ReportMetric(float64(heap)/segments/each, "B/object")
		})
	}
}

// BenchmarkSealed compares encrypted objects with plain ones.
func BenchmarkSealed(b *testing.B) {
	tiertest.RaceSealed(b, func(b *testing.B) (one, other tier.Tier) {
		place := func(sealed bool) tier.Tier {
			return open(b, Options{Dirs: []Dir{{benchDir(b), 2 * benchBytes}}, SegmentBytes: 256 << 20, MinFree: 1, FirstTouch: true, Sealed: sealed})
		}
		return place(false), place(true)
	})
}
