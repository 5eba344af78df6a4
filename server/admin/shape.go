// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"cmp"
	"strconv"

	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/evict"
)

// Shape has the fields of LMCache's /status that Status lacks, with LMCache's names and meanings (0.5.6, report_status of the server, its
// modules and storage_manager.py). testdata/lmcache-0.5.6.status lists the fields that are left out, and why.
type Shape struct {
	IsHealthy  bool   `json:"is_healthy"`
	EngineType string `json:"engine_type"`

	Storage StorageShape `json:"storage_manager"`

	PrefetchJobs int      `json:"active_prefetch_jobs"`
	P2PJobs      int      `json:"active_p2p_lookup_jobs"`
	P2PEnabled   bool     `json:"p2p_enabled"`
	P2PState     string   `json:"p2p_state"`
	P2PPeerCount int      `json:"p2p_peer_count"`
	P2PPeers     []string `json:"p2p_peers"`

	Liveness struct {
		Enabled   bool    `json:"enabled"`
		Reap      float64 `json:"reap_timeout_seconds"`
		Grace     float64 `json:"registration_grace_seconds"`
		Instances int     `json:"tracked_instances"`
	} `json:"worker_liveness"`
	Events EventShape `json:"kv_events"`

	Lenders    []int64                `json:"registered_gpu_ids"` // of lmcache_driven workers
	LenderMeta map[string]LenderShape `json:"cache_context_meta"`
	Others     []int64                `json:"registered_non_cuda_instance_ids"` // of engine_driven workers
	OtherMeta  map[string]OtherShape  `json:"non_cuda_context_meta"`
}

// StorageShape is the state of the pool and the tiers.
type StorageShape struct {
	Healthy    bool             `json:"is_healthy"`
	Usage      [2]int64         `json:"l1_usage"` // bytes in use, bytes in all
	Capacities map[string]int64 `json:"l1_capacity_bytes_by_backend"`

	L1       L1Shape                    `json:"l1_manager"`
	L1s      map[string]L1Shape         `json:"l1_managers"`
	Store    ControllerShape            `json:"store_controller"`
	Stores   map[string]ControllerShape `json:"store_controllers"`
	Evict    EvictShape                 `json:"l1_eviction_controller"`
	Evicting EvictShape                 `json:"eviction_controller"` // the same, at the place where lmcache describe looks for it
	Evicts   map[string]EvictShape      `json:"l1_eviction_controllers"`
	Prefetch PrefetchShape              `json:"prefetch_controller"`
	L2Evict  L2EvictShape               `json:"l2_eviction_controller"`
	Adapters []AdapterShape             `json:"l2_adapters"`
	Count    int                        `json:"num_l2_adapters"`
}

// L1Shape is the state of the pool.
type L1Shape struct {
	Healthy     bool             `json:"is_healthy"`
	Objects     int              `json:"total_object_count"` // objects that are stored
	ReadLocked  int              `json:"read_locked_count"`  // of them, objects that may not be evicted
	StagingSize int64            `json:"staging_bytes"`
	Used        int64            `json:"memory_used_bytes"`
	Total       int64            `json:"memory_total_bytes"` // bytes for which there is memory
	Configured  int64            `json:"memory_configured_bytes"`
	Capacities  map[string]int64 `json:"capacity_bytes_by_backend"`
	Ratio       float64          `json:"memory_usage_ratio"`
	WriteTTL    float64          `json:"write_ttl_seconds"`
	ReadTTL     float64          `json:"read_ttl_seconds"`
}

// ControllerShape is the state of the part that writes to the tiers.
type ControllerShape struct {
	Healthy  bool  `json:"is_healthy"`
	Pending  int   `json:"pending_keys_count"`
	InFlight int64 `json:"in_flight_task_count"` // running calls of tiers, of all kinds
	AdaptersShape
}

// AdaptersShape counts tiers.
type AdaptersShape struct {
	Count    int `json:"num_l2_adapters"`
	Active   int `json:"num_active_adapters"`
	Draining int `json:"num_draining_adapters"`
}

// EvictShape is the state of the part that evicts.
type EvictShape struct {
	Healthy bool   `json:"is_healthy"`
	Policy  string `json:"eviction_policy"`
}

// PrefetchShape is the state of the part that reads from the tiers.
type PrefetchShape struct {
	Healthy  bool `json:"is_healthy"`
	InFlight int  `json:"in_flight_request_count"` // pending lookups
	AdaptersShape
}

// L2EvictShape has no adapters: each tier evicts by itself.
type L2EvictShape struct {
	Healthy  bool  `json:"is_healthy"`
	Adapters []int `json:"adapters"`
}

// AdapterShape is one tier. Its problems are in the l2 field of Status.
type AdapterShape struct {
	Type string `json:"type"`
}

// EventShape is the state of subscribe_kv_events.
type EventShape struct {
	Enabled     bool   `json:"enabled"`
	Incarnation uint64 `json:"incarnation"`
	Depth       int    `json:"log_depth"`
	Capacity    int    `json:"log_capacity"`
	Next        uint64 `json:"next_seq"`
	Lost        uint64 `json:"lost_markers"`
	Unbound     uint64 `json:"unbound_stores"`
	Subscribers int    `json:"subscribers"`
}

// LenderShape is a worker whose KV the server copies.
type LenderShape struct {
	Model  string   `json:"model_name"`
	World  int      `json:"world_size"`
	Layout KVLayout `json:"kv_cache_layout"`
}

// KVLayout is the KV of such a worker.
type KVLayout struct {
	Layers     int     `json:"num_layers"`
	Blocks     int     `json:"num_blocks"`
	TokenBytes float64 `json:"cache_size_per_token"`
}

// OtherShape is a worker that copies itself.
type OtherShape struct {
	Model  string `json:"model_name"`
	World  int    `json:"world_size"`
	Slots  int    `json:"block_size"`
	UseMLA bool   `json:"use_mla"`
}

// shapeOf returns the fields of LMCache's /status for a server that was started with flags.
func shapeOf(s *server.Server, flags map[string]string) *Shape {
	st, o, n := s.Store().Stats(), s.Options(), s.Stats()
	healthy := s.Healthy()
	out := &Shape{
		IsHealthy: healthy, EngineType: "KvasirServer", PrefetchJobs: st.Pending, P2PJobs: n.P2PJobs, P2PState: "unregistered", P2PPeers: []string{},
		Lenders: []int64{}, LenderMeta: map[string]LenderShape{}, Others: []int64{}, OtherMeta: map[string]OtherShape{},
	}
	out.Storage = storageOf(s, &st, healthy, flags)
	out.Liveness.Enabled, out.Liveness.Reap, out.Liveness.Grace = !o.KeepSilent || !o.KeepNeverPinged, o.WorkerReap.Seconds(), o.RegistrationGrace.Seconds()
	if out.Events.Enabled = o.Events != nil; out.Events.Enabled {
		e := o.Events.Stats()
		out.Events = EventShape{
			Enabled: true, Incarnation: s.Incarnation(), Depth: e.Kept, Capacity: o.Events.Capacity(), Next: e.Last + 1, Lost: e.Scans, Unbound: e.Unbound, Subscribers: n.EventStreams,
		}
	}
	for _, in := range s.Registry().List() {
		if in.Refused != "" {
			continue
		}
		out.Liveness.Instances++
		id := strconv.FormatInt(in.ID, 10)
		if in.Lent == nil {
			out.Others = append(out.Others, in.ID)
			out.OtherMeta[id] = OtherShape{Model: in.Model, World: in.World, Slots: in.Layout.Slots, UseMLA: in.Layout.SinglePlane}
			continue
		}
		out.Lenders = append(out.Lenders, in.ID)
		layers, blocks := in.Lent.Size()
		out.LenderMeta[id] = LenderShape{in.Model, in.World, KVLayout{layers, blocks, float64(in.Bytes) / float64(in.Chunk)}}
	}
	return out
}

func storageOf(s *server.Server, st *store.Stats, healthy bool, flags map[string]string) StorageShape {
	used := st.Bytes - st.FreeBytes
	capacities := map[string]int64{"dram": st.Bytes}
	l1 := L1Shape{
		Healthy: healthy, Objects: st.Resident, ReadLocked: st.Resident - st.EvictableObjs, StagingSize: st.StagedBytes, Used: used,
		Total: s.Store().Memory().Provided(), Configured: st.Bytes, Capacities: capacities, Ratio: float64(used) / float64(max(1, st.Bytes)),
		WriteTTL: seconds(flags, "l1-write-ttl-seconds"), ReadTTL: seconds(flags, "session-ttl-seconds"),
	}
	out := StorageShape{
		Healthy: healthy, Usage: [2]int64{used, st.Bytes}, Capacities: capacities, L1: l1, L1s: map[string]L1Shape{"_default": l1},
		Evict: EvictShape{healthy, cmp.Or(flags["eviction-policy"], evict.Default)}, L2Evict: L2EvictShape{true, []int{}}, Adapters: []AdapterShape{},
	}
	calls := int64(0)
	for _, t := range s.Tiers() {
		calls += t.Stats().InFlight
		out.Adapters = append(out.Adapters, AdapterShape{t.Name()})
	}
	out.Count = len(out.Adapters)
	tiers := AdaptersShape{Count: out.Count, Active: out.Count}
	out.Store = ControllerShape{true, st.Outbox.Waiting, calls, tiers}
	out.Stores = map[string]ControllerShape{"_default": out.Store}
	out.Evicting = out.Evict
	out.Evicts = map[string]EvictShape{"_default": out.Evict}
	out.Prefetch = PrefetchShape{true, st.Pending, tiers}
	return out
}

// seconds returns the value of a flag in seconds. If that is no number it returns 600, the default of the two flags that storageOf reads.
func seconds(flags map[string]string, name string) float64 {
	n, err := strconv.ParseFloat(flags[name], 64)
	if err != nil {
		return 600
	}
	return n
}
