// SPDX-License-Identifier: Apache-2.0

package fs_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/fs"
)

// processorTime is what this process has used so far, seconds.
func processorTime(b *testing.B) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return (time.Duration(u.Utime.Nano()) + time.Duration(u.Stime.Nano())).Seconds()
}

// plain is the floor: files that are written under another name and renamed, and read whole, with direct I/O, without
// checksums, sizes that are looked at, or limits.
type plain struct{ dir string }

func (p plain) name(i int64) string { return filepath.Join(p.dir, fmt.Sprintf("%016x.data", i)) }

func (p plain) write(i int64, b []byte) error {
	fd, err := unix.Open(p.name(i)+".tmp", unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_DIRECT, 0o666)
	if err != nil {
		return err
	}
	if n, err := unix.Write(fd, b); err != nil || n < len(b) {
		return fmt.Errorf("%d bytes: %w", n, err)
	}
	if err := unix.Close(fd); err != nil {
		return err
	}
	return unix.Rename(p.name(i)+".tmp", p.name(i))
}

func (p plain) read(i int64, b []byte) error {
	fd, err := unix.Open(p.name(i), unix.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if n, err := unix.Read(fd, b); err != nil || n < len(b) {
		return fmt.Errorf("%d bytes: %w", n, err)
	}
	return nil
}

// BenchmarkFiles compares the layout of fs_native with plain files, with and without a checksum of their bytes, by
// processor time: 512 MiB written and read by 4 goroutines, from and to memory as a pool has it. KVASIR_BENCH_DIR names the file system.
func BenchmarkFiles(b *testing.B) {
	const all, workers = 512 << 20, 4
	path, err := shm.Path("", fmt.Sprintf("kvasir-bench-fs-%d", os.Getpid()))
	if err != nil {
		b.Fatal(err)
	}
	memory, err := shm.Create(path, all)
	if err != nil {
		b.Skip(err)
	}
	defer memory.Close()
	if err := errors.Join(memory.Unlink(), memory.Populate(0, all, true)); err != nil {
		b.Fatal(err)
	}
	for i, of := 0, memory.Bytes(0, all); i < all; i++ {
		of[i] = byte(i)
	}
	for _, n := range []int{1 << 20, 4 << 20} {
		run := func(name string, make func(dir string) (write, read func(i int64, b []byte) error)) {
			b.Run(fmt.Sprintf("%dMiB/%s", n>>20, name), func(b *testing.B) {
				var wrote, read, writing, reading float64
				for b.Loop() {
					dir, err := os.MkdirTemp(os.Getenv("KVASIR_BENCH_DIR"), "kvasir-fs-")
					if err != nil {
						b.Fatal(err)
					}
					w, r := make(dir)
					each := func(f func(i int64, b []byte) error) (processor, took float64) {
						before, began := processorTime(b), time.Now()
						var next atomic.Int64
						var wg sync.WaitGroup
						for range workers {
							wg.Go(func() {
								for i := next.Add(1) - 1; i < all/int64(n); i = next.Add(1) - 1 {
									if err := f(i, memory.Bytes(i*int64(n), int64(n))); err != nil {
										b.Error(err)
										return
									}
								}
							})
						}
						wg.Wait()
						return processorTime(b) - before, time.Since(began).Seconds()
					}
					p, t := each(w)
					wrote, writing = wrote+p, writing+t
					p, t = each(r)
					read, reading = read+p, reading+t
					if err := os.RemoveAll(dir); err != nil {
						b.Fatal(err)
					}
				}
				gb := float64(b.N) * all / 1e9
				b.ReportMetric(wrote/gb, "write-s/GB")
				b.ReportMetric(read/gb, "read-s/GB")
				b.ReportMetric(gb/writing, "write-GB/s")
				b.ReportMetric(gb/reading, "read-GB/s")
			})
		}
		run("plain", func(dir string) (write, read func(i int64, b []byte) error) {
			p := plain{dir}
			return p.write, p.read
		})
		run("plain-summed", func(dir string) (write, read func(i int64, b []byte) error) {
			p, sums := plain{dir}, make([]uint64, all/n)
			return func(i int64, b []byte) error {
					sums[i] = xxh3.Hash(b)
					return p.write(i, b)
				}, func(i int64, b []byte) error {
					err := p.read(i, b)
					if xxh3.Hash(b) != sums[i] {
						err = errors.Join(err, errors.New("another checksum"))
					}
					return err
				}
		})
		run("fs_native", func(dir string) (write, read func(i int64, b []byte) error) {
			names := tier.NewNames()
			d, err := fs.Open(fs.Options{Path: dir, Direct: true, Pad: true, Names: names})
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { _ = d.Close() })
			ns := kv.Namespace{1}
			names.Add(ns, "m", nil)
			key := func(i int64) kv.Key {
				return kv.Key{Namespace: ns, Chunk: kv.Hash{byte(i), byte(i >> 8), byte(i >> 16)}}
			}
			return func(i int64, buf []byte) error {
					return d.Write(b.Context(), key(i), tier.Meta{Len: int64(n), Sum: xxh3.Hash(buf)}, buf)
				}, func(i int64, buf []byte) error {
					m, sum, err := d.ReadSummed(b.Context(), key(i), buf)
					if err == nil && sum != m.Sum {
						err = fmt.Errorf("checksum %x of %x", sum, m.Sum)
					}
					return err
				}
		})
	}
}
