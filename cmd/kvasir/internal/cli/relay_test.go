// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestRelay(t *testing.T) {
	upstream, stopUpstream := bootstrapServer(t)
	base, stop := webServer(t, "the relay serves", "relay", "--upstream", upstream, "--memory-gb", "0.01")
	get := func(path string, status int, want string) {
		t.Helper()
		res, err := http.Get(base + path)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if body, _ := io.ReadAll(res.Body); res.StatusCode != status || !strings.Contains(string(body), want) {
			t.Errorf("%s: %s: %s", path, res.Status, body)
		}
	}
	get("/query", http.StatusOK, "{}")
	body := `{"engine_id":"e","dp_rank":0,"tp_rank":0,"pp_rank":0,"addr":"tcp://127.0.0.1:41233"}`
	res, err := http.Post(upstream+"/register", "application/json", strings.NewReader(body))
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatal(res, err)
	}
	res.Body.Close()
	for end := time.Now().Add(60 * time.Second); time.Now().Before(end); { // its view may be a second old
		time.Sleep(10 * time.Millisecond)
		if res, err = http.Get(base + "/query"); err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if strings.Contains(string(text), "relay-e") {
			break
		}
	}
	get("/healthz", http.StatusOK, "ok")
	get("/metrics", http.StatusOK, "kvasir_relay_kept_bytes 0")
	get("/other", http.StatusNotFound, "Not Found")
	if found, _ := filepath.Glob("/dev/shm/kvasir_relay_*"); len(found) != 0 {
		t.Errorf("left in /dev/shm: %v", found)
	}
	stopUpstream()
	if log := stop(); !strings.Contains(log, `msg="the relay stopped" served=0`) {
		t.Error(log)
	}

	code, _, stderr := run(t, "relay", "--upstream", "nonsense")
	if code != 2 || !strings.Contains(stderr, "http://HOST:PORT") {
		t.Errorf("exit %d\n%s", code, stderr)
	}
	code, _, stderr = run(t, "relay", "--upstream", upstream, "--memory-gb", "0")
	if code != 2 || !strings.Contains(stderr, "--memory-gb") {
		t.Errorf("exit %d\n%s", code, stderr)
	}
	code, stdout, _ := run(t, "relay", "--help")
	if code != 0 || !strings.Contains(stdout, "remote_bootstrap_addr") {
		t.Errorf("exit %d\n%s", code, stdout)
	}
}

// Peers dial --host: every address at once is none.
func TestRelayHost(t *testing.T) {
	for _, host := range []string{"0.0.0.0", "::"} {
		code, _, stderr := run(t, "relay", "--upstream", "http://127.0.0.1:1", "--memory-gb", "0.01", "--host", host)
		if code != 2 || !strings.Contains(stderr, "P and D dial") {
			t.Errorf("%s: exit %d\n%s", host, code, stderr)
		}
	}
}
