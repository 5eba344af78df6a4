// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bufio"
	"fmt"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/mooncake/store/storetest"
)

// A node may publish an address that is not this machine's, as behind a port mapping: it serves /healthz where it
// listens. A command that waits for its input ends on a signal.
func TestStoreNodeAndStore(t *testing.T) {
	master := storetest.New(t)
	port := testkit.FreePort(t)
	node := command("store-node", "--master", master.Addr, "--host", "192.0.2.1", "--bind", "127.0.0.1", "--memory-gb", "16MiB", "--http-port", fmt.Sprint(port))
	stderr, err := node.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := node.Start(); err != nil {
		t.Fatal(err)
	}
	kill := time.AfterFunc(60*time.Second, func() { _ = node.Process.Kill() })
	defer kill.Stop()
	defer func() { _ = node.Process.Kill() }()
	out := bufio.NewReader(stderr)
	for log := ""; !strings.Contains(log, "memory is mounted"); {
		line, err := out.ReadString('\n')
		if log += line; err != nil {
			t.Fatalf("it ended:\n%s", log)
		}
	}
	res, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/healthz", port))
	if err != nil {
		t.Fatal(err)
	}
	if res.Body.Close(); res.StatusCode != http.StatusOK {
		t.Error(res.Status)
	}

	if code, _, stderr := run(t, "store", "get", "none", "--master", master.Addr); code != 1 || !strings.Contains(stderr, "no such object") {
		t.Errorf("exit %d\n%s", code, stderr)
	}
	if code, stdout, stderr := run(t, "store", "ls", "none", "nor-this", "--master", master.Addr); code != 1 || strings.Count(stdout, "no such object") != 2 || !strings.Contains(stderr, "2 of 2 keys are not in the store") {
		t.Errorf("exit %d\n%s%s", code, stdout, stderr)
	}
	if code, _, stderr := run(t, "store", "put", "empty", "--master", master.Addr); code != 1 || !strings.Contains(stderr, "is empty") {
		t.Errorf("exit %d\n%s", code, stderr)
	}

	if code, _, stderr := run(t, "store", "rm", "none", "--master", master.Addr); code != 1 || !strings.Contains(stderr, "none") {
		t.Errorf("exit %d\n%s", code, stderr)
	}

	put := command("store", "put", "waits", "--master", master.Addr)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	put.Stdin = r
	log, err := put.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := put.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(120*time.Second, func() { _ = put.Process.Kill() })
	defer timer.Stop()
	if _, err := w.Write(make([]byte, 1<<20)); err != nil { // more than a pipe holds: it reads
		t.Fatal(err)
	}
	if err := put.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	text, _ := bufio.NewReader(log).ReadString('\n')
	if _ = put.Wait(); put.ProcessState.ExitCode() != 1 || !strings.Contains(text, "canceled") {
		t.Errorf("%v %q", put.ProcessState, text)
	}

	if err := node.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = out.ReadString('\n')
	}
	if err := node.Wait(); err != nil {
		t.Error(err)
	}
}

// A put of an object whose node is silent, and a get of it, are errors that say so.
func TestStorePutOfAHiddenObject(t *testing.T) {
	master := storetest.New(t)
	master.Set(func() {
		master.Lengths = true
		master.Objects["a"] = &storetest.Object{Complete: true}
		master.Hidden = map[string]bool{"a": true}
	})
	put := command("store", "put", "a", "--master", master.Addr)
	put.Stdin = strings.NewReader("bytes")
	out, err := put.CombinedOutput()
	if put.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), "its node is silent") {
		t.Errorf("%v\n%s", err, out)
	}
	if code, _, stderr := run(t, "store", "get", "a", "--master", master.Addr); code != 1 || !strings.Contains(stderr, "its node is silent") {
		t.Errorf("exit %d\n%s", code, stderr)
	}
}
