// SPDX-License-Identifier: Apache-2.0

// Command transfer writes blocks into the memory of a peer, as P does to D, and reads them back.
//
//	go run ./docs/examples/transfer
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

const blockBytes = 64 << 10

func main() {
	if err := run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "transfer:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) (err error) {
	// The peer publishes memory and listens.
	memory := make([]byte, 16*blockBytes)
	table := transfer.NewTable()
	regions, err := table.Publish(memory)
	if err != nil {
		return err
	}
	peer, err := transfer.Listen(transfer.TargetOptions{Host: "127.0.0.1"}, table)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, peer.Close()) }()
	base := regions[0].Range().Addr // the peer sends this number, and its name, over a channel of its own

	// This side writes two blocks to places 3 and 7 of the peer, and reads the first one back.
	c := transfer.New(transfer.Options{})
	defer c.Close()
	first, second := bytes.Repeat([]byte{1}, blockBytes), bytes.Repeat([]byte{2}, blockBytes)
	if err := c.Write(ctx, peer.Name(), []transfer.Entry{{Local: first, Remote: base + 3*blockBytes}, {Local: second, Remote: base + 7*blockBytes}}); err != nil {
		return err
	}
	back := make([]byte, blockBytes)
	if err := c.Read(ctx, peer.Name(), []transfer.Entry{{Local: back, Remote: base + 3*blockBytes}}); err != nil {
		return err
	}

	// The peer closes its region before it uses the memory for anything else: no write touches it afterwards.
	regions[0].Close(ctx)
	whole := bytes.Equal(back, first) && bytes.Equal(memory[7*blockBytes:8*blockBytes], second)
	fmt.Printf("2 blocks of %d bytes written, 1 read back, equal: %v\n", blockBytes, whole)
	return nil
}
