// SPDX-License-Identifier: Apache-2.0

package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

// NodeOptions configures a Node. A zero field means its default.
type NodeOptions struct {
	Memory []byte // memory given to the cluster; its owner must keep it until Run has returned
	Host   string // address that other nodes and clients dial; default 127.0.0.1
	Bind   string // address of the ports; default Host
	Name   string // name of the segments, for puts that prefer a segment; default the endpoint

	PingEvery time.Duration // default 1 s; a master gives up a node that has been silent for about 10 s
	Grace     time.Duration // how long objects stay readable after Run's end; default 0: they are lost at once

	Networks *auth.Networks    // networks from which clients and other nodes may reach the ports; nil: any
	Secrets  *auth.PeerSecrets // secrets of which clients and other nodes must prove one; nil: no proof is demanded

	Log *slog.Logger // default none
}

// Validate reports every field that cannot be used, as options.Errors.
func (o NodeOptions) Validate() error {
	var c options.Checks
	c.That(len(o.Memory) >= segmentAlign, "Memory", "has %d bytes, less than %d", len(o.Memory), segmentAlign)
	ip := net.ParseIP(o.Host)
	c.That(ip == nil || !ip.IsUnspecified(), "Host", "%s is every address: name the one that others dial", o.Host)
	options.Within(&c, "PingEvery", o.PingEvery, 0, 5*time.Second)
	options.Within(&c, "Grace", o.Grace, 0, time.Hour)
	return c.Err()
}

// segmentAlign is an alignment that suits every allocator of a master.
const segmentAlign = 16 << 20

// Node gives memory to a cluster: others put objects there and read them, by Mooncake's transfer engine.
//
// A master that gives up a node forgets its objects and gives their places to new objects, while clients may still read the old ones.
// The node then begins a new life: it gets another client id and segment id, another port, and addresses that it never had before.
// Reads and writes meant for an earlier life reach nothing.
type Node struct {
	o      NodeOptions
	log    *slog.Logger
	master *Master

	mu struct {
		sync.Mutex
		stats NodeStats
		life  *life     // nil: the node could not begin one
		known time.Time // when the master last knew this node
	}

	forgotten time.Duration // after this time without an answer, the master has given up this node
	listen    func(transfer.TargetOptions, *transfer.Table) (*transfer.Target, error)
}

// NodeStats is what a Node has done, in all its lives.
type NodeStats struct {
	Mounted  int64  `gauge:"kvasir_store_node_mounted" help:"1 while the master knows this node's memory; 0 also when it has not answered for 10 s."`
	Bytes    int64  `gauge:"kvasir_store_node_bytes" help:"Memory given to the cluster."`
	Lives    int64  `counter:"kvasir_store_node_lives_total" help:"How often the memory was mounted under new addresses."`
	Pings    int64  `counter:"kvasir_store_node_pings_total" help:"Pings that the master answered."`
	Failures int64  `counter:"kvasir_store_node_ping_failures_total" help:"Pings that failed."`
	Writes   int64  `counter:"kvasir_store_node_writes_total" help:"Writes of clients."`
	Reads    int64  `counter:"kvasir_store_node_reads_total" help:"Reads of clients."`
	BytesIn  int64  `counter:"kvasir_store_node_received_bytes_total" help:"Bytes that clients wrote."`
	BytesOut int64  `counter:"kvasir_store_node_sent_bytes_total" help:"Bytes that clients read."`
	Rejected int64  `counter:"kvasir_store_node_rejected_total" help:"Requests for addresses of no segment, or of a former life."`
	Endpoint string // of the transfer engine, host:port
}

// life is the time of the node under one client id and segment. It ends when the master forgets them.
type life struct {
	client  UUID
	segment Segment
	table   *transfer.Table
	region  *transfer.Region
	target  *transfer.Target
	known   bool // a master may know this life
}

// NewNode checks the options. The Node does nothing before Run. It does not close master.
func NewNode(master *Master, o NodeOptions) (*Node, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.Host = cmp.Or(o.Host, "127.0.0.1")
	o.PingEvery = cmp.Or(o.PingEvery, time.Second)
	n := &Node{o: o, log: safelog.New(o.Log), master: master, forgotten: 10 * time.Second, listen: transfer.Listen}
	n.mu.stats.Bytes = int64(n.bytes())
	return n, nil
}

func (n *Node) bytes() uint64 { return uint64(len(n.o.Memory)) / segmentAlign * segmentAlign }

// Stats returns what the node has done in all its lives.
func (n *Node) Stats() NodeStats {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.mu.stats
	if l := n.mu.life; l != nil {
		s.add(l.target.Stats())
		s.Endpoint = l.segment.Endpoint
	}
	return s
}

func (s *NodeStats) add(t transfer.TargetStats) {
	s.Writes += t.Writes
	s.Reads += t.Reads
	s.BytesIn += t.BytesIn
	s.BytesOut += t.BytesOut
	s.Rejected += t.RejectedAddress
}

// Run serves the memory until ctx ends, then takes it back from the cluster. It returns an error if the first master that answers
// cannot be used, or if it cannot open the ports at the start. While no master answers, and after any later error, it tries again.
func (n *Node) Run(ctx context.Context) error {
	defer n.end(false)
	if err := n.begin(); err != nil {
		return err
	}
	t := time.NewTicker(n.o.PingEvery)
	defer t.Stop()
	for was := error(nil); ; {
		err := n.step(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, ErrVersion) && n.Stats().Pings == 0:
			return err
		case err != nil && was == nil:
			n.log.Warn("the master has not confirmed that the memory is mounted; retrying", "err", err)
		case err == nil && was != nil:
			n.log.Info("the master is back")
		}
		was = err
		select {
		case <-t.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// step pings the master, and mounts the memory if the master does not know it.
func (n *Node) step(ctx context.Context) error {
	l := n.life()
	if l == nil {
		if err := n.begin(); err != nil {
			return err
		}
		l = n.life()
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	known, err := n.master.Ping(ctx, l.client)
	n.count(func(s *NodeStats) {
		if err != nil {
			s.Failures++
		} else {
			s.Pings++
		}
		if known {
			n.mu.known, s.Mounted = time.Now(), 1
		} else if time.Since(n.mu.known) > n.forgotten {
			s.Mounted = 0
		}
	})
	if err != nil || known {
		return err
	}
	if l.known { // the master forgot this node
		n.log.Warn("the master has forgotten this node: its objects are lost, and it mounts under new addresses")
		n.end(true)
		if err := n.begin(); err != nil {
			return err
		}
		l = n.life()
	}
	err = n.master.Mount(ctx, l.client, &l.segment)
	_, refused := errors.AsType[Code](err)
	_, unsent := errors.AsType[*unsentError](err)
	l.known = !refused && !unsent
	if err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	n.count(func(s *NodeStats) { n.mu.known, s.Mounted = time.Now(), 1 })
	if err := n.master.Remount(ctx, l.client, l.segment); err != nil {
		return fmt.Errorf("remount: %w", err)
	}
	n.log.Info("memory is mounted", "bytes", l.segment.Bytes, "endpoint", l.segment.Endpoint, "segment", l.segment.ID)
	return nil
}

func (n *Node) life() *life {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.mu.life
}

func (n *Node) count(f func(*NodeStats)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	f(&n.mu.stats)
}

// begin begins a new life: it opens ports and gives the memory new addresses.
func (n *Node) begin() error {
	l := &life{client: NewUUID(), table: transfer.NewTable()}
	base := (rand.Uint64N(1<<46/segmentAlign) + 1<<46/segmentAlign) * segmentAlign // 2^46 to 2^47
	region, err := l.table.Register(base, n.o.Memory[:n.bytes()])
	if err != nil {
		return fmt.Errorf("mooncake store: %w", err)
	}
	l.region = region
	l.target, err = n.listen(transfer.TargetOptions{Host: n.o.Host, Bind: n.o.Bind, Networks: n.o.Networks, Secrets: n.o.Secrets, Log: n.o.Log}, l.table)
	if err != nil {
		return fmt.Errorf("mooncake store: open the node's ports: %w", err)
	}
	endpoint := l.target.Name()
	l.segment = Segment{ID: NewUUID(), Name: cmp.Or(n.o.Name, endpoint), Base: base, Bytes: n.bytes(), Endpoint: endpoint}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.life = l
	n.mu.stats.Lives++
	return nil
}

// end ends the current life and takes its memory back. forgotten means that the master does not know this life any more.
func (n *Node) end(forgotten bool) {
	n.mu.Lock()
	l := n.mu.life
	n.mu.stats.Mounted = 0
	n.mu.Unlock()
	if l == nil {
		return
	}
	if l.known {
		n.leave(l, forgotten)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	l.table.Withdraw(ctx, l.region)
	l.target.Close()
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mu.stats.add(l.target.Stats())
	n.mu.life = nil
}

// leave withdraws the memory from the master. A master that seems to have forgotten the node may still have its segment; then the
// memory is withdrawn at once, without a grace.
func (n *Node) leave(l *life, forgotten bool) {
	if n.o.Grace > 0 && !forgotten {
		n.grace(l)
	}
	ctx, cancel := context.WithTimeout(context.Background(), maxLeft)
	defer cancel()
	if err := n.master.Unmount(ctx, l.client, l.segment.ID); err != nil {
		n.log.Warn("cannot unmount the segment at the master", "err", err)
	}
}

// grace keeps objects readable for Grace, while the master places nothing new in the memory. A lost ping does not end it.
func (n *Node) grace(l *life) {
	ctx, cancel := context.WithTimeout(context.Background(), n.o.Grace+maxLeft)
	defer cancel()
	if err := n.master.UnmountAfter(ctx, l.client, l.segment.ID, n.o.Grace); err != nil {
		n.log.Warn("the master refused a delayed unmount, so objects are unreadable from now on", "err", err)
		return
	}
	for end := time.Now().Add(n.o.Grace); time.Now().Before(end); {
		time.Sleep(min(n.o.PingEvery, time.Until(end)))
		ping, cancel := context.WithDeadline(ctx, end)
		known, err := n.master.Ping(ping, l.client)
		cancel()
		if err == nil && !known {
			return // the master has already forgotten the segment
		}
	}
}
