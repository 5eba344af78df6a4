// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// sealedStatus is the part of /status about tiers.
type sealedStatus struct {
	Below struct {
		Tiers []struct {
			Name         string
			Objects      int64
			ReadBytes    uint64 `json:"read_bytes"`
			Encrypted    bool
			SealedMisses map[string]uint64 `json:"sealed_misses"`
		}
		WaitingBytes int64 `json:"waiting_bytes"`
	} `json:"l2"`
	L1 struct {
		Name string `json:"shm_name"`
	} `json:"l1"`
	Findings []struct{ What, Do string }
}

// A server encrypts its disk: no bytes of the pool or of the prompts are plain there. A restart, a rotated key and a rekey lose no chunk. Without
// the key every lookup is a miss, and a finding says so. The keys are in no log and no answer.
func TestServerEncryptsItsDisk(t *testing.T) {
	dir := t.TempDir()
	disk, keys, kept := filepath.Join(dir, "disk"), filepath.Join(dir, "keys"), filepath.Join(dir, "kept")
	one, two := strings.Repeat("1d", 32), strings.Repeat("2e", 32)
	setKeys := func(lines ...string) {
		t.Helper()
		if err := os.WriteFile(keys, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	setKeys(one)
	name := fmt.Sprintf("kvasir_test_sealed_%d", os.Getpid())
	t.Cleanup(func() { run(t, "server", "--shm-name", name, "--drop") }) // after the servers have ended, also those of a failure
	var mu sync.Mutex
	var said strings.Builder // everything that servers logged or answered
	note := func(text string) {
		mu.Lock()
		defer mu.Unlock()
		said.WriteString(text + "\n")
	}
	start := func(more ...string) (*serving, func() sealedStatus) {
		t.Helper()
		s := serve(t, append([]string{
			"--shm-name", name, "--l1-size-gb", "64MiB", "--chunk-size", "64", "--disk", disk, "--disk-gb", "1", "--disk-min-free-gb", "0.001", "--disk-first-touch", "--cold",
		}, more...)...)
		url := fmt.Sprintf("http://127.0.0.1:%d", s.http)
		return s, func() (st sealedStatus) {
			t.Helper()
			for _, path := range []string{"/status", "/config", "/metrics"} {
				r, err := http.Get(url + path)
				if err != nil {
					t.Fatal(err)
				}
				b, err := io.ReadAll(r.Body)
				r.Body.Close()
				if err != nil {
					t.Fatal(err)
				}
				note(string(b))
				if path == "/status" {
					if err := json.Unmarshal(b, &st); err != nil || len(st.Below.Tiers) != 1 {
						t.Fatalf("%v: %d tiers", err, len(st.Below.Tiers))
					}
				}
			}
			return st
		}
	}
	stop := func(s *serving) {
		t.Helper()
		s.stop(t)
		note(strings.Join(s.waited, "\n"))
		for line := range s.lines {
			note(line)
		}
	}
	common := []string{"--prompt-tokens", "600", "--rate", "1000", "--pause", "200ms"}
	expect := func(s *serving) {
		t.Helper()
		if code, out, errs := run(t, append([]string{"verify", "--url", startEngine(t, s), "--expect", kept}, common...)...); code != 0 && code != 3 || strings.Contains(out, "verdict: failed") {
			t.Errorf("exit %d: %s%s", code, out, errs)
		}
	}

	s, status := start("--tier-key-file", keys)
	if code, out, errs := run(t, append([]string{"verify", "--url", startEngine(t, s), "--keep", kept}, common...)...); code != 3 {
		t.Fatalf("exit %d: %s%s", code, out, errs)
	}
	testkit.Eventually(t, "the chunks are on the disk", func() bool {
		st := status()
		return st.Below.Tiers[0].Objects > 0 && st.Below.WaitingBytes == 0
	})
	st := status()
	if !st.Below.Tiers[0].Encrypted {
		t.Error("the status does not say that the disk is encrypted")
	}
	pool, err := os.ReadFile(filepath.Join("/dev/shm", st.L1.Name))
	if err != nil {
		t.Fatal(err)
	}
	stop(s)
	noPlain(t, disk, pool, kept)

	s, status = start("--tier-key-file", keys)
	expect(s)
	if st = status(); st.Below.Tiers[0].ReadBytes == 0 || len(st.Below.Tiers[0].SealedMisses) > 0 {
		t.Errorf("after a restart: %+v", st.Below)
	}
	stop(s)

	s, status = start("--l2-write", "never") // without the key
	expect(s)
	st = status()
	if st.Below.Tiers[0].ReadBytes > 0 || st.Below.Tiers[0].SealedMisses["missing_key"] == 0 || !strings.Contains(fmt.Sprint(st.Findings), "encrypted with a key that this server does not have") {
		t.Errorf("without the key: %+v %+v", st.Below, st.Findings)
	}
	stop(s)

	s, status = start("--tier-key-file", keys)
	setKeys(two, one)
	code, out, errs := run(t, "tier", "rekey", "disk", "--url", fmt.Sprintf("http://127.0.0.1:%d", s.http), "--json")
	var end struct {
		Status            string
		Rewritten, Failed int64
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	objects := status().Below.Tiers[0].Objects // the index has been read
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &end); err != nil || objects == 0 || code != 0 || end.Status != "ok" || end.Rewritten != objects || end.Failed != 0 {
		t.Errorf("exit %d, of %d objects: %s%s", code, objects, out, errs)
	}
	note(out + errs)
	if code, out, errs := run(t, "tier", "rekey", "disk", "--url", fmt.Sprintf("http://127.0.0.1:%d", s.http)); code != 0 || !strings.Contains(out, fmt.Sprintf("%d had it", objects)) {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
	if code, _, errs := run(t, "tier", "rekey", "redis", "--url", fmt.Sprintf("http://127.0.0.1:%d", s.http)); code != 1 || !strings.Contains(errs, "this server has disk") {
		t.Errorf("exit %d: %s", code, errs)
	}
	stop(s)

	setKeys(two)
	s, status = start("--tier-key-file", keys)
	expect(s)
	if st = status(); st.Below.Tiers[0].ReadBytes == 0 || len(st.Below.Tiers[0].SealedMisses) > 0 {
		t.Errorf("with the new key alone: %+v", st.Below)
	}
	stop(s)
	if code, out, errs := run(t, "tier", "verify", "disk:"+disk, "--tier-key-file", keys); code != 0 || strings.HasPrefix(out, "0 objects") || !strings.Contains(out, "as they were written, 0 have no checksum, 0 are damaged, 0 of them were removed, 0 could not be read") {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
	if code, out, errs := run(t, "tier", "verify", "disk:"+disk, "--remove"); code != 0 || !strings.Contains(out, "0 objects are as they were written") {
		t.Errorf("without keys: exit %d: %s%s", code, out, errs)
	}
	for _, secret := range []string{one[:16], two[:16], "\x1d\x1d\x1d\x1d", "HR0dHR0d", "Li4uLi4u"} {
		if strings.Contains(said.String(), secret) {
			t.Errorf("a log or an answer has %q", secret)
		}
	}
	if !strings.Contains(said.String(), `encrypted=[disk]`) {
		t.Errorf("no log says what is encrypted")
	}
}

// noPlain checks that no file below a directory has bytes of the pool or of the prompts in it.
func noPlain(t *testing.T, dir string, pool []byte, kept string) {
	t.Helper()
	var all []byte
	if err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		all = append(all, b...)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	const piece = 24
	pieces := 0
	find := func(what string, b []byte) {
		if bytes.Contains(all, b) {
			t.Fatalf("the disk has %s: %q", what, b)
		}
		pieces++
	}
	for at := 0; at+piece <= len(pool); at += 4096 {
		if b := pool[at+64:][:piece]; bytes.Count(b, b[:1]) < piece/2 {
			find("bytes of the pool", b)
		}
	}
	if pieces < 10 {
		t.Fatalf("the pool has %d pieces", pieces)
	}
	text, err := os.ReadFile(kept)
	if err != nil {
		t.Fatal(err)
	}
	for at := 0; at+piece <= len(text); at += 64 {
		find("text of the prompts", text[at:][:piece])
	}
}

// Keys that cannot be used are refused by name before anything is opened, and none is shown.
func TestBadTierKeysAreRefused(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string, mode os.FileMode) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good := strings.Repeat("3f", 32) + "\n"
	open, short := file("open", good, 0o644), file("short", good[:20]+"\n", 0o600)
	f := func(want string, args ...string) {
		t.Helper()
		code, _, stderr := run(t, append([]string{"server", "--l1-size-gb", "0.01", "--shm-name", "kvasir_test_keys", "--disk", filepath.Join(dir, "disk"), "--disk-gb", "1"}, args...)...)
		if code == 0 || !strings.Contains(stderr, want) || strings.Contains(stderr, "3f3f") {
			t.Errorf("%v: exit %d, want %q, got:\n%s", args, code, want, stderr)
		}
	}
	f(open+": every user", "--tier-key-file", open)
	f(short+": line 1: a key is 32 bytes", "--tier-key-file", short)
	f(filepath.Join(dir, "none"), "--tier-key-file", filepath.Join(dir, "none"))
	f("exit status 7", "--tier-key-command", "exit 7 # 3f3f")
	f("--tier-key-file: it is empty", "--tier-key-file", "") // a server that is to encrypt never writes plain objects instead
	f("--tier-key-command: it is empty", "--tier-key-command", " ")
	t.Setenv("KVASIR_TIER_KEYS", "")
	f("the environment: it holds no key")
	t.Setenv("KVASIR_TIER_KEYS", good[:30])
	f("the environment: line 1")
	f("more than one way", "--tier-key-file", file("good", good, 0o640))
	if _, err := os.Stat(filepath.Join(dir, "disk")); err == nil {
		t.Error("the disk was made")
	}
	if code, _, stderr := run(t, "server", "--l1-size-gb", "0.01", "--tier-key-file", open); code == 0 || !strings.Contains(stderr, "none is given") {
		t.Errorf("keys without a tier: exit %d: %s", code, stderr)
	}
}
