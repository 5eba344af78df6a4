// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"cmp"
	"slices"
	"time"
)

// Stats are the figures of a Keeper.
type Stats struct {
	Files map[[2]string]int64 `json:"-" gauge:"kvasir_keeper_files" label:"directory,model" help:"Files of KV."`
	Bytes map[[2]string]int64 `json:"-" gauge:"kvasir_keeper_bytes" label:"directory,model" help:"Bytes of them."`

	Reads        map[[2]string]int64 `json:"-" counter:"kvasir_keeper_reads_total" label:"directory,model" help:"Files that engines of this host opened."`
	ReadBytes    map[[2]string]int64 `json:"-" counter:"kvasir_keeper_read_bytes_total" label:"directory,model" help:"Bytes of them."`
	Writes       map[[2]string]int64 `json:"-" counter:"kvasir_keeper_writes_total" label:"directory,model" help:"Files that engines wrote."`
	WrittenBytes map[[2]string]int64 `json:"-" counter:"kvasir_keeper_written_bytes_total" label:"directory,model" help:"Bytes of them: the wear of the disk."`
	Evicted      map[[2]string]int64 `json:"-" counter:"kvasir_keeper_evicted_total" label:"directory,model" help:"Files that the keeper unlinked."`
	EvictedBytes map[[2]string]int64 `json:"-" counter:"kvasir_keeper_evicted_bytes_total" label:"directory,model" help:"Bytes of them."`
	Expired      map[[2]string]int64 `json:"-" counter:"kvasir_keeper_expired_total" label:"directory,model" help:"Of these, files past their time to live."`
	Removed      map[[2]string]int64 `json:"-" counter:"kvasir_keeper_removed_by_others_total" label:"directory,model" help:"Files that an engine, another host or a person removed."`

	Limit        int64         `json:"limit_bytes" gauge:"kvasir_keeper_limit_bytes" help:"Bytes that all files may take; 0: no limit."`
	Total        int64         `json:"bytes" gauge:"kvasir_keeper_all_bytes" help:"Bytes of all files."`
	Reserve      int64         `json:"reserve_bytes" gauge:"kvasir_keeper_reserve_bytes" help:"Room below the limit for what is written before as much is unlinked."`
	Oldest       time.Duration `json:"oldest_ns" gauge:"kvasir_keeper_oldest_seconds" help:"Time since the last use of the file that goes next."`
	Known        bool          `json:"known" gauge:"kvasir_keeper_known" help:"1 once all files are known."`
	Watch        Watch         `json:"watch"`
	Watched      float64       `json:"watched_share" gauge:"kvasir_keeper_watched_share" help:"Share of the directories whose reads and writes are reported at once."`
	Looking      time.Duration `json:"look_ns" gauge:"kvasir_keeper_look_seconds" help:"Time of the last look at all files."`
	LostEvents   int64         `json:"lost_events" counter:"kvasir_keeper_lost_events_total" help:"Times that the kernel dropped events; a look at all files followed."`
	Unannounced  int64         `json:"unannounced_files" counter:"kvasir_keeper_unannounced_total" help:"Files that KV events do not name: their names have no hash of 32 bytes at most, or there are more than 4,096 models."`
	CannotUnlink bool          `json:"-" gauge:"kvasir_keeper_cannot_unlink" help:"1 while files cannot be unlinked: the limit does not hold."`

	Refusal     string      `json:"cannot_unlink,omitempty"` // why files cannot be unlinked
	Directories []Directory `json:"directories"`
}

// Directory has the figures of one model in one of the keeper's directories.
type Directory struct {
	Path         string `json:"path"`
	Model        string `json:"model"`
	Layout       string `json:"layout"`
	Files        int64  `json:"files"`
	Bytes        int64  `json:"bytes"`
	Reads        int64  `json:"reads"`
	ReadBytes    int64  `json:"read_bytes"`
	Writes       int64  `json:"writes"`
	WrittenBytes int64  `json:"written_bytes"`
	Evicted      int64  `json:"evicted"`
	EvictedBytes int64  `json:"evicted_bytes"`
	Expired      int64  `json:"expired"`
	Removed      int64  `json:"removed_by_others"`
}

// Stats returns the figures.
func (k *Keeper) Stats() Stats {
	var s Stats
	k.mu.Lock()
	all := map[[2]string]*Directory{}
	for _, d := range k.books.dirs {
		key := [2]string{d.root.path, d.model}
		e := all[key]
		if e == nil {
			e = &Directory{Path: d.root.path, Model: d.model, Layout: d.layout.String()}
			all[key] = e
		}
		e.Files += int64(d.count)
		e.Bytes += d.bytes
		e.Reads += d.reads
		e.ReadBytes += d.readBytes
		e.Writes += d.writes
		e.WrittenBytes += d.writtenBytes
		e.Evicted += d.evicted
		e.EvictedBytes += d.evictedBytes
		e.Expired += d.expired
		e.Removed += d.removedByOthers
	}
	s.Limit, s.Total, s.Known = k.o.Limit, k.books.bytes+k.pending, k.arranged
	if k.o.Limit > 0 {
		s.Reserve = k.reserve.bytes
	}
	if n := k.books.coldest(); n != 0 {
		s.Oldest = max(0, k.now().Sub(time.UnixMicro(k.books.file(n).usedAt)))
	}
	s.Looking, s.LostEvents = k.looking, k.lost
	if k.changes != nil {
		s.Unannounced = k.changes.unnamed
	}
	if k.refused != nil {
		s.CannotUnlink, s.Refusal = true, k.refused.Error()
	}
	k.mu.Unlock()
	s.Watch, s.Watched = k.watching(), k.watchedShare()
	s.label(all)
	return s
}

// label writes the figures of the directories twice: as metrics with labels, and as a list.
func (s *Stats) label(all map[[2]string]*Directory) {
	maps := []*map[[2]string]int64{&s.Files, &s.Bytes, &s.Reads, &s.ReadBytes, &s.Writes, &s.WrittenBytes, &s.Evicted, &s.EvictedBytes, &s.Expired, &s.Removed}
	for _, m := range maps {
		*m = map[[2]string]int64{}
	}
	for key, d := range all {
		for i, v := range []int64{d.Files, d.Bytes, d.Reads, d.ReadBytes, d.Writes, d.WrittenBytes, d.Evicted, d.EvictedBytes, d.Expired, d.Removed} {
			(*maps[i])[key] = v
		}
		s.Directories = append(s.Directories, *d)
	}
	slices.SortFunc(s.Directories, func(x, y Directory) int { return cmp.Or(cmp.Compare(x.Path, y.Path), cmp.Compare(x.Model, y.Model)) })
}

// watchedShare is the share of the directories whose events reach the keeper.
func (k *Keeper) watchedShare() float64 {
	switch {
	case k.eventsEnded.Load():
		return 0
	case k.fan != nil:
		return 1
	case k.ino != nil:
		n, more := k.ino.watched()
		return float64(n) / float64(max(1, n+more))
	}
	return 0
}
