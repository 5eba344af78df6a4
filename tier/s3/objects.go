// SPDX-License-Identifier: Apache-2.0

package s3

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// metaAnswer is metaField as written in answers.
const metaAnswer = "X-Amz-Meta-Kvasir"

// object is what a HEAD or GET says about an object.
type object struct {
	there  bool
	length int64
	meta   string
	tag    string // the ETag, which differs between versions
}

func objectOf(a *http1.Response) (object, error) {
	n, err := length(a)
	return object{there: true, length: n, meta: a.Field(metaAnswer), tag: a.Field("Etag")}, err
}

// look asks for an object without its bytes. If the store refuses, and the credentials have been renewed
// meanwhile, it asks again with the new ones.
func (t *Tier) look(ctx context.Context, name string) (object, error) {
	former, _ := t.keys.Get(ctx) // without credentials the request fails
	o, err := t.lookOnce(ctx, name)
	if s := status(err); s == http.StatusForbidden || s == http.StatusBadRequest {
		if now, err := t.keys.Get(ctx); err == nil && now != former {
			return t.lookOnce(ctx, name)
		}
	}
	return o, err
}

func (t *Tier) lookOnce(ctx context.Context, name string) (o object, _ error) {
	err := t.do(ctx, &request{kind: kindHead, name: name}, func(a *http1.Response) (err error) {
		o, err = objectOf(a)
		return err
	})
	switch status(err) {
	case http.StatusNotFound:
		if !t.bucket.Load() {
			return object{}, t.reason(ctx, name, err)
		}
		return object{}, nil
	case http.StatusForbidden, http.StatusBadRequest, http.StatusMovedPermanently: // a HEAD does not say why
		return object{}, t.reason(ctx, name, err)
	}
	return o, err
}

// reason finds out why a HEAD was refused, by a GET of one byte of the object. The error is
// nil if the object is missing: without the right to list S3 says that a missing object
// is forbidden.
func (t *Tier) reason(ctx context.Context, name string, refused error) error {
	if t.noList.on() && status(refused) == http.StatusForbidden {
		return nil
	}
	err := t.do(ctx, &request{kind: kindGet, name: name, fields: header(nil, "range", "bytes=0-0")}, discardAnswer)
	switch {
	case err == nil && status(refused) == http.StatusNotFound: // another client wrote it meanwhile
		return nil
	case err == nil: // only HEAD is forbidden
		return refused
	case status(err) == http.StatusNotFound && !hasCode(err, "NoSuchBucket"):
		t.bucket.Store(true)
		return nil
	case hasCode(err, "AccessDenied"):
		t.noList.begin(time.Minute)
		if t.warned.now("list") {
			t.log.Warn("S3 answers AccessDenied for missing objects: allow s3:GetObject and s3:ListBucket. Refused objects count as missing", "url", t.o.URL)
		}
		return nil
	}
	return err
}

// Flows implements tier.Flowing.
func (t *Tier) Flows() {}

// maxStatFailures is the number of failed requests after which a Stat ends: it makes no further requests for its keys.
const maxStatFailures = 3

// Stat implements tier.Tier with a HEAD for each key, many at once. If some requests fail and
// others succeed, the objects of the failed ones count as missing.
func (t *Tier) Stat(ctx context.Context, keys []kv.Key, metas []tier.Meta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	clear(metas[:len(keys)])
	var answered atomic.Bool
	var failed atomic.Int32
	var one atomic.Pointer[error] // error of a failed request
	err := spread(ctx, t.o.Lookups, len(keys), func(ctx context.Context, i int) error {
		name, ok := t.objectName(keys[i])
		if !ok {
			return nil
		}
		o, err := t.look(ctx, name)
		if err != nil {
			one.Store(&err)
			if failed.Add(1) < maxStatFailures {
				return nil
			}
			return err
		}
		answered.Store(true)
		metas[i] = t.known(keys[i], o.length, o.meta)
		return nil
	})
	switch e := one.Load(); {
	case answered.Load() && ctx.Err() == nil:
		return nil
	case err == nil && e != nil:
		return *e
	}
	return err
}

// Read implements tier.Tier. It reads several ranges at once if the object is larger than a part.
func (t *Tier) Read(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	return t.read(ctx, k, dst, nil)
}

// ReadSummed implements tier.Summing.
func (t *Tier) ReadSummed(ctx context.Context, k kv.Key, dst []byte) (m tier.Meta, sum uint64, err error) {
	return tier.Summed(dst, func(s *tier.Summer) (tier.Meta, error) { return t.read(ctx, k, dst, s) })
}

// read fills dst. If the object has a single part, its bytes pass through sum.
func (t *Tier) read(ctx context.Context, k kv.Key, dst []byte, sum *tier.Summer) (tier.Meta, error) {
	if err := ctx.Err(); err != nil {
		return tier.Meta{}, err
	}
	name, ok := t.objectName(k)
	if !ok || len(dst) == 0 {
		return tier.Meta{}, tier.ErrMissing
	}
	o, err := t.readParts(ctx, k, name, dst, sum)
	switch {
	case errors.Is(err, errWhole), errors.Is(err, errChanged):
		o, err = t.readWhole(ctx, k, name, dst, sum)
	}
	switch status(err) {
	case http.StatusNotFound:
		if !hasCode(err, "NoSuchBucket") {
			err = tier.ErrMissing
		}
	case http.StatusForbidden:
		if hasCode(err, "AccessDenied") { // perhaps the object is missing: see reason
			err = t.reason(ctx, name, err)
			if err == nil {
				err = tier.ErrMissing
			}
		}
	}
	if err != nil {
		return tier.Meta{}, err
	}
	meta := t.known(k, o.length, o.meta)
	if meta.Len == 0 {
		return tier.Meta{}, tier.ErrMissing
	}
	return meta, nil
}

var (
	// errWhole means that a store does not serve ranges.
	errWhole = errors.New("s3: the answer has the whole object, where a range was asked for")

	// errChanged means that an object was replaced while it was read in parts.
	errChanged = errors.New("s3: the object changed while it was read")
)

// readParts reads an object in parts, which must all be of one version of the object.
func (t *Tier) readParts(ctx context.Context, k kv.Key, name string, dst []byte, sum *tier.Summer) (object, error) {
	size := int64(len(dst))
	n := int((size-1)/t.o.Part) + 1
	if n == 1 {
		return t.readWhole(ctx, k, name, dst, sum)
	}
	parts := make([]object, n)
	err := spread(ctx, n, n, func(ctx context.Context, i int) error {
		from, to := int64(i)*t.o.Part, min(size, int64(i+1)*t.o.Part)
		r := request{kind: kindGet, name: name, bytes: to - from, fields: header(nil, "range", fmt.Sprintf("bytes=%d-%d", from, to-1))}
		return t.do(ctx, &r, func(a *http1.Response) error {
			if a.Status != http.StatusPartialContent {
				return errWhole
			}
			var first, last, whole int64
			if got, err := fmt.Sscanf(a.Field("Content-Range"), "bytes %d-%d/%d", &first, &last, &whole); err != nil || got != 3 {
				return fmt.Errorf("%w: its Content-Range is %.60q", errAnswer, a.Field("Content-Range"))
			}
			if whole != size {
				return &tier.CorruptError{Key: k, Want: tier.Meta{Len: size}, Got: tier.Meta{Len: whole, Seal: t.labelled(k, whole, a.Field(metaAnswer)).Seal}}
			}
			o, err := objectOf(a)
			if err != nil {
				return err
			}
			if first != from || last != to-1 || o.length != to-from {
				return fmt.Errorf("%w: it has %d bytes, %d to %d, where %d to %d were asked for", errAnswer, o.length, first, last, from, to-1)
			}
			o.length = whole
			parts[i] = o
			return t.fill(a, dst[from:to], nil, nil)
		})
	})
	if status(err) == http.StatusRequestedRangeNotSatisfiable {
		err = &tier.CorruptError{Key: k, Want: tier.Meta{Len: size}} // the object is shorter
	}
	if err != nil {
		return object{}, err
	}
	for _, p := range parts[1:] {
		if p.tag != parts[0].tag || p.meta != parts[0].meta {
			return object{}, errChanged
		}
	}
	return parts[0], nil
}

// readWhole reads an object with one request.
func (t *Tier) readWhole(ctx context.Context, k kv.Key, name string, dst []byte, sum *tier.Summer) (o object, _ error) {
	flow := tier.FlowOf(ctx)
	err := t.do(ctx, &request{kind: kindGet, name: name, bytes: int64(len(dst))}, func(a *http1.Response) (err error) {
		if a.Status != http.StatusOK {
			return fmt.Errorf("%w: its status is %d, not 200", errAnswer, a.Status)
		}
		if o, err = objectOf(a); err != nil {
			return err
		}
		if o.length != int64(len(dst)) {
			return &tier.CorruptError{Key: k, Want: tier.Meta{Len: int64(len(dst))}, Got: tier.Meta{Len: o.length, Seal: t.labelled(k, o.length, o.meta).Seal}}
		}
		flow.Starts(t.known(k, o.length, o.meta))
		return t.fill(a, dst, sum, flow)
	})
	return o, err
}

// Delete implements tier.Tier with a request for each key, many at once. In LMCache's layout
// it keeps objects of another layout of chunks.
func (t *Tier) Delete(ctx context.Context, keys []kv.Key) error {
	return spread(ctx, t.o.Lookups, len(keys), func(ctx context.Context, i int) error {
		name, ok := t.objectName(keys[i])
		if !ok {
			return nil
		}
		if t.o.Layout == LMCache { // an object of another layout of chunks may have the same name
			o, err := t.look(ctx, name)
			if err != nil || t.labelled(keys[i], o.length, o.meta).Len == 0 && o.length > 0 {
				return err
			}
		}
		return t.deleteNamed(ctx, name)
	})
}

// deleteNamed deletes the object of a name. A missing object is no error.
func (t *Tier) deleteNamed(ctx context.Context, name string) error {
	err := t.do(ctx, &request{kind: kindDelete, name: name}, discardAnswer)
	if status(err) == http.StatusNotFound && !hasCode(err, "NoSuchBucket") {
		err = nil
	}
	return err
}
