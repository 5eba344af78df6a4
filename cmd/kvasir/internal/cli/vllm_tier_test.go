// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kvasir-kv/kvasir/tier/vllm"
)

// Two engines of vLLM's tiered offloading share one server. It is killed and started again under them, and nothing that they load is
// wrong.
func TestVLLMTier(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "tier.sock")
	name := fmt.Sprintf("kvasir_test_tier_%d", os.Getpid())
	t.Cleanup(func() {
		left, _ := filepath.Glob("/dev/shm/lmcache_l1_pool_" + name + "*")
		for _, f := range left {
			_ = os.Remove(f)
		}
	})
	start := func() *serving { return serve(t, "--shm-name", name, "--vllm-tier", socket) }
	s := start()

	first := command("engine", "--like", "vllm-tiering", "--vllm-tier", socket)
	var out, log bytes.Buffer
	first.Stdout, first.Stderr = &out, &log
	if err := first.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if first.ProcessState == nil {
			_ = first.Process.Kill()
			_ = first.Wait()
		}
	}()
	s.wait(t, "an engine connected")
	for range 2 {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		s = start()
		s.wait(t, "an engine connected")
	}
	code, second, stderr := run(t, "engine", "--like", "vllm-tiering", "--vllm-tier", socket, "--requests", "300")
	if code != 0 {
		t.Errorf("exit %d: %s", code, stderr)
	}
	if err := first.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := first.Wait(); err != nil {
		t.Errorf("%v: %s", err, log.String())
	}
	for _, text := range []string{out.String(), second} {
		var r vllm.SimulationResult
		if err := json.Unmarshal([]byte(text), &r); err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		if r.Wrong != 0 || r.Loaded == 0 || r.Requests < 100 {
			t.Errorf("%+v", r)
		}
	}
	if left, _ := filepath.Glob(fmt.Sprintf("/dev/shm/vllm_offload_kvasir-%d.mmap", first.Process.Pid)); len(left) > 0 {
		t.Errorf("the engine left %v", left)
	}
}

// The module is printed as it is embedded. Flags that exclude each other are reported in one line.
func TestVLLMTierCommand(t *testing.T) {
	code, stdout, _ := run(t, "vllm-tier")
	if code != 0 || stdout != string(vllm.Shim) || !strings.Contains(stdout, "class KvasirTier(SecondaryTierManager)") {
		t.Errorf("exit %d, %d bytes", code, len(stdout))
	}
	f := func(want string, args ...string) {
		t.Helper()
		code, _, stderr := run(t, args...)
		if code == 0 || !strings.Contains(stderr, want) {
			t.Errorf("%v: exit %d, want %q: %s", args, code, want, stderr)
		}
	}
	f("needs --vllm-tier", "engine", "--like", "vllm-tiering")
	f("are for --like vllm-tiering", "engine", "--vllm-tier", "/x")
	f("at most 107", "server", "--vllm-tier", "/"+strings.Repeat("x", 107))
	f("are one path", "server", "--vllm-tier", "/x", "--ipc", "/x")
}
