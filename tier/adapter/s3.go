// SPDX-License-Identifier: Apache-2.0

package adapter

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/s3"
	"github.com/kvasir-kv/kvasir/tier/s3/aws"
)

// s3Layouts maps the adapter types for object stores to their layouts.
var s3Layouts = map[string]s3.Layout{"s3": s3.LMCache, "s3_native": s3.Native}

// bucket has the options of an adapter for an object store.
type bucket struct {
	s3.Options
	sts string // URL of the service that exchanges web identities for credentials

	// Root URLs of the buckets for single salts and models. An object goes to the bucket of its
	// salt, else to that of its model, else to Options.URL.
	bySalt, byModel map[string]string
}

// s3 reads the keys of LMCache's s3 adapter, for both types, and Kvasir's own keys.
func (r *reader) s3(a *Adapter) {
	b := &bucket{Options: s3.Options{Layout: s3Layouts[a.Type]}}
	a.S3 = b
	o := &b.Options
	r.take("s3_region", &o.Region)
	o.Region = cmp.Or(o.Region, os.Getenv("AWS_REGION"), os.Getenv("AWS_DEFAULT_REGION"))
	plain := false
	r.take("disable_tls", &plain)
	r.s3Where(b, plain)
	r.take("s3_prefix", &o.Prefix)
	if o.Prefix != "" && !strings.HasSuffix(o.Prefix, "/") {
		o.Prefix += "/"
	}
	r.s3Keys(b)
	r.s3Trust(o)
	r.take("s3_num_io_threads", &o.Workers)
	o.Lookups = o.Workers
	var request, connect, part, upload float64
	r.take("request_timeout", &request)
	r.take("connection_timeout", &connect)
	r.take("s3_part_mb", &part)
	r.take("s3_upload_part_mb", &upload)
	r.take("s3_puts_per_hour", &o.PutsPerHour)
	r.take("s3_overwrite", &o.Overwrite)
	r.within("s3_num_io_threads", float64(o.Workers), 0, 1<<12)
	r.within("request_timeout", request, 0, 3600)
	r.within("connection_timeout", connect, 0, 3600)
	r.within("s3_part_mb", part, 0, 5<<10)
	r.within("s3_upload_part_mb", upload, 0, 5<<10)
	o.Timeout, o.DialTimeout = time.Duration(request*float64(time.Second)), time.Duration(connect*float64(time.Second))
	o.Part, o.Upload = int64(part*(1<<20)), int64(upload*(1<<20))
	r.admission(a)
	r.absence(a)
	if _, ok := r.raw["serde"]; ok {
		r.errs = append(r.errs, errSerde)
	}
	if len(r.errs) == 0 {
		options.Each(o.Validate(), func(e *options.Error) { r.errs = append(r.errs, fmt.Errorf("%q %s", s3Fields[e.Field], e.Text)) })
	}
	r.ignore(a, "affinity_tag", "shared", "persist_enabled", "eviction", "serde", "max_capacity_gb", "s3_prefer_http2", "s3_enable_s3express")
}

// s3Fields maps a field of the options to its JSON key.
var s3Fields = map[string]string{
	"URL": "s3_endpoint", "Prefix": "s3_prefix", "Part": "s3_part_mb", "Upload": "s3_upload_part_mb", "PutsPerHour": "s3_puts_per_hour", "Workers": "s3_num_io_threads",
	"Lookups": "s3_num_io_threads", "Timeout": "request_timeout", "DialTimeout": "connection_timeout",
}

// admission reads which objects are not written to the adapter.
func (r *reader) admission(a *Adapter) {
	age := 0.0
	r.take("min_hits", &a.Admission.MinHits)
	r.take("min_age_seconds", &age)
	r.within("min_age_seconds", age, 0, 365*24*3600)
	r.within("min_hits", float64(a.Admission.MinHits), 0, 1<<16)
	a.Admission.MinAge = time.Duration(age * float64(time.Second))
}

// absence reads for how long the tier is not asked again for a missing object.
func (r *reader) absence(a *Adapter) {
	seconds := 1.0
	r.take("absent_seconds", &seconds)
	r.within("absent_seconds", seconds, 0, 3600)
	a.Absence.For = time.Duration(seconds * float64(time.Second))
}

var errEndpoint = errors.New(`the bucket is missing: set "s3_bucket" for Amazon S3, "s3_endpoint" like "s3://bucket.host", or "s3_bucket" and "s3_endpoint" like "https://host:9000"`)

// s3Where reads the root URLs of the buckets. As in LMCache, s3_endpoint is s3://BUCKET.HOST, or with s3_bucket the endpoint of the store.
func (r *reader) s3Where(b *bucket, plain bool) {
	endpoint, name, style := "", "", ""
	var salts, models map[string]string
	r.take("s3_endpoint", &endpoint)
	r.take("s3_bucket", &name)
	r.take("s3_addressing_style", &style)
	r.take("s3_bucket_of_salt", &salts)
	r.take("s3_bucket_of_model", &models)
	if !(style == "" || style == "path" || style == "virtual") {
		r.errs = append(r.errs, fmt.Errorf("\"s3_addressing_style\": %q is neither path nor virtual", style))
	}
	if endpoint == "" && name != "" {
		endpoint = cmp.Or(os.Getenv("AWS_ENDPOINT_URL_S3"), os.Getenv("AWS_ENDPOINT_URL"))
	}
	host, scheme := endpoint, "https"
	if before, after, ok := strings.Cut(endpoint, "://"); ok {
		host = after
		switch before {
		case "s3":
		case "http", "https":
			scheme = before
		default:
			r.errs = append(r.errs, fmt.Errorf("\"s3_endpoint\": %q begins with none of s3://, https:// and http://", safelog.HideLogin(endpoint)))
		}
	}
	if plain {
		scheme = "http"
	}
	root := func(name string) string {
		return scheme + "://" + s3Root(strings.TrimSuffix(host, "/"), name, style, cmp.Or(b.Region, "us-east-1"))
	}
	switch {
	case host == "" && name == "":
		r.errs = append(r.errs, errEndpoint)
	case name == "" && style == "path":
		r.errs = append(r.errs, errors.New(`"s3_bucket" is missing beside "s3_addressing_style": "path"`))
	case name == "" && len(salts)+len(models) > 0:
		r.errs = append(r.errs, errors.New(`"s3_bucket", for all others, is missing beside "s3_bucket_of_salt" and "s3_bucket_of_model"`))
	default:
		b.URL = root(name)
	}
	b.bySalt, b.byModel = make(map[string]string), make(map[string]string)
	for salt, other := range salts {
		b.bySalt[salt] = root(other)
	}
	for model, other := range models {
		b.byModel[model] = root(other)
	}
}

// s3Root returns the root URL of a bucket, without the scheme.
func s3Root(host, name, style, region string) string {
	amazon := "s3." + region + ".amazonaws.com"
	switch {
	case host == "" && !strings.Contains(name, "."):
		return name + "." + amazon
	case host == "": // no certificate is valid for a name with dots before amazon's
		return amazon + "/" + name
	case name == "":
		return host
	case style == "path" || style == "" && isAddress(host):
		return host + "/" + name
	case strings.HasPrefix(host, name+"."):
		return host
	}
	return name + "." + host
}

// isAddress reports whether a host is one that no bucket name can precede.
func isAddress(host string) bool {
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	_, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil || !strings.Contains(host, ".")
}

// s3Keys reads the credentials. Without any, it looks for them where Amazon's programs look.
func (r *reader) s3Keys(b *bucket) {
	var c aws.Static
	anonymous := false
	r.take("aws_access_key_id", &c.ID)
	r.take("aws_secret_access_key", &c.Secret)
	r.secret("aws_secret_access_key_file", &c.Secret)
	r.take("aws_session_token", &c.Token)
	r.take("s3_anonymous", &anonymous)
	r.take("sts_endpoint", &b.sts)
	b.sts = cmp.Or(strings.TrimSuffix(b.sts, "/"), os.Getenv("AWS_ENDPOINT_URL_STS"))
	switch {
	case anonymous:
		b.Keys = aws.Keep(aws.Anonymous{})
	case c.ID != "" && c.Secret != "":
		b.Keys = aws.Keep(c)
	case c.ID != "" || c.Secret != "":
		r.errs = append(r.errs, errors.New(`one of "aws_access_key_id" and "aws_secret_access_key" is missing`))
	default:
		b.Keys = aws.Keep(aws.Default(cmp.Or(b.Region, "us-east-1"), b.sts)...)
	}
}

// s3Trust reads how the store must prove who it is.
func (r *reader) s3Trust(o *s3.Options) {
	ca := ""
	r.take("s3_ca_bundle", &ca)
	if ca = cmp.Or(ca, os.Getenv("AWS_CA_BUNDLE")); ca == "" {
		return
	}
	pem, err := os.ReadFile(ca)
	o.TLS = &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	if err == nil && !o.TLS.RootCAs.AppendCertsFromPEM(pem) {
		err = fmt.Errorf("%s has no certificate in PEM", ca)
	}
	if err != nil {
		r.errs = append(r.errs, fmt.Errorf("\"s3_ca_bundle\": %w", err))
	}
}

// openS3 opens the bucket, and those of single salts and models.
func openS3(a Adapter, o Options) (_ tier.Tier, err error) {
	of := a.S3.Options
	of.Names, of.Log, of.Summed = o.Names, o.Log, o.Trust == fs.TrustChecksum
	if len(a.S3.bySalt)+len(a.S3.byModel) == 0 {
		return s3.Open(of)
	}
	if o.Names == nil {
		return nil, errNoTenants
	}
	var all []tier.Tier
	at := make(map[string]int) // by URL
	for _, url := range slices.Concat([]string{of.URL}, slices.Collect(maps.Values(a.S3.bySalt)), slices.Collect(maps.Values(a.S3.byModel))) {
		if _, ok := at[url]; ok {
			continue
		}
		of.URL = url
		t, err := s3.Open(of)
		if err != nil {
			for _, t := range all {
				err = errors.Join(err, t.Close())
			}
			return nil, err
		}
		at[url] = len(all)
		all = append(all, t)
	}
	return tier.Route(func(k kv.Key) int {
		n, ok := o.Names.Of(k.Namespace)
		if !ok {
			return -1
		}
		url, ok := a.S3.bySalt[n.Salt]
		if !ok {
			url = cmp.Or(a.S3.byModel[n.Model], a.S3.URL)
		}
		return at[url]
	}, all...), nil
}

var errNoTenants = errors.New("this command does not know salts and models: name one bucket, without \"s3_bucket_of_salt\" and \"s3_bucket_of_model\"")
