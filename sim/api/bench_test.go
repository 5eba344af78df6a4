// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/sim/api"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvmem"
)

const streamsEnv = "KVASIR_TEST_STREAMS" // ADDRESS STREAMS TOKENS: this process is the clients

// streamClients reads streams of an engine to their ends.
func streamClients(args string) {
	words := strings.Fields(args)
	streams, _ := strconv.Atoi(words[1])
	body := fmt.Sprintf(`{"prompt":"a b c","max_tokens":%s,"stream":true}`, words[2])
	var wg sync.WaitGroup
	for range streams {
		wg.Go(func() {
			c, err := net.Dial("tcp", words[0])
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
			defer c.Close()
			fmt.Fprintf(c, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
			text, err := io.ReadAll(c)
			if err != nil || !strings.Contains(string(text), "[DONE]") {
				fmt.Fprintln(os.Stderr, "a stream was cut:", err, len(text))
				os.Exit(1)
			}
		})
	}
	wg.Wait()
}

// BenchmarkStreams runs a thousand streams, each with a token in every step. It reports the processor time per token of
// this process, which has the engine and its API. The clients are another process. 10 us means a token each 10 ms on one core.
func BenchmarkStreams(b *testing.B) {
	const streams, tokens = 1000, 500
	var took time.Duration
	var wall time.Duration
	for b.Loop() {
		e, err := engine.Open(b.Context(), engine.Options{
			MaxModel: 1024, MaxSeqs: streams, MaxTokens: 8192, StepTime: 10 * time.Millisecond,
			KV: kvmem.Geometry{Layers: 1, Heads: 1, HeadBytes: 8, BlockTokens: 16, Blocks: streams * 40},
		})
		if err != nil {
			b.Fatal(err)
		}
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		s := &http.Server{Handler: api.New(e, api.Options{})}
		go s.Serve(l)
		clients := exec.Command(os.Args[0], "-test.run=^$")
		clients.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d %d", streamsEnv, l.Addr(), streams, tokens))
		clients.Stderr = os.Stderr
		began, start := processorTime(b), time.Now()
		if err := clients.Run(); err != nil {
			b.Fatal(err)
		}
		took += processorTime(b) - began
		wall += time.Since(start)
		s.Close()
		if err := e.Close(); err != nil {
			b.Fatal(err)
		}
	}
	n := float64(b.N) * streams * tokens
	b.ReportMetric(float64(took.Nanoseconds())/1000/n, "cpu-us/token")
	b.ReportMetric(float64(wall.Nanoseconds())/1e6/float64(b.N)/tokens, "ms/step")
}

func processorTime(b *testing.B) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
