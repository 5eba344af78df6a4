// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// pki is an authority, with a certificate of a server and one of a client.
type pki struct {
	ca, cert, key string // files
	clientFile    string // and .key
	pool          *x509.CertPool
	client        tls.Certificate
}

func newPKI(t *testing.T) *pki {
	t.Helper()
	dir := t.TempDir()
	keys := map[string]*ecdsa.PrivateKey{}
	made := map[string]*x509.Certificate{}
	for i, name := range []string{"ca", "server", "client"} {
		var err error
		if keys[name], err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
			t.Fatal(err)
		}
		c := &x509.Certificate{
			SerialNumber: big.NewInt(int64(i + 1)), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: map[string][]x509.ExtKeyUsage{"server": {x509.ExtKeyUsageServerAuth}, "client": {x509.ExtKeyUsageClientAuth}}[name],
			IsCA: name == "ca", BasicConstraintsValid: true,
		}
		parent := made["ca"]
		if name == "ca" {
			parent = c
		}
		der, err := x509.CreateCertificate(rand.Reader, c, parent, &keys[name].PublicKey, keys["ca"])
		if err != nil {
			t.Fatal(err)
		}
		if made[name], err = x509.ParseCertificate(der); err != nil {
			t.Fatal(err)
		}
		secret, err := x509.MarshalECPrivateKey(keys[name])
		if err != nil {
			t.Fatal(err)
		}
		for file, b := range map[string]*pem.Block{name: {Type: "CERTIFICATE", Bytes: der}, name + ".key": {Type: "EC PRIVATE KEY", Bytes: secret}} {
			if err := os.WriteFile(filepath.Join(dir, file), pem.EncodeToMemory(b), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	p := &pki{ca: filepath.Join(dir, "ca"), cert: filepath.Join(dir, "server"), key: filepath.Join(dir, "server.key"), clientFile: filepath.Join(dir, "client"), pool: x509.NewCertPool()}
	p.pool.AddCert(made["ca"])
	p.client = tls.Certificate{Certificate: [][]byte{made["client"].Raw}, PrivateKey: keys["client"]}
	return p
}

// Each HTTP listener of each command serves https, answers health without a certificate and a token, 401 to the rest, and the rest with a
// client certificate, or a token of its scope.
func TestHTTPSAndCertificatesOfEachCommand(t *testing.T) {
	p := newPKI(t)
	dir := t.TempDir()
	tokens := filepath.Join(dir, "tokens")
	kept, model := filepath.Join(dir, "kept"), filepath.Join(dir, "kept", "org-model_0123456789ab")
	if err := errors.Join(os.MkdirAll(model, 0o755), os.WriteFile(filepath.Join(model, "config.json"), []byte(`{"model_name":"org/model","blocks_per_file":4}`), 0o644)); err != nil {
		t.Fatal(err)
	}
	reader := strings.TrimSpace(must(t, "token", "reader", "--file", tokens))
	port := testkit.FreePort(t)
	t.Cleanup(func() { must(t, "server", "--port", fmt.Sprint(port), "--drop") })
	for _, c := range []struct {
		name, ready string
		paths       []string // that need the scope read, at one of the HTTP listeners each
		args        []string
	}{
		{"server", "serving HTTP", []string{"/status"}, []string{"--port", fmt.Sprint(port), "--http-port", "0", "--l1-size-gb", "8MiB"}},
		{"bootstrap", "Bootstrap Server started", []string{"/metrics"}, []string{"--port", "0"}},
		{"relay", "the relay serves", []string{"/metrics"}, []string{"--port", "0", "--upstream", "http://127.0.0.1:1", "--memory-gb", "8MiB"}},
		{"proxy", "the proxy serves", []string{"/v1/models", "/metrics"}, []string{"--port", "0", "--engine", "http://127.0.0.1:1", "--admin-port", fmt.Sprint(testkit.FreePort(t))}},
		{"engine", "the engine serves", []string{"/v1/models"}, []string{"--port", "0", "--num-gpu-blocks-override", "64"}},
		{"store-node", "giving memory", []string{"/metrics"}, []string{"--master", "127.0.0.1:1", "--memory-gb", "16MiB", "--http-port", "0"}},
		{"keeper", "the keeper watches", []string{"/status"}, []string{kept, "--max-gb", "1", "--http-port", fmt.Sprint(testkit.FreePort(t))}},
	} {
		t.Run(c.name, func(t *testing.T) {
			args := append([]string{c.name, "--token-file", tokens, "--tls-cert", p.cert, "--tls-key", p.key, "--tls-client-ca", p.ca}, c.args...)
			pid, _ := startAndLog(t, c.ready, args...)
			found := 0
			for _, port := range tcpPorts(t, pid) {
				ask := func(path, token string, certs ...tls.Certificate) int {
					client := http.Client{Timeout: time.Minute, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: p.pool, Certificates: certs}}}
					defer client.CloseIdleConnections()
					r, err := http.NewRequest(http.MethodGet, fmt.Sprintf("https://127.0.0.1:%d%s", port, path), nil)
					if err != nil {
						t.Fatal(err)
					}
					if token != "" {
						r.Header.Set("Authorization", "Bearer "+token)
					}
					answer, err := client.Do(r)
					if err != nil {
						return 0 // no HTTP
					}
					_ = answer.Body.Close()
					return answer.StatusCode
				}
				if !isHTTPS(port) {
					continue
				}
				for _, path := range c.paths {
					without, with, wrong, token := ask(path, ""), ask(path, "", p.client), ask(path, "kv-wrong"), ask(path, reader)
					if without != 401 || wrong != 401 || with == 401 || with == 403 || with == 0 {
						t.Errorf("port %d, %s: %d without, %d with a wrong token, %d with a certificate", port, path, without, wrong, with)
					}
					if isAPI := c.name == "proxy" && with != 404 && path == "/v1/models"; with == 200 && token != 200 && !isAPI {
						t.Errorf("port %d, %s: %d with a token", port, path, token)
					}
					if with == 200 {
						found++
					}
				}
				if health := ask("/healthz", ""); health == 0 || health == 401 && c.name != "proxy" {
					t.Errorf("port %d: health is %d", port, health)
				}
				if got := status(from(t, "127.0.0.1", port, "GET /healthz HTTP/1.0\r\n\r\n")); got != 400 {
					t.Errorf("port %d answers http with %d, want 400", port, got)
				}
			}
			if found != len(c.paths) {
				t.Errorf("%d of the routes %v answer 200 with a certificate", found, c.paths)
			}
		})
	}
}

// isHTTPS reports whether a port speaks TLS. Side channels and transfer ports do not.
func isHTTPS(port int) bool {
	d := net.Dialer{Timeout: time.Minute}                                                                             // the other ports close at once
	c, err := tls.DialWithDialer(&d, "tcp", fmt.Sprintf("127.0.0.1:%d", port), &tls.Config{InsecureSkipVerify: true}) // only whether it speaks TLS
	if err != nil {
		return false
	}
	_ = c.Close()
	return true
}

// Commands that ask a server do it over https, with a client certificate or a token, by flags or by the environment.
func TestCommandsAskOverHTTPS(t *testing.T) {
	p := newPKI(t)
	tokens := filepath.Join(t.TempDir(), "tokens")
	admin := strings.TrimSpace(must(t, "token", "admin", "--scope", "admin", "--file", tokens))
	port, web := testkit.FreePort(t), testkit.FreePort(t)
	t.Cleanup(func() { must(t, "server", "--port", fmt.Sprint(port), "--drop") })
	startAndLog(t, "serving HTTP", "server", "--port", fmt.Sprint(port), "--http-port", fmt.Sprint(web), "--l1-size-gb", "8MiB", "--disk", t.TempDir(), "--disk-gb", "1",
		"--token-file", tokens, "--tls-cert", p.cert, "--tls-key", p.key, "--tls-client-ca", p.ca)
	url := fmt.Sprintf("https://127.0.0.1:%d", web)
	cert := []string{"--tls-cert", p.clientFile, "--tls-key", p.clientFile + ".key"}
	commands := [][]string{
		{"status"}, {"top", "--json", "--interval", "0.1"}, {"explain"}, {"advise"}, {"quota", "list"}, {"clear", "--tier", "l1"}, {"tier", "drop", "disk", "--all"},
	}
	for _, c := range commands {
		ask := func(flags ...string) (int, string) {
			code, _, errs := run(t, slices.Concat(c, []string{"--url", url}, flags)...)
			return code, errs
		}
		if code, errs := ask("--token", admin); code == 0 || !strings.Contains(errs, "certificate") {
			t.Errorf("%v: an unknown authority: %d, %s", c, code, errs)
		}
		if code, errs := ask("--tls-ca", p.ca); code == 0 || !strings.Contains(errs, "KVASIR_TOKEN") {
			t.Errorf("%v: without a certificate and a token: %d, %s", c, code, errs)
		}
		if code, errs := ask("--tls-ca", p.ca, "--token", admin); code != 0 {
			t.Errorf("%v: with a token: %s", c, errs)
		}
		if code, errs := ask(append(cert, "--tls-ca", p.ca)...); code != 0 {
			t.Errorf("%v: with a certificate: %s", c, errs)
		}
	}
	if code, _, errs := run(t, "status", "--url", url, "--tls-cert", p.clientFile); code == 0 || !strings.Contains(errs, "--tls-ca, --tls-cert, --tls-key: ") {
		t.Errorf("a certificate without its key: %d, %s", code, errs)
	}
	for name, value := range map[string]string{"KVASIR_TLS_CA": p.ca, "KVASIR_TLS_CERT": p.clientFile, "KVASIR_TLS_KEY": p.clientFile + ".key"} {
		t.Setenv(name, value)
	}
	for _, c := range commands {
		if code, _, errs := run(t, append(slices.Clone(c), "--url", url)...); code != 0 {
			t.Errorf("%v: with the environment: %s", c, errs)
		}
	}
}

// A registry with https demands a token or a certificate for everything. P, the relay and the proxy can be its clients with either. Without
// both, P cannot register, and the relay sees no engine.
func TestClientsOfAGuardedRegistry(t *testing.T) {
	p := newPKI(t)
	tokens := filepath.Join(t.TempDir(), "tokens")
	writer := strings.TrimSpace(must(t, "token", "writer", "--scope", "write", "--file", tokens))
	boot, api := testkit.FreePort(t), testkit.FreePort(t)
	startAndLog(t, "Bootstrap Server started", "bootstrap", "--port", fmt.Sprint(boot), "--token-guards", "all",
		"--token-file", tokens, "--tls-cert", p.cert, "--tls-key", p.key, "--tls-client-ca", p.ca)
	registry := fmt.Sprintf("https://127.0.0.1:%d", boot)
	config := fmt.Sprintf(`{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","engine_id":"the-p","kv_connector_extra_config":{"bootstrap_server_address":"%s"}}`, registry)
	ca := []string{"--registry-tls-ca", p.ca}
	engine := func(flags ...string) []string {
		return slices.Concat([]string{"engine", "--port", fmt.Sprint(api), "--num-gpu-blocks-override", "64", "--kv-transfer-config", config}, flags)
	}
	if code, _, errs := run(t, engine(ca...)...); code != 1 || !strings.Contains(errs, "401") {
		t.Errorf("P without a token registers: %d, %s", code, errs)
	}
	if code, _, errs := run(t, engine("--registry-token", writer)...); code != 1 || !strings.Contains(errs, "certificate") {
		t.Errorf("P trusts an unknown authority: %d, %s", code, errs)
	}
	startAndLog(t, "the engine serves", engine(append(ca, "--registry-token", writer)...)...)
	shown := func(flags ...string) string {
		port := testkit.FreePort(t)
		startAndLog(t, "the relay serves", slices.Concat([]string{"relay", "--port", fmt.Sprint(port), "--memory-gb", "8MiB", "--upstream", registry}, flags)...)
		return from(t, "127.0.0.1", port, "GET /query HTTP/1.0\r\nHost: localhost\r\n\r\n")
	}
	cert := []string{"--registry-tls-cert", p.clientFile, "--registry-tls-key", p.clientFile + ".key"}
	for _, flags := range [][]string{append(slices.Clone(ca), "--registry-token", writer), slices.Concat(ca, cert)} {
		if got := shown(flags...); status(got) != 200 || !strings.Contains(got, "engine_id") {
			t.Errorf("the relay shows %q with %v", got, flags[2])
		}
	}
	if got := shown(ca...); strings.Contains(got, "engine_id") {
		t.Errorf("the relay without a token shows %q", got)
	}
	for _, flags := range [][]string{append(slices.Clone(ca), "--registry-token", writer), slices.Concat(ca, cert)} {
		port := testkit.FreePort(t)
		startAndLog(t, "the proxy serves", slices.Concat([]string{
			"proxy", "--port", fmt.Sprint(port), "--prefill", fmt.Sprintf("registry+%s?port=%d&scheme=http", registry, api), "--decode", "http://127.0.0.1:1",
		}, flags)...)
		testkit.Eventually(t, "the proxy finds P", func() bool {
			return strings.Contains(from(t, "127.0.0.1", port, "GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n"), fmt.Sprintf(`kvasir_proxy_engine_well{engine="http://127.0.0.1:%d"`, api))
		})
	}
}

// Lines for certificates in the token file limit their scope at each command's listeners, including the proxy's API. They need --tls-client-scope.
func TestScopesOfCertificatesOfCommands(t *testing.T) {
	p := newPKI(t)
	tokens := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(tokens, []byte("it cert:CN=client read\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	flags := []string{"--token-file", tokens, "--tls-cert", p.cert, "--tls-key", p.key, "--tls-client-ca", p.ca}
	for _, c := range []struct {
		want string
		args []string
	}{
		{"--tls-client-scope", append([]string{"bootstrap", "--check-config"}, flags...)},
		{"--tls-client-scope: scope", append([]string{"bootstrap", "--check-config", "--tls-client-scope", "all"}, flags...)},
		{"--tls-client-scope needs --tls-client-ca and --token-file", []string{"bootstrap", "--check-config", "--tls-client-scope", "none"}},
	} {
		if code, _, errs := run(t, c.args...); code != 2 || !strings.Contains(errs, c.want) {
			t.Errorf("%v: %d, %s", c.args, code, errs)
		}
	}
	flags = append(flags, "--tls-client-scope", "none")
	ask := func(port int, method, path string) int {
		client := http.Client{Timeout: time.Minute, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: p.pool, Certificates: []tls.Certificate{p.client}}}}
		defer client.CloseIdleConnections()
		r, err := http.NewRequest(method, fmt.Sprintf("https://127.0.0.1:%d%s", port, path), nil)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		_ = answer.Body.Close()
		return answer.StatusCode
	}
	boot, api := testkit.FreePort(t), testkit.FreePort(t)
	startAndLog(t, "Bootstrap Server started", append([]string{"bootstrap", "--port", fmt.Sprint(boot)}, flags...)...)
	startAndLog(t, "the proxy serves", append([]string{"proxy", "--port", fmt.Sprint(api), "--engine", "http://127.0.0.1:1"}, flags...)...)
	if read, write := ask(boot, http.MethodGet, "/metrics"), ask(boot, http.MethodDelete, "/register?engine_id=e"); read != 200 || write != 403 {
		t.Errorf("the registry answers a certificate of the scope read %d and %d", read, write)
	}
	if got := ask(api, http.MethodGet, "/v1/models"); got != 403 {
		t.Errorf("the proxy's API, which needs the scope write, answers %d", got)
	}
}
