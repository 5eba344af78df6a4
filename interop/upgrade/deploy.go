// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"

	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// deploy starts all parts of the previous release.
func (d *driver) deploy() error {
	at := func(name string) string { return filepath.Join(d.dir, name) }
	port, web, events, registry := freePort(), freePort(), freePort(), freePort()
	d.shm = "/dev/shm/lmcache_l1_pool_kvasir_upgrade" + port
	below, err := d.tiers()
	if err != nil {
		return err
	}
	d.registry = &service{name: "registry", health: "http://127.0.0.1:" + registry + "/healthz", args: []string{"bootstrap", "--host", "127.0.0.1", "--port", registry, "--state", at("registry.state")}}
	d.node = &service{name: "node", health: "http://127.0.0.1:" + web + "/readyz", args: append([]string{
		"server", "--host", "127.0.0.1", "--port", port, "--http-port", web, "--l1-size-gb", "256MiB", "--chunk-size", "64",
		"--shm-name", "kvasir_upgrade" + port, "--state", at("node.state"), "--kv-events", "tcp://127.0.0.1:" + events,
	}, below...)}
	if err := errors.Join(d.begin(d.registry, d.previous), d.begin(d.node, d.previous)); err != nil {
		return err
	}
	sub := zmtp.NewSub("tcp://127.0.0.1:"+events, zmtp.DealerOptions{Handler: func(m zmtp.Message) {
		if len(m) != 3 {
			d.violation("an event message of %d frames", len(m))
			return
		}
		if _, err := event.Decode(m[2]); err != nil {
			d.violation("an event message: %v", err)
		}
		d.events.Add(1)
	}})
	if err := errors.Join(sub.Subscribe(""), sub.Start()); err != nil {
		return err
	}
	urls := map[string]string{}
	for _, kind := range []string{"p", "d"} {
		moon := `{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}`
		if kind == "p" {
			moon = fmt.Sprintf(`{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_connector_extra_config":{"bootstrap_server_address":"127.0.0.1:%s"}}`, registry)
		}
		config := fmt.Sprintf(`{"kv_connector":"MultiConnector","kv_role":"kv_both","engine_id":%q,"kv_load_failure_policy":"recompute","kv_connector_extra_config":{"connectors":[%s,
			{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute","kv_connector_extra_config":{"lmcache.mp.server_urls":"tcp://127.0.0.1:%s",
			"lmcache.mp.mq_timeout":3,"lmcache.mp.heartbeat_interval":0.5}}]}}`, kind, moon, port)
		e := freePort()
		urls[kind] = "http://127.0.0.1:" + e
		engine := &service{name: kind, health: urls[kind] + "/health", args: []string{
			"engine", "--port", e, "--model", "m", "--layers", "2", "--kv-heads", "4", "--head-bytes", "64", "--num-gpu-blocks-override", "400",
			"--max-model-len", "4096", "--max-num-batched-tokens", "1024", "--step-time", "2ms", "--kv-transfer-config", config,
		}}
		if err := d.begin(engine, d.previous); err != nil {
			return err
		}
		d.others = append([]*service{engine}, d.others...)
	}
	upstream, front := "http://127.0.0.1:"+registry, freePort()
	relay := &service{name: "relay", health: "http://127.0.0.1:" + front + "/healthz", args: []string{"relay", "--upstream", upstream, "--host", "127.0.0.1", "--port", front, "--memory-gb", "48MiB", "--timeout", "15"}}
	if err := d.begin(relay, d.previous); err != nil {
		return err
	}
	d.others = append(d.others, relay)
	for i, from := range []string{upstream, "http://127.0.0.1:" + front} {
		port := freePort()
		url := "http://127.0.0.1:" + port
		proxy := &service{name: fmt.Sprintf("proxy%d", i+1), health: url + "/health", args: []string{
			"proxy", "--host", "127.0.0.1", "--port", port, "--prefill", urls["p"] + "," + from, "--decode", urls["d"],
		}}
		if err := d.begin(proxy, d.previous); err != nil {
			return err
		}
		d.others, d.proxies = append(d.others, proxy), append(d.proxies, url)
	}
	return nil
}

// tiers starts what the tiers below the node need, and returns the node's flags for them.
func (d *driver) tiers() (args []string, err error) {
	for _, tier := range d.below {
		port := freePort()
		switch tier {
		case "disk":
			args = append(args, "--disk", filepath.Join(d.dir, "disk"), "--disk-gb", "0.25", "--disk-first-touch")
		case "fs":
			args = append(args, "--l2-adapter", fmt.Sprintf(`{"type":"fs","base_path":%q}`, filepath.Join(d.dir, "fs")))
		case "redis":
			err = d.begin(&service{name: "redis", health: "tcp:127.0.0.1:" + port, args: []string{"--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", d.dir}}, "redis-server")
			args = append(args, "--l2-adapter", `{"type":"redis","host":"127.0.0.1","port":`+port+`}`)
		case "s3":
			if d.store == "" {
				d.store = filepath.Join(d.dir, "s3store")
				cmd := exec.Command("go", "build", "-o", d.store, ".")
				cmd.Dir = filepath.Join("interop", "s3")
				if out, err := cmd.CombinedOutput(); err != nil {
					return nil, fmt.Errorf("build interop/s3: %w: %.300s", err, out)
				}
			}
			err = d.begin(&service{name: "s3", health: "tcp:127.0.0.1:" + port, args: []string{"-bucket", "kvcache", "-addr", "127.0.0.1:" + port}}, d.store)
			args = append(args, "--l2-adapter", `{"type":"s3_native","s3_endpoint":"http://127.0.0.1:`+port+`","s3_bucket":"kvcache","s3_addressing_style":"path","aws_access_key_id":"id","aws_secret_access_key":"secret"}`)
		default:
			return nil, fmt.Errorf("-below %q is none of disk, fs, redis, s3", tier)
		}
		if err != nil {
			return nil, err
		}
	}
	return args, nil
}
