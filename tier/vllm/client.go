// SPDX-License-Identifier: Apache-2.0

package vllm

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/internal/shm"
)

// Client is the engine's side of a tier socket, as the Python module Shim is. It copies no rows: its user copies them between its own
// memory and Pool. Its methods are safe for concurrent use.
type Client struct {
	conn *Conn
	pool *shm.Segment
	hash int
	wg   sync.WaitGroup

	mu struct {
		sync.Mutex // a leaf
		last       uint64
		waiting    map[uint64]chan []Place
		err        error // why the connection ended
	}
	ended chan struct{}
}

// ErrRefused means that the node does not serve this engine; the text says why.
var ErrRefused = errors.New("vllm: the node refuses this engine")

// ErrSlow means that the node did not answer in time. If an answer comes later, the Client releases its places.
var ErrSlow = errors.New("vllm: the node does not answer")

// Dial connects to a node. region may be nil. hashBytes is the length of the keys' hashes in bytes.
func Dial(path string, h Hello, region *os.File, hashBytes int) (*Client, error) {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	client, err := greet(c, h, region, hashBytes)
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return client, nil
}

func greet(c *net.UnixConn, h Hello, region *os.File, hashBytes int) (*Client, error) {
	conn := NewConn(c)
	if err := conn.WriteFile(TypeHello, h.Append, region); err != nil {
		return nil, err
	}
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	kind, body, file, err := conn.ReadFirst()
	if err != nil {
		return nil, err
	}
	_ = c.SetReadDeadline(time.Time{})
	if kind == TypeRefused {
		return nil, fmt.Errorf("%w: %.400q", ErrRefused, body)
	}
	var w Welcome
	if kind != TypeWelcome || file == nil {
		err = fmt.Errorf("%w: the first frame has type %d, or does not carry the pool", ErrMalformed, kind)
	} else if err = json.Unmarshal(body, &w); err == nil && w.Protocol != Protocol {
		err = fmt.Errorf("%w: the node has protocol %d, this engine %d", ErrMalformed, w.Protocol, Protocol)
	}
	if err != nil {
		if file != nil {
			err = errors.Join(err, file.Close())
		}
		return nil, err
	}
	pool, err := shm.AttachFile(file)
	if err != nil {
		return nil, err
	}
	client := &Client{conn: conn, pool: pool, hash: hashBytes, ended: make(chan struct{})}
	client.mu.waiting = make(map[uint64]chan []Place)
	client.wg.Go(client.read)
	return client, nil
}

// Pool returns the pool's memory at a place, or nil if the pool does not have it. It is valid until Close.
func (c *Client) Pool(p Place) []byte {
	if p.Offset > uint64(c.pool.Len()) || uint64(p.Bytes) > uint64(c.pool.Len())-p.Offset {
		return nil
	}
	return c.pool.Bytes(int64(p.Offset), int64(p.Bytes))
}

// Connected reports whether the node has not ended the connection. A node ends it before it reuses places that it lent. So rows that were
// copied from the pool are valid only if Connected returns true after the copy.
func (c *Client) Connected() bool { return c.conn.Connected() }

// Ended returns a channel that is closed once the connection has ended.
func (c *Client) Ended() <-chan struct{} { return c.ended }

// Close ends the connection. The user must not touch the pool afterwards.
func (c *Client) Close() error {
	err := c.conn.Close()
	c.wg.Wait()
	return errors.Join(err, c.pool.Close())
}

// read passes answers to the waiting calls until the connection ends. What a call that has given up was given, it gives back.
func (c *Client) read() {
	defer close(c.ended)
	for {
		kind, body, err := c.conn.Read()
		var id uint64
		var places []Place
		if err == nil {
			if id, places, err = DecodePlaces(body); kind != TypeFound && kind != TypePlaces {
				err = fmt.Errorf("%w: an answer of type %d, which is neither Found nor Places", ErrMalformed, kind)
			}
		}
		if err != nil {
			c.fail(err)
			return
		}
		if to := c.answered(id); to != nil {
			to <- places
		} else if kind == TypeFound {
			_ = c.Release(Released{ID: id}) // the connection ends
		} else {
			_ = c.Commit(id, false) // the connection ends
		}
	}
}

func (c *Client) answered(id uint64) chan []Place {
	c.mu.Lock()
	defer c.mu.Unlock()
	to := c.mu.waiting[id]
	delete(c.mu.waiting, id)
	return to
}

// fail ends all waiting calls, and all later ones, with err.
func (c *Client) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.err = err
	for id, to := range c.mu.waiting {
		close(to)
		delete(c.mu.waiting, id)
	}
}

// Lookup asks for rows. The places are lent until Release.
func (c *Client) Lookup(tenant, request string, keys []Key, patience time.Duration) (id uint64, places []Place, err error) {
	return c.ask(TypeLookup, tenant, request, keys, patience)
}

// Store asks for places for rows that the pool lacks. The engine owns them until Commit.
func (c *Client) Store(tenant, request string, keys []Key, patience time.Duration) (id uint64, places []Place, err error) {
	return c.ask(TypeStore, tenant, request, keys, patience)
}

func (c *Client) ask(kind byte, tenant, request string, keys []Key, patience time.Duration) (id uint64, places []Place, err error) {
	id, to, err := c.wait()
	if err != nil {
		return 0, nil, err
	}
	a := Ask{ID: id, Tenant: []byte(tenant), Request: []byte(request), Keys: keys}
	if err := c.conn.Write(kind, func(dst []byte) []byte { return AppendAsk(dst, &a, c.hash) }); err != nil {
		c.answered(id)
		return 0, nil, err
	}
	late := time.NewTimer(patience)
	defer late.Stop()
	select {
	case places, ok := <-to:
		if !ok {
			return 0, nil, net.ErrClosed
		}
		return id, places, nil
	case <-late.C:
		if c.answered(id) == nil { // the answer came at this very moment
			if places, ok := <-to; ok {
				return id, places, nil
			}
		}
		return 0, nil, ErrSlow
	}
}

func (c *Client) wait() (uint64, chan []Place, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.err != nil {
		return 0, nil, c.mu.err
	}
	c.mu.last++
	to := make(chan []Place, 1)
	c.mu.waiting[c.mu.last] = to
	return c.mu.last, to, nil
}

// Release releases the places of a lookup.
func (c *Client) Release(r Released) error {
	return c.conn.Write(TypeRelease, func(dst []byte) []byte { return AppendReleased(dst, r) })
}

// Commit ends a store. ok says that all its rows were written; they then become visible.
func (c *Client) Commit(id uint64, ok bool) error {
	return c.conn.Write(TypeCommit, func(dst []byte) []byte { return AppendCommit(dst, id, ok) })
}
