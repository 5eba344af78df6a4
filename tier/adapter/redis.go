// SPDX-License-Identifier: Apache-2.0

package adapter

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/redis"
)

// redisLayouts maps the adapter types for Redis and Valkey to their layouts.
var redisLayouts = map[string]redis.Layout{"redis": redis.Native, "resp": redis.RESP, "valkey": redis.Valkey}

// redis reads the keys of LMCache's resp and valkey adapters and Kvasir's own keys. All three
// types accept all of them.
func (r *reader) redis(a *Adapter) {
	o := &redis.Options{Layout: redisLayouts[a.Type]}
	a.Redis = o
	r.redisServers(a)
	r.take("num_workers", &o.Workers)
	r.within("num_workers", float64(o.Workers), 0, 1<<12)
	r.take("username", &o.Username)
	r.take("password", &o.Password)
	r.secret("password_file", &o.Password)
	if a.Type == "resp" {
		o.Username, o.Password = cmp.Or(o.Username, os.Getenv("LMCACHE_RESP_USERNAME")), cmp.Or(o.Password, os.Getenv("LMCACHE_RESP_PASSWORD"))
	}
	r.take("sentinel_master", &o.Sentinel)
	r.take("sentinel_username", &o.SentinelUsername)
	r.take("sentinel_password", &o.SentinelPassword)
	r.secret("sentinel_password_file", &o.SentinelPassword)
	r.take("key_prefix", &o.Prefix)
	r.take("delete", &o.MayDelete)
	var seconds, request, connect, stripe float64
	r.take("ttl_seconds", &seconds)
	r.take("request_timeout", &request)
	r.take("connection_timeout", &connect)
	r.take("stripe_mb", &stripe)
	r.take("max_capacity_gb", &a.LimitGB)
	r.within("ttl_seconds", seconds, 0, 10*365*24*3600)
	r.within("request_timeout", request, 0, 3600)
	r.within("connection_timeout", connect, 0, 3600)
	r.within("stripe_mb", stripe, 0, 256)
	r.within("max_capacity_gb", a.LimitGB, 0, 1<<20)
	duration := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	o.TTL, o.Timeout, o.DialTimeout = duration(seconds), duration(request), duration(connect)
	o.Stripe, o.Limit = int64(stripe*(1<<20)), int64(a.LimitGB*gib)
	r.tls(o)
	r.admission(a)
	r.absence(a)
	if _, ok := r.raw["serde"]; ok {
		r.errs = append(r.errs, errSerde)
	}
	if len(r.errs) == 0 {
		options.Each(o.Validate(), func(e *options.Error) { r.errs = append(r.errs, fmt.Errorf("%q %s", redisKeys[e.Field], e.Text)) })
	}
	r.ignore(a, "affinity_tag", "shared", "persist_enabled", "eviction", "serde")
}

// redisKeys maps a field of the options to its JSON key.
var redisKeys = map[string]string{
	"Addrs": "startup_nodes", "Sentinel": "sentinel_master", "Database": "database_id", "Prefix": "key_prefix", "Stripe": "stripe_mb", "TTL": "ttl_seconds",
	"Limit": "max_capacity_gb", "Workers": "num_workers", "Timeout": "request_timeout", "DialTimeout": "connection_timeout",
}

// redisServers reads the addresses of the servers: host and port, startup_nodes, or unix_socket.
func (r *reader) redisServers(a *Adapter) {
	o := a.Redis
	host, port, nodes, path := "", 0, "", ""
	r.take("host", &host)
	r.take("port", &port)
	r.take("startup_nodes", &nodes)
	r.take("unix_socket", &path)
	r.take("cluster_mode", &o.Cluster)
	r.take("database_id", &o.Database)
	if a.Type == "resp" && nodes == "" && path == "" {
		host = cmp.Or(host, os.Getenv("LMCACHE_RESP_HOST"))
		if text := os.Getenv("LMCACHE_RESP_PORT"); port == 0 && text != "" {
			port, _ = strconv.Atoi(text)
		}
	}
	switch {
	case path != "":
		o.Addrs = append(o.Addrs, "unix:"+path)
	case nodes != "":
		for node := range strings.SplitSeq(nodes, ",") {
			o.Addrs = append(o.Addrs, strings.TrimSpace(node))
		}
	case host != "":
		if port < 1 || port > 65535 {
			r.errs = append(r.errs, fmt.Errorf("\"port\": %d is outside 1 to 65535", port))
		}
		o.Addrs = append(o.Addrs, net.JoinHostPort(host, strconv.Itoa(port)))
	default:
		r.errs = append(r.errs, errors.New("the address of the server is missing: \"host\" and \"port\", \"startup_nodes\" (\"host:port,host:port\"), or \"unix_socket\""))
	}
	_, sentinel := r.raw["sentinel_master"]
	if len(o.Addrs) > 1 && !o.Cluster && !sentinel { // as LMCache does
		o.Addrs = o.Addrs[:1]
		a.Ignored = append(a.Ignored, "startup_nodes but the first one")
	}
	if o.Cluster && o.Database > 0 {
		o.Database = 0
		a.Ignored = append(a.Ignored, "database_id")
	}
}

// secret reads a secret from the file that key names, so that no command line shows it.
func (r *reader) secret(key string, into *string) {
	path := ""
	if r.take(key, &path); path == "" {
		return
	}
	text, err := os.ReadFile(path)
	if err != nil {
		r.errs = append(r.errs, fmt.Errorf("%q: %w", key, err))
	}
	*into = strings.TrimRight(string(text), "\r\n")
}

// tls reads how the server must prove who it is.
func (r *reader) tls(o *redis.Options) {
	on, ca, cert, key, name := false, "", "", "", ""
	r.take("tls_enable", &on)
	r.take("tls_ca_file", &ca)
	r.take("tls_cert_file", &cert)
	r.take("tls_key_file", &key)
	r.take("tls_server_name", &name)
	if !on {
		if ca+cert+key+name != "" {
			r.errs = append(r.errs, errors.New("\"tls_enable\" is missing beside other tls keys"))
		}
		return
	}
	o.TLS = &tls.Config{ServerName: name, MinVersion: tls.VersionTLS12}
	if ca != "" {
		pem, err := os.ReadFile(ca)
		o.TLS.RootCAs = x509.NewCertPool()
		if err == nil && !o.TLS.RootCAs.AppendCertsFromPEM(pem) {
			err = fmt.Errorf("%s has no certificate in PEM", ca)
		}
		if err != nil {
			r.errs = append(r.errs, fmt.Errorf("\"tls_ca_file\": %w", err))
		}
	}
	if cert != "" || key != "" {
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			r.errs = append(r.errs, fmt.Errorf("\"tls_cert_file\" and \"tls_key_file\": %w", err))
		}
		o.TLS.Certificates = []tls.Certificate{pair}
	}
}

var errNoSums = errors.New("LMCache's values in Redis have no checksum, so with --l2-trust checksum none of them is served; use \"type\":\"redis\"")

func openRedis(a Adapter, o Options) (*redis.Tier, error) {
	if o.Trust == fs.TrustChecksum && a.Redis.Layout != redis.Native {
		return nil, errNoSums
	}
	of := *a.Redis
	of.Names, of.Log = o.Names, o.Log
	return redis.Open(of)
}

// redisPlace identifies the servers, the database and the prefix of the keys in it.
func redisPlace(o *redis.Options) string {
	return fmt.Sprintf("%s/%d/%s%s", strings.Join(o.Addrs, ","), o.Database, o.Sentinel, o.Prefix)
}
