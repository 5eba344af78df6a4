// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// startEngine starts kvasir engine over a server, and returns its URL.
func startEngine(t *testing.T, s *serving) string {
	t.Helper()
	port := testkit.FreePort(t)
	config := fmt.Sprintf(`{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute","kv_connector_extra_config":{"lmcache.mp.server_urls":"tcp://127.0.0.1:%d","lmcache.mp.mp_transfer_mode":"engine_driven"}}`, s.port)
	startAndLog(t, "the engine serves", "engine", "--port", fmt.Sprint(port), "--num-gpu-blocks-override", "512", "--kv-transfer-config", config)
	return fmt.Sprintf("http://127.0.0.1:%d", port)
}

// Two engines share one server with a tier, with signed salts. Restored KV is right, from the pool and from the tier. The prompts of --keep are
// right after an engine's restart. Nothing of the prompts stays.
func TestVerifyCommand(t *testing.T) {
	dir := t.TempDir()
	salts, file, page := filepath.Join(dir, "salts"), filepath.Join(dir, "kept"), filepath.Join(dir, "page.html")
	if err := os.WriteFile(salts, []byte(strings.Repeat("s", 40)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := serve(t, "--l1-size-gb", "64MiB", "--chunk-size", "64", "--disk", filepath.Join(dir, "disk"), "--disk-gb", "1", "--require-signed-salts", "--salt-secret-file", salts)
	server := fmt.Sprintf("http://127.0.0.1:%d", s.http)
	a, b := startEngine(t, s), startEngine(t, s)
	common := []string{"--salt-secret-file", salts, "--prompt-tokens", "600", "--rate", "1000", "--pause", "500ms", "--json"}
	code, out, errs := run(t, append([]string{"verify", "--url", a, "--second-url", b, "--server", server, "--html", page}, common...)...)
	var got struct {
		Verdict, Left string
		Steps         []struct {
			Name, Status, Why string
			Restored          bool
		}
	}
	if err := json.Unmarshal([]byte(out), &got); err != nil || code != 0 || got.Verdict != "passed" || got.Left != "" {
		t.Fatalf("exit %d, %v: %s%s", code, err, out, errs)
	}
	want := map[string]bool{"restored by a second engine": false, "restored from the tier disk": false, "another salt, a second engine": false}
	for _, step := range got.Steps {
		if _, ok := want[step.Name]; ok {
			want[step.Name] = step.Status == "passed"
		}
	}
	for name, passed := range want {
		if !passed {
			t.Errorf("%s has not passed: %s", name, out)
		}
	}
	if text, err := os.ReadFile(page); err != nil || !strings.Contains(string(text), "kvasir verify: passed") {
		t.Errorf("%v: %s", err, text)
	}
	code, out, errs = run(t, append([]string{"verify", "--url", a, "--keep", file}, common...)...)
	if code != 3 || !strings.Contains(out, `"verdict":"not tested"`) { // one engine alone shows only its own cache
		t.Fatalf("exit %d: %s%s", code, out, errs)
	}
	code, out, errs = run(t, append([]string{"verify", "--url", startEngine(t, s), "--expect", file}, common...)...)
	if code != 0 || !strings.Contains(out, `"verdict":"passed"`) {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
}

// verifyChunk is what a chunk of 64 tokens takes in the pool: 4 layers of 16 KiB.
const verifyChunk, verifyLayer = 64 << 10, 16 << 10

// changes are corruptions of the pool's bytes, below every checksum of a running server.
var changes = map[string]func(b []byte){
	"swapped chunks": func(b []byte) {
		for ; len(b) >= 2*verifyChunk; b = b[2*verifyChunk:] {
			swap(b[:verifyChunk], b[verifyChunk:2*verifyChunk])
		}
	},
	"wrong layer order": func(b []byte) {
		for ; len(b) >= verifyChunk; b = b[verifyChunk:] {
			swap(b[:verifyLayer], b[verifyLayer:2*verifyLayer])
		}
	},
	"stale weights": func(b []byte) { // what other weights make of the same prompts
		for i := range b {
			b[i] ^= 0x5a
		}
	},
	"truncated tail": func(b []byte) {
		for ; len(b) >= verifyChunk; b = b[verifyChunk:] {
			clear(b[verifyChunk/2 : verifyChunk])
		}
	},
	"off by one block": func(b []byte) { copy(b[4096:], b[:len(b)-4096]) },
}

func swap(a, b []byte) {
	for i := range a {
		a[i], b[i] = b[i], a[i]
	}
}

// Over kvasir engine, verify fails on restored KV with swapped chunks, layers in another order, other weights, a cut tail, or another block. It
// passes before that, and again when the bytes are right.
func TestVerifyCommandFindsChangedPools(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kept")
	s := serve(t, "--l1-size-gb", "16MiB", "--chunk-size", "64")
	common := []string{"--prompt-tokens", "600", "--rate", "1000", "--pause", "200ms"}
	if code, out, errs := run(t, append([]string{"verify", "--url", startEngine(t, s), "--keep", file}, common...)...); code != 3 {
		t.Fatalf("exit %d: %s%s", code, out, errs)
	}
	var status struct {
		L1 struct {
			Name string `json:"shm_name"`
		} `json:"l1"`
	}
	if _, out, errs := run(t, "status", "--json", "--url", fmt.Sprintf("http://127.0.0.1:%d", s.http)); json.Unmarshal([]byte(out), &status) != nil || status.L1.Name == "" {
		t.Fatal(out, errs)
	}
	pool, err := os.OpenFile(filepath.Join("/dev/shm", status.L1.Name), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	right := make([]byte, 16<<20)
	if _, err := io.ReadFull(pool, right); err != nil {
		t.Fatal(err)
	}
	expect := func(what string, change func(b []byte), want int, verdict string) {
		t.Helper()
		b := bytes.Clone(right)
		if change != nil {
			change(b)
			if bytes.Equal(b, right) {
				t.Fatalf("%s changes nothing", what)
			}
		}
		if _, err := pool.WriteAt(b, 0); err != nil {
			t.Fatal(err)
		}
		code, out, errs := run(t, append([]string{"verify", "--url", startEngine(t, s), "--expect", file}, common...)...)
		if code != want || !strings.Contains(out, "verdict: "+verdict) {
			t.Errorf("%s: exit %d: %s%s", what, code, out, errs)
		}
	}
	expect("nothing", nil, 0, "passed")
	for name, change := range changes {
		expect(name, change, 1, "failed")
	}
	expect("nothing any more", nil, 0, "passed")
}

// An adapter between engines and server loses the salts, so that one tenant loads KV that another one stored: verify finds that.
func TestVerifyCommandFindsAWrongSalt(t *testing.T) {
	s := serve(t, "--l1-size-gb", "16MiB", "--chunk-size", "64")
	salt := regexp.MustCompile(`kvasir-verify-[0-9a-f]{16}`)
	var mu sync.Mutex
	dealers := map[*zmtp.Peer]*zmtp.Dealer{}
	router := zmtp.NewRouter(func(p *zmtp.Peer, m zmtp.Message) {
		mu.Lock()
		d := dealers[p]
		if d == nil {
			d = zmtp.NewDealer(fmt.Sprintf("tcp://127.0.0.1:%d", s.port), zmtp.DealerOptions{Handler: func(m zmtp.Message) { _ = p.Send(m...) }})
			if err := d.Start(); err != nil {
				t.Error(err)
			}
			dealers[p] = d
		}
		mu.Unlock()
		var frames [][]byte
		for _, f := range m {
			frames = append(frames, salt.ReplaceAll(bytes.Clone(f), []byte("kvasir-verify-0000000000000000")))
		}
		_ = d.Send(frames...)
	}, zmtp.RouterOptions{})
	at, err := router.Listen(t.Context(), "tcp://127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = router.Close()
		for _, d := range dealers {
			_ = d.Close()
		}
	})
	through := &serving{port: at.(*net.TCPAddr).Port}
	code, out, errs := run(t, "verify", "--url", startEngine(t, through), "--prompt-tokens", "600", "--rate", "1000", "--pause", "500ms")
	if code != 1 || !strings.Contains(out, "never sent") {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
}

// Impossible flags are refused before a request is sent.
func TestVerifyCommandRefuses(t *testing.T) {
	dir := t.TempDir()
	garbage := filepath.Join(dir, "garbage")
	if err := os.WriteFile(garbage, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		want string
		args []string
	}{
		{"--url", nil},
		{"is not http://HOST:PORT", []string{"--url", "10.0.0.7"}},
		{"--second-url", []string{"--url", "http://127.0.0.1:1", "--second-url", "ftp://x"}},
		{"give one of them", []string{"--url", "http://127.0.0.1:1", "--keep", "a", "--expect", "b"}},
		{"--rate is above 0", []string{"--url", "http://127.0.0.1:1", "--rate", "0"}},
		{"not what kvasir verify --keep writes", []string{"--url", "http://127.0.0.1:1", "--expect", garbage}},
		{"no such file", []string{"--url", "http://127.0.0.1:1", "--expect", filepath.Join(dir, "none")}},
		{"connection refused", []string{"--url", fmt.Sprintf("http://127.0.0.1:%d", testkit.FreePort(t))}},
	} {
		if code, out, errs := run(t, append([]string{"verify"}, c.args...)...); code == 0 || code == 3 || !strings.Contains(errs, c.want) || out != "" {
			t.Errorf("%v: exit %d: %s%s", c.args, code, out, errs)
		}
	}
}
