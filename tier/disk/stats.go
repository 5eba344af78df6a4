// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"fmt"
	"time"

	"github.com/kvasir-kv/kvasir/internal/histogram"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// Stats are the figures of a Disk. A figure without the label dir is for all directories
// together.
type Stats struct {
	Opening  bool                     `gauge:"kvasir_disk_opening" help:"1 while the index is being read."`
	Objects  map[string]int64         `gauge:"kvasir_disk_objects" label:"dir" help:"Objects kept."`
	Bytes    map[string]int64         `gauge:"kvasir_disk_bytes" label:"dir" help:"Bytes of segments."`
	Limit    map[string]int64         `gauge:"kvasir_disk_limit_bytes" label:"dir" help:"Bytes that segments may take."`
	Segments map[string]int64         `gauge:"kvasir_disk_segments" label:"dir" help:"Segments."`
	Opened   map[string]time.Duration `gauge:"kvasir_disk_open_seconds" label:"dir" help:"Time that reading the index took."`

	Today map[string]int64 `gauge:"kvasir_disk_written_today_bytes" label:"dir" help:"Bytes written since midnight UTC."`
	Ever  map[string]int64 `counter:"kvasir_disk_written_ever_bytes_total" label:"dir" help:"Bytes written since the directory was made, about."`

	Written    map[string]int64 `counter:"kvasir_disk_written_bytes_total" label:"kind" help:"Bytes written: of objects, and all together. Their quotient is the write amplification."`
	Readmitted int64            `counter:"kvasir_disk_readmitted_bytes_total" help:"Bytes written again at eviction, since they had been read."`
	NotKept    map[string]int64 `counter:"kvasir_disk_not_kept_total" label:"reason" help:"Objects that were not written."`
	First      bool             `gauge:"kvasir_disk_first_touch" help:"1 while objects are kept when they are offered for the first time."`
	Evicted    int64            `counter:"kvasir_disk_evicted_segments_total" help:"Segments removed for room."`
	EvictedObj int64            `counter:"kvasir_disk_evicted_objects_total" help:"Objects in them."`
	Corrupt    int64            `counter:"kvasir_disk_corrupt_objects_total" help:"Objects forgotten since they were damaged."`
	Scrubbed   int64            `counter:"kvasir_disk_scrubbed_bytes_total" help:"Bytes compared with their checksums in the background."`
	ReadBytes  int64            `counter:"kvasir_disk_read_bytes_total" help:"Bytes of objects read."`
	ReadTime   histogram.Counts `histogram:"kvasir_disk_read_seconds" help:"Time of a read of an object."`
	WriteTime  histogram.Counts `histogram:"kvasir_disk_write_seconds" help:"Time of a write of an object."`
}

// Stats returns the figures.
func (d *Disk) Stats() Stats {
	s := Stats{
		Objects: map[string]int64{}, Bytes: map[string]int64{}, Limit: map[string]int64{}, Segments: map[string]int64{}, Opened: map[string]time.Duration{},
		Today: map[string]int64{}, Ever: map[string]int64{},
	}
	var objects, all, noRoom, overBudget, tooLarge int64
	for _, v := range d.volumes {
		s.Opening = s.Opening || !v.isOpen()
		path := v.dir.Path
		v.mu.Lock()
		v.overBudgetLocked(0) // another day may have begun
		s.Objects[path], s.Bytes[path], s.Segments[path] = int64(v.mu.index.len()), v.mu.used, int64(len(v.mu.segs))
		s.Today[path], s.Ever[path] = v.mu.today, v.mu.all
		v.mu.Unlock()
		s.Limit[path], s.Opened[path] = v.dir.Bytes, time.Duration(v.n.openTook.Load())
		objects += v.n.writeBytes.Load()
		all += v.n.diskBytes.Load()
		noRoom += v.n.noRoom.Load()
		overBudget += v.n.overBudget.Load()
		tooLarge += v.n.tooLarge.Load()
		s.Readmitted += v.n.readmitted.Load()
		s.Evicted += v.n.evicted.Load()
		s.EvictedObj += v.n.evictedObjects.Load()
		s.Corrupt += v.n.corrupt.Load()
		s.Scrubbed += v.n.scrubbed.Load()
		s.ReadBytes += v.n.readBytes.Load()
	}
	s.Written = map[string]int64{"objects": objects, "all": all}
	s.NotKept = map[string]int64{"first_touch": d.admission.refused.Load(), "no_room": noRoom, "budget": overBudget, "too_large": tooLarge}
	s.First = d.keepsFirst()
	s.ReadTime, s.WriteTime = d.readTime.Counts(), d.writeTime.Counts()
	return s
}

// Space implements tier.Sized.
func (d *Disk) Space() tier.Space {
	var s tier.Space
	for _, v := range d.volumes {
		v.mu.Lock()
		s.Objects += int64(v.mu.index.len())
		s.Used += v.mu.used
		v.mu.Unlock()
		s.Limit += v.dir.Bytes
		s.Written += v.n.diskBytes.Load()
		if free := v.n.free.Load(); free < 0 || s.Free < 0 {
			s.Free = -1
		} else {
			s.Free += free
		}
	}
	return s
}

// Space is what a directory may take, and what its file system lets it take.
type Space struct {
	Dir
	MinFree int64 // bytes that are left to others
	Now     int64 // bytes that it can have now, those of its files included; at most Bytes
}

// Rooms returns the room of each directory. Errors are those of the file system.
func (d *Disk) Rooms() ([]Space, error) {
	var out []Space
	for _, v := range d.volumes {
		all, free, err := v.files.space()
		if err != nil {
			return nil, fmt.Errorf("read the free space of %s: %w", v.dir.Path, err)
		}
		v.mu.Lock()
		used := v.mu.used
		v.mu.Unlock()
		least := v.opts.minFree(all)
		out = append(out, Space{Dir: v.dir, MinFree: least, Now: min(v.dir.Bytes, used+max(0, free-least))})
	}
	return out, nil
}

// stat sets the zero metas whose keys are in this volume.
func (v *volume) stat(keys []kv.Key, metas []tier.Meta) {
	now := v.now()
	v.mu.Lock()
	defer v.mu.Unlock()
	for i := range keys {
		if e, ok := v.mu.index.get(&keys[i]); ok && !e.meta().Over(now) {
			v.noteLocked(keys[i], true)
			if metas[i].Len == 0 {
				metas[i] = e.meta()
			}
		}
	}
}

// noteLocked reports to watchers that an object is in this volume, or with `here` false that it is not.
func (v *volume) noteLocked(k kv.Key, here bool) { v.opts.Changes.Note(v.number, k, here) }
