// SPDX-License-Identifier: Apache-2.0

// Package redis keeps objects in Redis or Valkey: one server, a cluster, or the master
// that sentinels name. There are three layouts of objects: Kvasir's own, which
// has checksums and splits large objects, and those of LMCache's resp and valkey
// adapters (0.5.6), byte for byte, which LMCache servers may share.
//
// Values move between the pool's memory and the socket without a copy in between. They have
// connections of their own, so lookups never wait for values. If a server does not
// answer, or answers something else, only the call that asked it fails, within its deadline.
package redis

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/internal/resp"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// Layout is how objects are stored in the database.
type Layout uint8

// Layouts.
const (
	Native Layout = iota // Kvasir's own; see header.go
	RESP                 // LMCache's resp adapter: the bytes under LMCache's name
	Valkey               // LMCache's valkey adapter: the same, after a prefix if there is one
)

// unixScheme begins the address of a UNIX socket.
const unixScheme = "unix:"

// Options configures a Tier. A zero field means its default.
type Options struct {
	Addrs    []string // host:port, or unix:PATH; one, or several of a cluster or of sentinels
	Cluster  bool     // the servers are a cluster
	Sentinel string   // if set, Addrs are sentinels, which know the master by this name

	Username, Password                 string
	SentinelUsername, SentinelPassword string
	Database                           int         // not in a cluster
	TLS                                *tls.Config // nil: no TLS; without a ServerName certificates must be for the host

	Layout Layout
	Prefix string        // before all names; default "kvasir:" in the native layout, none in Valkey. Not in RESP
	Stripe int64         // native: bytes of an object in one value; default 4 MiB
	TTL    time.Duration // time to live of objects, whole seconds; 0: no end. Not in RESP
	Limit  int64         // bytes of memory that a server may use; beyond it no object is kept. 0 for no limit

	// MayDelete allows Delete in the RESP layout. An LMCache server of 0.5.6
	// waits for ever if an object is deleted between its lookup and its load.
	MayDelete bool

	Workers     int           // connections for values, to each server; default 8
	Lookups     int           // connections for all else; default 4
	Timeout     time.Duration // time limit of a request, with a second more for each 4 MiB of a value; default 5 s
	DialTimeout time.Duration // time limit until a connection can be used; default 10 s

	Pause time.Duration // how long a server rests after three failures in a row; default 2 s

	Names *tier.Names // names of the namespaces; required in LMCache's layouts
	Log   *slog.Logger
}

// Validate reports every field that cannot be used, as options.Errors.
func (o Options) Validate() error {
	var c options.Checks
	for _, a := range o.Addrs {
		path, local := strings.CutPrefix(a, unixScheme)
		_, _, err := net.SplitHostPort(a)
		c.That(local && path != "" || !local && err == nil, "Addrs", "%q is no host:port and no unix:PATH", safelog.HideLogin(a))
	}
	c.That(!o.Cluster || o.Sentinel == "", "Sentinel", "%q cannot be combined with Cluster", o.Sentinel)
	options.Within(&c, "Database", o.Database, 0, 1<<20)
	c.That(o.Database <= 0 || !o.Cluster, "Database", "%d: a cluster has database 0 only", o.Database)
	c.That(o.Layout <= Valkey, "Layout", "%d is no known layout", o.Layout)
	c.That(o.Layout != RESP || o.Prefix == "", "Prefix", "%q: LMCache's resp adapter has no prefix", o.Prefix)
	c.That(o.Layout != Valkey || !strings.Contains(o.Prefix, "@"), "Prefix", "%q must not contain @", o.Prefix)
	c.That(o.Layout != Native || !strings.ContainsAny(o.Prefix, "{}*?[]\\"), "Prefix", "%q must contain none of {}*?[]\\", o.Prefix)
	options.Within(&c, "Stripe", o.Stripe, 0, 256<<20)
	c.That(o.Stripe <= 0 || o.Stripe >= 4<<10, "Stripe", "%d is less than 4 KiB", o.Stripe)
	options.Within(&c, "TTL", o.TTL, 0, 10*365*24*time.Hour)
	c.That(o.TTL <= 0 || o.TTL >= time.Second, "TTL", "%v is less than a second", o.TTL)
	c.That(o.Layout != RESP || o.TTL <= 0, "TTL", "%v: LMCache servers of 0.5.6 wait for ever for an object that expired", o.TTL)
	options.Within(&c, "Limit", o.Limit, 0, 1<<60)
	options.Within(&c, "Workers", o.Workers, 0, 1<<12)
	options.Within(&c, "Lookups", o.Lookups, 0, 1<<12)
	options.Within(&c, "Timeout", o.Timeout, 0, time.Hour)
	options.Within(&c, "DialTimeout", o.DialTimeout, 0, time.Hour)
	options.Within(&c, "Pause", o.Pause, 0, time.Hour)
	return c.Err()
}

// Tier is a tier.Tier in Redis or Valkey. Its methods are safe for concurrent use.
type Tier struct {
	o   Options
	log *slog.Logger

	topology topology
	memory   memory
	written  atomic.Int64
	warned   sync.Map // which warnings were logged

	stale chan struct{} // asks watch to ask for the topology again
	stop  func()
	done  sync.WaitGroup
}

// Open returns the Tier. It does not wait for the servers: while they do not answer, every
// object is missing.
func Open(o Options) (*Tier, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	switch {
	case len(o.Addrs) == 0:
		return nil, errors.New("redis: no address of a server is given")
	case len(o.Addrs) > 1 && !o.Cluster && o.Sentinel == "":
		return nil, errors.New("redis: several addresses need cluster_mode or sentinels")
	case o.Layout != Native && o.Names == nil:
		return nil, errors.New("redis: LMCache's layouts need Options.Names")
	}
	if o.Layout == Native {
		o.Prefix = cmp.Or(o.Prefix, "kvasir:")
	}
	o.Stripe = cmp.Or(o.Stripe, 4<<20)
	o.Workers, o.Lookups = cmp.Or(o.Workers, 8), cmp.Or(o.Lookups, 4)
	o.Timeout, o.DialTimeout = cmp.Or(o.Timeout, 5*time.Second), cmp.Or(o.DialTimeout, 10*time.Second)
	o.Pause = cmp.Or(o.Pause, 2*time.Second)
	t := &Tier{o: o, log: o.Log, stale: make(chan struct{}, 1)}
	if t.log == nil {
		t.log = slog.New(slog.DiscardHandler)
	}
	t.topology.open(&t.o)
	if o.Layout == RESP && !o.MayDelete {
		t.log.Info("nothing is deleted from Redis, and writes stop before it is full: LMCache's resp adapter survives neither", "addr", o.Addrs[0])
	}
	life, stop := context.WithCancel(context.Background())
	t.stop = stop
	t.done.Go(func() { t.watch(life) })
	return t, nil
}

// firstWarning reports whether the warning `what` was not logged before.
func (t *Tier) firstWarning(what string) bool {
	_, said := t.warned.LoadOrStore(what, true)
	return !said
}

// Space implements tier.Sized.
func (t *Tier) Space() tier.Space {
	s := t.memory.space()
	s.Written = t.written.Load()
	if t.o.Limit > 0 {
		s.Limit = t.o.Limit
	}
	return s
}

// Close implements tier.Tier.
func (t *Tier) Close() error {
	t.stop()
	t.done.Wait()
	t.topology.close()
	return nil
}

// isOurs reports whether an error is about an object, and not about a server.
func isOurs(err error) bool {
	_, corrupt := errors.AsType[*tier.CorruptError](err)
	return corrupt || errors.Is(err, tier.ErrMissing) || errors.Is(err, tier.ErrNotKept) || errors.Is(err, errForeign)
}

// errForeign means that a name has a value of another program.
var errForeign = errors.New("redis: the object's name has a value of another program")

// refusal turns the error of a server that takes no objects now into tier.ErrNotKept with the
// reason.
func (t *Tier) refusal(err error) error {
	e, ok := errors.AsType[*resp.Error](err)
	if !ok {
		return err
	}
	switch code := e.Code(); code {
	case "OOM", "MISCONF", "NOPERM", "READONLY", "NOREPLICAS":
		if code == "READONLY" {
			t.refresh()
		}
		if t.firstWarning(code) {
			t.log.Warn("Redis refuses writes: its objects are served, and none is added", "err", err)
		}
		why := tier.ErrReadOnly
		if code == "OOM" {
			why = tier.ErrFull
		}
		return fmt.Errorf("%w: %w: %w", tier.ErrNotKept, why, err)
	case "WRONGTYPE":
		return fmt.Errorf("%w: a value of another program has the object's name in Redis", tier.ErrNotKept)
	}
	return err
}

// lmcacheName returns the name of an object in LMCache's layouts. It reports false if the name is not
// known, or is not allowed.
func (t *Tier) lmcacheName(k kv.Key) (string, bool) {
	n, ok := t.o.Names.Of(k.Namespace)
	if !ok {
		return "", false
	}
	name, ok := n.LMCache(k)
	if !ok && t.firstWarning("name "+n.Model) {
		t.log.Warn("this model cannot be named in LMCache's layout, so its chunks are not written", "model", n.Model)
	}
	return t.before() + name, ok
}
