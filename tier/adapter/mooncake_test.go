// SPDX-License-Identifier: Apache-2.0

package adapter_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/mooncake/store"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/adapter"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/mooncakestore"
)

// What LMCache's command lines say of a Mooncake Store means the same here; values may be texts or numbers.
func TestParseMooncake(t *testing.T) {
	f := func(text string, want mooncakestore.Options, ignored ...string) {
		t.Helper()
		a, err := adapter.Parse(text)
		if err != nil || a.Mooncake == nil {
			t.Errorf("%s: %v", text, err)
			return
		}
		if fmt.Sprintf("%+v", *a.Mooncake) != fmt.Sprintf("%+v", want) || strings.Join(a.Ignored, " ") != strings.Join(ignored, " ") {
			t.Errorf("%s: %+v without %q", text, *a.Mooncake, a.Ignored)
		}
	}
	f(`{"type":"mooncake_store"}`, mooncakestore.Options{Masters: []string{"127.0.0.1:50051"}})
	f(`{"type":"mooncake_store","local_hostname":"10.0.0.7","metadata_server":"P2PHANDSHAKE","protocol":"tcp","global_segment_size":"3221225472","local_buffer_size":0,
		"master_server_addr":"m:50051","num_workers":4,"per_op_workers":{"lookup":2}}`,
		mooncakestore.Options{Masters: []string{"m:50051"}, Conns: 4}, "global_segment_size", "local_buffer_size", "local_hostname", "per_op_workers")
	f(`{"type":"mooncake_store","master_server_addr":"a:1, b:2","tenant_id":"t","replica_num":2,"preferred_segment":"s","soft_pin":true,"shared":true}`,
		mooncakestore.Options{Masters: []string{"a:1", "b:2"}, Tenant: "t", Put: store.PutOptions{Replicas: 2, Segment: "s", SoftPin: true}}, "shared")
}

func TestParseMooncakeRefuses(t *testing.T) {
	f := func(text string, notServed bool, want string) {
		t.Helper()
		if _, err := adapter.Parse(text); err == nil || errors.Is(err, adapter.ErrNotServed) != notServed || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
	f(`{"type":"mooncake_store","protocol":"rdma","rdma_devices":"mlx5_0"}`, true, "only tcp")
	f(`{"type":"mooncake_store","metadata_server":"http://m:8080/metadata"}`, true, "only P2PHANDSHAKE")
	f(`{"type":"mooncake_store","master_server_addr":"etcd://m"}`, false, `"master_server_addr" "etcd://m" is not HOST:PORT`)
	f(`{"type":"mooncake_store","num_workers":-1}`, false, `"num_workers"`)
	f(`{"type":"mooncake_store","replica_num":100}`, false, `"replica_num"`)
	f(`{"type":"mooncake_store","master_server_adr":"m:1"}`, false, `did you mean "master_server_addr"?`)
	f(`{"type":"mooncake_store","serde":{}}`, false, `"serde"`)
}

// Objects of a Mooncake Store have no checksum, so an adapter that trusts only checksums is refused at once. A cluster has its figures.
func TestOpenMooncake(t *testing.T) {
	a, err := adapter.Parse(`{"type":"mooncake_store","master_server_addr":"127.0.0.1:1"}`)
	if err != nil {
		t.Fatal(err)
	}
	o := adapter.Options{Adapters: []adapter.Adapter{a, a}, Names: tier.NewNames(), Trust: fs.TrustChecksum}
	if _, err := adapter.Open(o); err == nil || !strings.Contains(err.Error(), "no checksum") {
		t.Error(err)
	}
	o.Trust = fs.TrustLength
	s, err := adapter.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	if s.Clusters["mooncake_store"] == nil || s.Clusters["mooncake_store-2"] == nil || !strings.Contains(s.Place, "mooncake_store:127.0.0.1:1/") {
		t.Errorf("%+v", s)
	}
	if err := s.Tier.Close(); err != nil {
		t.Error(err)
	}
}
