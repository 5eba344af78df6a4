// SPDX-License-Identifier: Apache-2.0

package scheduler_test

import (
	"fmt"

	"github.com/kvasir-kv/kvasir/mooncake/scheduler"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// A request at D: P has its prompt of 64 tokens, D's own cache the first 16.
func Example() {
	s, err := scheduler.New(scheduler.Options{Role: wire.Consumer})
	if err != nil {
		panic(err)
	}
	r := &scheduler.Request{ID: "r", PromptTokens: 64, MaxTokens: 8, Params: wire.RemotePrefill("http://p:8998", "engine", "transfer 1")}
	s.NewRequest(r)
	m, err := s.Match(r, 16)
	if err != nil {
		panic(err)
	}
	fmt.Println("pull", m.Tokens, "tokens, wait:", m.Async)
	if err := s.Allocated(r, [][]int{{5, 6, 7}}, m.Tokens); err != nil { // blocks 5 to 7 are to be filled
		panic(err)
	}
	meta, err := s.Build()
	if err != nil {
		panic(err)
	}
	pull := meta.Pulls[0] // for the workers: Receiver.Apply(meta)
	fmt.Println(pull.TransferID, "into blocks", pull.Blocks)
	u, err := s.Update(scheduler.WorkerOutput{Received: []string{"r"}}) // what a worker reports
	if err != nil {
		panic(err)
	}
	fmt.Println("loaded:", u.Loaded)
	// Output:
	// pull 48 tokens, wait: true
	// transfer 1 into blocks [[5 6 7]]
	// loaded: [r]
}
