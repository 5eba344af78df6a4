// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/server"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("KVASIR_TEST_LEND"); dir != "" {
		lend(dir)
		return
	}
	if url := os.Getenv(visitURL); url != "" {
		visit(url)
		return
	}
	if url := os.Getenv(stayURL); url != "" {
		stay(url)
		return
	}
	if url := os.Getenv(pagesURL); url != "" {
		pagesWorker(url)
		return
	}
	server.ProcessesUseNoDevice()
	testkit.Main(m)
}

// lend is an engine's process: it makes a segment as LMCache's workers do, says
// its name and lives until its standard input ends, or until it is killed.
func lend(dir string) {
	name := fmt.Sprintf("lmcache_kv_%d_0", os.Getpid())
	seg, err := shm.Create(filepath.Join(dir, name), engineBytes)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(name)
	_, _ = os.Stdin.Read(make([]byte, 1))
	_ = seg.Close() // but the name stays, as LMCache leaves it
}
