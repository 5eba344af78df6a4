// SPDX-License-Identifier: Apache-2.0

package cluster_test

import (
	"os"
	"testing"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/sim/cluster"
)

// 1,000 requests of a production trace, if the file is there, at 1/32 of their size: the schedule is as without
// bytes, and every byte is right.
func TestProductionTraceWithBytes(t *testing.T) {
	f, err := os.Open("../../../shared/traces/conversation_trace.jsonl")
	if err != nil {
		t.Skip("no production trace beside the repository")
	}
	defer f.Close()
	list, err := workload.ReadTrace(f, workload.TraceOptions{Max: max(300, testkit.Volume(1000))})
	if err != nil {
		t.Fatal(err)
	}
	if list, err = workload.Scaled(list, 32); err != nil {
		t.Fatal(err)
	}
	o := cluster.Options{Profile: small(t, 800), Prefill: 4, Decode: 4, Store: cluster.Store{Blocks: 30000, GBps: 10}}
	without := run(t, list, o)
	o.Bytes = &cluster.Bytes{Dir: t.TempDir()}
	with := run(t, list, o)
	if b := with.Bytes; !same(without, with) || b.Wrong != 0 || b.Moved == 0 || b.Stored == 0 || b.Loaded == 0 || with.Figures().Completed != len(list) {
		t.Errorf("as without bytes: %v; %+v", same(without, with), b)
	}
}
