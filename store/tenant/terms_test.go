// SPDX-License-Identifier: Apache-2.0

package tenant_test

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/statefile"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/store/tenant"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var errFull = errors.New("the pool is too small")

// pool is a store whose quotas fit into so many bytes.
type pool struct {
	bytes int64
	mu    sync.Mutex
	has   map[string]string // "salt field": value
	quota map[string]int64
}

func newPool(bytes int64) *pool {
	return &pool{bytes: bytes, has: map[string]string{}, quota: map[string]int64{}}
}

func (p *pool) SetQuota(salt string, bytes int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	sum := bytes
	for s, n := range p.quota {
		if s != salt {
			sum += n
		}
	}
	if bytes < 0 || sum > p.bytes {
		return errFull
	}
	p.quota[salt] = bytes
	p.has[salt+" quota"] = fmt.Sprint(bytes)
	return nil
}

func (p *pool) DropQuota(salt string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.quota, salt)
	delete(p.has, salt+" quota")
	return true
}

func (p *pool) SetTTL(salt string, ttl time.Duration) error { return p.put(salt+" ttl", int64(ttl)) }

func (p *pool) SetPinLimit(salt string, bytes int64) error { return p.put(salt+" pins", bytes) }

func (p *pool) put(what string, v int64) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.has[what] = fmt.Sprint(v); v == 0 {
		delete(p.has, what)
	}
	return nil
}

// server is one life: a pool of so many bytes, flags and a file.
func server(t *testing.T, path string, bytes int64, flags tenant.Flags) (*tenant.Terms, *pool) {
	t.Helper()
	b, err := tenant.OpenTerms(path, flags, nil)
	if err != nil {
		t.Fatal(err)
	}
	p := newPool(bytes)
	if err := b.Apply(p); err != nil {
		t.Fatal(err)
	}
	return b, p
}

func end(t *testing.T, b *tenant.Terms) {
	t.Helper()
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func want(t *testing.T, p *pool, pairs ...string) {
	t.Helper()
	w := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		w[pairs[i]] = pairs[i+1]
	}
	if !maps.Equal(p.has, w) {
		t.Errorf("in effect: %v, want %v", p.has, w)
	}
}

// flagsOf are quotas.
func flagsOf(quotas map[string]int64) tenant.Flags {
	f := make(tenant.Flags)
	for salt, n := range quotas {
		_ = f.SetQuota(salt, n)
	}
	return f
}

// What is set holds in the next life and the one after it: values, and what was taken away of a flag. Without a file it does not.
func TestHoldsOverRestarts(t *testing.T) {
	for _, path := range []string{filepath.Join(t.TempDir(), "state"), ""} {
		flags := flagsOf(map[string]int64{"a": 10, "b": 20})
		_ = flags.SetTTL("c", time.Minute)
		b, p := server(t, path, 100, flags)
		want(t, p, "a quota", "10", "b quota", "20", "c ttl", "60000000000")
		must(t, b.Set("a", tenant.Quota, tenant.BytesValue(30)))
		must(t, b.Set("b", tenant.Quota, tenant.Value{}))
		must(t, b.Set("", tenant.TTL, tenant.TimeValue(tenant.Forever)))
		must(t, b.Set("d", tenant.TTL, tenant.TimeValue(90*time.Second)))
		must(t, b.Set("d", tenant.PinLimit, tenant.BytesValue(5)))
		must(t, b.Set("e", tenant.PinLimit, tenant.BytesValue(7)))
		must(t, b.Set("e", tenant.PinLimit, tenant.BytesValue(0)))
		must(t, b.Set("zero", tenant.Quota, tenant.BytesValue(0))) // it keeps nothing
		now := []string{"a quota", "30", "c ttl", "60000000000", " ttl", "-1", "d ttl", "90000000000", "d pins", "5", "zero quota", "0"}
		want(t, p, now...)
		end(t, b)
		for range 2 {
			b, p = server(t, path, 100, flags)
			if path == "" {
				want(t, p, "a quota", "10", "b quota", "20", "c ttl", "60000000000")
			} else {
				want(t, p, now...)
			}
			end(t, b)
		}
		b, p = server(t, path, 100, flags)
		for _, salt := range []string{"a", "b", "c", "d", "", "zero"} {
			had, err := b.Drop(salt)
			if must(t, err); had != (salt != "b" && path != "" || salt == "a" || salt == "b" && path == "" || salt == "c") {
				t.Errorf("%q had something: %v", salt, had)
			}
		}
		want(t, p)
		end(t, b)
		if path != "" {
			b, p = server(t, path, 100, flags)
			want(t, p)
			end(t, b)
		}
	}
}

// A changed flag replaces the setting for good, also when the flag is changed back.
func TestChangedFlagReplacesTheSetting(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	b, _ := server(t, path, 100, flagsOf(map[string]int64{"a": 10, "b": 10}))
	must(t, b.Set("a", tenant.Quota, tenant.BytesValue(30)))
	must(t, b.Set("b", tenant.Quota, tenant.BytesValue(31)))
	must(t, b.Set("c", tenant.Quota, tenant.BytesValue(5)))
	end(t, b)
	b, p := server(t, path, 100, flagsOf(map[string]int64{"a": 20, "b": 10}))
	want(t, p, "a quota", "20", "b quota", "31", "c quota", "5")
	end(t, b)
	b, p = server(t, path, 100, flagsOf(map[string]int64{"a": 10, "c": 6}))
	want(t, p, "a quota", "10", "c quota", "6")
	// A value that a flag already has is no setting.
	must(t, b.Set("a", tenant.Quota, tenant.BytesValue(11)))
	must(t, b.Set("a", tenant.Quota, tenant.BytesValue(10)))
	for _, term := range b.List() {
		if !term.Flag {
			t.Errorf("%+v", term)
		}
	}
	end(t, b)
}

// A quota moved from one tenant to another is in effect again whatever the order in which flags and file have them.
func TestQuotasThatFitOnlyTogether(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	flags := flagsOf(map[string]int64{"a": 60, "b": 40})
	b, _ := server(t, path, 100, flags)
	must(t, b.Set("a", tenant.Quota, tenant.BytesValue(20)))
	must(t, b.Set("b", tenant.Quota, tenant.BytesValue(80)))
	end(t, b)
	b, p := server(t, path, 100, flags)
	want(t, p, "a quota", "20", "b quota", "80")
	end(t, b)
}

// What does not fit into a smaller pool gives way to the flag, is told, and is back in a larger one.
func TestASmallerPool(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	flags := flagsOf(map[string]int64{"a": 10})
	b, _ := server(t, path, 100, flags)
	must(t, b.Set("a", tenant.Quota, tenant.BytesValue(70)))
	must(t, b.Set("b", tenant.Quota, tenant.BytesValue(20)))
	end(t, b)
	b, p := server(t, path, 50, flags)
	want(t, p, "a quota", "10", "b quota", "20")
	list := b.List()
	if len(list) != 3 || list[0].Idle != errFull.Error() || list[0].Value.N != 70 || !list[1].Flag || list[2].Idle != "" || list[2].Salt != "b" {
		t.Errorf("%+v", list)
	}
	must(t, b.Set("b", tenant.Quota, tenant.BytesValue(21))) // it writes the file
	end(t, b)
	b, p = server(t, path, 100, flags)
	want(t, p, "a quota", "70", "b quota", "21")
	end(t, b)
}

// A file cut anywhere, or with another byte anywhere, is no reason not to serve: it is put aside, and a new one begins. Something else under that name is
// touched in no way.
func TestDamagedFiles(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "state")
	b, _ := server(t, path, 100, nil)
	must(t, b.Set("a", tenant.Quota, tenant.BytesValue(30)))
	end(t, b)
	good, err := os.ReadFile(path)
	must(t, err)
	f := func(what string, text []byte) {
		t.Helper()
		must(t, os.WriteFile(path, text, 0o600))
		_ = os.Remove(path + ".bad")
		b, err := tenant.OpenTerms(path, nil, nil)
		if !strings.HasPrefix(string(text), "kvasir-tenants 1 ") {
			if e, ok := errors.AsType[*statefile.Error](err); !ok || !e.Foreign {
				t.Errorf("%s: %v", what, err)
			}
			if now, err := os.ReadFile(path); err != nil || string(now) != string(text) {
				t.Errorf("%s: it was changed: %v, %q", what, err, now)
			}
			return
		}
		if err != nil {
			t.Errorf("%s: %v", what, err)
			return
		}
		p := newPool(100)
		must(t, b.Apply(p))
		want(t, p)
		aside, err := os.ReadFile(path + ".bad")
		if err != nil || string(aside) != string(text) {
			t.Errorf("%s: aside %v, %q", what, err, aside)
		}
		must(t, b.Set("b", tenant.Quota, tenant.BytesValue(40)))
		end(t, b)
		b, p = server(t, path, 100, nil)
		want(t, p, "b quota", "40")
		end(t, b)
	}
	for n := 0; n < len(good)-1; n += 3 { // the last byte is a newline
		f(fmt.Sprintf("cut to %d bytes", n), good[:n])
	}
	for i := 0; i < len(good)-1; i += 3 {
		other := append([]byte(nil), good...)
		other[i] ^= 1
		f(fmt.Sprintf("byte %d changed", i), other)
	}
	f("too long", append(append([]byte(nil), good...), make([]byte, 5<<20)...))
	for what, doc := range map[string]string{
		"no JSON": "x", "another setting": `{"terms":[{"cache_salt":"a","field":"size","value":1,"over":null,"set_at":"2026-01-01T00:00:00Z"}]}`,
		"below 0": `{"terms":[{"cache_salt":"a","field":"quota_bytes","value":-1,"over":null,"set_at":"2026-01-01T00:00:00Z"}]}`,
		"twice":   `{"terms":[` + strings.Repeat(`{"cache_salt":"a","field":"quota_bytes","value":1,"over":null,"set_at":"2026-01-01T00:00:00Z"},`, 1) + `{"cache_salt":"a","field":"quota_bytes","value":1,"over":null,"set_at":"2026-01-01T00:00:00Z"}]}`,
		"more":    `{"terms":[]}{}`, "unknown": `{"terms":[],"x":1}`,
	} {
		must(t, os.Remove(path))
		file, _, err := statefile.Open(path, "kvasir-tenants 1", 1<<20)
		must(t, err)
		must(t, errors.Join(file.Write([]byte(doc)), file.Close()))
		text, err := os.ReadFile(path)
		must(t, err)
		f(what, text)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*.tmp")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// A salt that no store takes, in a file that is whole, is reported and has no effect.
func TestRefusedSaltInTheFileHasNoEffect(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	file, _, err := statefile.Open(path, "kvasir-tenants 1", 1<<20)
	must(t, err)
	must(t, file.Write([]byte(`{"terms":[{"cache_salt":"a","field":"quota_bytes","value":1e18,"over":null,"set_at":"2026-01-01T00:00:00Z"},{"cache_salt":"b","field":"quota_bytes","value":3,"over":null,"set_at":"2026-01-01T00:00:00Z"}]}`)))
	must(t, file.Close())
	b, p := server(t, path, 100, nil)
	want(t, p, "b quota", "3")
	if list := b.List(); len(list) != 2 || list[0].Idle == "" {
		t.Errorf("%+v", list)
	}
	// It ends when it is taken away, or set anew.
	if had, err := b.Drop("a"); err != nil || !had {
		t.Errorf("%v, %v", had, err)
	}
	if list := b.List(); len(list) != 1 {
		t.Errorf("%+v", list)
	}
	end(t, b)
}

// A caller learns that its setting could not be written to the file. The next setting, or the end of the server, writes all of them.
func TestWritesThatFail(t *testing.T) {
	f := func(after func(b *tenant.Terms), pairs ...string) {
		t.Helper()
		dir := filepath.Join(t.TempDir(), "dir")
		must(t, os.Mkdir(dir, 0o700))
		path := filepath.Join(dir, "state")
		b, p := server(t, path, 100, nil)
		must(t, b.Set("a", tenant.Quota, tenant.BytesValue(1)))
		must(t, os.RemoveAll(dir))
		err := b.Set("b", tenant.Quota, tenant.BytesValue(2))
		if e, ok := errors.AsType[*tenant.NotKeptError](err); !ok || !errors.Is(e, fs.ErrNotExist) || !b.Unkept() || !strings.Contains(err.Error(), "it is in effect, and not kept for a restart") {
			t.Errorf("%v, %v", err, b.Unkept())
		}
		want(t, p, "a quota", "1", "b quota", "2")
		if err := b.Set("c", tenant.Quota, tenant.BytesValue(1000)); !errors.Is(err, errFull) {
			t.Error(err) // a refusal is no trouble of the file
		}
		must(t, os.Mkdir(dir, 0o700))
		after(b)
		if b.Unkept() {
			t.Error("it is kept again")
		}
		end(t, b)
		b, p = server(t, path, 100, nil)
		want(t, p, pairs...)
		end(t, b)
	}
	f(func(b *tenant.Terms) { must(t, b.Set("a", tenant.Quota, tenant.BytesValue(3))) }, "a quota", "3", "b quota", "2")
	f(func(b *tenant.Terms) { must(t, b.Set("b", tenant.Quota, tenant.BytesValue(2))) }, "a quota", "1", "b quota", "2") // the same again
	f(func(b *tenant.Terms) { end(t, b) }, "a quota", "1", "b quota", "2")
}

// One server at a time has a file.
func TestTwoServers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	b, _ := server(t, path, 100, nil)
	if _, err := tenant.OpenTerms(path, nil, nil); err == nil || !strings.Contains(err.Error(), "in use by another process") {
		t.Error(err)
	}
	end(t, b)
	b, _ = server(t, path, 100, nil)
	end(t, b)
	if _, err := tenant.OpenTerms(filepath.Join(path, "nowhere"), nil, nil); err == nil {
		t.Error("a folder that is none")
	}
}

// Operators who set things at the same time: the file has what is in effect.
func TestManyAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state")
	b, p := server(t, path, 1<<20, nil)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for j := range 10 {
				if err := b.Set(fmt.Sprint(j%3), tenant.Quota, tenant.BytesValue(int64(100*i+j))); err != nil {
					t.Error(err)
				}
				_, _ = b.List(), b.Unkept()
			}
		})
	}
	wg.Wait()
	now := maps.Clone(p.has)
	end(t, b)
	b, p = server(t, path, 1<<20, nil)
	if !maps.Equal(p.has, now) || len(now) != 3 {
		t.Errorf("%v, was %v", p.has, now)
	}
	end(t, b)
}

// How many there may be is bounded, and a full book takes changes of what it has.
func TestManyTerms(t *testing.T) {
	b, _ := server(t, "", 1<<40, nil)
	for i := range tenant.MaxTerms {
		must(t, b.Set(fmt.Sprint(i), tenant.Quota, tenant.BytesValue(1)))
	}
	if err := b.Set("more", tenant.Quota, tenant.BytesValue(1)); !errors.Is(err, tenant.ErrTooManyTerms) {
		t.Error(err)
	}
	must(t, b.Set("7", tenant.Quota, tenant.BytesValue(2)))
	must(t, b.Set("more", tenant.Quota, tenant.Value{})) // it has none
	must(t, b.Set("7", tenant.Quota, tenant.Value{}))
	must(t, b.Set("more", tenant.Quota, tenant.BytesValue(1)))
}
