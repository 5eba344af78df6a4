// SPDX-License-Identifier: Apache-2.0

package seal

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

func TestMain(m *testing.M) { testkit.Main(m) }

var testName = kv.Key{Namespace: kv.Namespace{1}, Chunk: kv.Hash{2}, Rank: 3, Group: 4}

func oneKey(seed byte) *key {
	var master [32]byte
	copy(master[:], bytes.Repeat([]byte{seed}, 32))
	return newKey(master)
}

// seal encrypts src into dst at once.
func (k *key) seal(dst, src []byte, name *kv.Key, sum uint64, end uint32) error {
	s := newSealing(k, dst, src, name, sum, end)
	s.mu.summed, s.mu.begun = true, true // of any checksum, and without helpers
	defer s.end()
	return s.need(0, int64(len(dst)))
}

// Objects of every length around pieces come back, and no two ciphertexts are alike.
func TestLengths(t *testing.T) {
	k := oneKey(1)
	for _, n := range []int{1, 15, 16, 17, pieceBytes - 1, pieceBytes, pieceBytes + 1, 2 * pieceBytes, 7*pieceBytes + 3, 4 << 20} {
		src := make([]byte, n)
		_, _ = rand.Read(src)
		one, two, dst := make([]byte, sealedBytes(int64(n))), make([]byte, sealedBytes(int64(n))), make([]byte, n)
		for _, b := range [][]byte{one, two} {
			if err := k.seal(b, src, &testName, 7, 9); err != nil {
				t.Fatal(err)
			}
		}
		if bytes.Equal(one[headerBytes:], two[headerBytes:]) {
			t.Errorf("%d bytes: two writes are alike", n)
		}
		h, err := parseHeader(one)
		if err != nil || h.size != int64(n) || h.end != 9 || h.id != k.id {
			t.Fatalf("%d bytes: %+v, %v", n, h, err)
		}
		if err := k.open(dst, one, &h, &testName, 7); err != nil || !bytes.Equal(dst, src) {
			t.Errorf("%d bytes: %v", n, err)
		}
		if err := k.check(one, &h, &testName, 7); err != nil {
			t.Errorf("%d bytes: %v", n, err)
		}
		if err := k.open(dst, one, &h, &testName, 8); err == nil {
			t.Errorf("%d bytes: another checksum is taken", n)
		}
		other := testName
		other.Namespace[15]++ // of another generation
		if err := k.open(dst, one, &h, &other, 7); err == nil {
			t.Errorf("%d bytes: another name is taken", n)
		}
		for at := range headerBytes {
			bad := bytes.Clone(one[:min(len(one), 1000)])
			if bad[at] ^= 1; len(bad) < len(one) {
				continue // the rest is as it is of the shorter ones
			}
			if h, err := parseHeader(bad); err == nil && k.check(bad, &h, &testName, 7) == nil {
				t.Errorf("%d bytes: byte %d of the header may be another one", n, at)
			}
		}
		if err := oneKey(2).open(dst, one, &h, &testName, 7); err == nil {
			t.Errorf("%d bytes: another key opens it", n)
		}
		if got := plainBytes(int64(len(one))); got != int64(n) {
			t.Errorf("%d bytes become %d", n, got)
		}
	}
	for n := int64(-1); n < 3*pieceBytes; n++ {
		if size := plainBytes(n); size != 0 && sealedBytes(size) != n {
			t.Fatalf("%d bytes are of %d", n, size)
		}
	}
}

// The Tier distinguishes a header of a later version from a damaged one, whatever follows its version.
func TestObjectsOfALaterVersionAreMisses(t *testing.T) {
	b := make([]byte, headerBytes)
	h := header{size: 100}
	h.put(b)
	b[8] = version + 1
	if _, err := parseHeader(b); !errors.Is(err, errNewer) {
		t.Errorf("%v", err)
	}
	for i := 9; i < headerBytes; i++ {
		b[i] = 0xff
	}
	if _, err := parseHeader(b); !errors.Is(err, errNewer) {
		t.Errorf("with another form: %v", err)
	}
	b[8] = 0
	if _, err := parseHeader(b); !errors.Is(err, errDamaged) {
		t.Errorf("version 0: %v", err)
	}
}

// Nonces are as docs/formats/sealed.md has them: the last piece has 1 first, the number stands at the end, big-endian.
func TestNonces(t *testing.T) {
	f := func(i, pieces int64, want [12]byte) {
		t.Helper()
		if got := nonceOf(i, pieces); got != want {
			t.Errorf("piece %d of %d: %x, want %x", i, pieces, got, want)
		}
	}
	f(0, 1, [12]byte{0: 1})
	f(0, 2, [12]byte{})
	f(1, 2, [12]byte{0: 1, 11: 1})
	f(2, 3, [12]byte{0: 1, 11: 2})
	f(1, 3, [12]byte{11: 1})
	f(0x01020304, 1<<30, [12]byte{8: 1, 9: 2, 10: 3, 11: 4})
}

// FuzzHeader: a header that was read can be written with the same bytes, and opens no object.
func FuzzHeader(f *testing.F) {
	k := oneKey(1)
	whole := make([]byte, sealedBytes(100))
	h := header{id: k.id, size: 100} // each fuzzing process has the same header
	h.put(whole)
	b, nonce := k.newBox(whole, &h.salt, 7, &testName), nonceOf(0, 1)
	b.aead.Seal(whole[headerBytes:headerBytes], nonce[:], make([]byte, 100), b.data[:])
	f.Add(whole)
	f.Add(whole[:headerBytes])
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := parseHeader(b)
		if err != nil {
			return
		}
		again := make([]byte, headerBytes)
		if h.put(again); !bytes.Equal(again, b[:headerBytes]) || h.size < 1 || h.size > maxObject {
			t.Fatalf("%x is %+v", b, h)
		}
		opened := k.check(b, &h, &testName, 7) == nil
		if want := bytes.Equal(b, whole); opened != want {
			t.Fatalf("opens: %v, want %v: %x", opened, want, b)
		}
	})
}

// A nonce is never used twice for an object, and each object has a key of its own.
func TestNoncesAndKeysDiffer(t *testing.T) {
	seen := map[[12]byte]bool{}
	for pieces := range int64(5) {
		clear(seen)
		for i := range pieces {
			seen[nonceOf(i, pieces)] = true
		}
		if int64(len(seen)) != pieces {
			t.Errorf("%d nonces of %d pieces", len(seen), pieces)
		}
	}
	salts := map[string]bool{}
	k, b := oneKey(1), make([]byte, sealedBytes(1))
	for range 1000 {
		if err := k.seal(b, []byte{1}, &testName, 1, 0); err != nil {
			t.Fatal(err)
		}
		salts[string(b[24:56])] = true
	}
	if len(salts) != 1000 {
		t.Errorf("%d salts of 1000 objects", len(salts))
	}
}

func TestKeys(t *testing.T) {
	dir := t.TempDir()
	good, other := strings.Repeat("ab", 32), base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{9}, 32))
	file := func(text string, mode os.FileMode) string {
		t.Helper()
		path := filepath.Join(dir, fmt.Sprintf("keys-%d", time.Now().UnixNano()))
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	f := func(s Source, want string, ids int) {
		t.Helper()
		k, err := OpenKeys(t.Context(), s)
		if want == "" && (err != nil || len(k.IDs()) != ids) {
			t.Errorf("%+v: %v, %v", s, k.IDs(), err)
		}
		if want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%+v: %v, want %q", s, err, want)
		}
		if s.File != "" && s.Text == "" && err != nil && !strings.Contains(err.Error(), s.File) {
			t.Errorf("%v does not name %s", err, s.File)
		}
		if err != nil && strings.Contains(err.Error(), "abab") {
			t.Errorf("the error has a key: %v", err)
		}
	}
	f(Source{}, "", 0)
	f(Source{File: file(good+"\n", 0o600)}, "", 1)
	f(Source{File: file("# first\n\n"+good+"\n"+other, 0o640)}, "", 2)
	f(Source{Text: good + "," + other}, "", 2)
	f(Source{Command: "echo " + good + "; echo " + other + "; echo key >&2"}, "", 2)
	open := file(good+"\n", 0o644)
	f(Source{File: open}, "chmod o-rwx", 0)
	link := filepath.Join(dir, "link")
	if err := os.Symlink(open, link); err != nil {
		t.Fatal(err)
	}
	f(Source{File: link}, "chmod o-rwx", 0)
	f(Source{File: file("", 0o600)}, "empty", 0)
	f(Source{File: file("# none\n", 0o600)}, "no entry", 0)
	f(Source{File: filepath.Join(dir, "none")}, "no such file", 0)
	f(Source{File: file(good[:62]+"\n", 0o600)}, "line 1: a key is 32 bytes", 0)
	f(Source{File: file(good+"\n"+good+"ab\n", 0o600)}, "line 2: a key is 32 bytes", 0)
	f(Source{File: file(good+"\n"+good+"\n", 0o600)}, "line 2: the same key", 0)
	f(Source{File: file(strings.Repeat("00", 32)+"\n", 0o600)}, "zeros", 0)
	f(Source{File: file(strings.Repeat("#\n", maxKeyText), 0o600)}, "more than", 0)
	f(Source{Text: "short"}, "the environment: line 1", 0)
	f(Source{Text: ","}, "no key", 0)
	f(Source{Command: "exit 3"}, "exit status 3", 0)
	f(Source{Command: "true"}, "no key", 0)
	f(Source{Command: "yes " + good}, "more than 65536 bytes", 0)
	f(Source{File: "x", Text: "y"}, ErrSource.Error(), 0)
	long := &strings.Builder{}
	for i := range maxKeys + 1 {
		fmt.Fprintln(long, hex.EncodeToString(append(bytes.Repeat([]byte{7}, 31), byte(i))))
	}
	f(Source{Text: long.String()}, "more than 16 keys", 0)
}

// A command that does not end is killed, with its children.
func TestSlowCommandOfKeysIsEnded(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	began := time.Now()
	if _, err := OpenKeys(ctx, Source{Command: "sleep 100 & sleep 100"}); err == nil || time.Since(began) > 60*time.Second {
		t.Errorf("after %v: %v", time.Since(began), err)
	}
}

// A program that a command of keys starts may leave the process group and keep the output open. Nobody waits for it.
func TestCommandOfKeysThatLeavesAProgram(t *testing.T) {
	pid := filepath.Join(t.TempDir(), "pid")
	t.Cleanup(func() { // it outlives the command, as such programs do
		if text, err := os.ReadFile(pid); err == nil {
			if n, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil {
				_ = syscall.Kill(n, syscall.SIGKILL)
			}
		}
	})
	began, ended := time.Now(), make(chan error, 1)
	go func() {
		_, err := OpenKeys(t.Context(), Source{Command: "setsid sh -c 'echo $$ >" + pid + "; exec sleep 30' & echo " + strings.Repeat("ab", 32)})
		ended <- err
	}()
	select {
	case err := <-ended:
		if err == nil || !strings.Contains(err.Error(), "keeps its output open") {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
	case <-time.After(25 * time.Second):
		t.Error("it waits for the program that the command left")
	}
}

// The output of a command counts at once if no key in use is missing in it, and otherwise only if the command prints the same again. So
// half an output never counts, and a key that is gone for good is dropped.
func TestCommandOfKeysMustSayTwiceThatAKeyIsGone(t *testing.T) {
	dir := t.TempDir()
	path, runs := filepath.Join(dir, "keys"), filepath.Join(dir, "runs")
	one, two := strings.Repeat("11", 32)+"\n", strings.Repeat("22", 32)+"\n"
	put := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put(path, one+two)
	k, err := OpenKeys(t.Context(), Source{Command: "echo >>" + runs + "; cat " + path + "; test -e " + path + ".next && mv " + path + ".next " + path + " || true"})
	if err != nil {
		t.Fatal(err)
	}
	k.settle = 20 * time.Millisecond
	reload := func(text, next, why string, want ...string) {
		t.Helper()
		put(path, text)
		if next != "" {
			put(path+".next", next)
		}
		if err := k.Reload(t.Context()); (err == nil) != (why == "") || err != nil && !strings.Contains(err.Error(), why) {
			t.Errorf("%q: %v, want %q", text, err, why)
		}
		var ids []string
		for _, line := range want {
			of, err := parseKeys([]byte(line))
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, hex.EncodeToString(of.list[0].id[:]))
		}
		if !slices.Equal(k.IDs(), ids) {
			t.Errorf("after %q: %v, want %v", text, k.IDs(), ids)
		}
	}
	reload(one, one+two, "another text", one, two) // the first output was incomplete
	reload(two+one, "", "", two, one)              // only the order changes
	reload(two, "", "", two)                       // a key is gone
	reload(one+two, "", "", one, two)              // a key comes
	reload("# none\n", "", "no key", one, two)
	if text, err := os.ReadFile(runs); err != nil || len(text) != 1+2+1+2+1+1 {
		t.Errorf("the command ran %d times, %v", len(text), err)
	}
}

// A file of keys is read again when it changes; half of one never counts.
func TestKeysAreReadAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	one, two := strings.Repeat("11", 32)+"\n", strings.Repeat("22", 32)+"\n"
	write(one)
	k, err := OpenKeys(t.Context(), Source{File: path})
	if err != nil {
		t.Fatal(err)
	}
	first := k.IDs()[0]
	reload := func(text string, want int, why string) {
		t.Helper()
		write(text)
		err := k.Reload(t.Context())
		if ids := k.IDs(); len(ids) != want {
			t.Errorf("%q: %v", text, ids)
		}
		if why == "" && err != nil || why != "" && (err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), why)) {
			t.Errorf("%q: %v, want %q", text, err, why)
		}
	}
	reload(two[:40], 1, "line 1")
	reload(two+one[:64], 1, "last line") // otherwise a rekey with the former key would report that all is done
	reload("# none\n", 1, "no entry")
	reload(two, 1, "1 keys in use") // a key would be gone: only Watch accepts that
	if k.IDs()[0] != first {
		t.Error("a key is gone at once")
	}
	reload(one[:64], 1, "") // as the file may have been at the start
	reload(two+one, 2, "")
	if k.IDs()[1] != first {
		t.Error(k.IDs())
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); k.Watch(ctx, slog.New(slog.NewTextHandler(io.Discard, nil))) }()
	cancel()
	<-done
	var none *Keys
	none.Watch(t.Context(), nil)
	if err := none.Reload(t.Context()); err != nil || none.IDs() != nil {
		t.Error(err)
	}
}

// Only the same key and name recover a masked checksum.
func TestMaskedChecksum(t *testing.T) {
	k, other := oneKey(1), testName
	other.Group++
	for _, sum := range []uint64{0, 1, 1 << 63} {
		m := k.masked(sum, &testName)
		if k.masked(m, &testName) != sum || m == sum || m == k.masked(sum, &other) || m == oneKey(2).masked(sum, &testName) {
			t.Errorf("%x becomes %x", sum, m)
		}
	}
}

// lazyPlace is a place whose Write reads no bytes, as if it had every object.
type lazyPlace struct{ tier.Tier }

func (lazyPlace) Flows() {}

func (lazyPlace) Write(context.Context, kv.Key, tier.Meta, []byte) error { return nil }

// greedyPlace is a place that asks for the bytes of an object in its own order.
type greedyPlace struct {
	tier.Tier
	stored []byte
}

func (*greedyPlace) Flows() {}

func (p *greedyPlace) Write(ctx context.Context, _ kv.Key, _ tier.Meta, src []byte) error {
	f, n := tier.FlowOf(ctx), int64(len(src))
	for _, part := range [][2]int64{{n - 1, n}, {0, 1}, {n / 3, n / 2}, {0, n}} {
		if err := f.Wants(part[0], part[1]); err != nil {
			return err
		}
	}
	p.stored = bytes.Clone(src)
	return nil
}

// Bytes that a place does not ask for are not encrypted. An object that it takes is whole, in whatever order it asks.
func TestPlacesTakeWhatTheyNeed(t *testing.T) {
	keys, err := OpenKeys(t.Context(), Source{Text: strings.Repeat("ab", 32)})
	if err != nil {
		t.Fatal(err)
	}
	src := make([]byte, 1<<20+5)
	_, _ = rand.Read(src)
	m := tier.Meta{Len: int64(len(src)), Sum: xxh3.Hash(src)}
	lazy := New(lazyPlace{}, keys, Options{}).Sealed()
	if err := lazy.Write(t.Context(), testName, m, src); err != nil || lazy.Stats().Encrypted != 0 {
		t.Errorf("%v, %+v", err, lazy.Stats())
	}
	place := &greedyPlace{}
	x := New(place, keys, Options{}).Sealed()
	if err := x.Write(t.Context(), testName, m, src); err != nil || x.Stats().Encrypted != 1 {
		t.Fatalf("%v, %+v", err, x.Stats())
	}
	k := keys.ring().list[0]
	h, err := parseHeader(place.stored)
	dst := make([]byte, len(src))
	if err == nil {
		err = k.open(dst, place.stored, &h, &testName, m.Sum)
	}
	if err != nil || !bytes.Equal(dst, src) {
		t.Error(err)
	}
}

// An object that changed in memory since its checksum was computed is not written: its tags would be valid and hide the change.
func TestObjectsThatChangedInMemoryAreNotWritten(t *testing.T) {
	keys, err := OpenKeys(t.Context(), Source{Text: strings.Repeat("ab", 32)})
	if err != nil {
		t.Fatal(err)
	}
	src := make([]byte, 1<<20)
	m := tier.Meta{Len: 1 << 20, Sum: xxh3.Hash(src)}
	src[700_000] ^= 1
	place := &greedyPlace{}
	if err := New(place, keys, Options{}).Write(t.Context(), testName, m, src); !errors.Is(err, ErrSum) || !errors.Is(err, tier.ErrNotKept) || place.stored != nil {
		t.Errorf("%v, %d bytes were stored", err, len(place.stored))
	}
	memory := tier.NewMemory(1 << 24)
	if err := New(memory, keys, Options{}).Write(t.Context(), testName, m, src); !errors.Is(err, ErrSum) {
		t.Errorf("a place without a flow: %v", err)
	}
}

// If the memory of an object goes away, the call returns an error, whichever goroutine meets it.
func TestMemoryThatGoesAway(t *testing.T) {
	path := filepath.Join(t.TempDir(), "seg")
	s, err := shm.Create(path, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := os.Truncate(path, 4096); err != nil {
		t.Fatal(err)
	}
	keys, err := OpenKeys(t.Context(), Source{Text: strings.Repeat("ab", 32)})
	if err != nil {
		t.Fatal(err)
	}
	gone := s.Bytes(0, 1<<20)
	for range 20 {
		err := New(&greedyPlace{}, keys, Options{}).Write(t.Context(), testName, tier.Meta{Len: 1 << 20, Sum: 1}, gone) // which no checksum is of
		if !errors.Is(err, shm.ErrFault) {
			t.Fatalf("write: %v", err)
		}
		one, b := keys.ring().list[0], make([]byte, sealedBytes(1<<20))
		if err := one.seal(b, make([]byte, 1<<20), &testName, 1, 0); err != nil {
			t.Fatal(err)
		}
		h, _ := parseHeader(b)
		if err := one.open(gone, b, &h, &testName, 1); !errors.Is(err, shm.ErrFault) {
			t.Fatalf("open: %v", err)
		}
	}
}

// BenchmarkAES measures AES-256-GCM of one buffer by one goroutine, which is the floor, and this package beside it.
func BenchmarkAES(b *testing.B) {
	k := oneKey(1)
	for _, n := range []int{1 << 20, 4 << 20} {
		src, dst := make([]byte, n), make([]byte, sealedBytes(int64(n)))
		salt := [saltBytes]byte{1}
		aead := k.newBox(dst, &salt, 0, &testName).aead
		nonce := make([]byte, 12)
		bench := func(name string, f func()) {
			b.Run(fmt.Sprintf("%dMiB/%s", n>>20, name), func(b *testing.B) {
				b.SetBytes(int64(n))
				for b.Loop() {
					f()
				}
			})
		}
		bench("aes", func() { aead.Seal(dst[:0], nonce, src, nil) })
		bench("seal", func() { _ = k.seal(dst, src, &testName, 0, 0) })
		h, err := parseHeader(dst)
		if err != nil {
			b.Fatal(err)
		}
		bench("open", func() {
			if err := k.open(src, dst, &h, &testName, 0); err != nil {
				b.Fatal(err)
			}
		})
		bench("xxh3", func() { _ = xxh3.Hash(src) })
		bench("copy", func() { copy(dst, src) })
	}
}
