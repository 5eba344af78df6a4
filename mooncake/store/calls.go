// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"fmt"
	"math"
	"time"

	sp "github.com/kvasir-kv/kvasir/mooncake/store/structpack"
)

// PutOptions says how the cluster shall keep an object.
type PutOptions struct {
	Replicas int    // number of copies, on different segments; 0 means 1. The master makes at most one per segment
	Segment  string // name of the segment that gets the object while it has room
	SoftPin  bool   // the master evicts it after all objects without SoftPin
}

// Piece is a range of a segment's memory.
type Piece struct {
	Addr, Bytes uint64
	Endpoint    string // address of the segment's transfer engine, host:port
}

// Replica is one copy of an object.
type Replica struct {
	Pieces   []Piece // in order; none if the replica is not in memory that can be read over TCP
	Complete bool
	Kind     uint8 // 0 is memory
}

// Bytes returns the sum of the lengths of the pieces, or math.MaxUint64 if the sum overflows.
func (r *Replica) Bytes() (n uint64) {
	for _, p := range r.Pieces {
		if n += p.Bytes; n < p.Bytes {
			return math.MaxUint64
		}
	}
	return n
}

const complete = 3 // status of a replica; 2 means that it is being written

// Found is what the master knows about one object.
type Found struct {
	Replicas []Replica
	Lease    time.Duration // the object stays for this long, counted from before the call
	Err      error         // a Code
}

// batches splits n keys into ranges of at most MaxKeys and calls f for each range, until f returns an error.
func (m *Master) batches(n int, f func(from, to int) error) error {
	for from := 0; from < n; from += m.o.MaxKeys {
		if err := f(from, min(from+m.o.MaxKeys, n)); err != nil {
			return err
		}
	}
	return nil
}

// largest returns the largest of the sizes that a request has: the number of keys, the length of a key, the length of the tenant, and
// `more`.
func (m *Master) largest(keys []string, more ...int) int {
	n := max(len(keys), len(m.o.Tenant))
	for _, k := range keys {
		n = max(n, len(k))
	}
	for _, v := range more {
		n = max(n, v)
	}
	return n
}

// shape returns nil if ok; otherwise an error that says that the answer has a type that this release does not send.
func shape(ok bool) error {
	if !ok {
		return fmt.Errorf("%w: the answer has another type than this method's", sp.ErrMalformed)
	}
	return nil
}

// results reads a vector of n results from r, whose type is t. Result i is a value, which f reads, or a Code, with which results calls
// fail. It returns an error if the answer has another type or another number of results.
func results(r *sp.Reader, t *sp.Type, n int, f func(i int, t *sp.Type) error, fail func(i int, c Code)) error {
	if err := shape(t.Kind == sp.KindVector && t.Parts[0].Kind == sp.KindExpected); err != nil {
		return err
	}
	if got := r.Size(1); got != n {
		if err := r.Err(); err != nil {
			return err
		}
		return fmt.Errorf("%w: %d results for %d keys", sp.ErrMalformed, got, n)
	}
	value := t.Parts[0].Parts[0]
	for i := range n {
		if !r.Bool() {
			fail(i, Code(r.I32()))
		} else if err := f(i, value); err != nil {
			return err
		}
		if err := r.Err(); err != nil {
			return err
		}
	}
	return r.End()
}

// result reads one expected value with f. If the answer has a Code in its place, it returns that Code.
func result(r *sp.Reader, t *sp.Type, f func(t *sp.Type) error) error {
	if err := shape(t.Kind == sp.KindExpected); err != nil {
		return err
	}
	if !r.Bool() {
		code := Code(r.I32())
		if err := r.End(); err != nil {
			return err
		}
		return code
	}
	if err := f(t.Parts[0]); err != nil {
		return err
	}
	return r.End()
}

// Exists sets present[i] to whether the store has keys[i], and leases the objects found: the master does not evict them until the lease
// ends. A key counts as present even if all its replicas are outside memory; Replicas shows where they are.
func (m *Master) Exists(ctx context.Context, keys []string, present []bool) error {
	return m.batches(len(keys), func(from, to int) error {
		some := keys[from:to]
		return m.do(ctx, batchExist, true, func(c *conn, k *codec) {
			w := c.begin(batchExist, k.forms[batchExist], m.largest(some))
			w.Strings(some)
			m.tenant(k, w)
		}, func(r *sp.Reader, t *sp.Type) error {
			return results(r, t, len(some), func(i int, t *sp.Type) error {
				present[from+i] = r.Bool()
				return shape(t.Kind == sp.KindFixed && t.Size == 1)
			}, func(i int, _ Code) { present[from+i] = false })
		})
	})
}

// Replicas returns the places of the objects, and leases the objects.
func (m *Master) Replicas(ctx context.Context, keys []string) ([]Found, error) {
	out := make([]Found, len(keys))
	err := m.batches(len(keys), func(from, to int) error {
		some := keys[from:to]
		return m.do(ctx, batchReplicas, true, func(c *conn, k *codec) {
			w := c.begin(batchReplicas, k.forms[batchReplicas], m.largest(some))
			w.Strings(some)
			m.tenant(k, w)
		}, func(r *sp.Reader, t *sp.Type) error {
			return results(r, t, len(some), func(i int, t *sp.Type) error {
				return found(r, t, &out[from+i])
			}, func(i int, c Code) { out[from+i].Err = c })
		})
	})
	return out, err
}

// found reads into f a list of replicas and the duration of the lease.
func found(r *sp.Reader, t *sp.Type, f *Found) (err error) {
	if err := shape(t.Kind == sp.KindStruct && len(t.Parts) >= 2 && t.Parts[1].Size == 8); err != nil {
		return err
	}
	if f.Replicas, err = replicas(r, t.Parts[0]); err != nil {
		return err
	}
	const most = uint64(time.Hour / time.Millisecond)
	f.Lease = time.Duration(min(r.U64(), most)) * time.Millisecond
	for _, p := range t.Parts[2:] {
		r.Skip(p)
	}
	return nil
}

// replicas reads a vector of replica descriptors. The last two parts of each are its place (a variant of kinds) and its status.
func replicas(r *sp.Reader, t *sp.Type) ([]Replica, error) {
	if err := shape(t.Kind == sp.KindVector && t.Parts[0].Kind == sp.KindStruct && len(t.Parts[0].Parts) >= 2); err != nil {
		return nil, err
	}
	fields := t.Parts[0].Parts
	last := len(fields) - 1
	where := fields[last-1]
	if err := shape(where.Kind == sp.KindVariant && len(where.Parts) > 0 && fields[last].Size == 4); err != nil {
		return nil, err
	}
	out := make([]Replica, r.Size(6)) // a replica has at least one byte of variant and four bytes of status
	for i := range out {
		for _, p := range fields[:last-1] {
			r.Skip(p)
		}
		rep := &out[i]
		if rep.Kind = r.U8(); rep.Kind == 0 {
			if err := pieces(r, where.Parts[0], rep); err != nil {
				return nil, err
			}
		} else if int(rep.Kind) < len(where.Parts) {
			r.Skip(where.Parts[rep.Kind])
		} else {
			return nil, shape(false)
		}
		rep.Complete = r.I32() == complete
		if err := r.Err(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// pieces reads where a replica lies in memory: one piece, or a vector of pieces.
func pieces(r *sp.Reader, t *sp.Type, rep *Replica) error {
	if t.Kind == sp.KindStruct && len(t.Parts) == 1 {
		t = t.Parts[0]
	}
	n, part := 1, t
	if t.Kind == sp.KindVector {
		part = t.Parts[0]
		n = r.Size(part.Least())
	}
	k := len(part.Parts)
	if err := shape(part.Kind == sp.KindStruct && (k == 3 || k == 4) && part.Parts[0].Size == 8 && part.Parts[1].Size == 8 &&
		part.Parts[2].Kind == sp.KindString && part.Parts[k-1].Kind == sp.KindString); err != nil {
		return err
	}
	tcp := true
	rep.Pieces = make([]Piece, n)
	for i := range rep.Pieces {
		p := &rep.Pieces[i]
		p.Bytes, p.Addr = r.U64(), r.U64()
		if k == 4 {
			tcp = string(r.Bytes()) == "tcp" && tcp
		}
		p.Endpoint = r.String()
	}
	if !tcp {
		rep.Pieces = nil
	}
	return r.Err()
}

// Started is where the caller must write an object after PutStart.
type Started struct {
	Replicas []Replica
	Err      error // a Code
}

// PutStart reserves places for objects; sizes[i] is the length of object i in bytes. The caller must write every memory replica of an
// object. Then it must call PutEnd, which makes the object visible, or PutRevoke, which gives the places back.
func (m *Master) PutStart(ctx context.Context, client UUID, keys []string, sizes []uint64, o *PutOptions) ([]Started, error) {
	out := make([]Started, len(keys))
	err := m.batches(len(keys), func(from, to int) error {
		some := keys[from:to]
		return m.do(ctx, batchPutStart, false, func(c *conn, k *codec) {
			w := c.begin(batchPutStart, k.forms[batchPutStart], m.largest(some, len(o.Segment)))
			if !k.pieces() {
				uuid(w, client)
			}
			w.Strings(some)
			w.Size(len(some))
			for _, n := range sizes[from:to] {
				if k.pieces() {
					w.Size(1)
				}
				w.U64(n)
			}
			k.config(w, o)
			m.tenant(k, w)
		}, func(r *sp.Reader, t *sp.Type) error {
			return results(r, t, len(some), func(i int, t *sp.Type) (err error) {
				out[from+i].Replicas, err = replicas(r, t)
				return err
			}, func(i int, c Code) { out[from+i].Err = c })
		})
	})
	return out, err
}

// PutEnd makes objects visible that client began with PutStart and has written completely. errs[i] is a Code or nil.
func (m *Master) PutEnd(ctx context.Context, client UUID, keys []string, errs []error) error {
	return m.endPut(ctx, batchPutEnd, client, keys, errs)
}

// PutRevoke gives back the places of objects that client began with PutStart. errs[i] is a Code or nil.
func (m *Master) PutRevoke(ctx context.Context, client UUID, keys []string, errs []error) error {
	return m.endPut(ctx, batchPutRevoke, client, keys, errs)
}

func (m *Master) endPut(ctx context.Context, f method, client UUID, keys []string, errs []error) error {
	return m.batches(len(keys), func(from, to int) error {
		some := keys[from:to]
		return m.do(ctx, f, true, func(c *conn, k *codec) {
			w := c.begin(f, k.forms[f], m.largest(some))
			if !k.pieces() {
				uuid(w, client)
			}
			w.Size(len(some))
			for _, key := range some {
				w.String(key)
				if f == batchPutEnd && k.checksum() {
					w.Bool(false)
				}
			}
			if !k.pieces() {
				w.I32(allKinds)
			}
			m.tenant(k, w)
		}, func(r *sp.Reader, t *sp.Type) error {
			return results(r, t, len(some), func(i int, t *sp.Type) error {
				errs[from+i] = nil
				r.Skip(t)
				return nil
			}, func(i int, c Code) { errs[from+i] = c })
		})
	})
}

// Remove removes an object. With force, it removes a leased object, too; 0.3.7 has no force.
func (m *Master) Remove(ctx context.Context, key string, force bool) error {
	var code error
	err := m.do(ctx, removeOne, false, func(c *conn, k *codec) {
		w := c.begin(removeOne, k.forms[removeOne], m.largest(nil, len(key)))
		w.String(key)
		if !k.pieces() {
			w.Bool(force)
		}
		m.tenant(k, w)
	}, func(r *sp.Reader, t *sp.Type) error { return coded(&code, r, t) })
	return first(err, code)
}

// coded reads a result without a value. It stores the result's Code in *code; a Code is not an error of the call.
func coded(code *error, r *sp.Reader, t *sp.Type) error {
	err := result(r, t, func(t *sp.Type) error {
		r.Skip(t)
		return nil
	})
	if c, ok := err.(Code); ok {
		*code = c
		return nil
	}
	return err
}

func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// Segment is memory that a storage node gives to the cluster.
type Segment struct {
	ID          UUID
	Name        string
	Base, Bytes uint64 // a range of addresses, which are names and not pointers; multiples of 16 MiB suit every allocator of a master
	Endpoint    string // of the node's transfer engine, host:port
}

// Mount gives the segment s to the cluster, in the name of client. The cluster uses it at once, even if its answer is lost: after an
// error that is no Code, the segment may hold objects.
func (m *Master) Mount(ctx context.Context, client UUID, s *Segment) error {
	var code error
	err := m.do(ctx, mountSegment, false, func(c *conn, k *codec) {
		w := c.begin(mountSegment, k.forms[mountSegment], max(len(s.Name), len(s.Endpoint)))
		k.segment(w, s)
		uuid(w, client)
	}, func(r *sp.Reader, t *sp.Type) error { return coded(&code, r, t) })
	return first(err, code)
}

// Remount gives all segments of client to a master that does not know client.
func (m *Master) Remount(ctx context.Context, client UUID, segments ...Segment) error {
	var code error
	err := m.do(ctx, remountSegment, true, func(c *conn, k *codec) {
		n := len(segments)
		for i := range segments {
			n = max(n, len(segments[i].Name), len(segments[i].Endpoint))
		}
		w := c.begin(remountSegment, k.forms[remountSegment], n)
		w.Size(len(segments))
		for i := range segments {
			k.segment(w, &segments[i])
		}
		uuid(w, client)
	}, func(r *sp.Reader, t *sp.Type) error { return coded(&code, r, t) })
	return first(err, code)
}

// Unmount takes a segment back at once. Objects that lie only in it are lost.
func (m *Master) Unmount(ctx context.Context, client, segment UUID) error {
	return m.unmount(ctx, unmountSegment, client, segment, -1)
}

// UnmountAfter takes a segment back after the time grace. Until then, the master puts nothing new into it, and its objects stay
// readable. Releases before 0.3.11 do not have this call.
func (m *Master) UnmountAfter(ctx context.Context, client, segment UUID, grace time.Duration) error {
	return m.unmount(ctx, gracefulUnmount, client, segment, grace)
}

func (m *Master) unmount(ctx context.Context, f method, client, segment UUID, grace time.Duration) error {
	var code error
	err := m.do(ctx, f, true, func(c *conn, k *codec) {
		w := c.begin(f, k.forms[f], 0)
		uuid(w, segment)
		uuid(w, client)
		if grace >= 0 {
			w.U64(uint64(grace.Milliseconds()))
		}
	}, func(r *sp.Reader, t *sp.Type) error { return coded(&code, r, t) })
	return first(err, code)
}

// Ping informs the master that client lives. known is whether the master knows client's segments.
func (m *Master) Ping(ctx context.Context, client UUID) (known bool, err error) {
	var code error
	err = m.do(ctx, ping, true, func(c *conn, k *codec) {
		uuid(c.begin(ping, k.forms[ping], 0), client)
	}, func(r *sp.Reader, t *sp.Type) error {
		err := result(r, t, func(t *sp.Type) error {
			if err := shape(t.Kind == sp.KindStruct && len(t.Parts) == 2 && t.Parts[0].Size == 8 && t.Parts[1].Size == 4); err != nil {
				return err
			}
			r.U64() // the number of the master's view
			known = r.I32() == 1
			return nil
		})
		if c, ok := err.(Code); ok {
			code, err = c, nil
		}
		return err
	})
	return known, first(err, code)
}
