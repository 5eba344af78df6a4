// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

const examples = "../../../../docs/examples/"

// Every configuration among the examples is one that its command takes.
func TestExampleConfigurations(t *testing.T) {
	files, err := filepath.Glob(examples + "config/*.yaml")
	if err != nil || len(files) < 4 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		args := []string{"server", "--config", file, "--check-config"}
		if filepath.Base(file) == "prefill-decode.yaml" {
			args = []string{"config", "check", file}
		}
		if code, _, stderr := run(t, args...); code != 0 {
			t.Errorf("%v: exit %d, %s", args, code, stderr)
		}
	}
}

// The compose file starts a server with flags that it takes, and its memory limit is the pool and 1 GiB.
func TestExampleCompose(t *testing.T) {
	text, err := os.ReadFile(examples + "compose.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Services map[string]struct {
			Command  []string
			MemLimit string `yaml:"mem_limit"`
			IPC      string
		}
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	server, engine := file.Services["kvasir"], file.Services["vllm"]
	if code, out, errs := run(t, append(server.Command, "--check-config")...); code != 0 || !strings.Contains(out, "l1-size-gb: 8") || server.MemLimit != "9gb" {
		t.Errorf("%+v: %d, %s", server, code, errs)
	}
	if engine.IPC != "service:kvasir" || server.IPC != "shareable" {
		t.Errorf("/dev/shm of %q and %q", server.IPC, engine.IPC)
	}
}

// The scrape configuration names the alert rules and ports that serve /metrics.
func TestExamplePrometheus(t *testing.T) {
	text, err := os.ReadFile(examples + "prometheus.yml")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Rules []string `yaml:"rule_files"`
		Jobs  []struct {
			Name    string                       `yaml:"job_name"`
			Path    string                       `yaml:"metrics_path"`
			Configs []struct{ Targets []string } `yaml:"static_configs"`
		} `yaml:"scrape_configs"`
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	for _, rules := range file.Rules {
		if _, err := os.Stat(examples + rules); err != nil {
			t.Error(err)
		}
	}
	_, help, _ := run(t, "server", "--help")
	if len(file.Rules) != 1 || len(file.Jobs) != 2 || file.Jobs[0].Path != "" || !strings.Contains(help, "--http-port=8080") {
		t.Fatalf("%+v", file)
	}
	for _, target := range file.Jobs[0].Configs[0].Targets {
		if !strings.HasSuffix(target, ":8080") {
			t.Errorf("%s is not a server's default port", target)
		}
	}
}

// The programs among the examples compile, run and print what their pages say. lookup finds what an engine stored.
func TestExamplePrograms(t *testing.T) {
	bin := t.TempDir()
	build := exec.Command("go", "build", "-o", bin, examples+"policies", examples+"lookup", examples+"transfer")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // as kvasir is built: where tests have cgo, nothing is compiled twice
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	f := func(want string, args ...string) {
		t.Helper()
		out, err := exec.Command(filepath.Join(bin, args[0]), args[1:]...).CombinedOutput()
		if err != nil || !strings.Contains(strings.Join(strings.Fields(string(out)), " "), want) {
			t.Errorf("%v: %v, want %q:\n%s", args, err, want, out)
		}
	}
	f("leaf-hazard 53.51 %", "policies", examples+"trace.jsonl")
	f("2 blocks of 65536 bytes written, 1 read back, equal: true", "transfer")

	s := serve(t)
	port := testkit.FreePort(t)
	url := fmt.Sprintf("http://127.0.0.1:%d", port)
	startAndLog(t, "the engine serves", "engine", "--port", fmt.Sprint(port), "--model", "m", "--num-gpu-blocks-override", "256", "--layers", "1", "--kv-transfer-config",
		fmt.Sprintf(`{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_connector_extra_config":{"lmcache.mp.port":%d}}`, s.port))
	prompt := strings.TrimSpace(strings.Repeat("word ", 300))
	lookup := []string{"lookup", "-server", fmt.Sprintf("127.0.0.1:%d", s.port), "-engine", url, "-model", "m", prompt}
	f("0 of ", lookup...)
	res, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(`{"max_tokens":1,"prompt":"`+prompt+`"}`))
	if err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(res.Body)
	if res.Body.Close(); res.StatusCode != http.StatusOK {
		t.Fatal(res.Status, string(text))
	}
	testkit.Eventually(t, "the prompt is stored", func() bool {
		out, err := exec.Command(filepath.Join(bin, lookup[0]), lookup[1:]...).CombinedOutput()
		return err == nil && strings.HasPrefix(string(out), "256 of ")
	})
}
