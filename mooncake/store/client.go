// SPDX-License-Identifier: Apache-2.0

package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

// ClientOptions configures a Client. A zero field means its default.
type ClientOptions struct {
	Put PutOptions

	// RoomTimeout is how long a put waits until an eviction has made room; default 1 s.
	RoomTimeout time.Duration
	// BatchBytes is how many bytes are read under one lease; default 256 MiB. When a lease ends before its reads, a smaller batch loses
	// less.
	BatchBytes int64
	// ReportExisting makes Put return Exists, and not nil, if another client has put the object.
	ReportExisting bool
}

// Validate reports every field that cannot be used, as options.Errors.
func (o ClientOptions) Validate() error {
	var c options.Checks
	options.Within(&c, "RoomTimeout", o.RoomTimeout, 0, time.Hour)
	options.Within(&c, "BatchBytes", o.BatchBytes, 0, 1<<40)
	return c.Err()
}

// Client puts objects into a cluster and gets them from it. Its methods are safe for concurrent use.
type Client struct {
	o      ClientOptions
	times  putTimes
	now    func() twoClocks
	master *Master
	te     *transfer.Client
	stats  clientStats
	turn   atomic.Uint32 // counter by which reads take turns among the replicas of an object
}

// ClientStats are counters since NewClient.
type ClientStats struct {
	Put        int64 `counter:"kvasir_mooncake_store_put_total" help:"Objects put into Mooncake Store."`
	PutBytes   int64 `counter:"kvasir_mooncake_store_put_bytes_total" help:"Bytes of objects put into Mooncake Store, without replicas."`
	Existed    int64 `counter:"kvasir_mooncake_store_existed_total" help:"Puts of objects that another client had put, or was putting."`
	NoRoom     int64 `counter:"kvasir_mooncake_store_no_room_total" help:"Puts that the cluster had no room for."`
	PutErrors  int64 `counter:"kvasir_mooncake_store_put_errors_total" help:"Puts that failed otherwise."`
	Got        int64 `counter:"kvasir_mooncake_store_got_total" help:"Objects got from Mooncake Store."`
	GotBytes   int64 `counter:"kvasir_mooncake_store_got_bytes_total" help:"Bytes of objects got from Mooncake Store."`
	Missing    int64 `counter:"kvasir_mooncake_store_missing_total" help:"Gets of objects that were not there."`
	Unreadable int64 `counter:"kvasir_mooncake_store_unreadable_total" help:"Gets of objects of which no replica could be read over TCP: on disk, of RDMA, or of another length."`
	Expired    int64 `counter:"kvasir_mooncake_store_expired_total" help:"Gets whose lease ended before their bytes had come."`
	GetErrors  int64 `counter:"kvasir_mooncake_store_get_errors_total" help:"Gets that failed otherwise."`
}

type clientStats struct {
	put, putBytes, existed, noRoom, putErrors, got, gotBytes, missing, unreadable, expired, getErrors atomic.Int64
}

// NewClient returns a Client that uses master and te. It closes neither.
func NewClient(master *Master, te *transfer.Client, o ClientOptions) *Client {
	o.RoomTimeout = cmp.Or(o.RoomTimeout, time.Second)
	o.BatchBytes = cmp.Or(o.BatchBytes, 256<<20)
	return &Client{o: o, times: defaultPutTimes, now: now, master: master, te: te}
}

// Stats returns the counters.
func (c *Client) Stats() ClientStats {
	s := &c.stats
	return ClientStats{
		Put: s.put.Load(), PutBytes: s.putBytes.Load(), Existed: s.existed.Load(), NoRoom: s.noRoom.Load(), PutErrors: s.putErrors.Load(),
		Got: s.got.Load(), GotBytes: s.gotBytes.Load(), Missing: s.missing.Load(), Unreadable: s.unreadable.Load(), Expired: s.expired.Load(), GetErrors: s.getErrors.Load(),
	}
}

// Object is the key of an object and the memory from which it is put, or into which it is read. The object is the concatenation of
// Parts.
type Object struct {
	Key   string
	Parts [][]byte
}

// Bytes returns the length of the object.
func (o *Object) Bytes() (n uint64) {
	for _, p := range o.Parts {
		n += uint64(len(p))
	}
	return n
}

var (
	// ErrUnreadable means that no replica of an object can be read over TCP, or that the object is not as long as the memory for it.
	ErrUnreadable = errors.New("mooncake store: no replica can be read")

	// ErrTransfer means that bytes could not be moved to or from a node.
	ErrTransfer = errors.New("mooncake store: transfer failed")
)

// putTimes bound a put, counted from before PutStart: its writes must end within `writes`, its PutEnd within `whole`. After 30 s a
// master gives the key to any client that asks for it, and 0.3.7 would then let this client end the put of that other client.
type putTimes struct{ writes, whole time.Duration }

var defaultPutTimes = putTimes{writes: 20 * time.Second, whole: 28 * time.Second}

// maxLeft is the time limit of a call that gives places back, which may begin after its caller's context has ended.
const maxLeft = 5 * time.Second

// Put puts objects. errs[i] is also nil if another client has put the object: an object is immutable, so the first writer wins. errs[i]
// wraps NotReady if the object exists but cannot be read now. It is NoRoom if the cluster has no room, and wraps ErrTransfer if a node
// did not take the bytes. No object becomes visible before all of its bytes are written.
func (c *Client) Put(ctx context.Context, objects []Object) (errs []error) {
	errs = make([]error, len(objects))
	for from := 0; from < len(objects); {
		to := batch(objects, from, c.o.BatchBytes)
		c.put(ctx, objects[from:to], errs[from:to])
		from = to
	}
	var existing []int
	for i, err := range errs {
		switch {
		case err == nil:
			c.stats.put.Add(1)
			c.stats.putBytes.Add(int64(objects[i].Bytes()))
		case errors.Is(err, Exists):
			c.stats.existed.Add(1)
			if !c.o.ReportExisting {
				errs[i] = nil
				existing = append(existing, i)
			}
		case errors.Is(err, NoRoom):
			c.stats.noRoom.Add(1)
		default:
			c.stats.putErrors.Add(1)
		}
	}
	if len(existing) > 0 {
		c.checkExisting(ctx, objects, existing, errs)
	}
	return errs
}

// checkExisting asks the master again about objects that it reported as existing. It sets errs for those that cannot be read, and puts
// those again that have disappeared since: a master forgets the objects of a silent node after about 30 s. If the master does not
// answer, errs stay nil.
func (c *Client) checkExisting(ctx context.Context, objects []Object, existing []int, errs []error) {
	keys := make([]string, len(existing))
	for n, i := range existing {
		keys[n] = objects[i].Key
	}
	found, err := c.master.Replicas(ctx, keys)
	if err != nil {
		return
	}
	var gone []int
	for n, i := range existing {
		switch {
		case errors.Is(found[n].Err, NotReady):
			errs[i] = fmt.Errorf("mooncake store: the master did not take the object: %w: %w", Exists, found[n].Err)
		case errors.Is(found[n].Err, NotFound):
			gone = append(gone, i)
		}
	}
	for _, i := range gone {
		c.put(ctx, objects[i:i+1], errs[i:i+1])
		switch err := errs[i]; {
		case err == nil:
			c.stats.put.Add(1)
			c.stats.putBytes.Add(int64(objects[i].Bytes()))
		case errors.Is(err, Exists): // another client has put it by now
			errs[i] = nil
		case errors.Is(err, NoRoom):
			c.stats.noRoom.Add(1)
		default:
			c.stats.putErrors.Add(1)
		}
	}
}

// batch returns the end of the batch that begins at objects[from]. A batch has as many objects as fit into limit bytes, but at least
// one.
func batch(objects []Object, from int, limit int64) int {
	to, n := from, int64(0)
	for to < len(objects) && (to == from || n+int64(objects[to].Bytes()) <= limit) {
		n += int64(objects[to].Bytes())
		to++
	}
	return to
}

func (c *Client) put(ctx context.Context, objects []Object, errs []error) {
	todo := make([]int, len(objects))
	for i := range todo {
		todo[i] = i
	}
	end := time.Now().Add(c.o.RoomTimeout)
	for wait := 50 * time.Millisecond; len(todo) > 0; wait *= 2 {
		todo = c.putSome(ctx, objects, todo, errs)
		if len(todo) == 0 || time.Now().Add(wait).After(end) {
			return
		}
		select { // the errs of todo are NoRoom: the master has begun to evict
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
	}
}

// putSome puts objects[todo] and returns the indices of the objects for which there was no room.
func (c *Client) putSome(ctx context.Context, objects []Object, todo []int, errs []error) (noRoom []int) {
	keys, sizes := make([]string, len(todo)), make([]uint64, len(todo))
	for n, i := range todo {
		keys[n], sizes[n] = objects[i].Key, objects[i].Bytes()
	}
	// Each attempt has a client id of its own, so that no attempt can end or revoke a put that another began.
	id, begin := NewUUID(), c.now()
	last, cancel := context.WithDeadline(ctx, begin.steady.Add(c.times.whole))
	defer cancel()
	started, err := c.master.PutStart(last, id, keys, sizes, &c.o.Put)
	if err != nil {
		if _, unsent := errors.AsType[*unsentError](err); !unsent || len(keys) > c.master.o.MaxKeys {
			c.revoke(begin, id, keys, true)
		}
		for _, i := range todo {
			errs[i] = err
		}
		return nil
	}
	plan := newPlan(true, c.now)
	var begun []int // indices in todo of the objects whose put the master has begun
	for n, i := range todo {
		errs[i] = started[n].Err
		switch {
		case errors.Is(errs[i], NoRoom):
			noRoom = append(noRoom, i)
		case errs[i] == nil:
			begun = append(begun, n)
			memory := 0
			for r := range started[n].Replicas {
				rep := &started[n].Replicas[r]
				if rep.Kind != 0 {
					continue // the owner of a disk replica writes it
				}
				memory++
				if !plan.add(n, objects[i].Parts, sizes[n], rep) {
					plan.fail(n, fmt.Errorf("%w: the master allocated %d bytes for an object of %d", ErrTransfer, rep.Bytes(), sizes[n]))
				}
			}
			if memory == 0 {
				plan.fail(n, fmt.Errorf("%w: the master allocated no memory", ErrTransfer))
			}
		}
	}
	writing, cancelWriting := context.WithDeadline(last, begin.steady.Add(c.times.writes))
	plan.run(c.te, func([]int) context.Context { return writing })
	cancelWriting()
	if c.now().since(begin) > c.times.whole { // for example, because the machine slept
		for _, n := range begun {
			plan.fail(n, fmt.Errorf("%w: the put took longer than %v", ErrTransfer, c.times.whole))
		}
	}
	var whole, broken []string
	var of []int
	for _, n := range begun {
		if err := plan.errs[n]; err != nil {
			errs[todo[n]] = err
			// A node may still apply bytes of an unsettled write, so its place must not be given to other objects yet. The master frees
			// the place after ten minutes.
			if !errors.Is(err, transfer.ErrUnsettled) {
				broken = append(broken, keys[n])
			}
		} else {
			whole, of = append(whole, keys[n]), append(of, todo[n])
		}
	}
	if len(broken) > 0 {
		c.revoke(begin, id, broken, false)
	}
	if len(whole) > 0 {
		ended := make([]error, len(whole))
		if err := c.master.PutEnd(last, id, whole, ended); err != nil {
			for n := range ended {
				ended[n] = err
			}
			c.revoke(begin, id, whole, false)
		}
		for n, i := range of {
			errs[i] = ended[n]
		}
	}
	return noRoom
}

// revoke gives back the places that the attempt `id` reserved after begin, even if the caller's context has ended; otherwise they would
// stay reserved for ten minutes. unsure means that another client may be putting some of the keys. A 0.3.7 master does not distinguish
// clients and would revoke those puts, too; with such a master, revoke does nothing if unsure is true or the attempt took too long.
func (c *Client) revoke(begin twoClocks, id UUID, keys []string, unsure bool) {
	ctx, cancel := context.WithTimeout(context.Background(), maxLeft)
	defer cancel()
	v, err := c.master.Version(ctx)
	if err != nil || v == V0_3_7 && (unsure || c.now().since(begin) > c.times.whole) {
		return
	}
	_ = c.master.PutRevoke(ctx, id, keys, make([]error, len(keys))) // if it fails, the master discards them later
}

// Get reads objects into their Parts, which must be as long as the object. errs[i] is nil if all bytes came before the object's lease
// ended; otherwise the content of the Parts is undefined. errs[i] is NotFound or NotReady if the object is not there, wraps
// ErrUnreadable if it cannot be read, and is LeaseExpired if its bytes came too late. After Get has returned, nothing writes to the
// Parts any more.
func (c *Client) Get(ctx context.Context, objects []Object) (errs []error) {
	errs = make([]error, len(objects))
	for from := 0; from < len(objects); {
		to := batch(objects, from, c.o.BatchBytes)
		c.get(ctx, objects[from:to], errs[from:to])
		from = to
	}
	for i, err := range errs {
		switch {
		case err == nil:
			c.stats.got.Add(1)
			c.stats.gotBytes.Add(int64(objects[i].Bytes()))
		case errors.Is(err, NotFound), errors.Is(err, NotReady):
			c.stats.missing.Add(1)
		case errors.Is(err, ErrUnreadable):
			c.stats.unreadable.Add(1)
		case errors.Is(err, LeaseExpired):
			c.stats.expired.Add(1)
		default:
			c.stats.getErrors.Add(1)
		}
	}
	return errs
}

func (c *Client) get(ctx context.Context, objects []Object, errs []error) {
	keys := make([]string, len(objects))
	for i := range objects {
		keys[i] = objects[i].Key
	}
	asked := c.now()
	found, err := c.master.Replicas(ctx, keys)
	if err != nil {
		for i := range errs {
			errs[i] = err
		}
		return
	}
	// Objects with several readable replicas do not wait for the nodes of objects that have only one.
	var one, several []int
	for i := range objects {
		if found[i].readable(objects[i].Bytes(), 0) > 1 {
			several = append(several, i)
		} else {
			one = append(one, i)
		}
	}
	var reading sync.WaitGroup
	if len(one) > 0 && len(several) > 0 {
		reading.Go(func() { c.read(ctx, asked, objects, several, found, errs) })
		c.read(ctx, asked, objects, one, found, errs)
		reading.Wait()
		return
	}
	c.read(ctx, asked, objects, append(one, several...), found, errs)
}

// readable returns how many replicas, counted from index `from`, can be read into size bytes.
func (f *Found) readable(size uint64, from int) (n int) {
	for i := range f.Replicas[from:] {
		if f.Replicas[from+i].readable(size) {
			n++
		}
	}
	return n
}

func (r *Replica) readable(size uint64) bool {
	return r.Complete && len(r.Pieces) > 0 && r.Bytes() == size
}

// Bytes returns the length of the object; 0 if no replica of it can be read over TCP.
func (f *Found) Bytes() uint64 {
	for i := range f.Replicas {
		if r := &f.Replicas[i]; r.Complete && len(r.Pieces) > 0 {
			return r.Bytes()
		}
	}
	return 0
}

// read reads objects[todo], each from the first of its replicas that answers. found has the replicas that the master named at the time
// `asked`.
func (c *Client) read(ctx context.Context, asked twoClocks, objects []Object, todo []int, found []Found, errs []error) {
	next := make([]int, len(objects)) // index of the replica to try next
	for _, i := range todo {
		if r := found[i].Replicas; len(r) > 1 {
			n := int(c.turn.Add(1)) % len(r)
			found[i].Replicas = slices.Concat(r[n:], r[:n])
		}
	}
	for len(todo) > 0 {
		plan := newPlan(false, c.now)
		var tried []int
		for _, i := range todo {
			if found[i].Err != nil {
				errs[i] = found[i].Err
				continue
			}
			size := objects[i].Bytes()
			for next[i] < len(found[i].Replicas) {
				r := &found[i].Replicas[next[i]]
				next[i]++
				if r.readable(size) && plan.add(i, objects[i].Parts, size, r) {
					tried = append(tried, i)
					break
				}
			}
			if len(tried) == 0 || tried[len(tried)-1] != i { // the object has no further replica
				errs[i] = cmp.Or(errs[i], error(ErrUnreadable))
			}
		}
		// A node gets the time that is left of the longest lease of its objects; half of that if all these objects have other readable
		// replicas.
		var cancels []func()
		plan.run(c.te, func(of []int) context.Context {
			left, elsewhere := time.Duration(0), true
			for _, i := range of {
				left = max(left, found[i].Lease-c.now().since(asked))
				elsewhere = elsewhere && found[i].readable(objects[i].Bytes(), next[i]) > 0
			}
			if elsewhere {
				left /= 2
			}
			reading, cancel := context.WithTimeout(ctx, left)
			cancels = append(cancels, cancel)
			return reading
		})
		for _, cancel := range cancels {
			cancel()
		}
		todo = todo[:0]
		for _, i := range tried {
			errs[i] = plan.errs[i]
			took := plan.ends[i].since(asked)
			switch {
			case ctx.Err() == nil && errs[i] != nil && took >= found[i].Lease:
				errs[i] = LeaseExpired
			case errs[i] == nil && took >= found[i].Lease:
				errs[i] = LeaseExpired // the place may hold another object by now
			case errs[i] != nil && ctx.Err() == nil:
				todo = append(todo, i)
			}
		}
	}
}

// plan holds the transfers of a batch, grouped by node.
type plan struct {
	write bool
	nodes map[string]*nodePlan
	errs  map[int]error     // by object
	ends  map[int]twoClocks // by object: when the last of its nodes was done
	now   func() twoClocks
}

type nodePlan struct {
	entries []transfer.Entry
	of      []int // the object to which each entry belongs
}

func newPlan(write bool, now func() twoClocks) *plan {
	return &plan{write, make(map[string]*nodePlan), make(map[int]error), make(map[int]twoClocks), now}
}

func (p *plan) fail(object int, err error) {
	if old := p.errs[object]; old == nil || errors.Is(err, transfer.ErrUnsettled) {
		p.errs[object] = err
	}
}

// add plans the transfer between parts and the replica r. It returns false, and plans nothing, if their lengths differ.
func (p *plan) add(object int, parts [][]byte, size uint64, r *Replica) bool {
	if len(r.Pieces) == 0 || r.Bytes() != size {
		return false
	}
	at := 0 // offset in parts[0]
	for _, piece := range r.Pieces {
		n := p.nodes[piece.Endpoint]
		if n == nil {
			n = &nodePlan{}
			p.nodes[piece.Endpoint] = n
		}
		for addr, left := piece.Addr, piece.Bytes; left > 0; {
			if at == len(parts[0]) {
				parts, at = parts[1:], 0
				continue
			}
			part := parts[0][at:]
			part = part[:min(uint64(len(part)), left)]
			n.entries = append(n.entries, transfer.Entry{Local: part, Remote: addr})
			n.of = append(n.of, object)
			at += len(part)
			addr += uint64(len(part))
			left -= uint64(len(part))
		}
	}
	return true
}

// run carries out the plan, at all nodes at the same time. limit returns the context of the transfer with one node; `of` are the objects,
// by index, that have entries there.
func (p *plan) run(te *transfer.Client, limit func(of []int) context.Context) {
	type result struct {
		n   *nodePlan
		err error
		end twoClocks
	}
	done := make(chan result, len(p.nodes))
	move := func(ctx context.Context, endpoint string, n *nodePlan) {
		f := te.Read
		if p.write {
			f = te.Write
		}
		err := f(ctx, endpoint, n.entries)
		done <- result{n, err, p.now()}
	}
	for endpoint, n := range p.nodes {
		ctx := limit(n.of)
		if len(p.nodes) == 1 {
			move(ctx, endpoint, n)
			break
		}
		go move(ctx, endpoint, n)
	}
	for range p.nodes {
		r := <-done
		for _, object := range r.n.of {
			if p.ends[object].steady.Before(r.end.steady) {
				p.ends[object] = r.end
			}
		}
		if r.err == nil {
			continue
		}
		var some *transfer.BatchError
		single := errors.As(r.err, &some)
		for i, object := range r.n.of {
			err := r.err
			if single {
				err = some.Errs[i]
			}
			if err != nil {
				p.fail(object, fmt.Errorf("%w: %w", ErrTransfer, err))
			}
		}
	}
}
