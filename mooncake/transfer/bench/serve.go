// SPDX-License-Identifier: Apache-2.0

// Package bench has the work of the transfer commands of the command line: to serve a region, to write to a peer and read from it, and
// to measure.
package bench

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

// PeerFile says where a served region is; the benchmark drivers read it.
type PeerFile struct {
	Peer string `json:"peer"` // segment name, "host:port"
	Base uint64 `json:"base"` // published address
	Len  uint64 `json:"len"`  // bytes
}

// ServeOptions configures Serve. A zero field means its default.
type ServeOptions struct {
	Target transfer.TargetOptions
	Bytes  int64 // size of the region; default 256 MiB

	// Base is the published address. The default is random, so that a peer that still knows the addresses of an earlier process does
	// not hit this region.
	Base uint64

	PeerFile string    // file that Serve writes when the region is ready; "" writes none
	Out      io.Writer // gets one line when the region is ready; default none
	Log      *slog.Logger
}

// Serve publishes one region until ctx ends. It fails when a connection to its published address does not lead back to it.
func Serve(ctx context.Context, o ServeOptions) error {
	o.Bytes = cmp.Or(o.Bytes, 256<<20)
	if o.Bytes < 0 {
		return fmt.Errorf("serve %d bytes: %w", o.Bytes, transfer.ErrRange)
	}
	if err := checkMemory(o.Bytes); err != nil {
		return err
	}
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	o.Target.Log = o.Log
	table := transfer.NewTable()
	mem := make([]byte, o.Bytes)
	prepare(mem)
	base, err := register(table, o.Base, mem)
	if err != nil {
		return fmt.Errorf("register %d bytes at %#x: %w", o.Bytes, o.Base, err)
	}
	target, err := transfer.Listen(o.Target, table)
	if err != nil {
		return err
	}
	defer target.Close()
	if err := target.SelfDial(ctx); err != nil {
		return err
	}
	info := PeerFile{Peer: target.Name(), Base: base, Len: uint64(o.Bytes)}
	if o.PeerFile != "" {
		if err := writePeerFile(o.PeerFile, info); err != nil {
			return err
		}
		defer os.Remove(o.PeerFile)
	}
	if o.Out != nil {
		fmt.Fprintf(o.Out, "serving %d bytes at %#x as %s\n", info.Len, info.Base, info.Peer)
	}
	<-ctx.Done()
	s := target.Stats()
	o.Log.Info("transfer target stops", "writes", s.Writes, "bytes_in", s.BytesIn, "reads", s.Reads, "bytes_out", s.BytesOut,
		"rejected_address", s.RejectedAddress, "rejected_fence", s.RejectedFence, "broken", s.Broken)
	return nil
}

// register publishes mem at base, or at an address of the table's choice if base is 0. It returns the address.
func register(table *transfer.Table, base uint64, mem []byte) (uint64, error) {
	if base != 0 {
		_, err := table.Register(base, mem)
		return base, err
	}
	regions, err := table.Publish(mem)
	if err != nil {
		return 0, err
	}
	return regions[0].Range().Addr, nil
}

// writePeerFile writes the file completely or not at all.
func writePeerFile(path string, info PeerFile) error {
	b, err := json.Marshal(info)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("write peer file: %w", err)
	}
	_, err = f.Write(append(b, '\n'))
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("write peer file: %w", err)
	}
	return nil
}

// ReadPeerFile reads the file that Serve wrote.
func ReadPeerFile(path string) (PeerFile, error) {
	var info PeerFile
	b, err := os.ReadFile(path)
	if err != nil {
		return info, err
	}
	if err := json.Unmarshal(b, &info); err != nil {
		return info, fmt.Errorf("peer file %s: %w", path, err)
	}
	if info.Peer == "" || info.Base == 0 || info.Len == 0 {
		return info, fmt.Errorf("peer file %s: peer, base or len is missing", path)
	}
	return info, nil
}

// AwaitPeerFile reads the file like ReadPeerFile, but waits up to atMost for it, because a Serve started at the same moment may not
// have written it yet.
func AwaitPeerFile(ctx context.Context, path string, atMost time.Duration) (PeerFile, error) {
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	look := time.NewTicker(20 * time.Millisecond)
	defer look.Stop()
	for {
		info, err := ReadPeerFile(path)
		if !errors.Is(err, fs.ErrNotExist) {
			return info, err
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return info, fmt.Errorf("peer file: %w: transfer serve --peer-file writes it", err)
		}
	}
}

// CopyOptions configures Write and Read.
type CopyOptions struct {
	Client     transfer.Options
	Peer       string        // segment name
	Addr       uint64        // published address of the first byte
	Bytes      int64         // bytes to copy; only for Read
	BlockBytes int           // size of an entry of the batch; default 1 MiB
	Timeout    time.Duration // for the whole copy; default none
}

// copyStep bounds the memory that Write and Read use: they copy at most so many bytes at a time.
const copyStep = 64 << 20

// Write sends all bytes of `in` to the peer and returns how many bytes the peer has confirmed.
func Write(ctx context.Context, o CopyOptions, in io.Reader) (int64, error) {
	return o.each(ctx, -1, func(ctx context.Context, c *transfer.Client, addr uint64, buf []byte) (int, error) {
		n, err := io.ReadFull(in, buf)
		if err == io.ErrUnexpectedEOF {
			err = io.EOF
		}
		if n > 0 {
			if werr := c.Write(ctx, o.Peer, o.entries(addr, buf[:n])); werr != nil {
				return 0, werr
			}
		}
		return n, err
	})
}

// Read copies o.Bytes from the peer to `out` and returns the number of bytes copied.
func Read(ctx context.Context, o CopyOptions, out io.Writer) (int64, error) {
	if o.Bytes < 0 {
		return 0, fmt.Errorf("read %d bytes: %w", o.Bytes, transfer.ErrRange)
	}
	return o.each(ctx, o.Bytes, func(ctx context.Context, c *transfer.Client, addr uint64, buf []byte) (int, error) {
		if err := c.Read(ctx, o.Peer, o.entries(addr, buf)); err != nil {
			return 0, err
		}
		return out.Write(buf)
	})
}

// each calls step with consecutive addresses until step returns io.EOF or total bytes are copied. With a negative total, only io.EOF
// ends it.
func (o CopyOptions) each(ctx context.Context, total int64, step func(context.Context, *transfer.Client, uint64, []byte) (int, error)) (int64, error) {
	if o.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.Timeout)
		defer cancel()
	}
	c := transfer.New(o.Client)
	defer c.Close()
	buf := make([]byte, copyStep)
	for done := int64(0); ; {
		if total >= 0 {
			if done == total {
				return done, nil
			}
			buf = buf[:min(int64(len(buf)), total-done)]
		}
		n, err := step(ctx, c, o.Addr+uint64(done), buf)
		done += int64(n)
		if err == io.EOF {
			return done, nil
		}
		if err != nil {
			return done, fmt.Errorf("copy at byte %d: %w", done, err)
		}
	}
}

// entries cuts b into one entry per block, at consecutive addresses of the peer from addr on.
func (o CopyOptions) entries(addr uint64, b []byte) []transfer.Entry {
	block := cmp.Or(o.BlockBytes, 1<<20)
	list := make([]transfer.Entry, 0, len(b)/block+1)
	for off := 0; off < len(b); off += block {
		list = append(list, transfer.Entry{Local: b[off:min(off+block, len(b))], Remote: addr + uint64(off)})
	}
	return list
}
