// SPDX-License-Identifier: Apache-2.0

package transfer_test

import (
	"context"
	"fmt"

	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

// One side publishes memory, the other writes into it. Before the memory is used for
// something else, its region is closed: no write touches it afterwards.
func Example() {
	memory := make([]byte, 1<<20)
	table := transfer.NewTable()
	regions, err := table.Publish(memory)
	if err != nil {
		panic(err)
	}
	target, err := transfer.Listen(transfer.TargetOptions{Host: "127.0.0.1"}, table)
	if err != nil {
		panic(err)
	}
	defer target.Close()

	c := transfer.New(transfer.Options{})
	defer c.Close()
	base := regions[0].Range().Addr // what the owner tells its peers
	err = c.Write(context.Background(), target.Name(), []transfer.Entry{
		{Local: []byte("a block"), Remote: base},
		{Local: []byte("another"), Remote: base + 4096},
	})
	if err != nil {
		panic(err)
	}
	regions[0].Close(context.Background())
	fmt.Printf("%s, %s\n", memory[:7], memory[4096:4103])
	// Output: a block, another
}
