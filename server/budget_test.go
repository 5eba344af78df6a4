package server_test

import (
	"bytes"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// What a message claims or repeats takes no memory beyond its own, and a long
// request uid is not sent back.
func TestMessagesTakeNoMoreThanTheirLength(t *testing.T) {
	d := newDesk(t, server.Options{})
	d.register(7, 1, 4)
	const n = 8 << 20
	maps := append([]byte{0xdd, 0, 0x80, 0, 0}, bytes.Repeat([]byte{0x80}, n)...)
	f := func(name string, m ...[]byte) {
		t.Helper()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		reply := d.Answer(m)
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > n/2 {
			t.Errorf("%s of %d MiB took %d MiB", name, n>>20, got>>20)
		}
		size := 0
		for _, b := range reply {
			size += len(b)
		}
		if size > 4096 {
			t.Errorf("%s: the reply has %d bytes", name, size)
		}
	}
	op := func(o lmcache.Op) []byte { return lmcache.AppendOp(nil, o) }
	id := lmcache.AppendInt(nil, 7)
	f("a list of empty records", []byte{1}, op(lmcache.OpReportBlockAllocation), id, lmcache.AppendString(nil, "m"), maps)
	f("a key that is a list", []byte{1}, op(lmcache.OpLookup), maps, lmcache.AppendInt(nil, 1))
	f("block ids", []byte{1}, op(lmcache.OpStore), deskKey(1, 0, 1, "r").Append(nil), id, maps, lmcache.AppendBytes(nil, nil))
	f("object keys", []byte{1}, op(lmcache.OpP2PUnlockObjects), maps)
	f("object keys to look up", []byte{1}, op(lmcache.OpP2PLookupAndLock), maps)
	f("a long uid", make([]byte, n), op(lmcache.OpNoop))
	f("a long request id", []byte{1}, op(lmcache.OpEndSession), lmcache.AppendString(nil, string(make([]byte, n))))
	f("a registration", []byte{1}, op(lmcache.OpRegisterEngineDriven), maps)
	f("groups of a lent KV", append([][]byte{{1}, op(lmcache.OpRegisterKVCache)}, lentFrames(maps)...)...)
}

// lentFrames are a registration's with one frame replaced by every other.
func lentFrames(bad []byte) [][]byte {
	reg := lmcache.KVCache{InstanceID: 9, Model: "m", WorldSize: 1, EngineType: "vllm", KVLayout: "NHD", Descriptors: []lmcache.Descriptor{descriptor("/lmcache_kv_1_1")}}
	frames := reg.Frames()
	frames[len(frames)-1] = bad
	return frames
}

// A refused registration keeps and logs a bounded part of what the peer sent.
func TestRefusedRegistrationKeepsLittle(t *testing.T) {
	d := newDesk(t, server.Options{})
	long := string(bytes.Repeat([]byte("A\x1b]0;\n"), 1<<20))
	for id := range int64(20) {
		desc := descriptor("/lmcache_kv_1_1")
		desc.Type = long
		reg := lmcache.KVCache{InstanceID: id, Model: "m", WorldSize: 1, EngineType: "vllm", KVLayout: "NHD", Descriptors: []lmcache.Descriptor{desc}}
		d.ask(lmcache.OpRegisterKVCache, reg.Frames()...)
		desc.Type, desc.DType = lmcache.CPUShm, long
		reg.Descriptors = []lmcache.Descriptor{desc}
		d.ask(lmcache.OpRegisterKVCache, reg.Frames()...)
		reg.KVLayout, reg.Descriptors = long, []lmcache.Descriptor{descriptor("/lmcache_kv_1_1")}
		d.ask(lmcache.OpRegisterKVCache, reg.Frames()...)
	}
	if n := len(d.log.String()); n > 64<<10 {
		t.Errorf("%d KiB were logged", n>>10)
	}
	if n := len(get(d.Server, "/status")); n > 64<<10 {
		t.Errorf("/status has %d KiB", n>>10)
	}
}

// Pages of other sites, and names that lead here, read no status and clear nothing;
// probes and metrics answer under any name.
func TestPagesOfOtherSitesAreRefused(t *testing.T) {
	d := newDesk(t, server.Options{AllowHosts: []string{"cache.example"}})
	d.register(7, 1, 4)
	d.put(7, deskKey(1, 0, 2, "a"))
	h := d.HTTPHandler()
	f := func(want int, method, url, body string, header ...string) {
		t.Helper()
		r := httptest.NewRequest(method, url, strings.NewReader(body))
		for i := 0; i < len(header); i += 2 {
			r.Header.Add(header[i], header[i+1])
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != want {
			t.Errorf("%s %s %q: %d, want %d", method, url, header, w.Code, want)
		}
		if want == 403 && strings.Contains(w.Body.String(), "workers") {
			t.Errorf("%s %s tells %s", method, url, w.Body)
		}
	}
	const clear = "/cache/clear"
	f(403, "POST", "http://127.0.0.1"+clear, "", "Origin", "https://evil.example")
	f(403, "POST", "http://127.0.0.1"+clear, "", "Sec-Fetch-Site", "cross-site")
	f(415, "POST", "http://127.0.0.1"+clear, `{"tier":"l1","force":true}`, "Content-Type", "text/plain")
	f(403, "POST", "http://attacker.example"+clear, "")
	f(403, "GET", "http://attacker.example/status", "")
	f(200, "GET", "http://attacker.example/healthcheck", "")
	f(200, "GET", "http://attacker.example/metrics", "")
	f(200, "GET", "http://cache.example:8080/status", "")
	if n := d.hit(1, 2, "b"); n != 2 {
		t.Errorf("%d of 2 chunks are left", n)
	}
	f(200, "POST", "http://127.0.0.1"+clear, "")
}
