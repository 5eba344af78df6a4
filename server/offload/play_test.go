// SPDX-License-Identifier: Apache-2.0

package offload_test

import (
	"testing"

	"github.com/kvasir-kv/kvasir/tier/vllm"
)

// A played engine stores rows, loads them again, and counts both; each request met a node.
func TestPlayedEngineCountsWhatItStoresAndLoads(t *testing.T) {
	n := start(t, t.TempDir(), setup{rows: 200})
	defer n.close()
	out, err := vllm.RunPlay(t.Context(), vllm.Simulation{Socket: n.socket(), EngineID: "e", Model: "m", Dir: n.dir, RowBytes: rowBytes, Prompts: 4, Longest: 6, Requests: 60, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	if out.Requests != 60 || out.Stored == 0 || out.Loaded == 0 || out.Stored+out.Loaded > out.Asked || out.Wrong != 0 || out.Lost != 0 || out.Without != 0 {
		t.Errorf("%+v", out)
	}
}

// Once Close has returned the client's reader has ended: the pool is mapped no more.
func TestClosedClientReadsNoMore(t *testing.T) {
	n := start(t, t.TempDir(), setup{})
	defer n.close()
	for range 100 {
		e := n.connect(helloOf("a"))
		if !e.client.Connected() {
			t.Error("the connection does not stand")
		}
		e.close()
		select {
		case <-e.client.Ended():
		default:
			t.Fatal("the client still reads")
		}
		if e.client.Connected() {
			t.Error("a closed connection stands")
		}
	}
}
