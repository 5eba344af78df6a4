// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/kvasir-kv/kvasir/internal/resp"
)

const (
	slots      = 1 << 14 // of a cluster
	maxServers = 1 << 10 // servers that the topology may have at once; a call that needs a further one fails
	maxMoves   = 5       // redirections that a call follows; a further one is its error
)

// errNoServer means that the server of a key's slot is not known yet.
var errNoServer = errors.New("redis: no server of the cluster is known for the key's slot")

// topology knows the servers, and which server has which keys.
type topology struct {
	o *Options

	mu struct {
		sync.RWMutex
		servers map[string]*server
		slots   []*server // of a cluster; nil where the server is unknown
		master  *server   // without a cluster
		closed  bool
	}
}

func (t *topology) open(o *Options) {
	t.o = o
	t.mu.servers = make(map[string]*server)
	switch {
	case o.Cluster:
		t.mu.slots = make([]*server, slots)
		for _, a := range o.Addrs {
			_, _ = t.server(a)
		}
	case o.Sentinel == "":
		t.mu.master, _ = t.server(o.Addrs[0])
	}
}

// server returns the server at an address.
func (t *topology) server(addr string) (*server, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.serverLocked(addr)
}

func (t *topology) serverLocked(addr string) (*server, error) {
	s := t.mu.servers[addr]
	switch {
	case s != nil:
		return s, nil
	case t.mu.closed:
		return nil, net.ErrClosed
	case len(t.mu.servers) >= maxServers:
		return nil, fmt.Errorf("redis: the cluster or the sentinels name more than %d servers", maxServers)
	}
	s = newServer(t.o, addr)
	t.mu.servers[addr] = s
	return s, nil
}

// all returns the servers that have keys, as far as known.
func (t *topology) all() []*server {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.mu.slots == nil {
		if t.mu.master == nil {
			return nil
		}
		return []*server{t.mu.master}
	}
	seen := make(map[*server]bool)
	for _, s := range t.mu.slots {
		if s != nil {
			seen[s] = true
		}
	}
	return slices.Collect(maps.Keys(seen))
}

// pick returns the server that has a key.
func (t *topology) pick(key string) (*server, error) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.mu.slots == nil {
		if t.mu.master == nil {
			return nil, errNoServer
		}
		return t.mu.master, nil
	}
	if s := t.mu.slots[slotOf(key)]; s != nil {
		return s, nil
	}
	for _, s := range t.mu.servers { // any server redirects to the one that has the key
		return s, nil
	}
	return nil, errNoServer
}

// moved records a redirection: the objects of the slot are on the server `to` from now on.
func (t *topology) moved(slot int, to *server) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.slots[slot] = to
}

func (t *topology) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.mu.closed = true
	for _, s := range t.mu.servers {
		s.close()
	}
}

// ask learns the topology.
func (t *topology) ask(ctx context.Context) error {
	switch {
	case t.o.Cluster:
		return t.askCluster(ctx)
	case t.o.Sentinel != "":
		return t.askSentinels(ctx)
	}
	return nil
}

// askCluster asks one server after the other, until one says which servers have which slots.
func (t *topology) askCluster(ctx context.Context) error {
	t.mu.RLock()
	known := slices.Collect(maps.Values(t.mu.servers))
	t.mu.RUnlock()
	var errs []error
	for _, s := range known {
		var ranges []slotRange
		err := s.do(ctx, s.lookups, 0, func(c *resp.Conn) error {
			r, err := c.Do("CLUSTER", "SLOTS")
			if err == nil {
				ranges, err = parseSlots(r, s.addr)
			}
			return err
		})
		if err == nil {
			return t.replace(ranges)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// slotRange says which server has the slots first to last.
type slotRange struct {
	first, last int
	addr        string
}

// parseSlots reads the answer to CLUSTER SLOTS, which came from a server at an address.
func parseSlots(r resp.Reply, from string) (ranges []slotRange, _ error) {
	host, _, _ := net.SplitHostPort(from)
	total := int64(0) // each slot has one server
	for _, item := range r.List {
		if len(item.List) < 3 || len(item.List[2].List) < 2 {
			return nil, fmt.Errorf("%w: CLUSTER SLOTS has an entry without slots or server", resp.ErrProtocol)
		}
		first, last, master := item.List[0].Int, item.List[1].Int, item.List[2].List
		if first < 0 || last < first || last >= slots || master[1].Int < 1 || master[1].Int > 65535 {
			return nil, fmt.Errorf("%w: CLUSTER SLOTS has impossible slots, %d to %d, or port %d", resp.ErrProtocol, first, last, master[1].Int)
		}
		if total += last - first + 1; total > slots {
			return nil, fmt.Errorf("%w: CLUSTER SLOTS has slots twice", resp.ErrProtocol)
		}
		to := master[0].Text
		if to == "" || to == "?" {
			to = host
		}
		ranges = append(ranges, slotRange{int(first), int(last), net.JoinHostPort(to, strconv.FormatInt(master[1].Int, 10))})
	}
	if len(ranges) == 0 {
		return nil, fmt.Errorf("%w: CLUSTER SLOTS has no slots: the cluster is not set up", resp.ErrProtocol)
	}
	return ranges, nil
}

// replace replaces the known topology by the one that a server reported. It drops servers without
// slots, except those that the operator named.
func (t *topology) replace(ranges []slotRange) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	used := make(map[string]bool)
	table := make([]*server, slots)
	for _, r := range ranges {
		s, err := t.serverLocked(r.addr)
		if err != nil {
			return err
		}
		used[r.addr] = true
		for i := r.first; i <= r.last; i++ {
			table[i] = s
		}
	}
	t.mu.slots = table
	for addr, s := range t.mu.servers {
		if !used[addr] && !slices.Contains(t.o.Addrs, addr) {
			delete(t.mu.servers, addr)
			s.close()
		}
	}
	return nil
}

// askSentinels asks one sentinel after the other for the master.
func (t *topology) askSentinels(ctx context.Context) error {
	var errs []error
	for _, addr := range t.o.Addrs {
		master, err := t.askSentinel(ctx, addr)
		if err != nil {
			errs = append(errs, fmt.Errorf("sentinel %s: %w", addr, err))
			continue
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.mu.master != nil && t.mu.master.addr == master {
			return nil
		}
		if t.mu.master != nil {
			delete(t.mu.servers, t.mu.master.addr)
			t.mu.master.close()
		}
		t.mu.master, err = t.serverLocked(master)
		return err
	}
	return errors.Join(errs...)
}

func (t *topology) askSentinel(ctx context.Context, addr string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, t.o.Timeout)
	defer cancel()
	c, err := dial(ctx, t.o, addr, login{user: t.o.SentinelUsername, password: t.o.SentinelPassword})
	if err != nil {
		return "", err
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	r, err := c.Do("SENTINEL", "GET-MASTER-ADDR-BY-NAME", t.o.Sentinel)
	switch {
	case err != nil:
		return "", err
	case r.Kind == '_':
		return "", fmt.Errorf("it knows no master %q", t.o.Sentinel)
	case len(r.List) != 2:
		return "", resp.ErrProtocol
	}
	return net.JoinHostPort(r.List[0].Text, r.List[1].Text), nil
}

// slotOf returns the slot of a key: CRC16 of the text between the first { and the
// next }, or of the whole key if there is none.
func slotOf(key string) int {
	if _, tagged, ok := strings.Cut(key, "{"); ok {
		if tag, _, ok := strings.Cut(tagged, "}"); ok && tag != "" {
			key = tag
		}
	}
	crc := uint16(0)
	for i := range len(key) {
		crc ^= uint16(key[i]) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return int(crc) % slots
}

// redirection says to which server a command must go instead.
type redirection struct {
	addr string
	slot int
	ask  bool // ASK: only for this command; else MOVED
}

// redirected parses the redirection with which the server at the address `from` answered. It reports false if the error is none.
func (t *topology) redirected(from string, err error) (r redirection, ok bool) {
	e, isRefusal := errors.AsType[*resp.Error](err)
	if !isRefusal || !t.o.Cluster {
		return r, false
	}
	parts := strings.Fields(e.Text)
	if len(parts) != 3 || parts[0] != "MOVED" && parts[0] != "ASK" {
		return r, false
	}
	slot, err := strconv.Atoi(parts[1])
	colon := strings.LastIndexByte(parts[2], ':')
	if err != nil || slot < 0 || slot >= slots || colon < 0 {
		return r, false
	}
	host, port := strings.Trim(parts[2][:colon], "[]"), parts[2][colon+1:]
	if host == "" || host == "?" {
		host, _, _ = net.SplitHostPort(from)
	}
	return redirection{net.JoinHostPort(host, port), slot, parts[0] == "ASK"}, true
}
