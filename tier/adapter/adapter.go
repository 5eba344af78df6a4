// SPDX-License-Identifier: Apache-2.0

// Package adapter makes the tiers below the pool from what an operator writes: LMCache's
// --l2-adapter JSON.
package adapter

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/mooncakestore"
	"github.com/kvasir-kv/kvasir/tier/redis"
)

// Adapter is one --l2-adapter.
type Adapter struct {
	Type      string
	Path      string  // base_path
	TempDir   string  // relative_tmp_dir
	Direct    bool    // use_odirect
	Pad       bool    // pad; default: fs_native with use_odirect
	LimitGB   float64 // max_capacity_gb, GiB; 0 for no limit
	MinFreeGB float64 // min_free_gb, GiB
	Calls     int     // num_workers, read_io_depth: the larger
	Bytes     int64   // read_max_bytes_in_flight
	EvictAt   float64 // eviction.trigger_watermark; 0 without an eviction block
	Evict     float64 // eviction.eviction_ratio

	Redis    *redis.Options         // of types redis, resp and valkey
	Mooncake *mooncakestore.Options // of type mooncake_store
	S3       *bucket                // of types s3 and s3_native

	Admission tier.Admission // min_hits, min_age_seconds
	Absence   tier.Absence   // absent_seconds; only for tiers over a network

	Ignored []string // keys that have no effect in Kvasir
}

// Text is an --l2-adapter as the operator wrote it. Its String hides secrets.
type Text string

func (t Text) String() string {
	var raw map[string]json.RawMessage
	if json.Unmarshal([]byte(t), &raw) != nil {
		if strings.Contains(string(t), "\"") && isSecret(string(t)) { // broken JSON
			return "(a text with secrets)"
		}
		return safelog.HideLogin(string(t))
	}
	hidden := false
	for key := range raw {
		if isSecret(key) {
			raw[key], hidden = json.RawMessage(`"(set)"`), true
		}
	}
	if !hidden {
		return safelog.HideLogin(string(t))
	}
	b, _ := json.Marshal(raw)
	return safelog.HideLogin(string(b))
}

// isSecret reports whether the value of a key, or a text with such a key, must not be shown.
func isSecret(key string) bool {
	return strings.Contains(key, "password") || strings.Contains(key, "secret") || strings.Contains(key, "token")
}

// MarshalYAML returns the text for a file of flags, without secrets.
func (t Text) MarshalYAML() (any, error) { return t.String(), nil }

// served are the adapter types that Kvasir serves. unserved are types of LMCache that it does not serve.
var (
	served   = []string{"fs", "fs_native", "redis", "resp", "valkey", "s3", "s3_native", mooncakeType}
	unserved = strings.Fields(`aerospike bigtable dax fault_inject hf3fs hfbucket mock native_plugin nixl_native
		nixl_store nixl_store_dynamic p2p plugin raw_block sagemaker-hyperpod`)
)

// ErrNotServed means that LMCache has an adapter of this type, and Kvasir has none.
var ErrNotServed = errors.New("not served here; served are " + strings.Join(served, ", "))

var errSerde = errors.New("\"serde\" is not supported: objects are kept as they are, and those of LMCache servers with a serde would be read wrongly")

// reader reads the keys of an adapter, and remembers which were read and which values cannot be used.
type reader struct {
	raw  map[string]json.RawMessage
	errs []error
	seen map[string]bool
}

// take reads the value of a key into v, if the key is there. A value of another type than v's is an error in r.errs, which quotes no secret.
func (r *reader) take(key string, v any) {
	r.seen[key] = true
	raw, ok := r.raw[key]
	if !ok || string(raw) == "null" {
		return
	}
	if err := json.Unmarshal(raw, v); err != nil {
		shown := safelog.HideLogin(string(raw))
		if isSecret(key) {
			shown = "its value"
		}
		r.errs = append(r.errs, fmt.Errorf("%q: %s is no %s", key, shown, kindOf(v)))
	}
}

func kindOf(v any) string {
	switch v.(type) {
	case *bool:
		return "true or false"
	case *string:
		return "string"
	case *int, *int64:
		return "whole number"
	case *float64:
		return "number"
	}
	return "object"
}

// within records an error if v is not between `least` and `most`.
func (r *reader) within(key string, v, least, most float64) {
	if !(v >= least && v <= most) {
		r.errs = append(r.errs, fmt.Errorf("%q: %v is outside %v to %v", key, v, least, most))
	}
}

// Parse reads one --l2-adapter. The error names every fault, and for an unknown key the
// most similar known key. It wraps ErrNotServed for types of LMCache that Kvasir does not serve.
func Parse(text string) (a Adapter, _ error) {
	r := reader{seen: make(map[string]bool)}
	if err := json.Unmarshal([]byte(text), &r.raw); err != nil || r.raw == nil {
		return a, fmt.Errorf("%q is no JSON object like {\"type\":\"fs\",\"base_path\":\"/data/kv\"}", Text(text).String())
	}
	r.take("type", &a.Type)
	switch {
	case len(r.errs) > 0:
	case a.Type == "":
		return a, fmt.Errorf("%s has no \"type\"; served are %s", Text(text), strings.Join(served, ", "))
	case slices.Contains(unserved, a.Type):
		return a, fmt.Errorf("type %q: %w", a.Type, ErrNotServed)
	case !slices.Contains(served, a.Type):
		return a, fmt.Errorf("type %q is unknown%s; served are %s", a.Type, options.NearestHint(a.Type, slices.Concat(served, unserved)), strings.Join(served, ", "))
	}
	if _, ok := redisLayouts[a.Type]; ok {
		r.redis(&a)
		return a, errors.Join(r.errs...)
	}
	if _, ok := s3Layouts[a.Type]; ok {
		r.s3(&a)
		return a, errors.Join(r.errs...)
	}
	if a.Type == mooncakeType {
		err := r.mooncake(&a)
		return a, errors.Join(append(r.errs, err)...)
	}
	r.take("base_path", &a.Path)
	r.take("relative_tmp_dir", &a.TempDir)
	r.take("use_odirect", &a.Direct)
	r.take("max_capacity_gb", &a.LimitGB)
	r.take("min_free_gb", &a.MinFreeGB)
	a.Pad = a.Type == "fs_native" && a.Direct
	r.take("pad", &a.Pad)
	workers, depth := 0, 0
	if a.Type == "fs_native" {
		r.take("num_workers", &workers)
		r.take("read_io_depth", &depth)
		r.take("read_max_bytes_in_flight", &a.Bytes)
	}
	a.Calls = max(workers, depth)
	r.within("max_capacity_gb", a.LimitGB, 0, 1<<20)
	r.within("min_free_gb", a.MinFreeGB, 0, 1<<20)
	r.within("num_workers", float64(workers), 0, 1<<12)
	r.within("read_io_depth", float64(depth), 0, 1<<12)
	r.within("read_max_bytes_in_flight", float64(a.Bytes), 0, 1<<40)
	r.eviction(&a)
	r.admission(&a)
	if _, ok := r.raw["serde"]; ok {
		r.errs = append(r.errs, errSerde)
	}
	if a.Path == "" {
		r.errs = append(r.errs, errors.New("\"base_path\", the directory, is missing"))
	}
	r.ignore(&a, "affinity_tag", "shared", "persist_enabled", "read_ahead_size", "serde")
	return a, errors.Join(r.errs...)
}

// ParseAll reads every --l2-adapter. It logs and leaves out types of LMCache that Kvasir does not
// serve, and keys that have no effect in Kvasir.
func ParseAll(texts []Text, log *slog.Logger) (out []Adapter, _ error) {
	var errs []error
	for _, text := range texts {
		a, err := Parse(string(text))
		switch {
		case errors.Is(err, ErrNotServed):
			log.Warn("a tier of LMCache is left out: no chunk is written there", "flag", "--l2-adapter", "err", err)
			continue
		case err != nil:
			errs = append(errs, err)
			continue
		case len(a.Ignored) > 0:
			log.Warn("keys of --l2-adapter have no effect", "type", a.Type, "keys", strings.Join(a.Ignored, " "))
		}
		out = append(out, a)
	}
	return out, errors.Join(errs...)
}

// eviction reads LMCache's block "eviction".
func (r *reader) eviction(a *Adapter) {
	var block map[string]json.RawMessage
	r.take("eviction", &block)
	if block == nil {
		return
	}
	inner := reader{raw: block, seen: make(map[string]bool)}
	a.EvictAt, a.Evict = 0.8, 0.2
	policy := "LRU"
	inner.take("eviction_policy", &policy)
	inner.take("trigger_watermark", &a.EvictAt)
	inner.take("eviction_ratio", &a.Evict)
	inner.within("trigger_watermark", a.EvictAt, 0, 1)
	inner.within("eviction_ratio", a.Evict, 0, 1)
	inner.ignore(a)
	if policy == "noop" {
		a.EvictAt = 0
	}
	if a.LimitGB == 0 && a.EvictAt > 0 {
		inner.errs = append(inner.errs, errors.New("it needs \"max_capacity_gb\" beside it"))
	}
	for _, err := range inner.errs {
		r.errs = append(r.errs, fmt.Errorf("\"eviction\": %w", err))
	}
}

// ignore looks at the keys that were not read: it records those of `without`, which have no effect here, and refuses all others as unknown.
func (r *reader) ignore(a *Adapter, without ...string) {
	known := slices.Concat(slices.Sorted(maps.Keys(r.seen)), without)
	for _, key := range slices.Sorted(maps.Keys(r.raw)) {
		switch {
		case r.seen[key]:
		case slices.Contains(without, key):
			a.Ignored = append(a.Ignored, key)
		default:
			r.errs = append(r.errs, fmt.Errorf("key %q is unknown%s", key, options.NearestHint(key, known)))
		}
	}
}
