// SPDX-License-Identifier: Apache-2.0

// Package s3 keeps objects in a bucket of Amazon S3 or of a compatible store. They have
// names of Kvasir's own, or the names of LMCache's s3 adapter (0.5.6), byte for byte,
// which LMCache servers may share. The checksum is in the object's metadata, which
// LMCache does not read.
//
// Values move between the pool's memory and the socket without a copy in between, large
// ones in parts, several at once. An answer longer than the memory for it is not read.
// Each request is counted by its kind, as on a bill.
package s3

import (
	"cmp"
	"crypto/tls"
	"errors"
	"log/slog"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/http1"
	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/s3/aws"
)

// Layout is how objects are named.
type Layout uint8

// Layouts.
const (
	Native  Layout = iota // Kvasir's own; see names.go
	LMCache               // LMCache's s3 adapter
)

// Options configures a Tier. A zero field means its default.
type Options struct {
	URL    string      // root of the bucket: https://BUCKET.HOST, or with path style https://HOST/BUCKET
	Region string      // default us-east-1
	TLS    *tls.Config // for https; nil for the system's authorities
	Keys   *aws.Keeper // credentials; nil to look where Amazon's programs look
	Layout Layout
	Prefix string // before every name; default "kvasir/" in the native layout, none in LMCache's

	Part      int64 // bytes of one read; larger objects are read in several parts at once; default 8 MiB
	Upload    int64 // bytes of one write; larger objects are written in several parts at once; default 64 MiB, at least 5 MiB
	Overwrite bool  // write without If-None-Match, for stores that do not know it

	Summed bool // in LMCache's layout: serve only objects with a checksum

	PutsPerHour int // most PUT and POST requests in an hour; beyond it no object is kept; 0 for no limit

	Workers     int           // requests for values at once; default 64
	Lookups     int           // other requests at once; default 64
	Timeout     time.Duration // time limit of a request, with a second more for each 4 MiB; default 5 s
	DialTimeout time.Duration // time limit of a connection attempt; default 5 s
	Tries       int           // how often a request is tried; default 4

	Names *tier.Names // names of the namespaces; required in LMCache's layout
	Log   *slog.Logger
}

const (
	minUpload = 5 << 20 // bytes; smallest part that S3 accepts
	maxUpload = 5 << 30 // bytes; largest object that S3 accepts in one request
)

// Validate reports every field that cannot be used, as options.Errors.
func (o Options) Validate() error {
	var c options.Checks
	if o.URL != "" {
		u, err := url.Parse(o.URL)
		c.That(err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != "" && u.User == nil && u.RawQuery == "" && u.Fragment == "", "URL", "%.200q is not https://host/bucket", safelog.HideLogin(o.URL))
	}
	c.That(o.Layout <= LMCache, "Layout", "%d is no known layout", o.Layout)
	c.That(!strings.HasPrefix(o.Prefix, "/") && !strings.Contains(o.Prefix, "//"), "Prefix", "%q has an empty part", o.Prefix)
	c.That(o.Prefix == "" || strings.HasSuffix(o.Prefix, "/"), "Prefix", "%q does not end with /", o.Prefix)
	c.That(len(o.Prefix) <= 512, "Prefix", "has %d bytes, more than 512", len(o.Prefix))
	options.Within(&c, "Part", o.Part, 0, maxUpload)
	c.That(o.Part <= 0 || o.Part >= 64<<10, "Part", "%d is less than 64 KiB", o.Part)
	options.Within(&c, "Upload", o.Upload, 0, maxUpload)
	c.That(o.Upload <= 0 || o.Upload >= minUpload, "Upload", "%d is less than 5 MiB, the least that S3 takes as a part", o.Upload)
	options.Within(&c, "PutsPerHour", o.PutsPerHour, 0, 1<<40)
	options.Within(&c, "Workers", o.Workers, 0, 1<<12)
	options.Within(&c, "Lookups", o.Lookups, 0, 1<<12)
	options.Within(&c, "Timeout", o.Timeout, 0, time.Hour)
	options.Within(&c, "DialTimeout", o.DialTimeout, 0, time.Hour)
	options.Within(&c, "Tries", o.Tries, 0, 100)
	return c.Err()
}

// Tier is a tier.Tier in a bucket. Its methods are safe for concurrent use.
type Tier struct {
	o      Options
	log    *slog.Logger
	client *http1.Client
	base   string // path of the bucket, escaped; empty in virtual style
	signer aws.Signer
	keys   *aws.Keeper

	values, others chan struct{} // one place for each request at once
	retries        retries       // requests that are sent again
	puts           *budget       // nil for no limit
	written        atomic.Int64
	readOnly       pause       // runs after a write was refused
	noList         pause       // runs while the store refuses requests for missing objects
	unconditional  atomic.Bool // the store does not know If-None-Match
	bucket         atomic.Bool // the bucket exists, so 404 is about an object
	bill           bill
	warned         warnings
	note           atomic.Pointer[note]
	hidden         atomic.Bool // the note is missing, or the credentials may not read it
}

// Open returns the Tier. It does not wait for the store: while the store does not answer, every object is
// missing.
func Open(o Options) (*Tier, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	switch {
	case o.URL == "":
		return nil, errors.New("s3: no bucket is named")
	case o.Layout == LMCache && o.Names == nil:
		return nil, errors.New("s3: LMCache's layout needs Options.Names")
	}
	if o.Layout == Native {
		o.Prefix = cmp.Or(o.Prefix, "kvasir/")
	}
	o.URL, o.Region = strings.TrimSuffix(o.URL, "/"), cmp.Or(o.Region, "us-east-1")
	o.Part, o.Upload = cmp.Or(o.Part, 8<<20), cmp.Or(o.Upload, 64<<20)
	o.Workers, o.Lookups = cmp.Or(o.Workers, 64), cmp.Or(o.Lookups, 64)
	o.Timeout, o.DialTimeout, o.Tries = cmp.Or(o.Timeout, 5*time.Second), cmp.Or(o.DialTimeout, 5*time.Second), cmp.Or(o.Tries, 4)
	client, err := http1.New(o.URL, http1.Options{DialTimeout: o.DialTimeout, IdleTimeout: 20 * time.Second, MaxIdle: o.Workers + o.Lookups, TLS: o.TLS})
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(o.URL)
	if err != nil {
		return nil, err
	}
	t := &Tier{o: o, log: o.Log, client: client, base: u.EscapedPath(), keys: o.Keys}
	t.signer.Service, t.signer.Region = "s3", o.Region
	t.values, t.others = make(chan struct{}, o.Workers), make(chan struct{}, o.Lookups)
	if o.PutsPerHour > 0 {
		t.puts = newBudget(o.PutsPerHour, time.Hour)
	}
	if t.log == nil {
		t.log = slog.New(slog.DiscardHandler)
	}
	if t.keys == nil {
		t.keys = aws.Keep(aws.Default(o.Region, "")...)
	}
	return t, nil
}

// Space implements tier.Sized.
func (t *Tier) Space() tier.Space { return tier.Space{Free: -1, Written: t.written.Load()} }

// Requests implements tier.Billed.
func (t *Tier) Requests() (tier.Requests, bool) { return t.bill.read(), true }

// Close implements tier.Tier.
func (t *Tier) Close() error {
	t.client.Close()
	return nil
}
