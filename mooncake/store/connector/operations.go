// SPDX-License-Identifier: Apache-2.0

package connector

import (
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/histogram"
)

// The kinds of calls of a store that are counted, under vLLM's names.
const (
	lookupExists = "lookup_exists" // ask which blocks of a prompt are stored
	loadGet      = "load_get"      // read blocks
	saveExists   = "save_exists"   // ask which blocks need not be put
	savePut      = "save_put"      // put blocks
)

// The ways in which a call ends. A call that moves blocks ends with endPartial if any block failed; an existence query ends with
// endError if the master did not answer.
const (
	endOK      = "ok"
	endPartial = "partial_failure"
	endError   = "error"
)

// outcomes lists the ways in which each kind of call can end.
var outcomes = map[string][]string{
	lookupExists: {endOK, endError}, saveExists: {endOK, endError},
	loadGet: {endOK, endPartial}, savePut: {endOK, endPartial},
}

// operations count the calls of a Scheduler and its Workers.
type operations map[[2]string]*operation // by kind of call and end; immutable

type operation struct {
	times               *histogram.Histogram
	keys, bytes, failed atomic.Uint64
}

// operationTimes are the upper bounds of vLLM's histogram, in ns.
var operationTimes = []int64{
	1e6, 5e6, 10e6, 50e6, 100e6, 200e6, 300e6, 400e6, 500e6, 750e6, 1e9, 1500e6, 2e9, 3e9, 4e9,
}

func newOperations() operations {
	o := make(operations)
	for call, ends := range outcomes {
		for _, end := range ends {
			o[[2]string{call, end}] = &operation{times: histogram.New(1e-9, operationTimes...)}
		}
	}
	return o
}

// record counts a call that began at the time `began`. It named `keys` keys, of which `failed` failed, and moved `bytes` bytes in all.
func (o operations) record(call, end string, began time.Time, keys, failed int, bytes uint64) {
	n := o[[2]string{call, end}]
	n.times.Took(time.Since(began))
	n.keys.Add(uint64(keys))
	n.failed.Add(uint64(failed))
	n.bytes.Add(bytes)
}

// asked counts an existence query for `keys` keys.
func (o operations) asked(call string, began time.Time, keys int, err error) {
	if err != nil {
		o.record(call, endError, began, keys, keys, 0)
		return
	}
	o.record(call, endOK, began, keys, 0, 0)
}

// moved counts a call that moves blocks. errs has one entry per block.
func (o operations) moved(call string, began time.Time, errs []error, bytes uint64) {
	bad := 0
	for _, err := range errs {
		if err != nil {
			bad++
		}
	}
	end := endOK
	if bad > 0 {
		end = endPartial
	}
	o.record(call, end, began, len(errs), bad, bytes)
}

// OperationStats are the figures of a Scheduler and its Workers under the names of vLLM 0.33.
type OperationStats struct {
	Times  map[[2]string]histogram.Counts `histogram:"vllm:mooncake_store_operation_time_seconds" label:"operation,status" help:"Time of one call of the store."`
	Calls  map[[2]string]uint64           `counter:"vllm:mooncake_store_operation_total" label:"operation,status" help:"Calls of the store."`
	Keys   map[[2]string]uint64           `counter:"vllm:mooncake_store_operation_keys_total" label:"operation,status" help:"Keys that the calls named."`
	Bytes  map[[2]string]uint64           `counter:"vllm:mooncake_store_operation_bytes_total" label:"operation,status" help:"Bytes of the objects that the calls read and put."`
	Failed map[[2]string]uint64           `counter:"vllm:mooncake_store_operation_failed_keys_total" label:"operation,status" help:"Keys whose part of the call failed."`
}

// Stats returns the figures of s and of its Workers.
func (s *Scheduler) Stats() OperationStats {
	out := OperationStats{
		Times: make(map[[2]string]histogram.Counts), Calls: make(map[[2]string]uint64), Keys: make(map[[2]string]uint64),
		Bytes: make(map[[2]string]uint64), Failed: make(map[[2]string]uint64),
	}
	for which, n := range s.ops {
		times := n.times.Counts()
		out.Times[which], out.Calls[which] = times, times.Total()
		out.Keys[which], out.Bytes[which], out.Failed[which] = n.keys.Load(), n.bytes.Load(), n.failed.Load()
	}
	return out
}
