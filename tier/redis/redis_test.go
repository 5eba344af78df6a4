// SPDX-License-Identifier: Apache-2.0

package redis_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/redis"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestValidate(t *testing.T) { testkit.CheckNumbers[redis.Options](t) }

func open(t *testing.T, o redis.Options) *redis.Tier {
	t.Helper()
	if o.Names == nil {
		o.Names = tiertest.Names()
	}
	x, err := redis.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	return x
}

func TestTier(t *testing.T) {
	server, client := certificates(t)
	for name, o := range map[string]redis.Options{
		"one value": {}, "stripes": {Stripe: 64 << 10}, "stripes that end": {Stripe: 64 << 10, TTL: time.Hour}, "with a login and a database": {Username: "u", Password: "p", Database: 3},
		"UNIX socket": {}, "TLS": {TLS: client}, "resp": {Layout: redis.RESP, MayDelete: true}, "valkey": {Layout: redis.Valkey, Prefix: "site", TTL: time.Hour},
		"one connection": {Workers: 1, Lookups: 1}, "cluster": {Cluster: true, Stripe: 64 << 10}, "sentinel": {Sentinel: "main"},
	} {
		t.Run(name, func(t *testing.T) {
			tiertest.Run(t, func(t *testing.T) tier.Tier {
				o := o
				o.Names = tiertest.Names()
				switch {
				case name == "UNIX socket":
					l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
					if err != nil {
						t.Fatal(err)
					}
					newFakeOn(t, l)
					o.Addrs = []string{"unix:" + l.Addr().String()}
				case o.TLS != nil:
					l, err := tls.Listen("tcp", "127.0.0.1:0", server)
					if err != nil {
						t.Fatal(err)
					}
					o.Addrs = []string{newFakeOn(t, l).addr}
				case o.Cluster:
					o.Addrs = []string{newCluster(t, 3)[0].addr}
				case o.Sentinel != "":
					o.Addrs = []string{newSentinel(t, newFake(t).addr).addr}
				default:
					o.Addrs = []string{newFake(t).addr}
				}
				x, err := redis.Open(o)
				if err != nil {
					t.Fatal(err)
				}
				if o.Layout != redis.Native {
					return tiertest.WithSums(x)
				}
				return x
			})
		})
	}
}

// certificates returns the certificate of a server at 127.0.0.1, and a pool that trusts it.
func certificates(t *testing.T) (server, client *tls.Config) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}, &tls.Config{RootCAs: pool}
}

// A server whose certificate no authority signed gets neither objects nor a password.
func TestUnknownCertificateIsRefused(t *testing.T) {
	server, _ := certificates(t)
	_, other := certificates(t)
	l, err := tls.Listen("tcp", "127.0.0.1:0", server)
	if err != nil {
		t.Fatal(err)
	}
	f := newFakeOn(t, l)
	x := open(t, redis.Options{Addrs: []string{f.addr}, TLS: other, Password: "secret"})
	b, meta := tiertest.Object(1, 100)
	if err := x.Write(t.Context(), tiertest.Key(1), meta, b); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("Write: %v", err)
	}
	if f.called("AUTH") > 0 {
		t.Error("it was told the password")
	}
}

// Names and bytes in the database are those that LMCache's resp adapter writes and
// reads, and the Tier finds the objects that it wrote.
func TestLMCacheBytes(t *testing.T) {
	var vector struct {
		Objects []struct {
			Name   string `json:"name"`
			Fill   int    `json:"fill_index"`
			Salt   string `json:"salt"`
			Hash   string `json:"chunk_hash_hex"`
			Length int    `json:"length"`
			Digest string `json:"logical_sha256"`
		} `json:"objects"`
		Wire []struct {
			From string `json:"from"`
			Head string `json:"head_hex"`
		} `json:"wire"`
	}
	testkit.ReadVector(t, "lmcache-mp/l2_resp.json", &vector)
	f := newFake(t)
	for _, layout := range []redis.Layout{redis.RESP, redis.Valkey} {
		n := tier.NewNames()
		x := open(t, redis.Options{Addrs: []string{f.addr}, Layout: layout, Names: n})
		for i, o := range vector.Objects {
			k := kv.Key{Namespace: kv.Namespace{1, byte(len(o.Salt))}, Rank: 0x01000100}
			if _, err := hex.Decode(k.Chunk[:], []byte(o.Hash)); err != nil {
				t.Fatal(err)
			}
			n.Add(k.Namespace, "org/model-7b", []byte(o.Salt))
			data := make([]byte, o.Length)
			for j := range data {
				data[j] = byte((31*j + 17*o.Fill + 7) % 251)
			}
			if fmt.Sprintf("%x", sha256.Sum256(data)) != o.Digest {
				t.Fatal("the test's own data are wrong")
			}
			f.drop(o.Name)
			if err := x.Write(t.Context(), k, tier.Meta{Len: int64(o.Length)}, data); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(f.value(o.Name), data) {
				t.Errorf("object %d: the database has %d bytes under %s", i, len(f.value(o.Name)), o.Name)
			}
			f.drop(o.Name)
			f.set(o.Name, data) // as LMCache would have
			var metas [1]tier.Meta
			dst := make([]byte, o.Length)
			if err := x.Stat(t.Context(), []kv.Key{k}, metas[:]); err != nil || metas[0] != (tier.Meta{Len: int64(o.Length), NoSum: true}) {
				t.Errorf("Stat: %+v, %v", metas, err)
			}
			if m, err := x.Read(t.Context(), k, dst); err != nil || m != metas[0] || !bytes.Equal(dst, data) {
				t.Errorf("Read: %+v, %v", m, err)
			}
		}
	}
	if len(vector.Objects) < 4 || len(f.names()) != len(vector.Objects) {
		t.Errorf("%d names for %d objects", len(f.names()), len(vector.Objects))
	}
	sets := 0
	for _, w := range vector.Wire {
		head, _ := hex.DecodeString(w.Head)
		if w.From == "adapter" && strings.Contains(string(head), "SET") {
			sets++ // what LMCache sends is what the fake server read from us: SET, name, value, no options
			if !strings.HasPrefix(string(head), "*3\r\n$3\r\nSET\r\n") {
				t.Errorf("LMCache sends %q", head)
			}
		}
	}
	if sets == 0 {
		t.Error("no SET was recorded")
	}
}

// A value of LMCache's layout that has another length is not served, and replaced by the
// next write; one of the right length is not sent again.
func TestWrongLengthHeals(t *testing.T) {
	for _, length := range []int{50, 99, 101, 200, 0} {
		f := newFake(t)
		x := open(t, redis.Options{Addrs: []string{f.addr}, Layout: redis.RESP})
		k := tiertest.Key(1)
		b, meta := tiertest.Object(1, 100)
		write(t, x, k, meta, b)
		name := f.names()[0]
		f.set(name, make([]byte, length))
		dst := bytes.Repeat([]byte{0xee}, 100)
		_, err := x.Read(t.Context(), k, dst)
		if _, corrupt := errors.AsType[*tier.CorruptError](err); !corrupt && !(length == 0 && errors.Is(err, tier.ErrMissing)) {
			t.Errorf("%d bytes: Read: %v", length, err)
		}
		write(t, x, k, meta, b)
		if !bytes.Equal(f.value(name), b) {
			t.Errorf("%d bytes: it was not replaced", length)
		}
		sets := f.called("SET")
		write(t, x, k, meta, b)
		if f.called("SET") != sets {
			t.Error("what was there was sent again")
		}
	}
}

func write(t *testing.T, x tier.Tier, k kv.Key, m tier.Meta, b []byte) {
	t.Helper()
	if err := x.Write(t.Context(), k, m, b); err != nil {
		t.Fatal(err)
	}
}

func has(t *testing.T, x tier.Tier, keys ...kv.Key) (all []bool) {
	t.Helper()
	metas := make([]tier.Meta, len(keys))
	if err := x.Stat(t.Context(), keys, metas); err != nil {
		t.Fatal(err)
	}
	for _, m := range metas {
		all = append(all, m.Len > 0)
	}
	return all
}

// An object without one of its stripes, or with a torn one, is not there, leaves nothing
// behind, and can be written again.
func TestPartialSetIsAbsent(t *testing.T) {
	damages := map[string]func(f *fake, name string){
		"gone":  func(f *fake, name string) { f.drop(name) },
		"short": func(f *fake, name string) { f.set(name, f.value(name)[1:]) },
		"long":  func(f *fake, name string) { f.set(name, append(f.value(name), 0)) },
		"list": func(f *fake, name string) {
			f.drop(name)
			f.mu.Lock()
			f.lists[name] = true
			f.mu.Unlock()
		},
	}
	for what, damage := range damages {
		for stripe := range 4 {
			f := newFake(t)
			x := open(t, redis.Options{Addrs: []string{f.addr}, Stripe: 4 << 10})
			k, other := tiertest.Key(1), tiertest.Key(2)
			b, meta := tiertest.Object(1, 15<<10) // four stripes, the last one smaller
			write(t, x, k, meta, b)
			write(t, x, other, meta, b)
			mine := func() (all []string) {
				for _, name := range f.names() {
					if strings.Contains(name, k.String()) {
						all = append(all, name)
					}
				}
				return all
			}
			if len(mine()) != 4 {
				t.Fatal(mine())
			}
			damage(f, mine()[stripe])
			if stripe > 0 || what == "gone" || what == "list" { // of the first one only the header is looked at
				if got := has(t, x, k, other); got[0] || !got[1] {
					t.Errorf("stripe %d %s: Stat finds %v", stripe, what, got)
				}
			}
			dst := make([]byte, len(b))
			if _, err := x.Read(t.Context(), k, dst); !errors.Is(err, tier.ErrMissing) {
				t.Errorf("stripe %d %s: Read: %v", stripe, what, err)
			}
			if what == "list" {
				continue // another program's value: it stays, and nothing is written
			}
			if left := mine(); stripe > 0 && len(left) > 0 {
				t.Errorf("stripe %d %s: left are %q", stripe, what, left)
			}
			write(t, x, k, meta, b)
			if m, err := x.Read(t.Context(), k, dst); err != nil || m != meta || !bytes.Equal(dst, b) {
				t.Errorf("stripe %d %s: after a new write: %+v, %v", stripe, what, m, err)
			}
		}
	}
}

// The stripes of a writer that did not finish have an end of life in some minutes; those of an
// object have none.
func TestStraysEnd(t *testing.T) {
	f := newFake(t)
	x := open(t, redis.Options{Addrs: []string{f.addr}, Stripe: 4 << 10})
	b, meta := tiertest.Object(1, 15<<10)
	f.misbehave(func(cmd []string, normal []byte, c net.Conn) ([]byte, bool) {
		if cmd[0] == "SET" && strings.HasSuffix(cmd[1], "}") {
			f.drop(cmd[1])
			return []byte("-OOM command not allowed when used memory > 'maxmemory'.\r\n"), true
		}
		return nil, false
	})
	if err := x.Write(t.Context(), tiertest.Key(1), meta, b); !errors.Is(err, tier.ErrNotKept) {
		t.Errorf("Write: %v", err)
	}
	left := f.names()
	if len(left) != 3 {
		t.Fatal(left)
	}
	for _, name := range left {
		if !f.ends[name] {
			t.Errorf("%s stays for ever", name)
		}
	}
	f.misbehave(nil)
	write(t, x, tiertest.Key(1), meta, b)
	for _, name := range f.names() {
		if f.ends[name] {
			t.Errorf("%s of a whole object ends", name)
		}
	}
}

// If two servers write one object at the same time, with different bytes, one version stays
// whole, and nothing of the other.
func TestTwoWriters(t *testing.T) {
	f := newFake(t)
	k := tiertest.Key(1)
	first, firstMeta := tiertest.Object(1, 15<<10)
	second, secondMeta := tiertest.Object(2, 15<<10)
	a := open(t, redis.Options{Addrs: []string{f.addr}, Stripe: 4 << 10})
	z := open(t, redis.Options{Addrs: []string{f.addr}, Stripe: 4 << 10})
	var begun atomic.Bool
	f.misbehave(func(cmd []string, normal []byte, c net.Conn) ([]byte, bool) {
		if cmd[0] == "SET" && !strings.HasSuffix(cmd[1], "}") {
			if begun.CompareAndSwap(false, true) { // in the middle of a's
				write(t, z, k, secondMeta, second)
			}
		}
		return nil, false
	})
	write(t, a, k, firstMeta, first)
	dst := make([]byte, len(first))
	if m, err := a.Read(t.Context(), k, dst); err != nil || m != secondMeta || !bytes.Equal(dst, second) {
		t.Errorf("Read: %+v, %v", m, err)
	}
	if n := len(f.names()); n != 4 {
		t.Errorf("%d values of one object with four stripes: %q", n, f.names())
	}
	write(t, a, k, firstMeta, first) // later: the new one replaces the old one
	if m, err := z.Read(t.Context(), k, dst); err != nil || m != firstMeta || !bytes.Equal(dst, first) || len(f.names()) != 4 {
		t.Errorf("Read after it was replaced: %+v, %v, %q", m, err, f.names())
	}
}

// A value of another program under a name of this tier stays there.
func TestForeignDataStay(t *testing.T) {
	for _, layout := range []redis.Layout{redis.Native, redis.Valkey} {
		f := newFake(t)
		x := open(t, redis.Options{Addrs: []string{f.addr}, Layout: layout})
		b, meta := tiertest.Object(1, 100)
		k := tiertest.Key(1)
		write(t, x, k, meta, b)
		name := f.names()[0]
		f.drop(name)
		f.mu.Lock()
		f.lists[name] = true
		f.mu.Unlock()
		if got := has(t, x, k); got[0] {
			t.Error("Stat finds it")
		}
		if _, err := x.Read(t.Context(), k, make([]byte, 100)); !errors.Is(err, tier.ErrMissing) {
			t.Errorf("Read: %v", err)
		}
		if err := x.Write(t.Context(), k, meta, b); !errors.Is(err, tier.ErrNotKept) {
			t.Errorf("Write: %v", err)
		}
		if layout == redis.Native {
			if err := x.Delete(t.Context(), []kv.Key{k}); err != nil || f.called("UNLINK") > 0 {
				t.Errorf("Delete: %v, %d UNLINK", err, f.called("UNLINK"))
			}
		}
	}
}

// In the layout of LMCache's resp adapters the Tier deletes nothing from a database, and does not
// fill it.
func TestRESPSparesLMCache(t *testing.T) {
	f := newFake(t)
	f.misbehave(func(cmd []string, normal []byte, c net.Conn) ([]byte, bool) {
		return bulk([]byte("used_memory:890000\r\nmaxmemory:1000000\r\nmaxmemory_policy:noeviction\r\n")), cmd[0] == "INFO"
	})
	x := open(t, redis.Options{Addrs: []string{f.addr}, Layout: redis.RESP})
	testkit.Eventually(t, "the memory is known", func() bool { return x.Space().Limit == 1000000 })
	b, meta := tiertest.Object(1, 6000)
	write(t, x, tiertest.Key(1), meta, b)
	if err := x.Write(t.Context(), tiertest.Key(2), meta, b); !errors.Is(err, tier.ErrNotKept) {
		t.Errorf("Write beyond nine tenths: %v", err)
	}
	if err := x.Delete(t.Context(), []kv.Key{tiertest.Key(1)}); !errors.Is(err, tier.ErrNotKept) || !has(t, x, tiertest.Key(1))[0] || f.called("UNLINK")+f.called("DEL") > 0 {
		t.Errorf("Delete: %v", err)
	}
	y := open(t, redis.Options{Addrs: []string{f.addr}, Layout: redis.Valkey})
	testkit.Eventually(t, "the memory is known", func() bool { return y.Space().Limit == 1000000 })
	if err := y.Write(t.Context(), tiertest.Key(2), meta, b); err != nil {
		t.Errorf("Write in the layout whose clients survive it: %v", err)
	}
}

// If the user may not ask for the memory, the Tier writes nothing to a database of LMCache's resp adapters
// or to one with a Limit, and logs the reason.
func TestUnknownMemoryIsNotFilled(t *testing.T) {
	for _, o := range []redis.Options{{Layout: redis.RESP}, {Limit: 1 << 30}} {
		f := newFake(t)
		f.misbehave(func(cmd []string, _ []byte, _ net.Conn) ([]byte, bool) {
			return []byte("-NOPERM User x has no permissions to run the 'info' command\r\n"), cmd[0] == "INFO"
		})
		var log bytes.Buffer
		var mu sync.Mutex
		o.Addrs, o.Log = []string{f.addr}, slog.New(slog.NewTextHandler(locked{&mu, &log}, nil))
		x := open(t, o)
		b, meta := tiertest.Object(1, 6000)
		for i := range 3 {
			if err := x.Write(t.Context(), tiertest.Key(i), meta, b); !errors.Is(err, tier.ErrNotKept) {
				t.Errorf("layout %d: Write: %v", o.Layout, err)
			}
		}
		mu.Lock()
		if strings.Count(log.String(), "let the user call INFO") != 1 {
			t.Errorf("layout %d: %s", o.Layout, &log)
		}
		mu.Unlock()
	}
}

// The Tier knows the memory that a server uses before it writes anything to it.
func TestFirstWriteKnowsTheMemory(t *testing.T) {
	f := newFake(t)
	f.misbehave(func(cmd []string, _ []byte, _ net.Conn) ([]byte, bool) {
		if cmd[0] != "INFO" {
			return nil, false
		}
		time.Sleep(50 * time.Millisecond)
		return bulk([]byte("used_memory:990000\r\nmaxmemory:1000000\r\nmaxmemory_policy:noeviction\r\n")), true
	})
	x := open(t, redis.Options{Addrs: []string{f.addr}, Layout: redis.RESP})
	b, meta := tiertest.Object(1, 6000)
	if err := x.Write(t.Context(), tiertest.Key(1), meta, b); !errors.Is(err, tier.ErrNotKept) {
		t.Errorf("Write to a server that is nearly full: %v", err)
	}
}

func TestOpenRefuses(t *testing.T) {
	f := func(want string, o redis.Options) {
		t.Helper()
		x, err := redis.Open(o)
		if err == nil {
			x.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	f("no address", redis.Options{})
	f("several addresses", redis.Options{Addrs: []string{"a:1", "b:2"}})
	f("no host:port", redis.Options{Addrs: []string{"a"}})
	f("no host:port", redis.Options{Addrs: []string{"unix:"}})
	f("need Options.Names", redis.Options{Addrs: []string{"a:1"}, Layout: redis.RESP})
	f("Sentinel", redis.Options{Addrs: []string{"a:1"}, Cluster: true, Sentinel: "m"})
	f("Database", redis.Options{Addrs: []string{"a:1"}, Cluster: true, Database: 1})
	f("TTL", redis.Options{Addrs: []string{"a:1"}, Layout: redis.RESP, TTL: time.Hour, Names: tiertest.Names()})
	f("Prefix", redis.Options{Addrs: []string{"a:1"}, Prefix: "{x}"})
	f("Prefix", redis.Options{Addrs: []string{"a:1"}, Layout: redis.Valkey, Prefix: "a@b", Names: tiertest.Names()})
	f("Stripe", redis.Options{Addrs: []string{"a:1"}, Stripe: 100})
}

// With a user that may only read, reads go on, and the log says once that nothing is written.
func TestReadOnlyUser(t *testing.T) {
	f := newFake(t)
	b, meta := tiertest.Object(1, 6000)
	write(t, open(t, redis.Options{Addrs: []string{f.addr}, Stripe: 4 << 10}), tiertest.Key(1), meta, b)
	f.misbehave(func(cmd []string, normal []byte, c net.Conn) ([]byte, bool) {
		return []byte("-NOPERM User reader has no permissions to run the command\r\n"), slices.Contains([]string{"SET", "SETNX", "DEL", "UNLINK", "EXPIRE", "PERSIST"}, cmd[0])
	})
	var log bytes.Buffer
	var mu sync.Mutex
	x := open(t, redis.Options{Addrs: []string{f.addr}, Stripe: 4 << 10, Log: slog.New(slog.NewTextHandler(locked{&mu, &log}, nil))})
	for range 3 {
		if err := x.Write(t.Context(), tiertest.Key(2), meta, b); !errors.Is(err, tier.ErrNotKept) {
			t.Errorf("Write: %v", err)
		}
		dst := make([]byte, len(b))
		if m, err := x.Read(t.Context(), tiertest.Key(1), dst); err != nil || m != meta || !bytes.Equal(dst, b) {
			t.Errorf("Read: %+v, %v", m, err)
		}
	}
	if got := has(t, x, tiertest.Key(1), tiertest.Key(2)); !got[0] || got[1] {
		t.Errorf("there: %v", got)
	}
	mu.Lock()
	defer mu.Unlock()
	if text := log.String(); strings.Count(text, "refuses writes") != 1 || strings.Count(text, "level=WARN") != 1 || strings.Contains(text, "level=ERROR") {
		t.Errorf("%q", text)
	}
}

// locked is a Buffer to which several goroutines write.
type locked struct {
	mu *sync.Mutex
	*bytes.Buffer
}

func (l locked) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.Buffer.Write(b)
}

// The object that was used last is the hottest, or the one used most often if the server counts uses. If a server
// does not tell, Hottest still returns its objects.
func TestHottest(t *testing.T) {
	f := newFake(t)
	x := open(t, redis.Options{Addrs: []string{f.addr}, Stripe: 4 << 10})
	keys := objects(t, x, 8)
	f.set("others", []byte("theirs"))
	place := func(name string) int { // of an object, by its name
		return slices.IndexFunc(keys, func(k kv.Key) bool { return strings.Contains(name, k.Chunk.String()) })
	}
	for counts, heat := range map[string]func(i int) int{"IDLETIME": func(i int) int { return i * 5 % 8 }, "FREQ": func(i int) int { return 7 - i*5%8 }, "nothing": nil} {
		f.misbehave(func(cmd []string, _ []byte, _ net.Conn) ([]byte, bool) {
			switch {
			case cmd[0] != "OBJECT":
				return nil, false
			case cmd[1] == counts:
				return fmt.Appendf(nil, ":%d\r\n", heat(place(cmd[2]))), true
			}
			return []byte("-ERR An LFU maxmemory policy is not selected, access frequency not tracked.\r\n"), true
		})
		var got []int
		if err := x.Hottest(t.Context(), 5, func(k kv.Key, m tier.Meta) bool {
			got = append(got, slices.Index(keys, k))
			return m.Len > 0
		}); err != nil || len(got) != 5 {
			t.Fatalf("%s: %v, %v", counts, got, err)
		}
		if want := []int{0, 5, 2, 7, 4}; heat != nil && !slices.Equal(got, want) { // i*5%8 is 0, 1, 2, 3, 4 there
			t.Errorf("%s: %v, want %v", counts, got, want)
		}
	}
	y := open(t, redis.Options{Addrs: []string{f.addr}, Layout: redis.RESP})
	if err := y.Hottest(t.Context(), 4, nil); !errors.Is(err, tier.ErrNoList) {
		t.Errorf("LMCache's names: %v", err)
	}
}
