// SPDX-License-Identifier: Apache-2.0

package timing_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

const mostAccessCost = 1.3 // the added time of a proxy with access, of that of one without

// TestCostOfAccess compares a proxy with API keys, https and networks with one that has none: HTTP/1.1 on connections that are kept, in nine turns that
// alternate. KVASIR_ACCESS is the requests of a connection in a turn. What a proxy adds is its median less that of the engine. Half of what https costs
// is the client's, which shares the processors here, and it is there without a proxy, too: so the engine is asked by https beside it, and the ratio is
// that of what each proxy adds for its client: by https to the one with access, by http to the one without.
func TestCostOfAccess(t *testing.T) {
	var n int
	if _, err := fmt.Sscan(os.Getenv("KVASIR_ACCESS"), &n); err != nil || n < 10 {
		t.Skip("KVASIR_ACCESS is no number of requests")
	}
	answer := []byte(`{"id":"cmpl-1","object":"text_completion","created":1,"model":"mock","choices":[{"index":0,"text":"x","finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}`)
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		if r.URL.Path == "/v1/models" {
			_, _ = w.Write([]byte(`{"object":"list","data":[{"id":"mock","object":"model","owned_by":"x"}]}`))
			return
		}
		_, _ = w.Write(answer)
	})
	engine := httptest.NewServer(handler)
	defer engine.Close()
	dir := t.TempDir()
	cert, key, roots := pair(t, dir)
	own, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	secure := httptest.NewUnstartedServer(handler)
	secure.TLS = &tls.Config{Certificates: []tls.Certificate{own}, MinVersion: tls.VersionTLS12}
	secure.StartTLS()
	defer secure.Close()
	keys := filepath.Join(dir, "keys")
	if err := os.WriteFile(keys, fmt.Appendf(nil, "a %x\n", sha256.Sum256([]byte("secret"))), 0o600); err != nil {
		t.Fatal(err)
	}
	bare, guarded := testkit.FreePort(t), testkit.FreePort(t)
	start(t, "serv", "proxy", "--port", fmt.Sprint(bare), "--engine", engine.URL)
	start(t, "serv", "proxy", "--port", fmt.Sprint(guarded), "--engine", engine.URL, "--api-keys", keys, "--tls-cert", cert, "--tls-key", key, "--allow-from", "127.0.0.0/8")
	client := &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 64, DisableCompression: true,
		TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}, TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{},
	}}
	defer client.CloseIdleConnections()
	send := func(base string, body []byte) time.Duration {
		r, err := http.NewRequest(http.MethodPost, base+"/v1/completions", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Authorization", "Bearer secret")
		r.Header.Set("Content-Type", "application/json")
		began := time.Now()
		a, err := client.Do(r)
		if err != nil {
			t.Error(err)
			return 0
		}
		defer a.Body.Close()
		if got, err := io.ReadAll(a.Body); err != nil || a.StatusCode != http.StatusOK || !bytes.Contains(got, []byte("cmpl-")) {
			t.Errorf("%s, %v: %.200s", a.Status, err, got)
		}
		return time.Since(began)
	}
	places := []string{engine.URL, fmt.Sprintf("http://127.0.0.1:%d", bare), fmt.Sprintf("https://127.0.0.1:%d", guarded), secure.URL}
	testkit.Eventually(t, "the proxies answer", func() bool {
		for _, base := range places[1:3] {
			a, err := client.Get(base + "/health")
			if err != nil {
				return false
			}
			a.Body.Close()
			if a.StatusCode != http.StatusOK {
				return false
			}
		}
		return true
	})
	fmt.Println("| body | connections | engine alone, p50 | by https | the proxy adds | with keys and networks, by https | ratio, wanted at most 1.3 | with the https of the engine alone |")
	fmt.Println("| --- | --: | --: | --: | --: | --: | --: | --: |")
	for _, size := range []int{2 << 10, 16 << 10} {
		body := fmt.Appendf(nil, `{"model":"mock","prompt":%q,"max_tokens":1}`, strings.Repeat("word ", size/5))
		for _, conns := range []int{1, 16} {
			var medians [4][]time.Duration // of the turns
			for turn := range 10 {         // the first one warms
				for i := range places {
					which := (i + turn) % len(places)
					var mu sync.Mutex
					var all []time.Duration
					var wg sync.WaitGroup
					for range conns {
						wg.Go(func() {
							own := make([]time.Duration, n)
							for j := range own {
								own[j] = send(places[which], body)
							}
							mu.Lock()
							defer mu.Unlock()
							all = append(all, own...)
						})
					}
					wg.Wait()
					slices.Sort(all)
					if turn > 0 {
						medians[which] = append(medians[which], all[len(all)/2])
					}
				}
			}
			var p50 [4]time.Duration
			for i := range medians {
				slices.Sort(medians[i])
				p50[i] = medians[i][len(medians[i])/2]
			}
			added, access := p50[1]-p50[0], p50[2]-p50[3]
			ratio, whole := float64(access)/float64(added), float64(p50[2]-p50[0])/float64(added)
			fmt.Printf("| %d KiB | %d | %v | %v | %v | %v | %.2f | %.2f |\n", size>>10, conns, p50[0], p50[3], added, access, ratio, whole)
			if ratio > mostAccessCost {
				t.Errorf("%d KiB, %d connections: access makes the proxy's own time %.2f times as long, want at most %.1f", size>>10, conns, ratio, mostAccessCost)
			}
		}
	}
}

// pair makes a certificate of 127.0.0.1 and its key, and returns who trusts it.
func pair(t *testing.T, dir string) (cert, key string, roots *x509.CertPool) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "proxy"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalECPrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	roots = x509.NewCertPool()
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots.AddCert(parsed)
	write := func(name, kind string, b []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	return write("cert", "CERTIFICATE", der), write("key", "EC PRIVATE KEY", secret), roots
}
