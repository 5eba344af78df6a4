// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/statefile"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/server/workers"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
	"github.com/kvasir-kv/kvasir/store/tenant"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/disk"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/generation"
	"github.com/kvasir-kv/kvasir/tier/redis"
	"github.com/kvasir-kv/kvasir/tier/s3"
)

// releaseFiles is what a release wrote, as interop/formats recorded it: five chunks of one prompt, of 1 KiB each.
type releaseFiles struct {
	Attributes map[string]string
	Redis      map[string]string
	S3         map[string]recordedObject
	Events     []string
	dir        string
}

// recordedObject is an object of a bucket.
type recordedObject struct{ Meta, Body string } // x-amz-meta-kvasir; hexadecimal

const releaseChunks, releaseChunkBytes = 5, 1024

func unpackRelease(t *testing.T, from string) *releaseFiles {
	t.Helper()
	r := &releaseFiles{dir: t.TempDir()}
	text, err := os.ReadFile(filepath.Join(from, "recorded.json"))
	if err == nil {
		err = json.Unmarshal(text, r)
	}
	if err != nil {
		t.Fatal(err)
	}
	packed, err := os.ReadFile(filepath.Join(from, "files.tar.gz"))
	if err != nil {
		t.Fatal(err)
	}
	z, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	for files := tar.NewReader(z); ; {
		h, err := files.Next()
		if errors.Is(err, io.EOF) {
			return r
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(files)
		path := filepath.Join(r.dir, h.Name)
		if err := errors.Join(err, os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, b, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
}

func (r *releaseFiles) path(name string) string { return filepath.Join(r.dir, name) }

// The files of each release are read by this build: every chunk with its bytes, settings, registrations, events.
func TestFormatsOfReleases(t *testing.T) {
	releases, err := filepath.Glob("testdata/formats/*")
	if err != nil || len(releases) == 0 {
		t.Fatal(releases, err)
	}
	for _, from := range releases {
		t.Run(filepath.Base(from), func(t *testing.T) {
			commit, err := os.ReadFile(filepath.Join(from, "COMMIT"))
			if err != nil || len(bytes.TrimSpace(commit)) != 40 {
				t.Errorf("COMMIT: %q, %v", commit, err)
			}
			t.Run("disk", func(t *testing.T) { diskOfRelease(t, unpackRelease(t, from)) })
			t.Run("fs", func(t *testing.T) { fsOfRelease(t, unpackRelease(t, from)) })
			t.Run("redis", func(t *testing.T) { redisOfRelease(t, unpackRelease(t, from)) })
			t.Run("s3", func(t *testing.T) { s3OfRelease(t, unpackRelease(t, from)) })
			t.Run("generations", func(t *testing.T) { generationsOfRelease(t, unpackRelease(t, from)) })
			t.Run("pool", func(t *testing.T) { poolOfRelease(t, unpackRelease(t, from)) })
			t.Run("states", func(t *testing.T) { statesOfRelease(t, unpackRelease(t, from)) })
			t.Run("events", func(t *testing.T) { eventsOfRelease(t, unpackRelease(t, from)) })
		})
	}
}

type listingTier interface {
	tier.Tier
	tier.Lister
}

// wantChunks reads and checks all chunks that a tier lists.
func wantChunks(t *testing.T, place listingTier) {
	t.Helper()
	var keys []kv.Key
	err := place.List(t.Context(), func(k kv.Key, m tier.Meta) bool {
		if m.Len != releaseChunkBytes || m.Sum == 0 {
			t.Errorf("%v: %+v", k, m)
		}
		keys = append(keys, k)
		return true
	})
	if err != nil || len(keys) != releaseChunks {
		t.Fatalf("%d chunks, %v", len(keys), err)
	}
	for _, k := range keys {
		m, err := place.Read(t.Context(), k, make([]byte, releaseChunkBytes))
		if err != nil || m.Len != releaseChunkBytes || m.NoSum {
			t.Errorf("%v: %+v, %v", k, m, err)
		}
	}
}

func diskOfRelease(t *testing.T, r *releaseFiles) {
	d, err := disk.Open(disk.Options{Dirs: []disk.Dir{{Path: r.path("disk"), Bytes: 64 << 20}}, MinFree: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	<-d.Opened()
	wantChunks(t, d)
}

func fsOfRelease(t *testing.T, r *releaseFiles) {
	names := tier.NewNames()
	for name, attr := range r.Attributes {
		b, err := hex.DecodeString(attr)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Setxattr(filepath.Join(r.path("fs"), name), "user.kvasir.x3", b, 0); err != nil {
			t.Skip("no extended attributes here: ", err)
		}
		names.Add(kv.Namespace(b[1:17]), "m", nil)
	}
	d, err := fs.Open(fs.Options{Path: r.path("fs"), Names: names, Trust: fs.TrustChecksum})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	wantChunks(t, d)
}

func redisOfRelease(t *testing.T, r *releaseFiles) {
	if _, err := exec.LookPath("redis-server"); err != nil {
		t.Skip(err)
	}
	socket := filepath.Join(t.TempDir(), "s")
	cmd := exec.Command("redis-server", "--port", "0", "--unixsocket", socket, "--save", "", "--dir", r.dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Signal(syscall.SIGKILL)
		_ = cmd.Wait() // it was killed
	}()
	var c net.Conn
	testkit.Eventually(t, "redis-server listens", func() (ok bool) {
		var err error
		c, err = net.Dial("unix", socket)
		return err == nil
	})
	defer c.Close()
	for name, value := range r.Redis {
		v, err := hex.DecodeString(value)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s\r\n", len(name), name, len(v), v)
		answer := make([]byte, 5)
		if _, err := io.ReadFull(c, answer); err != nil || string(answer) != "+OK\r\n" {
			t.Fatalf("%q, %v", answer, err)
		}
	}
	place, err := redis.Open(redis.Options{Addrs: []string{"unix:" + socket}})
	if err != nil {
		t.Fatal(err)
	}
	defer place.Close()
	wantChunks(t, place)
}

func s3OfRelease(t *testing.T, r *releaseFiles) {
	const bucket = "/b/"
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		name, ok := strings.CutPrefix(q.URL.Path, bucket)
		if !ok || name == "" {
			fmt.Fprint(w, "<ListBucketResult><IsTruncated>false</IsTruncated>")
			for name, o := range r.S3 {
				fmt.Fprintf(w, "<Contents><Key>%s</Key><Size>%d</Size></Contents>", name, len(o.Body)/2)
			}
			fmt.Fprint(w, "</ListBucketResult>")
			return
		}
		o, ok := r.S3[name]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		b, err := hex.DecodeString(o.Body)
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("X-Amz-Meta-Kvasir", o.Meta)
		w.Header().Set("Content-Length", strconv.Itoa(len(b)))
		_, _ = w.Write(b)
	}))
	defer web.Close()
	t.Setenv("AWS_ACCESS_KEY_ID", "id")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	place, err := s3.Open(s3.Options{URL: web.URL + strings.TrimSuffix(bucket, "/")})
	if err != nil {
		t.Fatal(err)
	}
	defer place.Close()
	wantChunks(t, place)
}

func generationsOfRelease(t *testing.T, r *releaseFiles) {
	file := r.path("cleared/" + generation.FileName)
	if _, err := os.Stat(file); errors.Is(err, os.ErrNotExist) {
		t.Skip("this release kept no generations: a clear of tiers came after 0.1.0")
	}
	names := tier.NewNames()
	b, err := generation.Open([]string{file}, names, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(file)
	if err != nil || b.Damaged() || !bytes.Contains(text, []byte(`"number":1`)) {
		t.Errorf("%s, damaged: %v, %v", text, b.Damaged(), err)
	}
}

// sealIndex writes the copied segment and an index version into a copy of a pool's index.
func sealIndex(t *testing.T, r *releaseFiles, version uint32) {
	t.Helper()
	info, err := os.Stat(r.path("pool"))
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(r.path("pool.kvasir"))
	if err != nil {
		t.Fatal(err)
	}
	binary.LittleEndian.PutUint32(b[8:], version)
	binary.LittleEndian.PutUint64(b[40:], info.Sys().(*syscall.Stat_t).Ino)
	binary.LittleEndian.PutUint32(b[56:], crc32.Checksum(b[:56], crc32.MakeTable(crc32.Castagnoli)))
	if err := os.WriteFile(r.path("pool.kvasir"), b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// filesOf returns files with their bytes.
func filesOf(t *testing.T, dir string, names ...string) string {
	t.Helper()
	var all strings.Builder
	for _, name := range names {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&all, "%s %x\n", name, b)
	}
	return all.String()
}

func poolOfRelease(t *testing.T, r *releaseFiles) {
	o := pool.Options{Name: "pool", Dir: r.dir, Bytes: 1 << 20, ChunkTokens: 64}
	sealIndex(t, r, 2)
	before := filesOf(t, r.dir, "pool", "pool.kvasir", "pool.workers")
	if p, err := pool.Open(o); !errors.Is(err, pool.ErrChanged) || !strings.Contains(err.Error(), "version 2") {
		t.Errorf("an index of a later version: %v, %v", p, err)
	}
	if after := filesOf(t, r.dir, "pool", "pool.kvasir", "pool.workers"); after != before {
		t.Error("a pool of a later version was changed")
	}
	sealIndex(t, r, 1)
	p, err := pool.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	st := store.New(p, store.Options{})
	defer st.Close()
	if s := st.Stats(); s.Resident != releaseChunks {
		t.Errorf("%d chunks in the pool", s.Resident)
	}
	b, err := os.ReadFile(r.path("pool.workers"))
	if err != nil {
		t.Fatal(err)
	}
	n, err := workers.DecodeNote(b)
	if err != nil || len(n.Workers) != 1 {
		t.Fatalf("%+v, %v", n, err)
	}
	if w, err := n.Worker(0); err != nil || w.Model != "m" || w.World != 1 {
		t.Errorf("%+v, %v", w, err)
	}
}

// laterState raises the version at the end of the first word of a state file's magic.
func laterState(t *testing.T, path string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, bytes.Replace(b, []byte(" 1 "), []byte(" 2 "), 1), 0o600); err != nil {
		t.Fatal(err)
	}
}

func statesOfRelease(t *testing.T, r *releaseFiles) {
	terms, err := tenant.OpenTerms(r.path("tenants"), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("%+v", terms.List())
	if err := terms.Close(); err != nil || !strings.Contains(text, "team") {
		t.Errorf("%s, %v", text, err)
	}
	registry, err := bootstrap.Open(bootstrap.Options{StateFile: r.path("registry")})
	if err != nil {
		t.Fatal(err)
	}
	w := httptest.NewRecorder()
	registry.ServeHTTP(w, httptest.NewRequestWithContext(context.Background(), http.MethodGet, "/query", nil))
	if err := registry.Close(); err != nil || !strings.Contains(w.Body.String(), strconv.Quote("p")) {
		t.Errorf("%s, %v", w.Body, err)
	}
	laterState(t, r.path("tenants"))
	laterState(t, r.path("registry"))
	before := filesOf(t, r.dir, "tenants", "registry")
	defer func() {
		if filesOf(t, r.dir, "tenants", "registry") != before {
			t.Error("a state of a later version was changed")
		}
	}()
	later := func(what string, err error) {
		t.Helper()
		if e, ok := errors.AsType[*statefile.Error](err); !ok || !e.Newer {
			t.Errorf("%s of a later version: %v", what, err)
		}
	}
	_, err = tenant.OpenTerms(r.path("tenants"), nil, nil)
	later("settings", err)
	_, err = bootstrap.Open(bootstrap.Options{StateFile: r.path("registry")})
	later("a registry", err)
}

func eventsOfRelease(t *testing.T, r *releaseFiles) {
	has := map[string]bool{}
	for _, text := range r.Events {
		b, err := hex.DecodeString(text)
		if err != nil {
			t.Fatal(err)
		}
		batch, err := event.Decode(b)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range batch.Events {
			for _, h := range e.Hashes {
				has[e.Medium+string(h)] = e.Kind == event.Stored
			}
		}
	}
	if len(has) != 2*releaseChunks { // in the pool, and in tiers
		t.Errorf("%d hashes", len(has))
	}
}

// A server refuses a pool with the note of a later release, says what to do, and changes nothing. --cold discards the pool.
func TestNoteOfALaterReleaseIsRefused(t *testing.T) {
	r := unpackRelease(t, "testdata/formats/0.1.0")
	o := pool.Options{Name: "pool", Dir: r.dir}
	if err := readableNote(o); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(r.path("pool.workers"), []byte(`{"Version":2,"Workers":{"a":1}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	before := filesOf(t, r.dir, "pool", "pool.kvasir", "pool.workers")
	if _, err := (&serverCmd{}).openStore(&serverOptions{pool: o}); !errors.Is(err, workers.ErrNewer) || !strings.Contains(err.Error(), "version 2") || !strings.Contains(err.Error(), "--cold") {
		t.Errorf("%v", err)
	}
	if filesOf(t, r.dir, "pool", "pool.kvasir", "pool.workers") != before {
		t.Error("the pool was changed")
	}
	o.Cold = true
	if err := readableNote(o); err != nil {
		t.Errorf("with --cold: %v", err)
	}
}
