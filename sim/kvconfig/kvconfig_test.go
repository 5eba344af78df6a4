// SPDX-License-Identifier: Apache-2.0

package kvconfig_test

import (
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
)

// env is an environment of one test.
func env(pairs ...string) func(string) (string, bool) {
	return func(name string) (string, bool) {
		for i := 0; i < len(pairs); i += 2 {
			if pairs[i] == name {
				return pairs[i+1], true
			}
		}
		return "", false
	}
}

func parse(t *testing.T, text string) []*kvconfig.Config {
	t.Helper()
	list, err := kvconfig.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// wants checks that err names every one of what.
func wants(t *testing.T, err error, what ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("accepted; want an error that names %q", what)
	}
	for _, w := range what {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%v\nlacks %q", err, w)
		}
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("%q is more than one line", err)
	}
}

func TestMooncake(t *testing.T) {
	c := parse(t, `{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","engine_id":"p0","kv_port":14579,
		"kv_load_failure_policy":"recompute","kv_connector_extra_config":{"num_workers":4,"mooncake_protocol":"tcp","bootstrap_server_address":"10.0.0.1:8998"}}`)
	if len(c) != 1 || c[0].LoadFailurePolicy != kvconfig.Recompute {
		t.Fatalf("%+v", c)
	}
	m, err := c[0].Mooncake(env("VLLM_HOST_IP", "10.0.0.7", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", "60", "VLLM_MOONCAKE_CONNECTOR_TIMEOUT", "2.5"))
	if err != nil {
		t.Fatal(err)
	}
	want := kvconfig.Mooncake{
		Role: wire.Producer, EngineID: "p0", Workers: 4, Host: "10.0.0.7", BasePort: 8998, Registry: "http://10.0.0.1:8998",
		AbortTimeout: time.Minute, ConnectTimeout: 2500 * time.Millisecond,
	}
	if *m != want {
		t.Fatalf("%+v", *m)
	}
	d := parse(t, `{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}`)[0]
	if m, err = d.Mooncake(env("VLLM_HOST_IP", "h", "VLLM_MOONCAKE_BOOTSTRAP_PORT", "9000")); err != nil {
		t.Fatal(err)
	}
	if m.BasePort != 9000 || m.Registry != "" || m.AbortTimeout != 480*time.Second || m.ConnectTimeout != 30*time.Second || m.Workers != 10 || m.EngineID == "" {
		t.Fatalf("%+v", *m)
	}
	if other := parse(t, `{"kv_connector":"MooncakeConnector","kv_role":"kv_both"}`)[0]; other.EngineID == d.EngineID {
		t.Fatal("two engines have one id")
	}
}

// One error names every mistake, with the right values.
func TestWrongConfigurations(t *testing.T) {
	f := func(text string, what ...string) {
		t.Helper()
		_, err := kvconfig.Parse([]byte(text))
		wants(t, err, what...)
	}
	f(`{"kv_connector":"MooncakeConnector","kv_rol":"kv_producer","kv_load_failure_policy":"retry"}`,
		`unknown key "kv_rol", did you mean "kv_role"?`, `kv_role "": one of kv_producer, kv_consumer, kv_both`, `"retry": one of recompute, fail`)
	f(`{"kv_connector":"MoonCakeConnector","kv_role":"kv_prefill"}`, `did you mean "MooncakeConnector"?`, `kv_role "kv_prefill"`)
	f(`{"kv_role":"kv_both"}`, "kv_connector is missing")
	f(`{"kv_connector":3,"kv_role":"kv_both"}`, "kv_connector must be a text, not 3")
	f(`{"kv_connector":"MooncakeConnector","kv_role":"kv_both"} x`, "more than one JSON value")
	f(`[]`, "kv-transfer-config")
	f(`null`, "kv-transfer-config")
	f(`{"kv_connector":"MultiConnector","kv_role":"kv_both"}`, "connectors must list")
	f(`{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":{"connectors":[{"kv_connector":"X","kv_role":"kv_both"},
		{"kv_connector":"MultiConnector","kv_role":"kv_both"}]}}`, `connectors[0]: kv_connector "X"`, "connectors[1]: a MultiConnector inside")
	f(strings.Repeat(" ", 1<<20)+"{}", "bytes")

	c := parse(t, `{"kv_connector":"MooncakeConnector","kv_role":"kv_both","kv_connector_extra_config":{"mooncake_protocl":"tcp","mooncake_protocol":"rdma",
		"device_name":"mlx5_0","num_workers":0,"bootstrap_server_address":"p0"}}`)[0]
	_, err := c.Mooncake(env("VLLM_HOST_IP", "h", "VLLM_MOONCAKE_BOOTSTRAP_PORT", "70000"))
	wants(t, err, `unknown key "mooncake_protocl", did you mean "mooncake_protocol"?`, `"rdma": only tcp`, `"mlx5_0"`, "num_workers", `"p0": the address must be host:port`, "VLLM_MOONCAKE_BOOTSTRAP_PORT")
	_, err = c.LMCache()
	wants(t, err, "kv_connector is MooncakeConnector")

	l := parse(t, `{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_connector_extra_config":{"lmcache.mp.prot":1,"lmcache.mp.port":0,
		"lmcache.mp.mp_transfer_mode":"engine_drivn","lmcache.mp.lazy_offload":true,"lmcache.mp.save_decode_cache":1}}`)[0]
	_, err = l.LMCache()
	wants(t, err, `unknown key "lmcache.mp.prot", did you mean "lmcache.mp.port"?`, "lmcache.mp.port must be", `did you mean "engine_driven"?`, "lazy_offload is not supported", "save_decode_cache must be")
	_, err = l.Mooncake(env("VLLM_HOST_IP", "h"))
	wants(t, err, "kv_connector is LMCacheMPConnector")
}

func TestLMCache(t *testing.T) {
	f := func(extra string, mode string, servers ...string) {
		t.Helper()
		c := parse(t, `{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_connector_extra_config":`+extra+`}`)[0]
		l, err := c.LMCache()
		if err != nil {
			t.Fatal(err)
		}
		if l.Mode != mode || !slices.Equal(l.Servers, servers) {
			t.Errorf("%s: %+v", extra, l)
		}
	}
	f(`{}`, "auto", "tcp://localhost:5555")
	f(`null`, "auto", "tcp://localhost:5555")
	f(`{"lmcache.mp.host":"tcp://n1","lmcache.mp.port":"6000","lmcache.mp.mp_transfer_mode":"data"}`, "engine_driven", "tcp://n1:6000")
	f(`{"lmcache.mp.server_urls":"a:1, tcp://b:2,","lmcache.mp.mp_transfer_mode":"lmcache_driven"}`, "lmcache_driven", "tcp://a:1", "tcp://b:2")
	f(`{"lmcache.mp.server_urls":["ipc:///tmp/k"]}`, "auto", "ipc:///tmp/k")
}

// Connectors of a MultiConnector keep their order and share its engine id.
func TestMultiConnector(t *testing.T) {
	list := parse(t, `{"kv_connector":"MultiConnector","kv_role":"kv_both","engine_id":"e","kv_connector_extra_config":{"connectors":[
		{"kv_connector":"MooncakeConnector","kv_role":"kv_producer"},{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","engine_id":"own"}]}}`)
	if len(list) != 2 || list[0].Connector != kvconfig.MooncakeConnector || list[0].EngineID != "e" || list[1].EngineID != "own" || list[0].Role != wire.Producer {
		t.Fatalf("%+v", list)
	}
}

// The address is one of this host's, or the variable's.
func TestHost(t *testing.T) {
	if h, err := kvconfig.Host(env("VLLM_HOST_IP", "192.0.2.1")); err != nil || h != "192.0.2.1" {
		t.Fatal(h, err)
	}
	h, err := kvconfig.Host(env())
	if err != nil {
		wants(t, err, "VLLM_HOST_IP") // a host without a route
		return
	}
	l, err := net.Listen("tcp", net.JoinHostPort(h, "0"))
	if err != nil {
		t.Fatalf("%s is not an address of this host: %v", h, err)
	}
	l.Close()
}

// Every configuration that Parse accepts has a connector and a role, and its keys can be read without a panic.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"kv_connector":"MooncakeConnector","kv_role":"kv_both","kv_connector_extra_config":{"num_workers":1}}`))
	f.Add([]byte(`{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_connector_extra_config":{"lmcache.mp.port":"1"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		list, err := kvconfig.Parse(b)
		if (err == nil) != (len(list) > 0) {
			t.Fatal(list, err)
		}
		for _, c := range list {
			if c.EngineID == "" || c.Connector == "" {
				t.Fatalf("%+v", c)
			}
			_, _ = c.Mooncake(env("VLLM_HOST_IP", "h"))
			_, _ = c.LMCache()
		}
	})
}
