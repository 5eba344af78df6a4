// SPDX-License-Identifier: Apache-2.0

package kvconfig_test

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
)

func TestMooncakeStore(t *testing.T) {
	file := filepath.Join(t.TempDir(), "mooncake.json")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(`{"mode":"embedded","metadata_server":"P2PHANDSHAKE","master_server_address":"m:50051, n:50051","global_segment_size":"4GB","protocol":"tcp","device_name":"","tenant_id":"t"}`)
	c := parse(t, `{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both","kv_connector_extra_config":{"load_async":true,"cache_prefix":"blue",
		"preferred_segment":"s","save_decode_cache":true,"enable_lookup":false}}`)[0]
	m, err := c.MooncakeStore(env("MOONCAKE_CONFIG_PATH", file))
	if err != nil {
		t.Fatal(err)
	}
	if m.Role != wire.Both || !slices.Equal(m.Masters, []string{"m:50051", "n:50051"}) || m.Tenant != "t" || m.Prefix != "blue" || m.Segment != "s" || !m.SaveDecode || m.Lookup {
		t.Errorf("%+v", *m)
	}
	if m, err = parse(t, `{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both"}`)[0].MooncakeStore(env("MOONCAKE_CONFIG_PATH", file)); err != nil || !m.Lookup || m.SaveDecode {
		t.Errorf("%+v, %v", m, err)
	}

	_, err = parse(t, `{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both","kv_connector_extra_config":{"load_async":false}}`)[0].MooncakeStore(env("MOONCAKE_CONFIG_PATH", file))
	wants(t, err, "load_async false is not supported")
	_, err = c.MooncakeStore(env())
	wants(t, err, "MOONCAKE_CONFIG_PATH is not set")
	_, err = c.MooncakeStore(env("MOONCAKE_CONFIG_PATH", file+"x"))
	wants(t, err, "MOONCAKE_CONFIG_PATH", "no such file")
	write(`{"metadata_server":"http://m:8080/metadata","master_server_adress":"m:1"}`)
	_, err = parse(t, `{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both","kv_connector_extra_config":{"store_tp_size":2,"enable_lookups":1}}`)[0].
		MooncakeStore(env("MOONCAKE_CONFIG_PATH", file))
	wants(t, err, "store_tp_size is not supported", `did you mean "enable_lookup"?`, `did you mean "master_server_address"?`, "master_server_address is missing", `protocol "rdma": only tcp`, "only P2PHANDSHAKE")
	_, err = c.Mooncake(env())
	wants(t, err, "kv_connector is MooncakeStoreConnector")
}

// The variables that vLLM reads are used, or listed in Moot where they change nothing.
func TestMooncakeStoreEnvironment(t *testing.T) {
	file := filepath.Join(t.TempDir(), "mooncake.json")
	if err := os.WriteFile(file, []byte(`{"master_server_address":"m:50051","protocol":"tcp"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	read := func(extra string, pairs ...string) (*kvconfig.MooncakeStore, error) {
		c := parse(t, `{"kv_connector":"MooncakeStoreConnector","kv_role":"kv_both","kv_connector_extra_config":`+extra+`}`)[0]
		return c.MooncakeStore(env(append(pairs, "MOONCAKE_CONFIG_PATH", file)...))
	}
	f := func(extra, segment string, loads int, moot []string, pairs ...string) {
		t.Helper()
		m, err := read(extra, pairs...)
		if err != nil {
			t.Fatal(err)
		}
		if m.Segment != segment || m.Loads != loads || !slices.Equal(m.Moot, moot) {
			t.Errorf("%s, %q: %+v", extra, pairs, *m)
		}
	}
	f(`{}`, "", 1, nil)
	f(`{}`, "10.0.0.7:1", 4, nil, "MOONCAKE_PREFERRED_SEGMENT", " 10.0.0.7:1 ", "VLLM_MOONCAKE_LOAD_RECV_THREADS", "4")
	f(`{"preferred_segment":" s "}`, "s", 1, nil, "MOONCAKE_PREFERRED_SEGMENT", "10.0.0.7:1")
	f(`{"preferred_segment":null}`, "10.0.0.7:1", 1, nil, "MOONCAKE_PREFERRED_SEGMENT", "10.0.0.7:1")
	f(`{}`, "", 1, []string{"MOONCAKE_REQUESTER_LOCAL_HOSTNAME"}, "MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "h", "MOONCAKE_PREFERRED_SEGMENT", " ")

	_, err := read(`{"preferred_segment":" "}`, "VLLM_MOONCAKE_LOAD_RECV_THREADS", "0")
	wants(t, err, "preferred_segment must be a text that is not empty", "VLLM_MOONCAKE_LOAD_RECV_THREADS=")
	_, err = read(`{}`, "VLLM_MOONCAKE_LOAD_RECV_THREADS", "1.5")
	wants(t, err, "VLLM_MOONCAKE_LOAD_RECV_THREADS=1.5")
}
