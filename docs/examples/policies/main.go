// SPDX-License-Identifier: Apache-2.0

// Command policies compares eviction policies on a trace, at two sizes of the pool.
//
//	go run ./docs/examples/policies docs/examples/trace.jsonl
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/sim/replay"
)

func main() {
	if err := compare(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "policies:", err)
		os.Exit(1)
	}
}

func compare(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("want one argument, a trace")
	}
	requests := workload.Stream(args[0], workload.TraceOptions{}) // is read once, and may be longer than memory
	result, err := replay.CompareStream(context.Background(), requests, replay.PolicyOptions{Capacities: []int{500, 2000}})
	if err != nil {
		return err
	}
	return result.Print(os.Stdout)
}
