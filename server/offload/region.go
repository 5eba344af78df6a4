// SPDX-License-Identifier: Apache-2.0

package offload

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server/access"
	"github.com/kvasir-kv/kvasir/tier/vllm"
)

// maxLeft is the largest number of regions of former engines that are remembered. Further ones are not remembered, and stay.
const maxLeft = 1 << 12

// Region is the file of an engine's region. An engine that was killed leaves the file, and the file keeps all of its memory.
type Region struct {
	Name  string `json:"name"` // under /dev/shm
	Bytes int64  `json:"bytes"`
	PID   int    `json:"pid"`           // of the engine
	Why   string `json:"why,omitempty"` // why it is not removed

	inode   uint64
	process peercred.Process
}

// region checks the descriptor that came with a Hello and returns the region. Without a descriptor the region has no inode, and is never
// removed.
func (s *Server) region(h *vllm.Hello, file *os.File, caller *access.Caller) (Region, error) {
	name, err := vllm.RegionName(h.EngineID)
	r := Region{Name: name, Bytes: h.RowBytes * h.Rows, PID: caller.Peer.PID}
	if err != nil || file == nil {
		return r, err
	}
	st, err := file.Stat()
	if err != nil {
		return r, fmt.Errorf("%w: its region: %w", vllm.ErrHello, err)
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok || !st.Mode().IsRegular() {
		return r, fmt.Errorf("%w: the descriptor of its region is not a regular file", vllm.ErrHello)
	}
	if st.Size() != r.Bytes {
		return r, fmt.Errorf("%w: its region has %s, announced are %d rows of %d bytes", vllm.ErrHello, kv.FormatBytes(st.Size()), h.Rows, h.RowBytes)
	}
	if p, ok := peercred.Running(caller.Peer.PID); ok {
		r.inode, r.process = sys.Ino, p
	}
	return r, nil
}

// Tick removes regions that killed engines left.
func (s *Server) Tick() {
	s.sweep.Lock()
	defer s.sweep.Unlock()
	for _, r := range s.lost() {
		why, gone := s.remove(&r)
		s.noteRegionEnd(r, why, gone)
	}
	if s.looks++; s.looks%strangersEvery == 1 {
		s.noteStrangers(s.strangers())
	}
}

// strangersEvery is how many calls of Tick there are between two looks for regions of engines that this server never knew: each
// one may read all of /proc.
const strangersEvery = 10

// strangers returns regions of this user that no process maps and no engine of this server had. Probably their engines were killed while no
// server ran, or another one. Since nothing proves that, the regions are only reported.
func (s *Server) strangers() (out []Region) {
	names, err := filepath.Glob(filepath.Join(cmp.Or(s.opts.Dir, shm.Dir), "vllm_offload_*.mmap"))
	if err != nil {
		return nil
	}
	known := s.known()
	for _, path := range names[:min(len(names), maxLeft)] {
		f, err := shm.Stat(path)
		if name := filepath.Base(path); err == nil && !known[name] && shm.Ours(f) == nil {
			if pids, _ := peercred.Mappers(name, f.Inode, peercred.Process{}); len(pids) == 0 {
				out = append(out, Region{Name: name, Bytes: f.Bytes, Why: "no engine of this server had it: remove it if no engine runs under its id"})
			}
		}
	}
	return out
}

// known returns the names of regions of engines that this server knows.
func (s *Server) known() map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make(map[string]bool)
	for _, e := range s.mu.engines {
		out[e.region.Name] = true
	}
	for _, r := range s.mu.left {
		out[r.Name] = true
	}
	return out
}

func (s *Server) noteStrangers(list []Region) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mu.strangers = list
}

// Left returns the regions that former engines left and that still exist, including those of engines that this server never knew.
func (s *Server) Left() []Region {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Concat(s.mu.left, s.mu.strangers)
}

// lost returns the regions of engines that were connected and are gone.
func (s *Server) lost() []Region {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.mu.left)
}

// noteRegionEnd records the result of remove: a region that is gone is no longer listed as left, another one is listed with the reason
// `why`. It does nothing for a region that an engine has taken over meanwhile.
func (s *Server) noteRegionEnd(r Region, why string, gone bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.mu.left, func(x Region) bool { return x.Name == r.Name && x.inode == r.inode })
	switch {
	case i < 0: // an engine has it again
	case gone:
		s.mu.left = slices.Delete(s.mu.left, i, i+1)
	default:
		s.mu.left[i].Why = why
	}
}

// remove removes a region if its name leads to the file that the engine sent, its process has ended and no process maps it. gone means that
// nothing is left to remove; otherwise why is the reason why the region stays.
func (s *Server) remove(r *Region) (why string, gone bool) {
	path, err := shm.Path(s.opts.Dir, r.Name)
	if err != nil {
		return "", true
	}
	f, err := shm.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && f.Inode != r.inode {
		return "", true // the engine has removed it, or another one has the name
	}
	if err != nil {
		return err.Error(), false
	}
	if err := shm.Ours(f); err != nil {
		return err.Error(), false
	}
	if !r.process.Gone() {
		return fmt.Sprintf("process %d runs", r.PID), false
	}
	pids, whole := peercred.Mappers(r.Name, r.inode, r.process)
	switch {
	case len(pids) > 0:
		return fmt.Sprintf("processes %v map it", pids), false
	case !whole:
		return "a process that may map it cannot be looked into", false
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err.Error(), false
	}
	s.n.regionsRemoved.Add(1)
	s.log.Info("removed the region of an engine that was killed", "path", path, "bytes", r.Bytes, "pid", r.PID)
	return "", true
}

// Engine is a connected engine.
type Engine struct {
	EngineID  string  `json:"engine_id"`
	Model     string  `json:"model_name"`
	VLLM      string  `json:"vllm"`
	PID       int     `json:"pid"`
	RowBytes  int64   `json:"row_bytes"`
	Rows      int64   `json:"rows"`
	Region    string  `json:"region"`
	Connected float64 `json:"connected_s"`
	LentBytes int64   `json:"lent_bytes"` // found by lookups and not released
	Stores    int64   `json:"stores"`     // not committed yet
}

// Engines returns the engines that are connected, by id.
func (s *Server) Engines() []Engine {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Engine, 0, len(s.mu.engines))
	for _, e := range s.mu.engines {
		out = append(out, Engine{
			e.hello.EngineID, e.hello.Model, e.hello.VLLM, e.caller.Peer.PID, e.hello.RowBytes, e.hello.Rows, e.region.Name,
			time.Since(e.since).Round(time.Millisecond).Seconds(), e.figures.lent.Load(), e.figures.stores.Load(),
		})
	}
	slices.SortFunc(out, func(a, b Engine) int {
		return cmp.Or(strings.Compare(a.EngineID, b.EngineID), cmp.Compare(a.PID, b.PID))
	})
	return out
}

// Stats are figures of a Server, for metrics.
type Stats struct {
	Engines      int    `gauge:"kvasir_vllm_engines" help:"Engines of vLLM with a Kvasir tier that are connected."`
	LentBytes    int64  `gauge:"kvasir_vllm_lent_bytes" help:"Pool bytes that lookups of these engines found and that are not released: they stay in place."`
	LeftRegions  int    `gauge:"kvasir_vllm_left_regions" help:"Regions in /dev/shm of engines that are gone."`
	LeftBytes    int64  `gauge:"kvasir_vllm_left_bytes" help:"Memory in /dev/shm that these regions take until they are removed."`
	Connected    uint64 `counter:"kvasir_vllm_connections_total" help:"Connections of engines that were served."`
	Refused      uint64 `counter:"kvasir_vllm_refused_total" help:"Connections that were not: of another user, with another protocol, or with a Hello that cannot be served."`
	Malformed    uint64 `counter:"kvasir_vllm_malformed_total" help:"Connections that ended because of a frame that cannot be read."`
	Lookups      uint64 `counter:"kvasir_vllm_lookups_total" help:"Lookups of engines: one for each request and scheduler step."`
	Asked        uint64 `counter:"kvasir_vllm_asked_rows_total" help:"Rows that lookups asked for."`
	Found        uint64 `counter:"kvasir_vllm_found_rows_total" help:"Rows of these that were lent."`
	Loaded       uint64 `counter:"kvasir_vllm_loaded_rows_total" help:"Rows that engines copied into their regions."`
	LoadedBytes  uint64 `counter:"kvasir_vllm_loaded_bytes_total" help:"Bytes that engines copied from the pool into their regions."`
	Stores       uint64 `counter:"kvasir_vllm_stores_total" help:"Stores of engines."`
	Stored       uint64 `counter:"kvasir_vllm_stored_rows_total" help:"Rows that engines stored and that were not there before."`
	StoredBytes  uint64 `counter:"kvasir_vllm_stored_bytes_total" help:"Bytes of the rows that engines stored and that were not there before."`
	Aborted      uint64 `counter:"kvasir_vllm_aborted_stores_total" help:"Stores that engines gave up."`
	RegionsFreed uint64 `counter:"kvasir_vllm_removed_regions_total" help:"Regions of killed engines that were removed."`
}

// Stats returns the figures.
func (s *Server) Stats() Stats {
	n := &s.n
	out := Stats{
		Connected: n.engines.Load(), Refused: n.refused.Load(), Malformed: n.malformed.Load(), Lookups: n.lookups.Load(), Asked: n.asked.Load(), Found: n.hits.Load(),
		Loaded: n.loads.Load(), LoadedBytes: n.loadedBytes.Load(), Stores: n.stores.Load(), Stored: n.rows.Load(), StoredBytes: n.writtenBytes.Load(),
		Aborted: n.aborted.Load(), RegionsFreed: n.regionsRemoved.Load(),
	}
	for _, e := range s.Engines() {
		out.Engines++
		out.LentBytes += e.LentBytes
	}
	for _, r := range s.Left() {
		out.LeftRegions++
		out.LeftBytes += r.Bytes
	}
	return out
}
