// SPDX-License-Identifier: Apache-2.0

package redis_test

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/resp"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/redis"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// TestRealServer runs the conformance suite on a real Redis or Valkey, whose address
// KVASIR_REDIS names (host:port, or unix:PATH), or on a cluster (KVASIR_REDIS_CLUSTER).
// make interop starts them.
func TestRealServer(t *testing.T) {
	one, cluster := os.Getenv("KVASIR_REDIS"), os.Getenv("KVASIR_REDIS_CLUSTER")
	if one == "" && cluster == "" {
		t.Skip("neither KVASIR_REDIS nor KVASIR_REDIS_CLUSTER names a server")
	}
	all := map[string]redis.Options{}
	if one != "" {
		all["one value"] = redis.Options{Addrs: []string{one}}
		all["stripes"] = redis.Options{Addrs: []string{one}, Stripe: 64 << 10}
		all["stripes that end"] = redis.Options{Addrs: []string{one}, Stripe: 64 << 10, TTL: time.Minute}
		all["another database"] = redis.Options{Addrs: []string{one}, Database: 3}
		all["resp"] = redis.Options{Addrs: []string{one}, Layout: redis.RESP, MayDelete: true}
		all["valkey"] = redis.Options{Addrs: []string{one}, Layout: redis.Valkey, Prefix: "site", TTL: time.Minute}
	}
	if cluster != "" {
		all["cluster"] = redis.Options{Addrs: []string{cluster}, Cluster: true, Stripe: 64 << 10}
		all["valkey in a cluster"] = redis.Options{Addrs: []string{cluster}, Cluster: true, Layout: redis.Valkey}
	}
	n := 0
	for name, o := range all {
		t.Run(name, func(t *testing.T) {
			tiertest.Run(t, func(t *testing.T) tier.Tier {
				n++ // each gets names of its own
				unique := fmt.Sprintf("test-%d-%d", time.Now().UnixNano(), n)
				o := o
				o.Names = tier.NewNames()
				other := tiertest.Key(0).Namespace
				other[15]++
				o.Names.Add(tiertest.Key(0).Namespace, unique, nil)
				o.Names.Add(other, unique, []byte("tenant"))
				if o.Layout == redis.Native {
					o.Prefix = unique + ":"
				}
				x, err := redis.Open(o)
				if err != nil {
					t.Fatal(err)
				}
				testkit.Eventually(t, "the server answers", func() bool { return x.Stat(t.Context(), []kv.Key{tiertest.Key(1)}, make([]tier.Meta, 1)) == nil })
				if o.Layout != redis.Native {
					return tiertest.WithSumsAndNames(x, o.Names, unique)
				}
				return x
			})
		})
	}
}

// TestRealEndsOfLives has a real server (KVASIR_REDIS) and a real cluster (KVASIR_REDIS_CLUSTER) end the lives of objects: they are
// misses at their end, and the server has removed all their values soon after it.
func TestRealEndsOfLives(t *testing.T) {
	one, cluster := os.Getenv("KVASIR_REDIS"), os.Getenv("KVASIR_REDIS_CLUSTER")
	if one == "" && cluster == "" {
		t.Skip("neither KVASIR_REDIS nor KVASIR_REDIS_CLUSTER names a server")
	}
	f := func(name string, o redis.Options) {
		t.Run(name, func(t *testing.T) {
			o.Prefix = fmt.Sprintf("lives-%s-%d:", name[:3], time.Now().UnixNano())
			x := open(t, o)
			testkit.Eventually(t, "the server answers", func() bool { return x.Stat(t.Context(), []kv.Key{tiertest.Key(1)}, make([]tier.Meta, 1)) == nil })
			tiertest.Mortal(t, x)
			if err := x.Delete(t.Context(), []kv.Key{tiertest.Key(1), tiertest.Key(2), tiertest.Key(3)}); err != nil {
				t.Fatal(err)
			}
			tiertest.Ending(t, x)
			if o.Cluster {
				return
			}
			if err := x.Delete(t.Context(), []kv.Key{tiertest.Key(7)}); err != nil {
				t.Fatal(err)
			}
			b, meta := tiertest.Object(8, 9000)
			meta.End = uint32(time.Now().Unix()) + 2
			if err := x.Write(t.Context(), tiertest.Key(8), meta, b); err != nil {
				t.Fatal(err)
			}
			raw := dialRaw(t, o.Addrs[0])
			testkit.Eventually(t, "the server has removed all values of the object", func() bool {
				v, err := raw.Do("KEYS", o.Prefix+"*")
				return err == nil && len(v.List) == 0
			})
		})
	}
	if one != "" {
		f("one value", redis.Options{Addrs: []string{one}})
		f("stripes", redis.Options{Addrs: []string{one}, Stripe: 4 << 10})
		f("ttl_seconds that is longer", redis.Options{Addrs: []string{one}, Stripe: 4 << 10, TTL: time.Hour})
	}
	if cluster != "" {
		f("cluster", redis.Options{Addrs: []string{cluster}, Cluster: true, Stripe: 4 << 10})
	}
}

// TestRealHottest asks a real server (KVASIR_REDIS) and a real cluster (KVASIR_REDIS_CLUSTER) for the hottest
// objects, by both of a server's ways of counting.
func TestRealHottest(t *testing.T) {
	one, cluster := os.Getenv("KVASIR_REDIS"), os.Getenv("KVASIR_REDIS_CLUSTER")
	if one == "" && cluster == "" {
		t.Skip("neither KVASIR_REDIS nor KVASIR_REDIS_CLUSTER names a server")
	}
	for addr, o := range map[string]redis.Options{one: {Addrs: []string{one}}, cluster: {Addrs: []string{cluster}, Cluster: true}} {
		if addr == "" {
			continue
		}
		o.Prefix = fmt.Sprintf("hot-%d:", time.Now().UnixNano())
		x := open(t, o)
		testkit.Eventually(t, "the server answers", func() bool { return x.Stat(t.Context(), []kv.Key{tiertest.Key(1)}, make([]tier.Meta, 1)) == nil })
		keys := objects(t, x, 20)
		seen := map[kv.Key]bool{}
		if err := x.Hottest(t.Context(), 100, func(k kv.Key, m tier.Meta) bool { seen[k] = m.Len > 0; return true }); err != nil || len(seen) != len(keys) {
			t.Errorf("%d of %d are named, %v", len(seen), len(keys), err)
		}
	}
}

// TestRealReshard moves slots of a real cluster (KVASIR_REDIS_CLUSTER) from one master to another with
// redis-cli (KVASIR_REDIS_CLI), while objects are read and written. No byte is wrong, no call stalls, and in
// the end all is there.
func TestRealReshard(t *testing.T) {
	cluster, cli := os.Getenv("KVASIR_REDIS_CLUSTER"), os.Getenv("KVASIR_REDIS_CLI")
	if cluster == "" || cli == "" {
		t.Skip("KVASIR_REDIS_CLUSTER names no server, or KVASIR_REDIS_CLI no program")
	}
	x := open(t, redis.Options{Addrs: []string{cluster}, Cluster: true, Stripe: 4 << 10, Prefix: fmt.Sprintf("reshard-%d:", time.Now().UnixNano())})
	l := newLoad(x, objects(t, x, 400))
	masters := masters(t, cluster)
	redirected := func() (asks, moves int) {
		for _, m := range masters {
			info, err := dialRaw(t, m.addr).Do("INFO", "errorstats")
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(info.Text) {
				var n int
				if _, err := fmt.Sscanf(line, "errorstat_ASK:count=%d", &n); err == nil {
					asks += n
				} else if _, err := fmt.Sscanf(line, "errorstat_MOVED:count=%d", &n); err == nil {
					moves += n
				}
			}
		}
		return asks, moves
	}
	asks, moves := redirected()
	l.start(t)
	began := time.Now()
	rounds, a, m := 0, asks, moves
	for ; rounds < 2 || rounds < 10 && (a == asks || m == moves); rounds++ {
		testkit.Eventually(t, "the servers agree", func() bool { return exec.CommandContext(t.Context(), cli, "--cluster", "check", cluster).Run() == nil })
		out, err := exec.CommandContext(t.Context(), cli, "--cluster", "reshard", cluster, "--cluster-from", masters[rounds%len(masters)].id, "--cluster-to", masters[(rounds+1)%len(masters)].id,
			"--cluster-slots", "2000", "--cluster-yes", "--cluster-pipeline", "1").CombinedOutput()
		if err != nil {
			t.Fatalf("redis-cli: %v\n%s", err, out[max(0, len(out)-2000):])
		}
		a, m = redirected()
	}
	took := time.Since(began)
	l.end(t)
	if l.slowest > 30*time.Second {
		t.Errorf("a call took %v", l.slowest)
	}
	testkit.Eventually(t, "all is there", func() bool { return l.missing(t) == 0 })
	if a == asks || m == moves {
		t.Errorf("%d times ASK, %d times MOVED: this tests nothing", a-asks, m-moves)
	}
	t.Logf("%d slots moved in %v: %d times ASK, %d times MOVED; %d reads and %d writes, of which %d and %d failed, the slowest took %v; none were missing in the end",
		2000*rounds, took.Round(time.Millisecond), a-asks, m-moves, l.reads, l.writes, l.readsFailed, l.writesFailed, l.slowest.Round(time.Millisecond))
}

// TestRealFailover ends a master of a real cluster (KVASIR_REDIS_CLUSTER) with SHUTDOWN.
// Meanwhile nothing is wrong and nothing hangs, and afterwards all is there again, for
// its replica had it.
func TestRealFailover(t *testing.T) {
	cluster := os.Getenv("KVASIR_REDIS_CLUSTER")
	if cluster == "" {
		t.Skip("KVASIR_REDIS_CLUSTER names no server")
	}
	x := open(t, redis.Options{Addrs: []string{cluster}, Cluster: true, Stripe: 4 << 10, Prefix: fmt.Sprintf("failover-%d:", time.Now().UnixNano()), Timeout: 10 * time.Second})
	keys := objects(t, x, 60)
	missing := func() (n int) {
		for i, k := range keys {
			want, meta := tiertest.Object(i, 9<<10)
			dst := make([]byte, len(want))
			began := time.Now()
			m, err := x.Read(t.Context(), k, dst)
			if err == nil && (m != meta || !bytes.Equal(dst, want)) {
				t.Fatalf("object %d: wrong bytes", i)
			}
			if took := time.Since(began); took > 60*time.Second {
				t.Fatalf("object %d: %v", i, took)
			}
			if err != nil {
				n++
			}
		}
		return n
	}
	if n := missing(); n > 0 {
		t.Fatalf("%d of %d are missing before anything happened", n, len(keys))
	}
	master := anotherMaster(t, cluster)
	c := dialRaw(t, master)
	_, _ = c.Do("SHUTDOWN", "NOSAVE")
	most := 0
	for range 5 {
		most = max(most, missing())
	}
	testkit.Eventually(t, "all is there again", func() bool { return missing() == 0 })
	b, meta := tiertest.Object(100, 9<<10)
	for i := range keys {
		write(t, x, tiertest.Key(1000+i), meta, b)
	}
	t.Logf("%s ended: at most %d of %d were missing", master, most, len(keys))
}

func dialRaw(t *testing.T, addr string) *resp.Conn {
	network := "tcp"
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		network, addr = "unix", path
	}
	nc, err := net.Dial(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	_ = nc.SetDeadline(time.Now().Add(30 * time.Second))
	return resp.New(nc)
}

// master is one of a cluster.
type master struct{ addr, id string }

func masters(t *testing.T, addr string) (all []master) {
	r, err := dialRaw(t, addr).Do("CLUSTER", "SLOTS")
	if err != nil {
		t.Fatal(err)
	}
	for _, item := range r.List {
		m := item.List[2].List
		one := master{fmt.Sprintf("%s:%d", m[0].Text, m[1].Int), m[2].Text}
		if !slices.Contains(all, one) {
			all = append(all, one)
		}
	}
	return all
}

// anotherMaster returns the address of a master that is not at addr.
func anotherMaster(t *testing.T, addr string) string {
	for _, m := range masters(t, addr) {
		if m.addr != addr {
			return m.addr
		}
	}
	t.Fatal("a cluster of one")
	return ""
}
