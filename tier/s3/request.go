// SPDX-License-Identifier: Apache-2.0

package s3

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/xml"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/s3/aws"
)

// slowest is the rate, in bytes per second, at which a value must move at least.
const slowest = 4 << 20

// maxDocument bounds the bytes of an answer that is no object: an error, or a page of a list.
const maxDocument = 8 << 20

// request is one request to the bucket.
type request struct {
	kind   kind
	name   string // of the object; empty for the bucket
	query  string // escaped and in order
	fields []aws.Field
	body   []byte
	flow   *tier.Flow // Flow of body, which begins at byte `at` of its object; nil: all of body is ready
	at     int64
	bytes  int64 // about how many bytes the answer has
}

func (k kind) method() string {
	if k == kindList {
		return http.MethodGet
	}
	return kindNames[k]
}

// Error is an answer with which the store refuses a request.
type Error struct {
	Status          int
	Code, Message   string // from the store's answer; Code may be empty
	Region          string // region of the bucket, if the store reports it
	Kind            string // of the request
	skew            time.Duration
	unknownDocument bool
}

func (e *Error) Error() string {
	text := fmt.Sprintf("s3: %s: status %d", e.Kind, e.Status)
	if e.Code != "" {
		text += " " + safelog.Text(e.Code, 100)
	}
	if e.Message != "" {
		text += ": " + safelog.Text(e.Message, 300)
	}
	return text
}

// errAnswer means that an answer does not fit the request.
var errAnswer = errors.New("s3: the store's answer does not fit the request")

// do sends a request and calls `take` with the answer. It tries again if that may help and there is time, so `take` may be called more than
// once.
func (t *Tier) do(ctx context.Context, r *request, take func(*http1.Response) error) error {
	room := t.others
	if int64(len(r.body))+r.bytes > 0 {
		room = t.values
	}
	select {
	case room <- struct{}{}:
	default:
		select {
		case room <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	defer func() { <-room }()
	for try := 0; ; try++ {
		keys, err := t.keys.Get(ctx)
		if err != nil {
			if ctx.Err() == nil && t.warned.now("keys") {
				t.log.Error("no credentials for S3: nothing is read or written", "err", err)
			}
			return err
		}
		err = t.once(ctx, r, keys, take)
		if err == nil {
			t.retries.worked()
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("s3: %s: %w", kindNames[r.kind], ctx.Err())
		}
		why, ok := t.transient(err, keys, try)
		if !ok || try+1 >= t.o.Tries {
			t.explain(err)
			return err
		}
		if r.kind == kindPut || r.kind == kindPost {
			if !t.spend(1) {
				return err
			}
		}
		if !t.retries.take() {
			t.bill.noRetries.Add(1)
			return err
		}
		if !wait(ctx, backoff(try)) {
			return err
		}
		t.bill.retries[why].Add(1)
	}
}

// wait waits for d. It reports false, without waiting, if the context would end before.
func wait(ctx context.Context, d time.Duration) bool {
	if end, ok := ctx.Deadline(); ok && time.Until(end) < d {
		return false
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// once sends a request once: over an idle connection, and if that turns out to be
// closed, over a new one.
func (t *Tier) once(ctx context.Context, r *request, keys aws.Credentials, take func(*http1.Response) error) error {
	conn, err := t.client.Conn(ctx)
	if err != nil {
		return fmt.Errorf("s3: connect: %w", err)
	}
	err = t.exchange(ctx, conn, r, keys, take)
	if errors.Is(err, http1.ErrStale) && ctx.Err() == nil {
		if conn, err = t.client.Dial(ctx); err != nil {
			return fmt.Errorf("s3: connect: %w", err)
		}
		err = t.exchange(ctx, conn, r, keys, take)
	}
	return err
}

func (t *Tier) exchange(ctx context.Context, conn *http1.Conn, r *request, keys aws.Credentials, take func(*http1.Response) error) error {
	until := time.Now().Add(t.o.Timeout + time.Duration((int64(len(r.body))+r.bytes)/slowest)*time.Second)
	fields := r.fields
	target := path(r.name)
	if !keys.Anonymous() {
		fields = t.signer.Sign(&aws.Request{Method: r.kind.method(), Path: t.base + target, Query: r.query, Host: t.client.Host(), Fields: r.fields, Digest: aws.Unsigned}, keys, time.Now())
	}
	var head []byte
	for _, f := range fields {
		head = append(append(append(append(head, f.Name...), ": "...), f.Value...), "\r\n"...)
	}
	if r.kind == kindPut && len(r.body) == 0 {
		head = append(head, "content-length: 0\r\n"...)
	}
	if r.query != "" {
		target += "?" + r.query
	}
	send := http1.Request{Method: r.kind.method(), Target: target, Fields: head}
	if len(r.body) > 0 {
		send.Body = [][]byte{r.body}
		if r.flow != nil {
			send.Body, send.Ready = r.flow.Parts(r.body, r.at)
		}
	}
	t.bill.requests[r.kind].Add(1)
	done := false
	defer func() {
		if !done { // panicked: a peer took the memory of the body away
			conn.Close()
		}
	}()
	a, err := conn.Do(ctx, &send, until)
	done = true
	if err != nil {
		return fmt.Errorf("s3: %s: %w", kindNames[r.kind], err)
	}
	defer a.Close()
	t.bill.sent.Add(uint64(len(r.body)))
	if a.Status/100 != 2 {
		return refusal(a, r.kind)
	}
	return take(a)
}

// refusal reads an answer that refuses.
func refusal(a *http1.Response, k kind) error {
	e := &Error{Status: a.Status, Kind: kindNames[k], Region: a.Field("X-Amz-Bucket-Region")}
	if date, err := http.ParseTime(a.Field("Date")); err == nil {
		e.skew = time.Since(date)
	}
	body, err := a.ReadAll(64 << 10)
	if err != nil {
		return e
	}
	e.read(body)
	return e
}

// read reads the document of an error.
func (e *Error) read(body []byte) {
	var doc struct {
		XMLName               xml.Name
		Code, Message, Region string
	}
	if xml.Unmarshal(body, &doc) != nil || doc.XMLName.Local != "Error" {
		e.unknownDocument = len(body) > 0
		return
	}
	e.Code, e.Message = doc.Code, doc.Message
	if doc.Region != "" {
		e.Region = doc.Region
	}
}

// discardAnswer reads an answer and ignores its content.
func discardAnswer(a *http1.Response) error {
	_, err := a.ReadAll(maxDocument)
	return err
}

// transient reports whether a request that failed may work when it is sent again.
func (t *Tier) transient(err error, keys aws.Credentials, try int) (why int, ok bool) {
	if e, refused := errors.AsType[*Error](err); refused {
		switch {
		case e.Code == "ExpiredToken" || e.Code == "TokenRefreshRequired" || e.Code == "InvalidToken":
			t.keys.Reject(keys)
			return whyFailed, try == 0 && !keys.Expires.IsZero()
		case e.Status == http.StatusServiceUnavailable || e.Status == http.StatusTooManyRequests || e.Code == "SlowDown":
			return whyBusy, true
		case e.Status == http.StatusNotImplemented:
			return whyFailed, false
		case e.Status/100 == 5 || e.Status == http.StatusRequestTimeout || e.Code == "RequestTimeout" || e.Code == "OperationAborted":
			return whyFailed, true
		}
		return whyFailed, false
	}
	switch {
	case isOurs(err), isTrust(err), errors.Is(err, syscall.EFAULT), errors.Is(err, shm.ErrFault), errors.Is(err, errWhole):
		return whyBroken, false
	case errors.Is(err, errAnswer), errors.Is(err, http1.ErrAnswer):
		return whyFailed, true
	}
	if e, timed := errors.AsType[net.Error](err); timed && e.Timeout() {
		return whyBroken, false // the request has used up its time
	}
	return whyBroken, true
}

// isOurs reports whether an error is about an object, and not about the store.
func isOurs(err error) bool {
	_, corrupt := errors.AsType[*tier.CorruptError](err)
	return corrupt || errors.Is(err, tier.ErrMissing) || errors.Is(err, tier.ErrNotKept)
}

// isTrust reports whether a server could not prove who it is.
func isTrust(err error) bool {
	_, bad := errors.AsType[*tls.CertificateVerificationError](err)
	_, unknown := errors.AsType[x509.UnknownAuthorityError](err)
	_, name := errors.AsType[x509.HostnameError](err)
	return bad || unknown || name
}

// explain logs what the operator must do, every sayEvery for each cause.
func (t *Tier) explain(err error) {
	cause, what := diagnosis(err)
	if cause == "" || !t.warned.now(cause) {
		return
	}
	args := []any{"what", what, "url", t.o.URL, "region", t.o.Region, "keys_from", t.keys.Source(), "err", err}
	if e, ok := errors.AsType[*Error](err); ok {
		if e.Region != "" {
			args = append(args, "bucket_region", safelog.Text(e.Region, 100))
		}
		if cause == "clock" {
			args = append(args, "clock_ahead_by", e.skew.Round(time.Second))
		}
	}
	t.log.Error("S3 refuses the configuration: nothing is read or written", args...)
}

// diagnosis says what the operator must do about an error that does not go away by itself. It returns empty
// texts for other errors.
func diagnosis(err error) (cause, what string) {
	if isTrust(err) {
		return "trust", "its certificate is not trusted: give its authority (s3_ca_bundle), or the name that it is for"
	}
	e, ok := errors.AsType[*Error](err)
	if !ok || e.Kind == kindNames[kindHead] { // a HEAD does not say why
		return "", ""
	}
	switch e.Code {
	case "ExpiredToken", "TokenRefreshRequired":
		return e.Code, "the credentials have expired: renew them where they are from"
	case "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurity", "NotSignedUp":
		return e.Code, "it does not accept the credentials: look at the keys, the region, and the name by which it is called"
	case "RequestTimeTooSkewed", "RequestExpired":
		return "clock", "the clocks of this machine and of S3 differ by too much: set this one's"
	case "NoSuchBucket":
		return e.Code, "there is no such bucket: make it, or give its name"
	case "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException":
		return "region", "the bucket is in another region, or has another address: give its region (s3_region)"
	}
	switch {
	case e.Status == http.StatusMovedPermanently:
		return "region", "the bucket is in another region, or has another address: give its region (s3_region)"
	case e.unknownDocument:
		return "document", "what answers is no S3: look at the endpoint"
	}
	return "", ""
}

// length returns the length of the object in an answer.
func length(a *http1.Response) (int64, error) {
	text := a.Field("Content-Length")
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%w: its Content-Length is %.30q", errAnswer, text)
	}
	return n, nil
}

// fill reads an answer that must have exactly as many bytes as dst.
func (t *Tier) fill(a *http1.Response, dst []byte, sum *tier.Summer, flow *tier.Flow) error {
	if err := flow.Fill(sum, a, dst, 0); err != nil {
		return fmt.Errorf("s3: read the answer: %w", err)
	}
	t.bill.received.Add(uint64(len(dst)))
	return nil
}

// spread calls f with 0 to n-1, width calls at once, until one fails, and returns after
// the last call. If a peer takes memory away under a call, that is an error of the call.
func spread(ctx context.Context, width, n int, f func(ctx context.Context, i int) error) error {
	if n == 0 {
		return nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var mu sync.Mutex
	next := 0
	var errs []error
	take := func() (int, bool) {
		mu.Lock()
		defer mu.Unlock()
		if next == n || len(errs) > 0 {
			return 0, false
		}
		next++
		return next - 1, true
	}
	work := func() {
		for i, ok := take(); ok; i, ok = take() {
			var err error
			fault := shm.Guard(func() { err = f(ctx, i) })
			if err = errors.Join(err, fault); err != nil {
				mu.Lock()
				errs = append(errs, err)
				mu.Unlock()
				cancel()
			}
		}
	}
	var wg sync.WaitGroup
	for range min(width, n) - 1 {
		wg.Go(work)
	}
	work()
	wg.Wait()
	if len(errs) > 0 {
		return errs[0] // the other errors follow from it
	}
	return nil
}

// header adds a field to the fields of a request.
func header(fields []aws.Field, name, value string) []aws.Field {
	return append(slices.Clip(fields), aws.Field{Name: name, Value: value})
}

// hasCode reports whether an error is an answer with one of these codes.
func hasCode(err error, codes ...string) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && slices.ContainsFunc(codes, func(c string) bool { return strings.EqualFold(c, e.Code) })
}

// status returns the status of an answer that refuses, 0 for other errors.
func status(err error) int {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Status
	}
	return 0
}
