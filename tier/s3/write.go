// SPDX-License-Identifier: Apache-2.0

package s3

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/s3/aws"
)

const (
	readOnlyFor = time.Minute      // pause of writes after a refusal
	abortTime   = 10 * time.Second // bounds the request that ends a failed upload
	uploadWidth = 4                // parts that are sent at once
	maxParts    = 10_000           // parts of an upload; for a larger object the parts are larger
	maxRaces    = 3                // tries while other clients write or delete the same object; then it is not kept
)

var (
	errReadOnly = errors.New("the credentials may not write")
	errBudget   = errors.New("the PUTs of this hour are used up")
)

// Write implements tier.Tier. It leaves an existing object of the right length as it is; a HEAD
// finds it and costs a tenth of a PUT. When two servers write one object at once, the
// first one stays if the store supports If-None-Match.
func (t *Tier) Write(ctx context.Context, k kv.Key, m tier.Meta, src []byte) error {
	if m.Len != int64(len(src)) || m.Len < 1 {
		return fmt.Errorf("s3: write of %d bytes for an object of %d: the lengths must be equal and above 0", len(src), m.Len)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	name, ok := t.objectName(k)
	if !ok {
		return t.o.Names.Unnamed(k)
	}
	if t.readOnly.on() {
		t.bill.readOnly.Add(1)
		return fmt.Errorf("%w: %w: %w", tier.ErrNotKept, tier.ErrReadOnly, errReadOnly)
	}
	var err error
	for race := range maxRaces {
		var was object
		was, err = t.look(ctx, name)
		has := t.known(k, was.length, was.meta)
		if err != nil || t.isStored(m, has) {
			return err
		}
		if isLater(was.meta) {
			if t.warned.now("later") {
				t.log.Warn("objects of a later release are misses and stay as they are: start the release that wrote them, or name another prefix", "url", t.o.URL, "name", name)
			}
			return fmt.Errorf("%w: %w", tier.ErrNotKept, tier.ErrNewer)
		}
		if m.Unseals(has) {
			return fmt.Errorf("%w: %w", tier.ErrNotKept, tier.ErrSealed)
		}
		err = t.put(ctx, name, labelOf(k, m), src, was.there)
		switch {
		case err == nil:
			t.written.Add(m.Len)
			return nil
		case status(err) != http.StatusPreconditionFailed && status(err) != http.StatusConflict:
			return t.refused(err)
		}
		if (race > 0 || status(err) == http.StatusConflict) && race+1 < maxRaces && !wait(ctx, backoff(race)) { // wait for the other client to end
			break
		}
	}
	return fmt.Errorf("%w: other clients write or delete the object, or it exists and cannot be read: %w", tier.ErrNotKept, err)
}

// isStored reports whether an object with Meta m need not be written, because the bucket has an object of the same length under its name
// that does not live longer.
func (t *Tier) isStored(m, has tier.Meta) bool {
	return has.Len == m.Len && has.Seal == m.Seal && (has.NoSum || (tier.Meta{End: m.End}).Lasts(tier.Meta{End: has.End}))
}

// refused turns the error of a store that takes no objects now, or not this one, into tier.ErrNotKept with the reason.
func (t *Tier) refused(err error) error {
	e, ok := errors.AsType[*Error](err)
	switch {
	case !ok:
		return err
	case e.Code == "AccessDenied", e.Code == "AllAccessDisabled", e.Code == "MethodNotAllowed", e.Code == "AccountProblem":
		t.readOnly.begin(readOnlyFor)
		if t.warned.now("write " + e.Code) {
			t.log.Warn("S3 refuses writes: its objects are served, and none is added", "url", t.o.URL, "err", err)
		}
		return fmt.Errorf("%w: %w: %w", tier.ErrNotKept, tier.ErrReadOnly, err)
	case e.Status == http.StatusInsufficientStorage, e.Code == "QuotaExceeded", e.Code == "XMinioStorageFull", e.Code == "InvalidRequest", e.Code == "EntityTooLarge":
		if t.warned.now("write " + e.Code) {
			t.log.Warn("S3 does not take an object", "url", t.o.URL, "err", err)
		}
		if e.Code == "InvalidRequest" || e.Code == "EntityTooLarge" { // only this object is refused
			return fmt.Errorf("%w: %w", tier.ErrNotKept, err)
		}
		return fmt.Errorf("%w: %w: %w", tier.ErrNotKept, tier.ErrFull, err)
	}
	return err
}

// put writes an object with one request, or in parts. Without replace, the error has status 412
// if another client has written the object meanwhile.
func (t *Tier) put(ctx context.Context, name string, l label, src []byte, replace bool) error {
	requests := 1
	part := t.o.Upload
	if l.length > part {
		part = max(part, (l.length-1)/maxParts+1)
		requests = int((l.length-1)/part) + 1 + 2
	}
	if !t.spend(requests) {
		return fmt.Errorf("%w: %w: %w", tier.ErrNotKept, tier.ErrBudget, errBudget)
	}
	fields := []aws.Field{{Name: "content-type", Value: "application/octet-stream"}, {Name: metaField, Value: l.String()}}
	var condition []aws.Field
	if !replace && !t.o.Overwrite && !t.unconditional.Load() {
		condition = []aws.Field{{Name: "if-none-match", Value: "*"}}
	}
	write := func(condition []aws.Field) error {
		if l.length > t.o.Upload {
			return t.upload(ctx, name, fields, condition, src, part)
		}
		return t.do(ctx, &request{kind: kindPut, name: name, fields: append(fields, condition...), body: src, flow: tier.FlowOf(ctx)}, discardAnswer)
	}
	err := write(condition)
	if condition != nil && (status(err) == http.StatusNotImplemented || hasCode(err, "NotImplemented")) {
		if !t.unconditional.Swap(true) {
			t.log.Info("this S3 store does not support If-None-Match: when two servers write one object at once, the last write stays", "url", t.o.URL)
		}
		if !t.spend(requests) {
			return fmt.Errorf("%w: %w: %w", tier.ErrNotKept, tier.ErrBudget, errBudget)
		}
		err = write(nil)
	}
	return err
}

// spend takes PUT and POST requests from the budget. If the budget is used up it reports false, and counts and logs that: the caller must
// not send the requests.
func (t *Tier) spend(requests int) bool {
	if t.puts == nil || t.puts.take(requests) {
		return true
	}
	t.bill.noBudget.Add(1)
	if t.warned.now("budget") {
		t.log.Warn("the PUTs of this hour are used up: nothing is added to S3 for a while", "url", t.o.URL, "puts_per_hour", t.o.PutsPerHour)
	}
	return false
}

// upload writes an object in parts. If it fails, it removes the parts that it has written.
func (t *Tier) upload(ctx context.Context, name string, fields, condition []aws.Field, src []byte, part int64) (err error) {
	var begun struct {
		UploadID string `xml:"UploadId"`
	}
	err = t.do(ctx, &request{kind: kindPost, name: name, query: "uploads=", fields: fields}, func(a *http1.Response) error {
		return document(a, "InitiateMultipartUploadResult", &begun)
	})
	if err == nil && begun.UploadID == "" {
		err = fmt.Errorf("%w: an upload without an UploadId", errAnswer)
	}
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), abortTime)
			defer cancel()
			_ = t.do(ctx, &request{kind: kindDelete, name: name, query: aws.Query(map[string]string{"uploadId": begun.UploadID})}, discardAnswer)
		}
	}()
	size, flow := int64(len(src)), tier.FlowOf(ctx)
	tags := make([]string, (size-1)/part+1)
	err = spread(ctx, uploadWidth, len(tags), func(ctx context.Context, i int) error {
		r := request{kind: kindPut, name: name, flow: flow, at: int64(i) * part, body: src[int64(i)*part : min(size, int64(i+1)*part)], query: aws.Query(map[string]string{"partNumber": fmt.Sprint(i + 1), "uploadId": begun.UploadID})}
		return t.do(ctx, &r, func(a *http1.Response) error {
			if tags[i] = a.Field("Etag"); tags[i] == "" {
				return fmt.Errorf("%w: a part without an ETag", errAnswer)
			}
			return discardAnswer(a)
		})
	})
	if err != nil {
		return err
	}
	if err = ctx.Err(); err != nil { // the caller has gone: the object must not appear after it
		return fmt.Errorf("s3: upload: %w", err)
	}
	var list bytes.Buffer
	list.WriteString("<CompleteMultipartUpload>")
	for i, tag := range tags {
		fmt.Fprintf(&list, "<Part><PartNumber>%d</PartNumber><ETag>", i+1)
		_ = xml.EscapeText(&list, []byte(tag)) // a Buffer never fails
		list.WriteString("</ETag></Part>")
	}
	list.WriteString("</CompleteMultipartUpload>")
	r := request{kind: kindPost, name: name, query: aws.Query(map[string]string{"uploadId": begun.UploadID}), fields: condition, body: list.Bytes()}
	return t.do(ctx, &r, func(a *http1.Response) error {
		return document(a, "CompleteMultipartUploadResult", &struct{}{}) // the answer may have status 200 and still be an error
	})
}

// document reads an answer that must be an XML document with this root. The answer may be an error in spite of
// its status.
func document(a *http1.Response, root string, into any) error {
	body, err := a.ReadAll(maxDocument)
	if err != nil {
		return fmt.Errorf("s3: read the answer: %w", err)
	}
	var name struct{ XMLName xml.Name }
	if err := xml.Unmarshal(body, &name); err != nil {
		return fmt.Errorf("%w: %w", errAnswer, err)
	}
	if name.XMLName.Local == "Error" {
		e := &Error{Status: http.StatusInternalServerError, Kind: root}
		e.read(body)
		return e
	}
	if name.XMLName.Local != root {
		return fmt.Errorf("%w: its XML is %.60q, %s was asked for", errAnswer, name.XMLName.Local, root)
	}
	if err := xml.Unmarshal(body, into); err != nil {
		return fmt.Errorf("%w: %w", errAnswer, err)
	}
	return nil
}
