// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// figures are what a part's /metrics say: the sum over all labels of each name.
func (p *part) figures(ctx context.Context) (map[string]float64, error) {
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, p.url("/metrics"), nil)
	if err != nil {
		return nil, err
	}
	r, err := httpClient.Do(q)
	if err != nil {
		return nil, err
	}
	defer r.Body.Close()
	out := map[string]float64{}
	for sc := bufio.NewScanner(r.Body); sc.Scan(); {
		line := sc.Text()
		if strings.HasPrefix(line, "#") {
			continue
		}
		at := strings.LastIndexByte(line, ' ')
		if at < 0 {
			continue
		}
		v, err := strconv.ParseFloat(line[at+1:], 64)
		if err != nil {
			continue
		}
		name, _, _ := strings.Cut(line[:at], "{")
		out[name] += v
	}
	return out, nil
}

// mustBeZero are figures that are 0 while nothing is in progress.
var mustBeZero = map[string][]string{
	"node": {"kvasir_transfers", "kvasir_transfers_quarantined", "kvasir_pool_quarantined_bytes", "lmcache_mp_l1_staging_bytes", "kvasir_sessions", "kvasir_below_waiting_bytes", "kvasir_panics_total"},
	"p":    {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "kvasir_engine_wrong_kv_requests_total"},
	"d":    {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "kvasir_engine_wrong_kv_requests_total"},
	"proxy": {
		"kvasir_proxy_requests_in_flight", "kvasir_proxy_requests_queued", "kvasir_proxy_engine_requests",
	},
}

// size is what an idle part takes.
type size struct {
	Goroutines  int
	Descriptors int
	Mappings    int
	ResidentMiB int
}

func (p *part) size(ctx context.Context) (z size, err error) {
	f, err := p.figures(ctx)
	if err != nil {
		return z, err
	}
	pid := p.pid()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return z, err
	}
	for _, name := range []string{"go_goroutines", "process_resident_memory_bytes"} {
		if f[name] == 0 {
			return z, fmt.Errorf("/metrics has no %s", name)
		}
	}
	return size{
		Goroutines: int(f["go_goroutines"]), Descriptors: descriptors(pid), Mappings: bytes.Count(maps, []byte("\n")),
		ResidentMiB: int(f["process_resident_memory_bytes"]) >> 20,
	}, nil
}

// descriptors counts what a process has open, segments of disks left out: their number is that of what they hold.
func descriptors(pid int) (n int) {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, _ := os.ReadDir(dir) // the process may have ended
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil && !strings.HasSuffix(to, ".seg") {
			n++
		}
	}
	return n
}

// openFiles counts the descriptors of a process by what they are.
func openFiles(pid int) map[string]int {
	out := map[string]int{}
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, _ := os.ReadDir(dir) // the process may have ended
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil {
			kind, _, _ := strings.Cut(to, ":[")
			out[kind]++
		}
	}
	return out
}

// pooled is how many connections a part keeps when it has used them all, each with a descriptor and a goroutine: a node for its tiers, D
// those of each worker of the two P, and of the relay.
func (p *part) pooled(o *options, v variant) (n int) {
	const ofPeer = 4 // mooncake/transfer: Conns
	switch p.kind {
	case "d":
		return ofPeer * (2*v.pTP + 1)
	case "node":
		n = map[string]int{"one": 1, "cluster": redisNodes}[o.redis] * 8 // its default for each server
		if o.master != none {
			n += 9 + 2*ofPeer // the master, and each store-node
		}
	}
	return n
}

// cachesMiB is how much a part may have more than at its start for what it keeps of the past. A node has 64 MiB of KV events for replays and
// about as much in its other tables, once they are full (docs/limits.md). Where garbage is not collected first, the heap may have as much of it.
func (p *part) cachesMiB(collected bool) int {
	switch {
	case p.kind != "node":
		return 100
	case collected:
		return 100 + 2*64
	}
	return 100 + 2*2*64
}

// beyond names what of z is more than the baseline allows, with a number of pooled connections and of MiB for caches.
func (z size) beyond(b size, pooled, caches int) string {
	switch {
	case z.Goroutines > b.Goroutines+pooled+20:
		return fmt.Sprintf("%d goroutines, at the start %d", z.Goroutines, b.Goroutines)
	case z.Descriptors > b.Descriptors+pooled+16:
		return fmt.Sprintf("%d descriptors, at the start %d", z.Descriptors, b.Descriptors)
	case z.Mappings > b.Mappings+60:
		return fmt.Sprintf("%d mappings, at the start %d", z.Mappings, b.Mappings)
	case z.ResidentMiB > b.ResidentMiB+caches:
		return fmt.Sprintf("%d MiB resident, at the start %d", z.ResidentMiB, b.ResidentMiB)
	}
	return ""
}

// idle reports what a part holds although nothing is in progress.
func (p *part) idle(ctx context.Context) error {
	if p.foreign {
		return nil
	}
	f, err := p.figures(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", p.name, err)
	}
	for _, name := range mustBeZero[p.kind] {
		if v, ok := f[name]; !ok || v != 0 {
			return fmt.Errorf("%s: %s is %v (there: %v), want 0 while nothing is in progress", p.name, name, v, ok)
		}
	}
	if p.kind == "node" {
		return p.books(ctx)
	}
	return nil
}

// books compares what a node counts with what it has: without requests every chunk can be evicted, and a tenant has
// the bytes of its objects.
func (p *part) books(ctx context.Context) error {
	var status struct {
		L1 struct {
			Resident  int `json:"resident_chunks"`
			Evictable int `json:"evictable_chunks"`
		}
	}
	if err := call(ctx, http.MethodGet, p.url("/status"), "", &status); err != nil {
		return err
	}
	if status.L1.Resident != status.L1.Evictable {
		return fmt.Errorf("%s: %d of %d chunks can be evicted while nothing is in progress", p.name, status.L1.Evictable, status.L1.Resident)
	}
	return p.tenants(ctx)
}

// tenants compares what a tenant with a quota is charged with the objects that it has.
func (p *part) tenants(ctx context.Context) error {
	var list struct {
		Tenants []struct {
			Salt    string `json:"cache_salt"`
			Quota   *int64 `json:"quota_bytes"`
			Bytes   int64
			Objects int
		}
	}
	if err := call(ctx, http.MethodGet, p.url("/tenants"), "", &list); err != nil {
		return err
	}
	for _, t := range list.Tenants {
		if t.Quota == nil {
			continue
		}
		objects, err := p.objects(ctx)
		if err != nil {
			return err
		}
		bytes, n := int64(0), 0
		for _, o := range objects {
			if o.Key.Salt == t.Salt {
				bytes += o.Bytes
				n++
			}
		}
		if bytes != t.Bytes || n != t.Objects {
			return fmt.Errorf("%s: tenant %q is charged %d bytes for %d objects; it has %d bytes in %d objects", p.name, t.Salt, t.Bytes, t.Objects, bytes, n)
		}
	}
	return nil
}

// eventually calls f until it returns nil.
func eventually(ctx context.Context, limit time.Duration, f func() error) error {
	var err error
	for end := time.Now().Add(limit); ; {
		if err = f(); err == nil || ctx.Err() != nil {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("after %v: %w", limit, err)
		}
		wait(ctx, 200*time.Millisecond)
	}
}

// check compares everything in a time without load: nothing held, lists equal, sizes as at the start.
func (s *soak) check(ctx context.Context) {
	for _, p := range s.parts {
		if err := eventually(ctx, 40*time.Second, func() error { return p.idle(ctx) }); err != nil {
			s.violation("%v", err)
		}
	}
	for _, r := range s.readers {
		if err := eventually(ctx, 10*time.Second, func() error { return r.compare(ctx) }); err != nil {
			s.violation("%v", err)
		}
	}
	for _, p := range s.parts {
		if err := p.scan(); err != nil {
			s.violation("%v", err)
		}
	}
	s.promises(ctx)
}

// sizes compares what parts take with the start.
func (s *soak) sizes(ctx context.Context) {
	err := eventually(ctx, 60*time.Second, func() error {
		now, err := shared()
		if err == nil && len(now) > len(s.shared) {
			err = fmt.Errorf("/dev/shm has %d files, at the start %d: %v", len(now), len(s.shared), now)
		}
		return err
	})
	if err != nil {
		s.violation("%v", err)
	}
	collected := s.collect(ctx)
	for _, p := range s.parts {
		base, ok := s.baseline[p.name]
		if !ok {
			continue
		}
		said := false
		err := eventually(ctx, 200*time.Second, func() error { // connections over a cut link end by TCP's keep-alive, after 150 s
			z, err := p.size(ctx)
			if err != nil {
				return err
			}
			s.record.Sizes[p.name] = [2]size{base, z}
			if what := z.beyond(base, p.pooled(s.o, s.variant), p.cachesMiB(collected)); what != "" {
				if !said {
					said = true
					s.logf("%s has %s; waiting until it has fewer", p.name, what)
				}
				return fmt.Errorf("%s has %s; open: %v", p.name, what, openFiles(p.pid()))
			}
			return nil
		})
		if err != nil && ctx.Err() == nil {
			p.stacks()
			s.violation("%v; its stacks are in %s", err, p.log)
		}
	}
}

// ofPython reports whether a file of /dev/shm is one that Python or PyTorch made: real engines that are killed leave them.
func ofPython(name string) bool {
	for _, prefix := range []string{"psm_", "sem.", "torch_"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// shared lists /dev/shm: pools, and what engines lend.
func shared() (out []string, err error) {
	entries, err := os.ReadDir("/dev/shm")
	for _, e := range entries {
		if !ofPython(e.Name()) {
			out = append(out, e.Name())
		}
	}
	return out, err
}

// temporary lists the files in directories of tiers that a write has not finished.
func (s *soak) temporary() (out []string) {
	for _, d := range []string{"disk1", "disk2", "fs2"} {
		_ = filepath.WalkDir(filepath.Join(s.o.dir, d), func(path string, e fs.DirEntry, err error) error {
			if err == nil && !e.IsDir() && (strings.Contains(e.Name(), ".tmp") || strings.HasSuffix(e.Name(), ".new")) {
				out = append(out, path)
			}
			return nil
		})
	}
	slices.Sort(out)
	return out
}

// leftovers are files that parts should have removed.
func (s *soak) leftovers() {
	names, err := shared()
	if err != nil {
		s.violation("%v", err)
		return
	}
	for _, name := range names {
		if !strings.HasPrefix(name, "lmcache_l1_pool_kvasir_n") {
			s.violation("/dev/shm has %s after everything has ended", name)
		}
	}
	if left := s.temporary(); len(left) > 0 {
		s.logf("temporary files after everything has ended: %s", strings.Join(left[:min(len(left), 5)], " "))
	}
}
