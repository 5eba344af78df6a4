// SPDX-License-Identifier: Apache-2.0

// Package timing_test measures what the time of an answer tells one tenant of another one's prompts. interop/bench.sh runs it.
package timing_test

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
)

const (
	program      = "../../bin/kvasir" // of make build
	promptTokens = 300
	chunkTokens  = 64
	prefillRate  = 10_000 // tokens a second
)

// probe is a prompt that B sends: A sent half of them before.
type probe struct {
	tokens []uint32
	stored bool
	ttft   time.Duration
	lookup time.Duration
}

// TestTimingOfProbes has tenant A store prompts, and tenant B send the same and others, through the proxy and as lookups. KVASIR_TIMING is the number of
// probes, 10,000 for the figures of docs/operate/security.md. The area under the curve is 0.5 where the time tells nothing.
func TestTimingOfProbes(t *testing.T) {
	n, err := strconv.Atoi(os.Getenv("KVASIR_TIMING"))
	if err != nil || n < 2 {
		t.Skip("KVASIR_TIMING is no number of probes")
	}
	rounds := []struct {
		name string
		deployment
		least, most float64 // of the areas
	}{
		{"one namespace (control)", deployment{}, 0.95, 1},
		{"own salts", deployment{own: true}, 0, 1},
		{"own signed salts", deployment{own: true, signed: true}, 0, 1},
		{"own signed salts, --timing-shield", deployment{own: true, signed: true, shield: true}, 0, 0.55},
		{"own salts, --timing-shield", deployment{own: true, shield: true}, 0, 0.55},
	}
	if only := os.Getenv("KVASIR_TIMING_ROUND"); only != "" {
		i, _ := strconv.Atoi(only)
		rounds = rounds[i : i+1]
	}
	fmt.Printf("%d probes; the area under the curve of the times (0.5: they tell nothing), and what it should be\n\n", n)
	fmt.Println("| namespaces | what | AUC | p50 of prompts that A sent | p50 of others | wanted |\n| --- | --- | --: | --: | --: | --- |")
	for _, r := range rounds {
		t.Run(r.name, func(t *testing.T) {
			probes := measure(t, n, r.deployment)
			report := func(what string, least float64, of func(*probe) time.Duration) {
				area := auc(probes, of)
				wanted := "stated"
				switch {
				case least > 0:
					wanted = fmt.Sprintf("at least %.2f", least)
				case r.most < 1:
					wanted = fmt.Sprintf("at most %.2f, either way", r.most)
				}
				fmt.Printf("| %s | %s | %.3f | %v | %v | %s |\n", r.name, what, area, median(probes, true, of), median(probes, false, of), wanted)
				if area < least || r.most < 1 && max(area, 1-area) > r.most {
					t.Errorf("%s: AUC %.3f, want %.2f to %.2f", what, area, least, r.most)
				}
			}
			report("TTFT", r.least, func(p *probe) time.Duration { return p.ttft })
			report("lookups", 0, func(p *probe) time.Duration { return p.lookup }) // one that hits is not answered faster
		})
	}
}

// auc is the chance that a prompt which A sent is answered faster than another one, ties counted as halves.
func auc(probes []probe, of func(*probe) time.Duration) float64 {
	order := make([]*probe, len(probes))
	for i := range probes {
		order[i] = &probes[i]
	}
	slices.SortFunc(order, func(a, b *probe) int { return cmp.Compare(of(a), of(b)) })
	sum, stored := 0.0, 0.0
	for i := 0; i < len(order); {
		j := i
		for j < len(order) && of(order[j]) == of(order[i]) {
			j++
		}
		rank := float64(i+j+1) / 2 // of all that took as long
		for ; i < j; i++ {
			if order[i].stored {
				sum += rank
				stored++
			}
		}
	}
	others := float64(len(order)) - stored
	return 1 - (sum-stored*(stored+1)/2)/(stored*others)
}

func median(probes []probe, stored bool, of func(*probe) time.Duration) time.Duration {
	var all []time.Duration
	for i := range probes {
		if probes[i].stored == stored {
			all = append(all, of(&probes[i]))
		}
	}
	slices.Sort(all)
	return all[len(all)/2].Round(time.Microsecond)
}

// start starts a command and waits for a line of its log.
func start(t *testing.T, line string, args ...string) {
	t.Helper()
	c := exec.Command(program, args...)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	log, err := c.StderrPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Signal(syscall.SIGTERM)
		_ = c.Wait()
	})
	ready := make(chan struct{})
	var once sync.Once
	var last string
	go func() {
		for r := bufio.NewScanner(log); r.Scan(); {
			if last = r.Text(); strings.Contains(last, line) {
				once.Do(func() { close(ready) })
			}
		}
	}()
	select {
	case <-ready:
	case <-time.After(60 * time.Second):
		t.Fatalf("%v never said %q: %s", args, line, last)
	}
}

// deployment says what keeps tenants apart: salts of their own, whether they are signed, and the shield.
type deployment struct{ own, signed, shield bool }

// measure runs a deployment, and returns the probes with their times.
func measure(t *testing.T, n int, d deployment) []probe {
	dir := t.TempDir()
	put := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	salts := put("salts", strings.Repeat("s", 40)+"\n")
	own := " salt=off"
	if d.own {
		own = ""
	}
	keys := put("keys", fmt.Sprintf("a %x%s\nb %x%s\n", sha256.Sum256([]byte("secret-of-a")), own, sha256.Sum256([]byte("secret-of-b")), own))
	port, http1, engine, proxy := testkit.FreePort(t), testkit.FreePort(t), testkit.FreePort(t), testkit.FreePort(t)
	name := fmt.Sprintf("kvasir_timing_%d", os.Getpid())
	mib := n/2*(promptTokens/chunkTokens)*chunkTokens/1024*5/4 + 64 // of 1 KiB a token, with room for what B stores
	server := []string{"server", "--port", fmt.Sprint(port), "--http-port", fmt.Sprint(http1), "--shm-name", name, "--l1-size-gb", fmt.Sprintf("%dMiB", 3*mib), "--chunk-size", fmt.Sprint(chunkTokens)}
	front := []string{"proxy", "--port", fmt.Sprint(proxy), "--engine", fmt.Sprintf("http://127.0.0.1:%d", engine), "--api-keys", keys}
	if d.signed {
		server = append(server, "--require-signed-salts", "--salt-secret-file", salts)
		front = append(front, "--salt-secret-file", salts)
	}
	if d.shield {
		server = append(server, "--timing-shield")
	}
	t.Cleanup(func() { _ = exec.Command(program, "server", "--shm-name", name, "--drop").Run() })
	start(t, "/status", server...)
	start(t, "the engine serves", "engine", "--port", fmt.Sprint(engine), "--num-gpu-blocks-override", "256", "--prefill-tokens-per-second", fmt.Sprint(prefillRate), "--kv-transfer-config",
		fmt.Sprintf(`{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_connector_extra_config":{"lmcache.mp.server_urls":"tcp://127.0.0.1:%d","lmcache.mp.mp_transfer_mode":"engine_driven"}}`, port))
	start(t, "serv", front...)
	url := fmt.Sprintf("http://127.0.0.1:%d/v1/completions", proxy)
	testkit.Eventually(t, "the proxy answers", func() bool {
		_, err := ask(url, "secret-of-a", []uint32{1, 2, 3})
		return err == nil
	})
	probes := make([]probe, n)
	for i := range probes {
		probes[i].stored = i%2 == 0
		probes[i].tokens = make([]uint32, promptTokens)
		for j := range probes[i].tokens {
			probes[i].tokens[j] = rand.Uint32N(30_000) + 10
		}
	}
	next := make(chan *probe)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for p := range next {
				if _, err := ask(url, "secret-of-a", p.tokens); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range probes {
		if probes[i].stored {
			next <- &probes[i]
		}
	}
	close(next)
	wg.Wait()
	salt := ""
	if d.own {
		salt = "probe"
	}
	if d.signed {
		s, err := auth.OpenSaltSecrets(salts)
		if err != nil {
			t.Fatal(err)
		}
		if salt, err = s.Sign(salt); err != nil {
			t.Fatal(err)
		}
	}
	c, err := lmcache.NewClient(fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Minute)
	defer cancel()
	if _, err := c.Negotiate(ctx, chunkTokens); err != nil {
		t.Fatal(err)
	}
	rand.Shuffle(n, func(i, j int) { probes[i], probes[j] = probes[j], probes[i] })
	for i := range probes { // before B stores anything
		p := &probes[i]
		k := &lmcache.Key{Model: "simulated", WorldSize: 1, Worker: lmcache.AllWorkers, Tokens: p.tokens, End: len(p.tokens), RequestID: fmt.Sprint("probe-", i), Salt: salt, Readers: 1, Packed: c.Enveloped()}
		began := time.Now()
		if _, err := c.Lookup(ctx, k); err != nil {
			t.Fatal(err)
		}
		p.lookup = time.Since(began)
		if err := c.EndSession(ctx, k.RequestID); err != nil {
			t.Fatal(err)
		}
	}
	for i := range probes {
		if probes[i].ttft, err = ask(url, "secret-of-b", probes[i].tokens); err != nil {
			t.Fatal(err)
		}
	}
	return probes
}

// ask sends a prompt and returns the time to its first token.
func ask(url, key string, tokens []uint32) (time.Duration, error) {
	body, err := json.Marshal(map[string]any{"model": "simulated", "prompt": tokens, "max_tokens": 1, "stream": true})
	if err != nil {
		return 0, err
	}
	r, err := http.NewRequest(http.MethodPost, url, strings.NewReader(string(body)))
	if err != nil {
		return 0, err
	}
	r.Header.Set("Authorization", "Bearer "+key)
	r.Header.Set("Content-Type", "application/json")
	began := time.Now()
	a, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, err
	}
	defer a.Body.Close()
	if a.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(a.Body, 1000))
		return 0, fmt.Errorf("%s: %s", a.Status, text)
	}
	lines := bufio.NewReader(a.Body)
	if _, err := lines.ReadString('\n'); err != nil {
		return 0, err
	}
	took := time.Since(began)
	_, err = io.Copy(io.Discard, lines)
	return took, err
}
