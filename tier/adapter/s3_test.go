// SPDX-License-Identifier: Apache-2.0

package adapter_test

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/adapter"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/s3"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// noAWS unsets the variables of the environment that name a store.
func noAWS(t *testing.T) {
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); strings.HasPrefix(name, "AWS_") {
			t.Setenv(name, "")
		}
	}
}

// Where the bucket is, in LMCache's words and in ours.
func TestParseS3Where(t *testing.T) {
	noAWS(t)
	f := func(text, want string) {
		t.Helper()
		a, err := adapter.Parse(text)
		if err != nil || a.S3 == nil || a.S3.URL != want {
			t.Errorf("%s: %+v, %v, want %s", text, a.S3, err, want)
		}
	}
	f(`{"type":"s3","s3_endpoint":"s3://kv.s3.eu-west-1.amazonaws.com","s3_region":"eu-west-1"}`, "https://kv.s3.eu-west-1.amazonaws.com")
	f(`{"type":"s3","s3_endpoint":"s3://kvcache.localhost:9000","disable_tls":true}`, "http://kvcache.localhost:9000")
	f(`{"type":"s3","s3_endpoint":"kvcache.localhost:9000","disable_tls":true}`, "http://kvcache.localhost:9000")
	f(`{"type":"s3","s3_endpoint":"s3://store.corp:9000","s3_bucket":"kv","s3_addressing_style":"path"}`, "https://store.corp:9000/kv")
	f(`{"type":"s3","s3_endpoint":"s3://store.corp:9000","s3_bucket":"kv"}`, "https://kv.store.corp:9000")
	f(`{"type":"s3","s3_endpoint":"s3://kv.store.corp","s3_bucket":"kv"}`, "https://kv.store.corp")
	f(`{"type":"s3_native","s3_endpoint":"http://10.0.0.7:9000/","s3_bucket":"kv"}`, "http://10.0.0.7:9000/kv")
	f(`{"type":"s3_native","s3_endpoint":"http://[::1]:9000","s3_bucket":"kv"}`, "http://[::1]:9000/kv")
	f(`{"type":"s3_native","s3_endpoint":"https://localhost","s3_bucket":"kv"}`, "https://localhost/kv")
	f(`{"type":"s3_native","s3_bucket":"kv","s3_region":"eu-central-1"}`, "https://kv.s3.eu-central-1.amazonaws.com")
	f(`{"type":"s3_native","s3_bucket":"kv.corp"}`, "https://s3.us-east-1.amazonaws.com/kv.corp")
	t.Setenv("AWS_REGION", "eu-north-1")
	f(`{"type":"s3_native","s3_bucket":"kv"}`, "https://kv.s3.eu-north-1.amazonaws.com")
	t.Setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
	f(`{"type":"s3_native","s3_bucket":"kv"}`, "http://127.0.0.1:9000/kv")
}

func TestParseS3(t *testing.T) {
	noAWS(t)
	a, err := adapter.Parse(`{"type":"s3","s3_endpoint":"s3://kv.host","s3_region":"r","s3_num_io_threads":32,"s3_prefer_http2":true,"max_capacity_gb":5,"aws_access_key_id":"i","aws_secret_access_key":"s",
		"request_timeout":1.5,"s3_part_mb":16,"s3_upload_part_mb":32,"s3_puts_per_hour":1000,"s3_prefix":"site","min_hits":2,"min_age_seconds":60}`)
	if err != nil {
		t.Fatal(err)
	}
	o := a.S3.Options
	if o.Layout != s3.LMCache || o.Region != "r" || o.Workers != 32 || o.Timeout != 1500*time.Millisecond || o.Part != 16<<20 || o.Upload != 32<<20 || o.PutsPerHour != 1000 || o.Prefix != "site/" ||
		a.Admission != (tier.Admission{MinHits: 2, MinAge: time.Minute}) || strings.Join(a.Ignored, " ") != "max_capacity_gb s3_prefer_http2" {
		t.Errorf("%+v", a)
	}
	f := func(text string, want ...string) {
		t.Helper()
		_, err := adapter.Parse(text)
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v, want %s", text, err, w)
			}
		}
	}
	f(`{"type":"s3"}`, `"s3_bucket"`, `"s3_endpoint"`)
	f(`{"type":"s3","s3_endpoint":"ftp://kv.host"}`, `"s3_endpoint"`)
	f(`{"type":"s3","s3_endpoint":"s3://kv.host","s3_addressing_style":"path"}`, `"s3_bucket" is missing`)
	f(`{"type":"s3","s3_endpoint":"s3://kv.host","s3_addressing_style":"paths"}`, `neither path nor virtual`)
	f(`{"type":"s3","s3_endpoint":"s3://kv.host","aws_access_key_id":"i"}`, `is missing`)
	f(`{"type":"s3","s3_endpoint":"s3://kv.host","s3_ca_bundle":"/dev/null"}`, "no certificate")
	f(`{"type":"s3","s3_endpoint":"s3://kv.host","s3_bukcet":"kv"}`, `did you mean "s3_bucket"?`)
	f(`{"type":"s3","s3_endpoint":"s3://kv.host","s3_upload_part_mb":1}`, `"s3_upload_part_mb"`)
	f(`{"type":"s3","s3_endpoint":"s3://kv.host","s3_prefix":"//x"}`, `"s3_prefix"`)
	f(`{"type":"s3","s3_endpoint":"s3://kv.host","serde":{}}`, `"serde"`)
}

// Tenants and models have buckets of their own, and no bucket has objects of another.
func TestBucketsOfTenants(t *testing.T) {
	noAWS(t)
	var mu sync.Mutex
	in := map[string]int{}
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut {
			mu.Lock()
			defer mu.Unlock()
			in[strings.Split(r.URL.Path, "/")[1]]++
			return
		}
		w.WriteHeader(http.StatusNotFound)
	}))
	defer store.Close()
	a, err := adapter.Parse(`{"type":"s3_native","s3_endpoint":"` + store.URL + `","s3_bucket":"all","s3_bucket_of_salt":{"a":"for-a"},"s3_bucket_of_model":{"m2":"for-m2"},"aws_access_key_id":"i","aws_secret_access_key":"s"}`)
	if err != nil {
		t.Fatal(err)
	}
	names := tier.NewNames()
	s, err := adapter.Open(adapter.Options{Names: names, Adapters: []adapter.Adapter{a}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Tier.Close()
	b, m := tiertest.Object(1, 100)
	for i, n := range []tier.Name{{Model: "m1"}, {Model: "m1", Salt: "a"}, {Model: "m2", Salt: "a"}, {Model: "m2", Salt: "b"}, {Model: "m2"}, {Model: "m3", Salt: "b"}} {
		k := tiertest.Key(1)
		k.Namespace[3] = byte(i)
		if err := s.Tier.Write(t.Context(), k, m, b); !errors.Is(err, tier.ErrNotKept) {
			t.Errorf("a namespace that nobody knows: %v", err)
		}
		names.Add(k.Namespace, n.Model, []byte(n.Salt))
		if err := s.Tier.Write(t.Context(), k, m, b); err != nil {
			t.Errorf("%+v: %v", n, err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if in["all"] != 2 || in["for-a"] != 2 || in["for-m2"] != 2 {
		t.Errorf("%v", in)
	}
	if r, ok := s.Each[0].Requests(); !ok || r.Requests["PUT"] != 6 {
		t.Errorf("%+v", r)
	}
	if _, err := adapter.Parse(`{"type":"s3","s3_endpoint":"s3://a.host","s3_bucket_of_salt":{"a":"for-a"}}`); err == nil || !strings.Contains(err.Error(), `"s3_bucket"`) {
		t.Error(err)
	}
}

// A server starts while its store is away, and each bucket and prefix is a place of its
// own.
func TestOpenS3(t *testing.T) {
	noAWS(t)
	var places []string
	for _, text := range []string{`{"type":"s3","s3_endpoint":"http://127.0.0.1:1","s3_bucket":"a","min_hits":1}`, `{"type":"s3","s3_endpoint":"http://127.0.0.1:1","s3_bucket":"b"}`, `{"type":"s3_native","s3_endpoint":"http://127.0.0.1:1","s3_bucket":"b","s3_prefix":"x"}`} {
		a, err := adapter.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		s, err := adapter.Open(adapter.Options{Names: tier.NewNames(), Adapters: []adapter.Adapter{a}, Trust: fs.TrustChecksum})
		if err != nil {
			t.Fatal(err)
		}
		places = append(places, s.Place)
		if r, ok := s.Each[0].Requests(); !ok || len(r.Requests) == 0 {
			t.Errorf("%s: its requests are not counted", text)
		}
		if err := s.Tier.Close(); err != nil {
			t.Error(err)
		}
	}
	if places[0] == places[1] || places[1] == places[2] {
		t.Errorf("%q", places)
	}
	t.Setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
	x, err := adapter.OpenOne("s3_native:bucket/a/prefix", adapter.Options{})
	if err != nil {
		t.Fatal(err)
	}
	x.Close()
}
