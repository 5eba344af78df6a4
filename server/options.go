// SPDX-License-Identifier: Apache-2.0

package server

import (
	"cmp"
	"context"
	"log/slog"
	"math"
	"net/netip"
	"runtime"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/events"
	"github.com/kvasir-kv/kvasir/store/evict"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/disk"
	"github.com/kvasir-kv/kvasir/tier/generation"
	"github.com/kvasir-kv/kvasir/tier/mooncakestore"
	"github.com/kvasir-kv/kvasir/tier/seal"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// Options configures a Server. A zero field means its default.
type Options struct {
	ChunkTokens       int                   // tokens per chunk; default 256
	WorkerReap        time.Duration         // silence after which a worker that has pinged is dropped; default 120 s
	KeepSilent        bool                  // a worker that has pinged is never dropped for silence
	RegistrationGrace time.Duration         // silence after which a worker that never pinged is dropped; default 3600 s
	KeepNeverPinged   bool                  // a worker that never pinged is never dropped for silence
	MemoBytes         int64                 // token-list memo; default 64 MiB
	NoMemo            bool                  // no token-list memo
	MaxInstances      int                   // most registered workers; beyond it a new one replaces another or is refused; default 4096
	DrainTimeout      time.Duration         // longest wait for transfers in progress at shutdown; default 10 s
	RefuseDriven      bool                  // refuse workers whose KV the server would copy (lmcache_driven)
	RefuseEngine      bool                  // refuse workers that copy themselves (engine_driven)
	SeparateGroups    bool                  // one object for each kind of attention of a chunk, instead of one object for all
	SGLangCPUViews    bool                  // see lent.Options.CPUViews
	CopyWorkers       int                   // goroutines per copy; default: the processors
	Pickle            PickleMode            // whose chunks may pass through the socket; default none
	PickleBytes       int64                 // size of a message with chunks; default and limit MaxPickleBytes
	Trust             []netip.Prefix        // addresses whose peers count as this server's user; see package access
	ShmDir            string                // where workers' segments are; default shm.Dir
	Networks          *auth.Networks        // from which engines may reach the ZMQ ports; nil: any
	Clients           zmtp.Authentication   // how clients of the ZMQ ports prove their identity; LMCache's own clients cannot
	Salts             *auth.SaltSecrets     // a salt that these sign counts as its tenant, another is refused (but see CountUnsigned); without a memo. nil: any salt
	Tenants           *auth.TenantLimits    // tenants that clients may use, by their listener, user, key or token; without a memo. nil: all
	CountUnsigned     bool                  // requests whose salts have no such signature are counted, and served under their salt
	Log               *slog.Logger          // nil discards
	ClientGenerations lmcache.Generations   // those that clients may be of; default all that are served
	Version           string                // reported in Status
	Events            *events.Book          // records what is stored and removed, for subscribe_kv_events; nil: no events. The Server runs it
	Publisher         *events.Publisher     // publishes Events on its own sockets; nil: none. The Server runs and closes it
	Generations       *generation.Book      // generations of the objects in the tiers; nil without tiers
	Places            []string              // for each tier that other servers may share: what a clear reports about it
	Changes           *tier.Changes         // changes in the tiers; nil: not recorded
	Names             *tier.Names           // the Server adds the namespaces that requests use; nil for none
	Revisions         map[string]string     // revisions of the models' weights: chunks of another revision are not found
	Contents          map[string]tier.Tier  // the tiers themselves, by name: for the removal of their objects
	Seals             map[string]*seal.Tier // tiers of Contents that can be encrypted, by name
	Numbers           map[string]uint8      // numbers of the Contents in Changes; the disk records its removals itself and has none
	SweepRate         int                   // objects per second that are removed from a tier after a clear; default 500
	DropRate          int                   // objects per second that DropTier removes; default 20,000
	Tiers             []*tier.Counting      // tiers below the pool, for Status
	ProbeTiers        func(context.Context) // asks the tiers once, at the start; nil: not done
	Lifetimes         *evict.Lifetimes      // of the store's policies, for metrics; nil for none
	Disk              *disk.Disk            // the disk among the tiers, for its own figures; nil for none

	// UsesDevice reports whether a process uses an accelerator that copies (uses), and whether that could be seen (seen). nil:
	// peercred.UsesDevice.
	UsesDevice func(pid int) (uses, seen bool)

	// Clusters are those of the Tiers that are a Mooncake Store, by name, for their own figures.
	Clusters map[string]*mooncakestore.Tier
}

// Validate reports every field that cannot be used, as options.Errors.
func (o Options) Validate() error {
	var c options.Checks
	const forever = time.Duration(math.MaxInt64)
	options.Within(&c, "SweepRate", o.SweepRate, 0, 1<<30)
	options.Within(&c, "DropRate", o.DropRate, 0, 1<<30)
	options.Within(&c, "ChunkTokens", o.ChunkTokens, 0, kv.MaxChunkTokens)
	options.Within(&c, "WorkerReap", o.WorkerReap, 0, forever)
	options.Within(&c, "RegistrationGrace", o.RegistrationGrace, 0, forever)
	options.Within(&c, "DrainTimeout", o.DrainTimeout, 0, forever)
	options.Within(&c, "MemoBytes", o.MemoBytes, 0, 1<<40)
	options.Within(&c, "MaxInstances", o.MaxInstances, 0, 1<<20)
	options.Within(&c, "CopyWorkers", o.CopyWorkers, 0, 1<<10)
	options.Within(&c, "PickleBytes", o.PickleBytes, 0, MaxPickleBytes)
	c.That(o.Pickle <= PickleOnly, "Pickle", "%d is not a known mode", o.Pickle)
	c.That(!o.RefuseDriven || !o.RefuseEngine, "RefuseEngine", "and RefuseDriven leave no worker")
	c.That(o.ClientGenerations&^lmcache.AllGenerations == 0, "ClientGenerations", "%b has bits of unknown generations", o.ClientGenerations)
	return c.Err()
}

// usesDevice is the default of Options.UsesDevice.
var usesDevice = peercred.UsesDevice

// withDefaults returns the options with defaults in place of zero fields.
func (o Options) withDefaults() Options {
	o.ChunkTokens = cmp.Or(o.ChunkTokens, 256)
	o.WorkerReap = cmp.Or(o.WorkerReap, 120*time.Second)
	o.RegistrationGrace = cmp.Or(o.RegistrationGrace, 3600*time.Second)
	o.MemoBytes = cmp.Or(o.MemoBytes, 64<<20)
	if o.NoMemo || o.Salts != nil && !o.CountUnsigned || o.Tenants != nil { // a memo would hash a prompt faster that another tenant has sent, and so show it
		o.MemoBytes = 0
	}
	o.MaxInstances = cmp.Or(o.MaxInstances, 4096)
	o.DrainTimeout = cmp.Or(o.DrainTimeout, 10*time.Second)
	o.CopyWorkers = cmp.Or(o.CopyWorkers, runtime.GOMAXPROCS(0))
	o.Log = safelog.New(o.Log)
	o.ClientGenerations = cmp.Or(o.ClientGenerations, lmcache.AllGenerations)
	if o.UsesDevice == nil {
		o.UsesDevice = usesDevice
	}
	o.PickleBytes = min(cmp.Or(o.PickleBytes, MaxPickleBytes), MaxPickleBytes)
	return o
}

// silences returns the times of silence after which workers are dropped, 0 for never: of those that have pinged, and of those that never
// did.
func (o *Options) silences() (pinged, never time.Duration) {
	if !o.KeepSilent {
		pinged = o.WorkerReap
	}
	if !o.KeepNeverPinged {
		never = o.RegistrationGrace
	}
	return pinged, never
}
