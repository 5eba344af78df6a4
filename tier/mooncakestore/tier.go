// SPDX-License-Identifier: Apache-2.0

// Package mooncakestore keeps objects in the pool of a Mooncake Store, in the memory of its
// storage nodes, as LMCache's mooncake_store adapter (0.5.6) does: only the bytes, under LMCache's
// name. LMCache servers may share them.
//
// The tier reads bytes over its own connections into the caller's memory, whose address no
// peer ever learns. So no peer can write there late, and no transfer.Table needs a fence.
// The tier's lease of an object begins before the tier asks for the object's place. A read
// that ends after the lease is a miss.
package mooncakestore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/mooncake/store"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/tier"
)

// Options configures a Tier. A zero field means its default.
type Options struct {
	Masters []string // host:port; if there are several, one of them leads
	Tenant  string   // default "default"
	Put     store.PutOptions

	Conns int           // to the master, and to each node; default 8 and 4
	Look  time.Duration // how often the master is asked for its release; default 10 s

	// SecretFile has the secrets with which this client and the nodes prove who they are (auth.PeerSecrets). Nodes in the networks Stock
	// need not prove it. Without SecretFile no side proves who it is.
	SecretFile string
	Stock      []netip.Prefix

	Names *tier.Names // names of the namespaces; required
	Log   *slog.Logger
}

// Validate reports every field that cannot be used, as options.Errors.
func (o Options) Validate() error {
	var c options.Checks
	options.Each(o.master().Validate(), func(e *options.Error) {
		if e.Field == "Addresses" {
			c.That(false, "Masters", "%s", e.Text)
		}
	})
	options.Within(&c, "Put.Replicas", o.Put.Replicas, 0, 64)
	options.Within(&c, "Conns", o.Conns, 0, 1024)
	options.Within(&c, "Look", o.Look, 0, time.Hour)
	return c.Err()
}

// callTimeout is the time limit of a call of the master, because lookups wait for such calls.
const callTimeout = 5 * time.Second

func (o Options) master() store.MasterOptions {
	return store.MasterOptions{Addresses: o.Masters, Tenant: o.Tenant, MaxConns: o.Conns, CallTimeout: callTimeout}
}

// Tier is a tier.Tier in a Mooncake Store. Its methods are safe for concurrent use.
type Tier struct {
	o      Options
	log    *slog.Logger
	master *store.Master
	te     *transfer.Client
	client *store.Client

	off    atomic.Bool // the master's release is unknown: every read is a miss, and no write is kept
	warned sync.Map    // which warnings were logged

	stop func()
	done sync.WaitGroup
}

// Open returns the Tier. It does not wait for the master: while the master does not answer, every
// object is missing.
func Open(o Options) (*Tier, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	switch {
	case len(o.Masters) == 0:
		return nil, errors.New("mooncakestore: no master is named")
	case o.Names == nil:
		return nil, errors.New("mooncakestore: LMCache's layout needs Options.Names")
	}
	o.Look = cmp.Or(o.Look, 10*time.Second)
	var secrets *auth.PeerSecrets
	if o.SecretFile != "" {
		var err error
		if secrets, err = auth.OpenPeerSecrets(o.SecretFile, o.Stock, o.Log); err != nil {
			return nil, err
		}
	}
	master, err := store.NewMaster(o.master())
	if err != nil {
		return nil, err
	}
	t := &Tier{o: o, log: o.Log, master: master, te: transfer.New(transfer.Options{Conns: o.Conns, Secrets: secrets})}
	if t.log == nil {
		t.log = slog.New(slog.DiscardHandler)
	}
	t.client = store.NewClient(master, t.te, store.ClientOptions{Put: o.Put, ReportExisting: true})
	life, stop := context.WithCancel(context.Background())
	t.stop = stop
	t.done.Go(func() { t.watch(life) })
	if secrets != nil {
		t.done.Go(func() { secrets.Watch(life, t.log) })
	}
	return t, nil
}

// Stats returns the client's counters.
func (t *Tier) Stats() store.ClientStats { return t.client.Stats() }

// Close implements tier.Tier.
func (t *Tier) Close() error {
	t.stop()
	t.done.Wait()
	t.te.Close()
	return t.master.Close()
}

// watch asks the master for its release, every Options.Look, until ctx ends. It logs once when the master does
// not answer, or when its release is not known, and once when the master can be used again.
func (t *Tier) watch(ctx context.Context) {
	ticker := time.NewTicker(t.o.Look)
	defer ticker.Stop()
	masters := strings.Join(t.o.Masters, " ")
	said := "" // the last state that was logged
	say := func(what string, f func()) {
		if what != said {
			said = what
			f()
		}
	}
	for {
		v, err := t.master.Version(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, store.ErrVersion):
			t.off.Store(true)
			say("off", func() {
				t.log.Warn("the tier is off: the Mooncake Store's master is of a release that is not known", "masters", masters, "err", err)
			})
		case err != nil:
			say("silent", func() {
				t.log.Warn("the Mooncake Store's master does not answer: its objects are misses until it does", "masters", masters, "err", err)
			})
		default:
			t.off.Store(false)
			say(v.String(), func() { t.log.Info("the Mooncake Store's master answers", "masters", masters, "release", v) })
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// name returns the name of an object. It reports false if the name is not known, or is not allowed.
func (t *Tier) name(k kv.Key) (string, bool) {
	n, ok := t.o.Names.Of(k.Namespace)
	if !ok {
		return "", false
	}
	name, ok := n.LMCache(k)
	if _, said := t.warned.LoadOrStore(n.Model, true); !ok && !said {
		t.log.Warn("this model cannot be named in LMCache's layout, so its chunks are not written", "model", n.Model)
	}
	return name, ok
}

// maxObject is the largest length, in bytes, that the tier accepts from a master. A longer object counts as one that cannot be read.
const maxObject = 1 << 50

// length returns the length of an object, 0 if the object cannot be read.
func length(f *store.Found) int64 {
	if n := f.Bytes(); f.Err == nil && n <= maxObject {
		return int64(n)
	}
	return 0
}

// Stat implements tier.Tier. The master leases the objects that it finds, so that they stay until they can be read.
func (t *Tier) Stat(ctx context.Context, keys []kv.Key, metas []tier.Meta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	clear(metas[:len(keys)])
	if t.off.Load() {
		return nil
	}
	names, of := make([]string, 0, len(keys)), make([]int, 0, len(keys))
	for i, k := range keys {
		if name, ok := t.name(k); ok {
			names, of = append(names, name), append(of, i)
		}
	}
	if len(names) == 0 {
		return nil
	}
	found, err := t.master.Replicas(ctx, names)
	if err != nil {
		return err
	}
	for n, i := range of {
		if bytes := length(&found[n]); bytes > 0 {
			metas[i] = tier.Meta{Len: bytes, NoSum: true}
		}
	}
	return nil
}

// Read implements tier.Tier. If one node does not deliver an object, or the object comes after its
// lease, that is only a miss of this object, and not a failure of the tier.
func (t *Tier) Read(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	if err := ctx.Err(); err != nil {
		return tier.Meta{}, err
	}
	name, ok := t.name(k)
	if !ok || t.off.Load() {
		return tier.Meta{}, tier.ErrMissing
	}
	err := t.client.Get(ctx, []store.Object{{Key: name, Parts: [][]byte{dst}}})[0]
	switch {
	case err == nil:
		return tier.Meta{Len: int64(len(dst)), NoSum: true}, nil
	case ctx.Err() != nil:
		return tier.Meta{}, ctx.Err()
	case errors.Is(err, store.NotFound), errors.Is(err, store.NotReady):
		return tier.Meta{}, tier.ErrMissing
	case errors.Is(err, store.ErrUnreadable):
		return tier.Meta{}, t.unreadable(ctx, k, name, len(dst))
	case errors.Is(err, store.ErrTransfer), errors.Is(err, store.LeaseExpired):
		return tier.Meta{}, fmt.Errorf("%w: %w", tier.ErrMissing, err)
	}
	return tier.Meta{}, err
}

// unreadable returns the error for an existing object that could not be read.
func (t *Tier) unreadable(ctx context.Context, k kv.Key, name string, want int) error {
	found, err := t.master.Replicas(ctx, []string{name})
	if err != nil {
		return err
	}
	if n := length(&found[0]); n > 0 && n != int64(want) {
		return &tier.CorruptError{Key: k, Want: tier.Meta{Len: int64(want)}, Got: tier.Meta{Len: n, NoSum: true}}
	}
	return fmt.Errorf("%w: %w", tier.ErrMissing, store.ErrUnreadable)
}

// Write implements tier.Tier. Objects are immutable: an existing object stays as it is, and
// if its length differs the new one is not written. An object that another client is putting counts as written if
// that put ends soon. Otherwise it counts as not kept, since its node may be silent.
func (t *Tier) Write(ctx context.Context, k kv.Key, m tier.Meta, src []byte) error {
	if m.Len != int64(len(src)) || m.Len < 1 {
		return fmt.Errorf("mooncakestore: write of %d bytes for an object of %d: the lengths must be equal and above 0", len(src), m.Len)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	name, ok := t.name(k)
	switch {
	case t.off.Load():
		return fmt.Errorf("%w: the master is of an unknown release, so the tier is off", tier.ErrNotKept)
	case !ok:
		return t.o.Names.Unnamed(k)
	}
	object := []store.Object{{Key: name, Parts: [][]byte{src}}}
	err := t.client.Put(ctx, object)[0]
	if errors.Is(err, store.Exists) {
		found, err := t.existing(ctx, name)
		if errors.Is(found.Err, store.NotFound) { // removed meanwhile, as the objects of a silent node are after about 30 s
			if err = t.client.Put(ctx, object)[0]; errors.Is(err, store.Exists) {
				found, err = t.existing(ctx, name)
			} else {
				found = store.Found{}
			}
		}
		switch {
		case err != nil:
			return t.notPut(ctx, err)
		case errors.Is(found.Err, store.NotReady), errors.Is(found.Err, store.NotFound):
			return fmt.Errorf("%w: %w: %w", tier.ErrNotKept, store.Exists, found.Err)
		}
		if n := length(&found); n > 0 && n != m.Len {
			return fmt.Errorf("%w: an object of another length, %d bytes, has its name", tier.ErrNotKept, n)
		}
		return nil
	}
	return t.notPut(ctx, err)
}

// notPut turns the error of a put into an error of a tier.
func (t *Tier) notPut(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, store.NoRoom) && t.hasNoRoom(ctx): // there is no node, or all are full: the caller should offer the object again
		return fmt.Errorf("%w: %w: %w", tier.ErrResting, tier.ErrFull, err)
	case errors.Is(err, store.NoRoom): // no room for an object of this size
		return fmt.Errorf("%w: %w", tier.ErrNotKept, err)
	case errors.Is(err, store.QuotaExceeded):
		return fmt.Errorf("%w: %w: %w", tier.ErrNotKept, tier.ErrFull, err)
	}
	return err
}

// existing looks up an object that exists, and waits a moment if it cannot be read yet.
func (t *Tier) existing(ctx context.Context, name string) (store.Found, error) {
	for wait := 10 * time.Millisecond; ; wait *= 2 {
		found, err := t.master.Replicas(ctx, []string{name})
		if err != nil {
			return store.Found{}, err
		}
		if !errors.Is(found[0].Err, store.NotReady) || wait > 160*time.Millisecond {
			return found[0], nil
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return store.Found{}, ctx.Err()
		}
	}
}

// probeName is the name of an object that hasNoRoom puts to learn whether there is any room.
const probeName = ".kvasir-probe"

// hasNoRoom reports whether the cluster has no room for a single byte. A master without nodes
// also has none.
func (t *Tier) hasNoRoom(ctx context.Context) bool {
	err := t.client.Put(ctx, []store.Object{{Key: probeName, Parts: [][]byte{{0}}}})[0]
	if err == nil {
		_ = t.master.Remove(ctx, probeName, true) // if it stays, the next probe finds it, and that is no NoRoom either
	}
	return errors.Is(err, store.NoRoom)
}

// Delete implements tier.Tier. It does not remove a leased object: a client may be reading it, and the master would
// give its place to another object.
func (t *Tier) Delete(ctx context.Context, keys []kv.Key) error {
	if len(keys) > 0 && t.off.Load() {
		return fmt.Errorf("%w: %w", tier.ErrNotKept, errOff)
	}
	var errs []error
	for _, k := range keys {
		name, ok := t.name(k)
		if !ok {
			continue
		}
		err := t.master.Remove(ctx, name, false)
		if err == nil || errors.Is(err, store.NotFound) {
			continue
		}
		errs = append(errs, fmt.Errorf("%s: %w", k, err))
		if _, of := errors.AsType[store.Code](err); !of {
			break // the master does not answer
		}
	}
	return errors.Join(errs...)
}
