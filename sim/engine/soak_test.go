// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// childEnv makes this test program a cache server: "DIR PORT".
const childEnv = "KVASIR_ENGINE_TEST_SERVER"

func TestMain(m *testing.M) {
	if v := os.Getenv(childEnv); v != "" {
		if err := serveChild(v); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	testkit.Main(m)
}

func serveChild(args string) error {
	dir, port, _ := strings.Cut(args, " ")
	p, err := pool.Open(pool.Options{Name: "pool", Bytes: 24 << 20, Dir: dir, ChunkTokens: 32})
	if err != nil {
		return err
	}
	st := store.New(p, store.Options{Quarantine: 2 * time.Second})
	srv := server.New(st, server.Options{ChunkTokens: 32, ShmDir: dir, Log: slog.New(slog.DiscardHandler)})
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if _, err := srv.Listen(ctx, "tcp://127.0.0.1:"+port); err != nil {
		return err
	}
	srv.Run(ctx)
	return nil
}

// childServer is a cache server in a process of its own.
type childServer struct {
	t    testing.TB
	args string
	cmd  *exec.Cmd
}

func (c *childServer) start() {
	c.cmd = exec.Command(os.Args[0], "-test.run=^$")
	c.cmd.Env = append(os.Environ(), childEnv+"="+c.args)
	c.cmd.Stderr = os.Stderr
	if err := c.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
}

func (c *childServer) kill() {
	_ = c.cmd.Process.Kill() // it may have ended
	_ = c.cmd.Wait()
}

// Engines of two ranks share a cache server that is killed again and again, in both transfer
// modes: no wrong byte, no hang, no block lost. KVASIR_SOAK is the number of requests.
func TestServerKilled(t *testing.T) {
	requests := max(150, testkit.Volume(600))
	if n, err := strconv.Atoi(os.Getenv("KVASIR_SOAK")); err == nil {
		requests = n
	}
	dir, err := os.MkdirTemp("/dev/shm", "kvasir_engine_test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	port := testkit.FreePort(t)
	node := &childServer{t: t, args: dir + " " + strconv.Itoa(port)}
	node.start()
	t.Cleanup(node.kill)
	var engines []*engine.Engine
	for i := range 4 {
		mode := []string{"engine_driven", "lmcache_driven"}[i%2]
		config := fmt.Sprintf(`{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute","kv_connector_extra_config":{
			"lmcache.mp.server_urls":"tcp://127.0.0.1:%d","lmcache.mp.mp_transfer_mode":%q,"lmcache.mp.mq_timeout":3,"lmcache.mp.heartbeat_interval":0.2}}`, port, mode)
		g := geometry(2)
		g.Blocks = 1200
		engines = append(engines, open(t, engine.Options{KV: g, MaxModel: 16384, MaxTokens: 2048, ShmDir: dir, StepTime: time.Millisecond}, config, nil))
	}
	chats := workload.Chats(requests, workload.ChatOptions{Seed: 5, Open: 8})
	var next, failed, kills atomic.Int64
	var wg sync.WaitGroup
	tokensLoaded := func() (n int64) {
		for _, e := range engines {
			n += e.Stats().LoadedTokens
		}
		return n
	}
	// After the wanted number of requests more are sent until the server was killed twice and the engines have loaded tokens: the server may
	// start so late that the engines are done without it.
	limit := time.Now().Add(3 * time.Minute)
	more := func(i int64) bool {
		return i < int64(requests) || (kills.Load() < 2 || tokensLoaded() == 0) && time.Now().Before(limit)
	}
	for worker := range 8 {
		wg.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if !more(int64(i)) || t.Context().Err() != nil {
					return
				}
				chat := chats[i%len(chats)]
				e := engines[rand.IntN(len(engines))]
				ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
				if i%17 == 0 { // some clients leave
					time.AfterFunc(time.Duration(rand.IntN(20))*time.Millisecond, cancel)
				}
				s, err := e.Submit(ctx, engine.Request{ID: fmt.Sprint(worker, "-", i), Tokens: chat.Tokens()[:min(chat.Input, 4000)], MaxTokens: 1 + i%5})
				if err == nil {
					var end *engine.End
					_, end, err = s.Wait(t.Context())
					if err == nil && end.Err != nil {
						err = end.Err
					}
				}
				cancel()
				if err != nil && i%17 != 0 {
					failed.Add(1)
					t.Errorf("request %d: %v", i, err)
				}
			}
		})
	}
	for more(next.Load()) {
		// The server is killed only after the engines have loaded tokens from it, however slow the machine is.
		before := tokensLoaded()
		for end := time.Now().Add(20 * time.Second); tokensLoaded() == before && more(next.Load()) && time.Now().Before(end); {
			time.Sleep(10 * time.Millisecond)
		}
		time.Sleep(time.Duration(200+rand.IntN(300)) * time.Millisecond)
		node.kill()
		kills.Add(1)
		time.Sleep(50 * time.Millisecond)
		node.start()
	}
	wg.Wait()
	for _, e := range engines {
		idle(t, e)
		if s := e.Stats(); s.Failed > 0 {
			t.Errorf("%+v", s)
		}
	}
	loaded := tokensLoaded()
	if kills.Load() < 2 || loaded == 0 {
		t.Fatalf("%d kills, %d tokens loaded", kills.Load(), loaded)
	}
	t.Logf("%d requests, the server killed %d times, %d tokens loaded", next.Load(), kills.Load(), loaded)
}
