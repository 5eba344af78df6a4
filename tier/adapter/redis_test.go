// SPDX-License-Identifier: Apache-2.0

package adapter_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/adapter"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/redis"
)

// What LMCache's command lines say of Redis and Valkey means the same here.
func TestParseRedis(t *testing.T) {
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("from a file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f := func(text string, want redis.Options, ignored ...string) {
		t.Helper()
		a, err := adapter.Parse(text)
		if err != nil || a.Redis == nil {
			t.Errorf("%s: %v", text, err)
			return
		}
		a.Redis.TLS = nil
		if fmt.Sprintf("%+v", *a.Redis) != fmt.Sprintf("%+v", want) || strings.Join(a.Ignored, " ") != strings.Join(ignored, " ") {
			t.Errorf("%s: %+v without %q", text, *a.Redis, a.Ignored)
		}
	}
	f(`{"type":"resp","host":"h","port":6379,"num_workers":4,"username":"u","password":"p","max_capacity_gb":2}`,
		redis.Options{Layout: redis.RESP, Addrs: []string{"h:6379"}, Workers: 4, Username: "u", Password: "p", Limit: 2 << 30})
	f(`{"type":"resp","host":"::1","port":1,"eviction":{"eviction_policy":"LRU"},"shared":true}`, redis.Options{Layout: redis.RESP, Addrs: []string{"[::1]:1"}}, "eviction", "shared")
	f(`{"type":"valkey","startup_nodes":"a:1, b:2","cluster_mode":true,"key_prefix":"site","ttl_seconds":60,"tls_enable":true,"database_id":2,"request_timeout":1.5,"connection_timeout":3}`,
		redis.Options{Layout: redis.Valkey, Addrs: []string{"a:1", "b:2"}, Cluster: true, Prefix: "site", TTL: time.Minute, Timeout: 1500 * time.Millisecond, DialTimeout: 3 * time.Second}, "database_id")
	f(`{"type":"valkey","startup_nodes":"a:1,b:2","database_id":2}`, redis.Options{Layout: redis.Valkey, Addrs: []string{"a:1"}, Database: 2}, "startup_nodes but the first one")
	f(`{"type":"redis","startup_nodes":"a:1,b:2","sentinel_master":"m","stripe_mb":0.5,"password_file":"`+secret+`"}`,
		redis.Options{Addrs: []string{"a:1", "b:2"}, Sentinel: "m", Stripe: 1 << 19, Password: "from a file"})
	f(`{"type":"redis","unix_socket":"/run/redis"}`, redis.Options{Addrs: []string{"unix:/run/redis"}})

	t.Setenv("LMCACHE_RESP_HOST", "env")
	t.Setenv("LMCACHE_RESP_PORT", "7")
	t.Setenv("LMCACHE_RESP_PASSWORD", "secret")
	f(`{"type":"resp"}`, redis.Options{Layout: redis.RESP, Addrs: []string{"env:7"}, Password: "secret"})
	f(`{"type":"resp","host":"h","port":1,"password":"p"}`, redis.Options{Layout: redis.RESP, Addrs: []string{"h:1"}, Password: "p"})
}

func TestParseRedisRefuses(t *testing.T) {
	f := func(text string, want ...string) {
		t.Helper()
		_, err := adapter.Parse(text)
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v, want %s", text, err, w)
			}
		}
	}
	f(`{"type":"resp"}`, `"host" and "port"`)
	f(`{"type":"resp","host":"h"}`, `"port"`)
	f(`{"type":"resp","host":"h","port":1,"passwort":"x","clustermode":true}`, `did you mean "password"?`, `did you mean "cluster_mode"?`)
	f(`{"type":"resp","host":"h","port":1,"ttl_seconds":60}`, `"ttl_seconds"`, "wait for ever")
	f(`{"type":"valkey","startup_nodes":"h"}`, `"startup_nodes"`, "no host:port")
	f(`{"type":"valkey","startup_nodes":"h:1","key_prefix":"a@b"}`, `"key_prefix"`)
	f(`{"type":"redis","host":"h","port":1,"tls_ca_file":"/x"}`, `"tls_enable" is missing`)
	f(`{"type":"redis","host":"h","port":1,"tls_enable":true,"tls_ca_file":"/dev/null"}`, "no certificate")
	f(`{"type":"redis","host":"h","port":1,"password_file":"/does/not/exist"}`, `"password_file"`)
	f(`{"type":"redis","host":"h","port":1,"serde":{}}`, `"serde"`)
	f(`{"type":"reddis"}`, `did you mean "redis"?`)
}

// A server starts while its Redis is away. Databases have names of their own.
func TestOpenRedis(t *testing.T) {
	a, err := adapter.Parse(`{"type":"resp","host":"127.0.0.1","port":1}`)
	if err != nil {
		t.Fatal(err)
	}
	b, err := adapter.Parse(`{"type":"resp","startup_nodes":"127.0.0.1:1","database_id":2}`)
	if err != nil {
		t.Fatal(err)
	}
	o := adapter.Options{Names: tier.NewNames(), Adapters: []adapter.Adapter{a}}
	one, err := adapter.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	o.Adapters[0] = b
	two, err := adapter.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	if one.Place == two.Place || one.Each[0].Name() != "resp" {
		t.Errorf("%q and %q", one.Place, two.Place)
	}
	if one.Tier.Close() != nil || two.Tier.Close() != nil {
		t.Error("Close fails")
	}
	o.Trust = fs.TrustChecksum
	if _, err := adapter.Open(o); err == nil {
		t.Error("LMCache's values are served by their checksums, which they have not")
	}
	x, err := adapter.OpenOne("redis:127.0.0.1:1", adapter.Options{})
	if err != nil {
		t.Fatal(err)
	}
	x.Close()
}

// Passwords are in no status and in no list of flags.
func TestTextHidesSecrets(t *testing.T) {
	all := []adapter.Text{
		`{"type":"redis","host":"h","port":1,"password":"hunter2","sentinel_password":"hunter2"}`,
		`{"type":"s3","aws_secret_access_key":"hunter2","aws_session_token":"hunter2"}`, `{"type":"fs","base_path":"/d"}`,
	}
	shown := fmt.Sprint(all)
	if strings.Contains(shown, "hunter2") || strings.Count(shown, "(set)") != 4 || !strings.Contains(shown, `{"type":"fs","base_path":"/d"}`) {
		t.Error(shown)
	}
}

// An error of a wrong adapter never shows its secrets, whatever is wrong.
func TestErrorsHideSecrets(t *testing.T) {
	noAWS(t)
	for _, text := range []string{
		`{"type":"redis","host":"h","port":1,"password":"hunter2"`,    // no end
		`{"type":"redis","host":"h","port":1,"password":"hunter2",}`,  // a comma too many
		`[{"type":"redis","host":"h","port":1,"password":"hunter2"}]`, // a list
		`{"host":"h","port":1,"password":"hunter2"}`,                  // no type
		`{"type":"redis","host":"h","port":1,"password":["hunter2"]}`, // no string
		`{"type":"redis","host":"h","port":1,"sentinel_password":{"hunter2":1}}`,
		`{"type":"s3","s3_endpoint":"s3://b.h","aws_access_key_id":"i","aws_secret_access_key":["hunter2"]}`,
		`{"type":"s3","s3_endpoint":"s3://b.h","aws_session_token":["hunter2"]}`,
		`{"type":"redis","startup_nodes":"redis://:hunter2@h:6379"}`, // a URL, as other programs have it
		`{"type":"s3_native","s3_bucket":"b","s3_endpoint":"https://id:hunter2@h"}`,
		`redis://:hunter2@h:6379`,
	} {
		_, err := adapter.OpenOne(text, adapter.Options{Names: tier.NewNames()})
		if err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", text, err)
		}
		if shown := adapter.Text(text).String(); strings.Contains(shown, "hunter2") {
			t.Errorf("%s is shown as %s", text, shown)
		}
	}
}
