// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// An engine in another container hits through shared memory: in one pod, and in two pods of a node that share a UNIX socket. Without a common
// /dev/shm the server would have to pass bytes through its socket. --pickle off forbids that, so the engine does not start.
func TestEngineInAnotherContainerHits(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("namespaces need root")
	}
	for _, tool := range []string{"unshare", "ip", "curl", "bash"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(err)
		}
	}
	if out, err := exec.Command("unshare", "-m", "-n", "-p", "--fork", "true").CombinedOutput(); err != nil {
		t.Skipf("no namespaces: %v, %s", err, out)
	}
	f := func(form, script, refusal string) {
		t.Helper()
		dir := t.TempDir()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		c := exec.CommandContext(ctx, "unshare", "-m", "-n", "-p", "--fork", "--kill-child", "bash", "-c", script, "pods", form, os.Args[0], dir)
		c.Env = append(os.Environ(), "KVASIR_TEST_COMMAND=1")
		out, err := c.CombinedOutput()
		server, _ := os.ReadFile(filepath.Join(dir, "server.log"))
		engine, _ := os.ReadFile(filepath.Join(dir, "engine.log"))
		answers := strings.Split(strings.TrimSpace(string(out)), "\n")
		hit := err == nil && len(answers) == 2 && !strings.Contains(answers[0], `"cached_tokens":512`) && strings.Contains(answers[1], `"cached_tokens":512`)
		if hit != (refusal == "") || !strings.Contains(string(engine), refusal) {
			t.Errorf("%s: %v\n%s\nserver:\n%s\nengine:\n%s", form, err, out, server, engine)
		}
	}
	script, err := os.ReadFile("testdata/pods.sh")
	if err != nil {
		t.Fatal(err)
	}
	f("sidecar", string(script), "")
	f("daemonset", string(script), "")
	// The engine has a /dev/shm of its own.
	apart := strings.Replace(string(script), `enter='mount --bind "$0/shm" /dev/shm;`, `enter='mount -t tmpfs -o size=256m tmpfs /dev/shm;`, 1)
	if apart == string(script) {
		t.Fatal("the script has another text")
	}
	f("sidecar", apart, "map the server's pool (same host, same user, same /dev/shm?)")
}
