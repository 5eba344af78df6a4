// SPDX-License-Identifier: Apache-2.0

package s3_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/s3"
	"github.com/kvasir-kv/kvasir/tier/s3/aws"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

func TestValidate(t *testing.T) {
	testkit.CheckNumbers[s3.Options](t)
	for field, o := range map[string]s3.Options{
		"URL": {URL: "s3://bucket"}, "Prefix": {Prefix: "a"}, "Part": {Part: 100}, "Upload": {Upload: 1 << 20}, "Layout": {Layout: 7},
	} {
		if err := o.Validate(); err == nil || !strings.HasPrefix(err.Error(), field+" ") {
			t.Errorf("%s: %v", field, err)
		}
	}
}

func keys() *aws.Keeper { return aws.Keep(aws.Static{ID: "id", Secret: "secret"}) }

func open(t *testing.T, o s3.Options) *s3.Tier {
	t.Helper()
	if o.Names == nil {
		o.Names = tiertest.Names()
	}
	if o.Keys == nil {
		o.Keys = keys()
	}
	x, err := s3.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	return x
}

func write(t *testing.T, x tier.Tier, k kv.Key, m tier.Meta, b []byte) {
	t.Helper()
	if err := x.Write(t.Context(), k, m, b); err != nil {
		t.Fatal(err)
	}
}

func stat(t *testing.T, x tier.Tier, k kv.Key) tier.Meta {
	t.Helper()
	metas := make([]tier.Meta, 1)
	if err := x.Stat(t.Context(), []kv.Key{k}, metas); err != nil {
		t.Fatal(err)
	}
	return metas[0]
}

// requests returns how many requests of a kind a Tier has sent.
func requests(x *s3.Tier, kind string) uint64 {
	r, _ := x.Requests()
	return r.Requests[kind]
}

func TestTier(t *testing.T) {
	for name, o := range map[string]s3.Options{
		"native": {}, "parts and pages": {Part: 64 << 10}, "LMCache's with a prefix": {Layout: s3.LMCache, Prefix: "a b/%c/"}, "one request at a time": {Workers: 1, Lookups: 1, Part: 64 << 10}, "TLS": {},
		"virtual style, no conditions, nobody": {Overwrite: true, Keys: aws.Keep(aws.Anonymous{})},
	} {
		t.Run(name, func(t *testing.T) {
			tiertest.Run(t, func(t *testing.T) tier.Tier {
				o := o
				o.Names = tiertest.Names()
				if o.Keys == nil {
					o.Keys = keys()
				}
				var f *fake
				switch name {
				case "TLS":
					f = startFake(t, httptest.NewTLSServer, "/bucket")
					o.TLS = f.Client().Transport.(*http.Transport).TLSClientConfig
				case "virtual style, no conditions, nobody":
					f = startFake(t, httptest.NewServer, "")
				default:
					f = newFake(t)
				}
				if name == "parts and pages" {
					f.pages = 3
				}
				o.URL = f.url
				x, err := s3.Open(o)
				if err != nil {
					t.Fatal(err)
				}
				if o.Layout == s3.LMCache {
					return struct{ tier.Tier }{x} // it does not list
				}
				return x
			})
		})
	}
}

// Large objects are uploaded in parts and are whole afterwards; a part that fails leaves
// neither an object nor parts.
func TestUploadInParts(t *testing.T) {
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url, Upload: 5 << 20, Part: 3 << 20, Tries: 1})
	for i, size := range []int{5<<20 + 1, 11 << 20} {
		k := tiertest.Key(i)
		b, meta := tiertest.Object(i, size)
		write(t, x, k, meta, b)
		dst := make([]byte, size)
		if m, err := x.Read(t.Context(), k, dst); err != nil || m != meta || !bytes.Equal(dst, b) {
			t.Errorf("%d bytes: %+v, %v", size, m, err)
		}
	}
	if posts, puts := requests(x, "POST"), requests(x, "PUT"); posts != 4 || puts != 2+3 {
		t.Errorf("%d POST and %d PUT", posts, puts)
	}
	for _, bad := range []string{"partNumber=2", "CompleteMultipartUpload"} {
		f.misbehave(func(w http.ResponseWriter, r *http.Request, _ *httptest.ResponseRecorder) bool {
			if strings.Contains(r.URL.RawQuery, bad) || bad[0] == 'C' && r.Method == http.MethodPost && r.URL.Query().Has("uploadId") {
				// The second one is a success by its status: S3 begins to answer before it knows.
				w.WriteHeader(map[bool]int{true: 200, false: 500}[bad[0] == 'C'])
				_, _ = w.Write([]byte("<Error><Code>InternalError</Code></Error>"))
				return true
			}
			return false
		})
		b, meta := tiertest.Object(9, 11<<20)
		if err := x.Write(t.Context(), tiertest.Key(9), meta, b); err == nil || errors.Is(err, tier.ErrNotKept) {
			t.Errorf("%s fails: %v", bad, err)
		}
		f.misbehave(nil)
		f.mu.Lock()
		if left := len(f.uploads); left > 0 && bad[0] != 'C' {
			t.Errorf("%s fails: %d uploads are left", bad, left)
		}
		f.mu.Unlock()
	}
}

// Names, bytes and headers are those that LMCache's s3 adapter sends, except our mark,
// which that ignores. The tier finds the objects that the adapter wrote.
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
		Requests []struct {
			Method string `json:"method"`
			Path   string `json:"path"`
		} `json:"requests"`
	}
	testkit.ReadVector(t, "lmcache-mp/l2_s3.json", &vector)
	f := startFake(t, httptest.NewServer, "") // virtual style, as LMCache's
	var mu sync.Mutex
	var paths []string
	f.misbehave(func(_ http.ResponseWriter, r *http.Request, _ *httptest.ResponseRecorder) bool {
		mu.Lock()
		defer mu.Unlock()
		paths = append(paths, r.RequestURI)
		return false
	})
	n := tier.NewNames()
	x := open(t, s3.Options{URL: f.url, Layout: s3.LMCache, Names: n})
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
		write(t, x, k, tier.Meta{Len: int64(o.Length), Sum: 5}, data)
		if !bytes.Equal(f.get(o.Name).data, data) {
			t.Errorf("object %d: the bucket has %q", i, f.names())
		}
		if got := stat(t, x, k); got != (tier.Meta{Len: int64(o.Length), Sum: 5}) {
			t.Errorf("what we wrote: %+v", got)
		}
		f.set(o.Name, stored{data, ""}) // as LMCache would have
		want := tier.Meta{Len: int64(o.Length), NoSum: true}
		if got := stat(t, x, k); got != want {
			t.Errorf("what LMCache wrote: %+v", got)
		}
		dst := make([]byte, o.Length)
		if m, err := x.Read(t.Context(), k, dst); err != nil || m != want || !bytes.Equal(dst, data) {
			t.Errorf("Read: %+v, %v", m, err)
		}
		puts := requests(x, "PUT")
		write(t, x, k, tier.Meta{Len: int64(o.Length), Sum: 5}, data)
		if requests(x, "PUT") != puts {
			t.Error("what LMCache wrote was written again")
		}
	}
	if len(vector.Objects) < 4 || len(f.names()) != len(vector.Objects) {
		t.Errorf("%d names for %d objects", len(f.names()), len(vector.Objects))
	}
	for _, r := range vector.Requests {
		if !slices.Contains(paths, r.Path) {
			t.Errorf("LMCache sends %s %s, which we never did", r.Method, r.Path)
		}
	}
}

// The tier does not serve an object that is shorter or longer than it should be, or has the mark of another
// checksum, or no mark in our layout. No byte is written past the end of the memory of the
// read. The next write replaces the object.
func TestTornObjectsHeal(t *testing.T) {
	const size = 100 << 10
	damages := map[string]func(stored) stored{
		"half":                    func(s stored) stored { return stored{s.data[:size/2], s.meta} },
		"double":                  func(s stored) stored { return stored{append(s.data, s.data...), s.meta} },
		"a byte less":             func(s stored) stored { return stored{s.data[1:], s.meta} },
		"a byte more":             func(s stored) stored { return stored{append(s.data, 0), s.meta} },
		"empty":                   func(s stored) stored { return stored{nil, s.meta} },
		"no mark":                 func(s stored) stored { return stored{s.data, ""} },
		"another mark":            func(s stored) stored { return stored{s.data, strings.Replace(s.meta, ".01", ".02", 1)} },
		"half a mark":             func(s stored) stored { return stored{s.data, s.meta[:20]} },
		"half of somebody else's": func(s stored) stored { return stored{s.data[:size/2], ""} },
		"somebody else's, double": func(s stored) stored { return stored{append(s.data, s.data...), ""} },
	}
	for what, damage := range damages {
		for _, o := range []s3.Options{{}, {Part: 64 << 10}, {Layout: s3.LMCache}, {Layout: s3.LMCache, Part: 64 << 10}} {
			if o.Layout == s3.LMCache && (what == "no mark" || what == "half a mark") {
				continue // an object of another program, which is served
			}
			t.Run(fmt.Sprint(what, o.Part, o.Layout), func(t *testing.T) {
				f := newFake(t)
				o.URL = f.url
				x := open(t, o)
				k := tiertest.Key(1)
				b, meta := tiertest.Object(1, size)
				write(t, x, k, meta, b)
				f.change(damage)
				if m := stat(t, x, k); m.Fits(size) {
					t.Errorf("Stat: %+v", m)
				}
				memory := bytes.Repeat([]byte{0xee}, 3*size)
				if m, err := x.Read(t.Context(), k, memory[size:2*size:2*size]); err == nil {
					t.Errorf("Read: %+v", m)
				}
				if !bytes.Equal(memory[:size], bytes.Repeat([]byte{0xee}, size)) || !bytes.Equal(memory[2*size:], bytes.Repeat([]byte{0xee}, size)) {
					t.Error("memory around the slot was written")
				}
				write(t, x, k, meta, b)
				dst := make([]byte, size)
				if m, err := x.Read(t.Context(), k, dst); err != nil || m != meta || !bytes.Equal(dst, b) {
					t.Errorf("after a write: %+v, %v", m, err)
				}
			})
		}
	}
}

// Of two servers that write one object at once one PUT succeeds, and both have it.
func TestTwoWritersOneObject(t *testing.T) {
	f := newFake(t)
	a, b := open(t, s3.Options{URL: f.url}), open(t, s3.Options{URL: f.url})
	data, meta := tiertest.Object(1, 5000)
	looked := make(chan bool, 2)
	both := make(chan bool)
	f.misbehave(func(_ http.ResponseWriter, r *http.Request, _ *httptest.ResponseRecorder) bool {
		if r.Method == http.MethodGet { // that after the first HEAD, which asks whether the bucket is there
			looked <- true
			<-both
		}
		return false
	})
	var wg sync.WaitGroup
	for _, x := range []tier.Tier{a, b} {
		wg.Go(func() {
			if err := x.Write(t.Context(), tiertest.Key(1), meta, data); err != nil {
				t.Error(err)
			}
		})
	}
	<-looked
	<-looked
	close(both) // neither of them has seen it
	wg.Wait()
	if n := requests(a, "PUT") + requests(b, "PUT"); n != 2 || a.Space().Written+b.Space().Written != 5000 {
		t.Errorf("%d PUTs, %d bytes written", n, a.Space().Written+b.Space().Written)
	}
	for _, x := range []tier.Tier{a, b} {
		if stat(t, x, tiertest.Key(1)) != meta {
			t.Error("it is not there")
		}
	}
}

// If a store answers that another client writes the object, the tier sends its PUT again: the other write may fail, or its object may be
// deleted at once.
func TestConflictsPass(t *testing.T) {
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url})
	b, meta := tiertest.Object(1, 5000)
	var conflicts atomic.Int32
	f.misbehave(func(w http.ResponseWriter, r *http.Request, _ *httptest.ResponseRecorder) bool {
		if r.Method != http.MethodPut || conflicts.Add(1) > 2 {
			return false
		}
		f.mu.Lock()
		clear(f.objects) // it was not written
		f.mu.Unlock()
		refuse(w, http.StatusConflict, "ConditionalRequestConflict")
		return true
	})
	write(t, x, tiertest.Key(1), meta, b)
	if n := f.called("PUT"); n != 3 || stat(t, x, tiertest.Key(1)) != meta {
		t.Errorf("%d PUTs", n)
	}
}

// The tier neither lists, reads, replaces nor deletes the objects of others in the bucket.
func TestOthersObjectsStay(t *testing.T) {
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url})
	k := tiertest.Key(1)
	other := k
	other.Chunk[0]++
	foreign := []string{"backup.tar", "kvasir/notes", "kvasir/00/kv1/x", "kvasir/zz/" + k.String(), "kvasir/" + k.String(), "kvasir/" + k.Chunk.String()[:2] + "/" + k.String() + "/more"}
	for _, name := range foreign {
		f.set(name, stored{[]byte("theirs"), ""})
	}
	b, meta := tiertest.Object(1, 100)
	write(t, x, k, meta, b)
	var listed []kv.Key
	if err := x.List(t.Context(), func(k kv.Key, _ tier.Meta) bool { listed = append(listed, k); return true }); err != nil || !slices.Equal(listed, []kv.Key{k}) {
		t.Errorf("%v, %v", listed, err)
	}
	if err := x.Delete(t.Context(), []kv.Key{k, other}); err != nil {
		t.Fatal(err)
	}
	slices.Sort(foreign)
	if got := f.names(); !slices.Equal(got, foreign) {
		t.Errorf("left: %q", got)
	}
	for _, name := range foreign {
		if string(f.get(name).data) != "theirs" {
			t.Errorf("%s was changed", name)
		}
	}
}

// A lookup sends one HEAD for each key. Stats counts every request that the store gets, as a bill
// would.
func TestRequestsAreCounted(t *testing.T) {
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url, Part: 64 << 10})
	for i := range 3 {
		b, meta := tiertest.Object(i, 100<<10)
		write(t, x, tiertest.Key(i), meta, b)
	}
	before := requests(x, "HEAD")
	metas := make([]tier.Meta, 10)
	all := make([]kv.Key, 10)
	for i := range all {
		all[i] = tiertest.Key(i)
	}
	if err := x.Stat(t.Context(), all, metas); err != nil {
		t.Fatal(err)
	}
	if n := requests(x, "HEAD") - before; n != 10 {
		t.Errorf("%d HEAD for 10 keys", n)
	}
	for i := range 3 {
		if _, err := x.Read(t.Context(), tiertest.Key(i), make([]byte, 100<<10)); err != nil {
			t.Fatal(err)
		}
	}
	if err := x.Delete(t.Context(), all[:2]); err != nil {
		t.Fatal(err)
	}
	if err := x.List(t.Context(), func(kv.Key, tier.Meta) bool { return true }); err != nil {
		t.Fatal(err)
	}
	r, ok := x.Requests()
	if !ok || r.Requests["PUT"] != 3 || r.Requests["GET"] != 6+1 || r.Requests["DELETE"] != 2 || r.Requests["LIST"] != 1 || r.Sent != 300<<10 || r.Received != 300<<10 {
		t.Errorf("%+v", r)
	}
	total := 0
	for _, n := range r.Requests {
		total += int(n)
	}
	if came := f.called(""); came != total {
		t.Errorf("%d requests came, %d are counted", came, total)
	}
}

// Beyond the budget of PUTs the tier writes nothing, and still serves its objects.
func TestPutBudget(t *testing.T) {
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url, PutsPerHour: 3})
	kept := 0
	for i := range 10 {
		b, meta := tiertest.Object(i, 100)
		if err := x.Write(t.Context(), tiertest.Key(i), meta, b); err == nil {
			kept++
		} else if !errors.Is(err, tier.ErrNotKept) {
			t.Error(err)
		}
	}
	r, _ := x.Requests()
	if kept != 3 || r.Requests["PUT"] != 3 || r.Unspent["budget"] != 7 {
		t.Errorf("%d of 10 were kept, %+v", kept, r)
	}
	b, meta := tiertest.Object(1, 100)
	if m, err := x.Read(t.Context(), tiertest.Key(1), b); err != nil || m != meta {
		t.Errorf("%+v, %v", m, err)
	}
}

// PUTs that are sent again count against the budget of PUTs, too.
func TestPutBudgetCountsRetries(t *testing.T) {
	f := newFake(t)
	x := open(t, s3.Options{URL: f.url, PutsPerHour: 3})
	f.misbehave(func(w http.ResponseWriter, r *http.Request, normal *httptest.ResponseRecorder) bool {
		return r.Method == http.MethodPut && status(503, "SlowDown")(w, r, normal)
	})
	for i := range 3 {
		b, meta := tiertest.Object(i, 100)
		_ = x.Write(t.Context(), tiertest.Key(i), meta, b)
	}
	if r, _ := x.Requests(); r.Requests["PUT"] != 3 || r.Unspent["budget"] == 0 {
		t.Errorf("%+v", r)
	}
}

// Calls end with their context, whatever they wait for.
func TestCallsEndWithTheirContext(t *testing.T) {
	for _, silent := range []string{http.MethodGet, http.MethodHead, http.MethodPut} {
		f := newFake(t)
		release := make(chan bool)
		begun := make(chan bool, 100)
		b, meta := tiertest.Object(1, 100)
		f.misbehave(func(_ http.ResponseWriter, r *http.Request, _ *httptest.ResponseRecorder) bool {
			if r.Method == silent {
				begun <- true
				<-release
			}
			return false
		})
		x := open(t, s3.Options{URL: f.url, Workers: 1, Lookups: 1})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 2)
		for range 2 { // the second one waits for the first
			go func() {
				switch silent {
				case http.MethodGet:
					_, err := x.Read(ctx, tiertest.Key(1), b)
					ended <- err
				case http.MethodHead:
					ended <- x.Stat(ctx, []kv.Key{tiertest.Key(1), tiertest.Key(2)}, make([]tier.Meta, 2))
				default:
					ended <- x.Write(ctx, tiertest.Key(1), meta, bytes.Clone(b))
				}
			}()
		}
		<-begun
		cancel()
		for range 2 {
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v", silent, err)
			}
		}
		close(release)
	}
}

// The object that was written last is the hottest, in all pages of the list, and only our objects count.
func TestHottest(t *testing.T) {
	f := newFake(t)
	f.pages = 3
	x := open(t, s3.Options{URL: f.url})
	b, meta := tiertest.Object(1, 100)
	for seed := range 10 {
		write(t, x, tiertest.Key(seed), meta, b)
	}
	f.set("kvasir/notes", stored{[]byte("theirs"), ""})
	names := f.names()
	f.mu.Lock()
	for i, name := range names {
		f.modified[name] = time.Unix(int64(i*7%11), 0) // in another order than the names
	}
	f.mu.Unlock()
	var got []kv.Key
	if err := x.Hottest(t.Context(), 4, func(k kv.Key, m tier.Meta) bool {
		if m != meta {
			t.Errorf("%+v", m)
		}
		got = append(got, k)
		return len(got) < 3
	}); err != nil || len(got) != 3 {
		t.Fatalf("%v, %v", got, err)
	}
	slices.SortFunc(names, func(a, b string) int { return f.modified[b].Compare(f.modified[a]) })
	names = slices.DeleteFunc(names, func(name string) bool { return name == "kvasir/notes" })
	for i, k := range got {
		if !strings.HasSuffix(names[i], k.Chunk.String()) {
			t.Errorf("place %d: %s, written last is %s", i, k, names[i])
		}
	}
	y := open(t, s3.Options{URL: f.url, Layout: s3.LMCache})
	if err := y.Hottest(t.Context(), 4, nil); !errors.Is(err, tier.ErrNoList) {
		t.Errorf("LMCache's names: %v", err)
	}
}
