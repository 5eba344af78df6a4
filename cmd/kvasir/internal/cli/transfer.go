// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/transfer"
	"github.com/kvasir-kv/kvasir/mooncake/transfer/bench"
)

// transferCmd uses the transfer engine alone, without an engine.
type transferCmd struct {
	Serve transferServeCmd `cmd:"" help:"Publish a region of memory that peers may write and read."`
	Write transferWriteCmd `cmd:"" help:"Write standard input into a region."`
	Read  transferReadCmd  `cmd:"" help:"Read bytes of a region to standard output."`
	Bench transferBenchCmd `cmd:"" help:"Measure writes and reads; prints Go benchmark lines."`
}

// Help returns the text that kvasir transfer --help shows. It implements kong's detailed help.
func (transferCmd) Help() string {
	return `Moves bytes between the memories of two processes on the wire of Mooncake's transfer engine (TCP);
either end may be the C++ engine. This wire has no passwords: keep it private, name networks (--allow-from), or
have Kvasir ends prove a secret (--transfer-secret-file).
docs/how/transfer.md has the details.

Examples:
  kvasir transfer serve --size 256MiB --peer-file peer.json
  kvasir transfer write --peer-file peer.json < blocks.bin
  kvasir transfer read  --peer-file peer.json --bytes 1MiB > blocks.bin
  kvasir transfer bench --peer-file peer.json --sizes 4k,64k,1m --batches 1,64,1024`
}

type transferServeCmd struct {
	configFlags
	networkFlags
	peerFlags

	Size          byteSize `help:"Bytes of the region." default:"256MiB"`
	PeerFile      string   `help:"Write where the region is to this file, for the other commands." placeholder:"FILE"`
	Host          string   `help:"Address published to peers." default:"127.0.0.1"`
	Bind          string   `help:"Address to listen on; default that of --host." placeholder:"ADDRESS"`
	HandshakePort int      `help:"Port of the handshake; 0 takes a free one."`
	DataPort      int      `help:"Port of the data; 0 takes a free one."`
	Base          uint64   `help:"Published address of the region; default random."`
}

func (c *transferServeCmd) check(*env) error {
	var f faults
	f.unless(c.Size > 0, "--size %v is not above 0", c.Size)
	f.port("--handshake-port", c.HandshakePort, true)
	f.port("--data-port", c.DataPort, true)
	networks, err := c.networks(slog.New(slog.DiscardHandler), transferListeners...)
	if err == nil {
		err = c.refuseOpen(networks, false, c.exposed())
	}
	return errors.Join(f.err(), c.peerFlags.check(), err)
}

// exposed returns the listener at which the region is served.
func (c *transferServeCmd) exposed() []exposure {
	host, flag := c.Host, "--host"
	if c.Bind != "" {
		host, flag = c.Bind, "--bind"
	}
	return []exposure{{listener: "transfer", at: flag + " " + host, host: host, own: c.defends(), keys: "--transfer-secret-file", risk: "read and write the region"}}
}

// transferListeners are the names of the listeners of kvasir transfer serve, for --allow-from.
var transferListeners = []string{"transfer"}

// Run serves until a signal.
func (c *transferServeCmd) Run(e *env) error {
	if err := c.check(e); err != nil {
		return err
	}
	networks, err := c.networks(e.log, transferListeners...)
	if err != nil {
		return err
	}
	secrets, err := c.peerFlags.open(e.log)
	if err != nil {
		return err
	}
	defer watchPeers(secrets, e.log)()
	return bench.Serve(e.ctx, bench.ServeOptions{
		Target: transfer.TargetOptions{Host: c.Host, Bind: c.Bind, HandshakePort: c.HandshakePort, DataPort: c.DataPort, Networks: networks["transfer"], Secrets: secrets, Log: e.log},
		Bytes:  int64(c.Size), Base: c.Base, PeerFile: c.PeerFile, Out: e.stdout, Log: e.log,
	})
}

// peerFileWait is how long a command waits for the file that kvasir transfer serve writes, which may just have been started. Then the
// command ends with an error.
const peerFileWait = 5 * time.Second

// region says which bytes of which peer a command uses.
type region struct {
	PeerFile string        `help:"File that serve wrote." placeholder:"FILE"`
	Peer     string        `help:"Peer as host:port, instead of --peer-file; needs --addr." placeholder:"HOST:PORT"`
	Addr     uint64        `help:"Published address of the first byte; default the region's base."`
	Offset   byteSize      `help:"Bytes after that address to begin at." default:"0"`
	Timeout  time.Duration `help:"Time for the whole; default none."`
	peerFlags
}

func (r *region) options(ctx context.Context, log *slog.Logger) (o bench.CopyOptions, left int64, err error) {
	o = bench.CopyOptions{Peer: r.Peer, Addr: r.Addr, Timeout: r.Timeout}
	if o.Client.Secrets, err = r.peerFlags.open(log); err != nil {
		return o, 0, err
	}
	switch {
	case r.PeerFile != "" && r.Peer == "":
		p, err := bench.AwaitPeerFile(ctx, r.PeerFile, peerFileWait)
		if err != nil {
			return o, 0, err
		}
		o.Peer, left = p.Peer, int64(p.Len)
		if r.Addr == 0 {
			o.Addr = p.Base
		}
	case r.Peer == "" || r.Addr == 0 || r.PeerFile != "":
		return o, 0, usagef("name the region with --peer-file, or with --peer and --addr")
	}
	o.Addr += uint64(r.Offset)
	return o, left - int64(r.Offset), nil
}

type transferWriteCmd struct{ region }

// Run writes standard input to the peer.
func (c *transferWriteCmd) Run(e *env) error {
	o, _, err := c.options(e.ctx, e.log)
	if err != nil {
		return err
	}
	n, err := bench.Write(e.ctx, o, os.Stdin)
	if err != nil {
		return fmt.Errorf("the write ended after %d confirmed bytes (more may have arrived): %w", n, err)
	}
	e.log.Info("wrote to the peer's region", "bytes", n, "peer", o.Peer)
	return nil
}

type transferReadCmd struct {
	region
	Bytes byteSize `help:"How many; default to the region's end." default:"0"`
}

// Run reads from the peer and writes to standard output.
func (c *transferReadCmd) Run(e *env) error {
	o, left, err := c.options(e.ctx, e.log)
	if err != nil {
		return err
	}
	if o.Bytes = int64(c.Bytes); o.Bytes == 0 {
		o.Bytes = left
	}
	if o.Bytes <= 0 {
		return usagef("--bytes is needed with --peer")
	}
	n, err := bench.Read(e.ctx, o, e.stdout)
	if err != nil {
		return fmt.Errorf("the read ended after %d bytes: %w", n, err)
	}
	e.log.Info("read from the peer's region", "bytes", n, "peer", o.Peer)
	return nil
}

type transferBenchCmd struct {
	PeerFile []string   `help:"File that serve wrote; repeat it for several peers." required:"" placeholder:"FILE"`
	Sizes    []byteSize `help:"Bytes of a block." default:"4k,16k,64k,256k,1m,4m,16m"`
	Batches  []int      `help:"Blocks per call." default:"1,8,64,256,1024"`
	Ops      []string   `help:"write, read, socket (the floor: a plain loopback copy)." default:"write,read" enum:"write,read,socket"`
	Layout   string     `help:"How blocks lie at the peer: packed, reversed, scattered." default:"packed" enum:"packed,reversed,scattered"`
	Conns    int        `help:"Connections per peer; 0 means 4." default:"0"`
	Callers  int        `help:"Callers per peer, each with connections of its own." default:"1"`
	Seconds  float64    `help:"Time per measurement." default:"1"`
	Pieces   string     `help:"Measure writes of the one batch in this file: JSON, a list of [own offset, peer's offset, bytes]." placeholder:"FILE"`
	Verify   bool       `help:"Write a fresh pattern and read it back after each measurement."`
	peerFlags
}

// Run measures writes and reads.
func (c *transferBenchCmd) Run(e *env) error {
	if !(c.Seconds > 0) || c.Seconds > 3600 || c.Conns < 0 || c.Callers < 1 {
		return usagef("need --seconds above 0 and up to 3600, --conns of at least 0, --callers of at least 1")
	}
	secrets, err := c.peerFlags.open(e.log)
	if err != nil {
		return err
	}
	o := bench.BenchOptions{
		Client: transfer.Options{Conns: c.Conns, Secrets: secrets}, Callers: c.Callers, Ops: c.Ops, Batches: c.Batches,
		Layout: bench.Layout(c.Layout), For: seconds(c.Seconds), Verify: c.Verify,
	}
	for _, path := range c.PeerFile {
		p, err := bench.AwaitPeerFile(e.ctx, path, peerFileWait)
		if err != nil {
			return err
		}
		o.Peers = append(o.Peers, p)
	}
	fits := false
	for _, s := range c.Sizes {
		o.Sizes = append(o.Sizes, int(s))
		for _, p := range o.Peers {
			fits = fits || uint64(s) <= p.Len
		}
	}
	if !fits {
		return usagef("--sizes: every block is larger than the region: serve one of more than %s", sizeWords(int64(o.Peers[0].Len)))
	}
	if c.Pieces != "" {
		b, err := os.ReadFile(c.Pieces)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(b, &o.Pieces); err != nil || len(o.Pieces) == 0 {
			return usagef("--pieces %s is no list of [own offset, peer's offset, bytes]", c.Pieces)
		}
	}
	_, err = bench.Bench(e.ctx, o, e.stdout)
	if errors.Is(err, e.ctx.Err()) && e.ctx.Err() != nil {
		return errors.New("interrupted")
	}
	return err
}
