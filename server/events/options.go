// SPDX-License-Identifier: Apache-2.0

package events

import (
	"cmp"
	"log/slog"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// Options configures a Book. A zero field means its default.
type Options struct {
	StoreEvents int   // events of the store that are kept until they are applied, 64 B each; default 65,536
	Records     int   // records that are kept for readers; default 32,768
	TokenBytes  int64 // tokens in memory; beyond it chunks that only tiers have are dropped, then no further chunk is announced; default 256 MiB

	Tiers *tier.Changes // changes of the tiers below the pool; nil for none
}

// Validate reports every field that cannot be used, as options.Errors.
func (o Options) Validate() error {
	var c options.Checks
	options.Within(&c, "StoreEvents", o.StoreEvents, 0, 1<<24)
	options.Within(&c, "Records", o.Records, 0, 1<<24)
	options.Within(&c, "TokenBytes", o.TokenBytes, 0, 1<<40)
	return c.Err()
}

func (o Options) withDefaults() Options {
	o.StoreEvents = cmp.Or(o.StoreEvents, 1<<16)
	o.Records = cmp.Or(o.Records, 32768)
	o.TokenBytes = cmp.Or(o.TokenBytes, 256<<20)
	return o
}

// PublisherOptions configures a Publisher. A zero field means its default.
type PublisherOptions struct {
	Topic          string // ModelInTopic in it is replaced by the model; default kv@kvasir@{model}
	ChunkTokens    int    // tokens per block in events; default 256
	Encoding       event.Encoding
	BatchEvents    int                 // events per message; default 256
	Replay         int                 // messages kept for replays; default 10,000
	ReplayBytes    int                 // largest sum of the payloads of these messages; default 64 MiB
	QueueBytes     int                 // bytes that wait for a subscriber, or for a replay; default 16 MiB
	MaxSubscribers int                 // default 256
	Interval       time.Duration       // time between two messages with events: events in between share one message; default 50 ms
	Heartbeat      time.Duration       // time after which a message without events is sent; default 5 s
	Networks       *auth.Networks      // networks from which subscribers may connect; nil: any
	Clients        zmtp.Authentication // how subscribers prove their identity
	Tenants        *auth.TenantLimits  // tenants whose events they may get; nil: all
	Log            *slog.Logger        // nil discards
}

// Validate reports every field that cannot be used, as options.Errors.
func (o PublisherOptions) Validate() error {
	var c options.Checks
	options.Within(&c, "ChunkTokens", o.ChunkTokens, 0, 1<<20)
	options.Within(&c, "BatchEvents", o.BatchEvents, 0, 1<<16)
	options.Within(&c, "Replay", o.Replay, 0, 1<<24)
	options.Within(&c, "ReplayBytes", o.ReplayBytes, 0, 1<<40)
	options.Within(&c, "QueueBytes", o.QueueBytes, 0, 1<<40)
	options.Within(&c, "MaxSubscribers", o.MaxSubscribers, 0, 1<<20)
	options.Within(&c, "Interval", o.Interval, 0, time.Hour)
	options.Within(&c, "Heartbeat", o.Heartbeat, 0, time.Duration(1<<62))
	return c.Err()
}

func (o PublisherOptions) withDefaults() PublisherOptions {
	o.Topic = cmp.Or(o.Topic, "kv@kvasir@"+ModelInTopic)
	o.ChunkTokens = cmp.Or(o.ChunkTokens, 256)
	o.BatchEvents = cmp.Or(o.BatchEvents, 256)
	o.Replay = cmp.Or(o.Replay, 10_000)
	o.ReplayBytes = cmp.Or(o.ReplayBytes, 64<<20)
	o.QueueBytes = cmp.Or(o.QueueBytes, 16<<20)
	o.MaxSubscribers = cmp.Or(o.MaxSubscribers, 256)
	o.Interval = cmp.Or(o.Interval, 50*time.Millisecond)
	o.Heartbeat = cmp.Or(o.Heartbeat, 5*time.Second)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return o
}
