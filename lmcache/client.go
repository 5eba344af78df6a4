// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/zmtp"
)

var (
	// ErrDisconnected means that there is no connection, or that the connection was lost after a request was sent. In the second case the
	// server may or may not have carried out the request. A later server will not carry it out.
	ErrDisconnected = errors.New("lmcache: connection lost before the reply")
	// ErrClosed means that the client was closed.
	ErrClosed = errors.New("lmcache: client closed")
	// errReply means that a reply does not fit its request.
	errReply = errors.New("lmcache: bad reply")
)

// Client calls a server over one DEALER socket, many requests in flight. It
// connects when needed and again when the connection is lost. Its methods are
// safe for concurrent use; each waits for its reply or its context.
type Client struct {
	dealer      *zmtp.Dealer
	connections atomic.Uint64
	announced   atomic.Uint64 // value of connections when the announcing ping was last sent
	packed      atomic.Bool   // the server is of 0.5.7: the client sends packed tokens in its keys
	alignment   atomic.Int64  // alignment that was negotiated; 0: none
	size        atomic.Int64  // tokens per chunk in the server's answer to that negotiation
	wrongSize   atomic.Bool   // the server of the present connection has another chunk size than size

	mu struct {
		sync.Mutex
		last    int64
		pending map[string]*call // by uid frame
		next    chan struct{}    // closed by the next connection
		closed  bool
	}
}

type call struct {
	op   []byte
	done chan struct{}
	res  []byte // result frame, nil for None
	err  error
}

// endpoint turns a URL of an LMCache client into a ZMQ endpoint: a host:port without a scheme gets tcp://.
func endpoint(url string) string {
	if strings.Contains(url, "://") {
		return url
	}
	return "tcp://" + url
}

// ClientOptions say how a client proves its identity. At most one of them may be set.
type ClientOptions struct {
	Curve *zmtp.CurveClient // its key
	Plain *zmtp.PlainClient // its password
}

// NewClient returns a client of the server at url (host:port, tcp://, ipc://).
// It does not wait for the connection; calls do.
func NewClient(url string) (*Client, error) { return OpenClient(url, ClientOptions{}) }

// OpenClient is NewClient for a server that requires its clients to prove their identity.
func OpenClient(url string, o ClientOptions) (*Client, error) {
	c := &Client{}
	c.mu.pending, c.mu.next = make(map[string]*call), make(chan struct{})
	c.dealer = zmtp.NewDealer(endpoint(url), zmtp.DealerOptions{
		Handler: c.receive, OnState: c.state, HeartbeatInterval: 10 * time.Second, Curve: o.Curve, Plain: o.Plain,
		NoWaiting: true, // a later server must not get a call that its caller gave up: for example a store of blocks that the engine has reused since
	})
	if err := c.dealer.Start(); err != nil {
		return nil, fmt.Errorf("connect to %s: %w", url, err)
	}
	return c, nil
}

// Close ends the connection; calls in progress return ErrClosed.
func (c *Client) Close() error {
	err := c.dealer.Close()
	c.mu.Lock()
	c.mu.closed = true
	c.mu.Unlock()
	c.failAll(ErrClosed)
	return err
}

func (c *Client) state(connected bool, err error) {
	if connected {
		c.connections.Add(1)
		c.mu.Lock()
		close(c.mu.next)
		c.mu.next = make(chan struct{})
		c.mu.Unlock()
		return
	}
	c.failAll(fmt.Errorf("%w: %w", ErrDisconnected, err))
}

// Connections counts the connections made so far. After it has grown, the server may be another process, which does not know this client.
func (c *Client) Connections() uint64 { return c.connections.Load() }

// failAll ends every call in progress with err, because its reply can no longer come.
func (c *Client) failAll(err error) {
	c.mu.Lock()
	pending := c.mu.pending
	c.mu.pending = make(map[string]*call)
	c.mu.Unlock()
	for _, w := range pending {
		w.err = err
		close(w.done)
	}
}

// receive pairs a reply with its call. Replies without a waiting call are ignored.
func (c *Client) receive(m zmtp.Message) {
	if len(m) < 2 || len(m) > 3 {
		return
	}
	c.mu.Lock()
	w := c.mu.pending[string(m[0])]
	delete(c.mu.pending, string(m[0]))
	c.mu.Unlock()
	if w == nil {
		c.renegotiated(m)
		return
	}
	if !bytes.Equal(m[1], w.op) {
		w.err = fmt.Errorf("%w: it names operation %x, not %x", errReply, m[1], w.op)
	} else if len(m) == 3 {
		w.res = bytes.Clone(m[2])
	}
	close(w.done)
}

// Call sends one request and returns the result frame, nil for None.
func (c *Client) Call(ctx context.Context, op Op, payloads ...[]byte) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	w := &call{op: AppendOp(nil, op), done: make(chan struct{})}
	c.mu.Lock()
	if c.mu.closed {
		c.mu.Unlock()
		return nil, ErrClosed
	}
	uid := AppendInt(nil, c.mu.last)
	c.mu.last++
	c.mu.pending[string(uid)] = w
	next := c.mu.next
	c.mu.Unlock()
	for {
		c.announce()
		err := c.dealer.Send(append([][]byte{uid, w.op}, payloads...)...)
		if err == nil {
			break
		}
		if !errors.Is(err, zmtp.ErrNotConnected) {
			c.forget(uid)
			return nil, fmt.Errorf("%s: %w", op, err)
		}
		select { // an attempt to connect that fails ends the call
		case <-next:
			c.mu.Lock()
			next = c.mu.next
			c.mu.Unlock()
			continue
		case <-w.done:
		case <-ctx.Done():
		}
		break
	}
	select {
	case <-w.done:
		if w.err != nil {
			return nil, fmt.Errorf("%s: %w", op, w.err)
		}
		return w.res, nil
	case <-ctx.Done():
		c.forget(uid)
		return nil, fmt.Errorf("%s: %w", op, ctx.Err())
	}
}

// announce sends a ping on a new connection and does not wait for the answer. A server derives the client's generation from its first
// messages, and a ping is the message that shows it.
func (c *Client) announce() {
	if n := c.connections.Load(); c.announced.Swap(n) != n {
		_ = c.dealer.Send(AppendInt(nil, -1), AppendOp(nil, OpPing), AppendNil(nil)) // the call's own Send reports what is wrong
		if a := c.alignment.Load(); a > 0 {                                          // a new server process has no fixed size yet
			_ = c.dealer.Send(AppendInt(nil, -1), AppendOp(nil, OpNegotiateChunkSize), AppendInt(nil, a))
		}
	}
}

func (c *Client) forget(uid []byte) {
	c.mu.Lock()
	delete(c.mu.pending, string(uid))
	c.mu.Unlock()
}

// result calls op and decodes a result that may not be None.
func result[T any](ctx context.Context, c *Client, decode func([]byte) (T, error), op Op, payloads ...[]byte) (T, error) {
	var zero T
	b, err := c.Call(ctx, op, payloads...)
	if err != nil {
		return zero, err
	}
	if b == nil {
		return zero, fmt.Errorf("%s: %w: it has no result", op, errReply)
	}
	v, err := decode(b)
	if err != nil {
		return zero, fmt.Errorf("%s: %w: %w", op, errReply, err)
	}
	return v, nil
}

// callNone calls op, whose result is None.
func (c *Client) callNone(ctx context.Context, op Op, payloads ...[]byte) error {
	_, err := c.Call(ctx, op, payloads...)
	return err
}

// ChunkTokens returns the server's tokens per chunk.
func (c *Client) ChunkTokens(ctx context.Context) (int, error) {
	n, err := result(ctx, c, DecodeInt, OpGetChunkSize)
	if err == nil && (n < 1 || n > MaxTokens) {
		return 0, fmt.Errorf("%s: %w: a chunk size of %d is outside 1 to %d", OpGetChunkSize, errReply, n, MaxTokens)
	}
	return int(n), err
}

// negotiateFirst and negotiateAgain are how long Negotiate waits for the answer to negotiate_chunk_size, which servers before 0.5.7 never
// answer: at the first attempt, and at the attempt after the server has answered another call.
const negotiateFirst, negotiateAgain = 2 * time.Second, 500 * time.Millisecond

// Negotiate returns the server's tokens per chunk; a size that is no multiple of alignment is an error. It also finds out whether the
// server is of 0.5.7: only then the client sends packed tokens in its keys.
func (c *Client) Negotiate(ctx context.Context, alignment int) (int, error) {
	n, ok := c.negotiate(ctx, alignment, negotiateFirst)
	if !ok {
		var err error
		if n, err = c.ChunkTokens(ctx); err != nil {
			return 0, err
		}
		if now, again := c.negotiate(ctx, alignment, negotiateAgain); again { // the first answer was only slow
			n, ok = now, true
		}
	}
	c.packed.Store(ok)
	if n%alignment != 0 {
		return 0, fmt.Errorf("%s: the server has chunks of %d tokens, which is no multiple of the %d that the client asks for", OpNegotiateChunkSize, n, alignment)
	}
	if ok {
		c.alignment.Store(int64(alignment))
		c.size.Store(int64(n))
	}
	return n, nil
}

// ErrChunkSize means that the server, after a new connection, has another chunk size than was negotiated.
var ErrChunkSize = errors.New("lmcache: the server restarted with another chunk size")

// renegotiated records the answer to the negotiate_chunk_size that announce sent. This answer comes before the answers to later calls.
func (c *Client) renegotiated(m zmtp.Message) {
	if op, err := ParseOp(m[1]); err == nil && op == OpNegotiateChunkSize && len(m) == 3 {
		n, err := DecodeInt(m[2])
		c.wrongSize.Store(err != nil || n != c.size.Load())
	}
}

func (c *Client) negotiate(ctx context.Context, alignment int, limit time.Duration) (n int, ok bool) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	v, err := result(ctx, c, DecodeInt, OpNegotiateChunkSize, AppendInt(nil, int64(alignment)))
	return int(v), err == nil && v > 0 && v <= MaxTokens
}

// key encodes a key in the form of the server's release: with packed tokens for 0.5.7.
func (c *Client) key(k *Key) []byte {
	own := *k
	own.Packed = own.Packed || c.packed.Load()
	return own.Append(nil)
}

// appendSince057 appends the payload `more` if the server is of 0.5.7: earlier servers do not take it.
func (c *Client) appendSince057(payloads [][]byte, more []byte) [][]byte {
	if c.packed.Load() {
		payloads = append(payloads, more)
	}
	return payloads
}

var noExtraRanges, noSkippedChunks = []byte{0x90}, []byte{0x90}

// Ping informs the server that a worker lives. A result of false asks the worker to register again.
func (c *Client) Ping(ctx context.Context, instanceID int64) (bool, error) {
	return result(ctx, c, DecodeBool, OpPing, AppendInt(nil, instanceID))
}

// PingServer asks whether the server answers. It names no worker.
func (c *Client) PingServer(ctx context.Context) (bool, error) {
	return result(ctx, c, DecodeBool, OpPing, AppendNil(nil))
}

// ReportBlockAllocations reports which engine blocks the requests got. The server only observes them.
func (c *Client) ReportBlockAllocations(ctx context.Context, instanceID int64, model string, records []BlockAllocation) error {
	return c.callNone(ctx, OpReportBlockAllocation, AppendInt(nil, instanceID), AppendString(nil, model), AppendBlockAllocations(nil, records))
}

// RegisterEngineDriven registers a worker that copies its KV itself.
func (c *Client) RegisterEngineDriven(ctx context.Context, p *EngineDriven) (Pool, error) {
	own := *p
	own.HasGroups = own.HasGroups || c.packed.Load()
	return result(ctx, c, DecodePool, OpRegisterEngineDriven, own.Append(nil))
}

// UnregisterEngineDriven ends a registration.
func (c *Client) UnregisterEngineDriven(ctx context.Context, instanceID int64) error {
	return c.callNone(ctx, OpUnregisterEngineDriven, AppendInt(nil, instanceID))
}

// Lookup asks for the longest stored prefix of k's tokens and pins it for the request. It returns the hit in chunks. It polls until the
// server has a result.
func (c *Client) Lookup(ctx context.Context, k *Key) (chunks int, err error) {
	if err := c.callNone(ctx, OpLookup, c.key(k), AppendInt(nil, 1)); err != nil {
		return 0, err
	}
	for wait := time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		b, err := c.Call(ctx, OpQueryPrefetchStatus, AppendString(nil, k.RequestID))
		if err != nil {
			return 0, err
		}
		if b != nil {
			n, err := DecodeInt(b)
			if c.wrongSize.Load() {
				return 0, fmt.Errorf("%s: %w", OpQueryPrefetchStatus, ErrChunkSize)
			}
			if err != nil {
				return 0, fmt.Errorf("%s: %w: the hit is not a number of chunks: %w", OpQueryPrefetchStatus, errReply, err)
			}
			if n < 0 || n > MaxTokens {
				return 0, fmt.Errorf("%s: %w: a hit of %d chunks is outside 0 to %d", OpQueryPrefetchStatus, errReply, n, MaxTokens)
			}
			return int(n), nil
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return 0, fmt.Errorf("%s: %w", OpQueryPrefetchStatus, ctx.Err())
		}
	}
}

// FreeLookupLocks gives up the pins of k's range.
func (c *Client) FreeLookupLocks(ctx context.Context, k *Key) error {
	return c.callNone(ctx, OpFreeLookupLocks, c.appendSince057([][]byte{c.key(k), AppendInt(nil, 1)}, noExtraRanges)...)
}

// EndSession ends a request.
func (c *Client) EndSession(ctx context.Context, requestID string) error {
	return c.callNone(ctx, OpEndSession, AppendString(nil, requestID))
}

// PrepareStore asks where to put the chunks of k's range. skipped are the positions in the range that are not stored, for each
// object group; nil for none. Only servers of 0.5.7 learn them.
func (c *Client) PrepareStore(ctx context.Context, k *Key, instanceID int64, skipped [][]int) (PrepareStore, error) {
	more := noSkippedChunks
	if slices.ContainsFunc(skipped, func(of []int) bool { return len(of) > 0 }) {
		more = AppendBlockIDs(nil, skipped)
	}
	return result(ctx, c, DecodePrepareStore, OpPrepareStore, c.appendSince057([][]byte{c.key(k), AppendInt(nil, instanceID)}, more)...)
}

// CommitStore informs the server that the worker has written the chunks into the slots that PrepareStore named.
func (c *Client) CommitStore(ctx context.Context, k *Key, instanceID int64) (bool, error) {
	return result(ctx, c, DecodeBool, OpCommitStore, c.key(k), AppendInt(nil, instanceID), AppendBytes(nil, nil))
}

// Enveloped reports whether the server is of 0.5.7. Such a server sends and receives objects in envelopes when it offers no shared memory;
// earlier releases use pickles.
func (c *Client) Enveloped() bool { return c.packed.Load() }

// CommitEnvelope sends the objects of k's range to a server without shared memory. layouts has one layout for each object group. A message
// carries less than 4 GiB. For more it sends nothing and returns an error that wraps ErrEnvelope.
func (c *Client) CommitEnvelope(ctx context.Context, k *Key, instanceID int64, layouts []kv.Layout, e *Envelope) (bool, error) {
	if n := EnvelopeBytes(layouts, e); n > math.MaxUint32 {
		return false, fmt.Errorf("%w: the objects take %s, a message carries less than 4 GiB", ErrEnvelope, kv.FormatBytes(n))
	}
	data := AppendInline(nil, func(b []byte) []byte { return AppendEnvelope(b, layouts, e) })
	return result(ctx, c, DecodeBool, OpCommitStore, c.key(k), AppendInt(nil, instanceID), data)
}

// PrepareRetrieve asks where the chunks of k's range are.
func (c *Client) PrepareRetrieve(ctx context.Context, k *Key, instanceID int64) (PrepareRetrieve, error) {
	return result(ctx, c, DecodePrepareRetrieve, OpPrepareRetrieve, c.key(k), AppendInt(nil, instanceID))
}

// CommitRetrieve informs the server that the worker has read the chunks of a PrepareRetrieve, or has given them up.
func (c *Client) CommitRetrieve(ctx context.Context, k *Key, instanceID int64) (bool, error) {
	return result(ctx, c, DecodeBool, OpCommitRetrieve, c.key(k), AppendInt(nil, instanceID))
}

// Clear drops the chunks that no request has pinned or holds, and with force all chunks.
func (c *Client) Clear(ctx context.Context, force bool) error {
	return c.callNone(ctx, OpClear, AppendBool(nil, force))
}

// RegisterKVCache registers a worker whose KV the server copies. The protocol has no negative answer: the server accepts the call of a
// worker that it refuses, and declines that worker's transfers.
func (c *Client) RegisterKVCache(ctx context.Context, k *KVCache) error {
	return c.callNone(ctx, OpRegisterKVCache, k.Frames()...)
}

// UnregisterKVCache ends a registration of RegisterKVCache.
func (c *Client) UnregisterKVCache(ctx context.Context, instanceID int64) error {
	return c.callNone(ctx, OpUnregisterKVCache, AppendInt(nil, instanceID))
}

// StoreBlocks asks the server to copy the blocks of k's range out of the worker's memory. blocks has the block ids of each KV group.
func (c *Client) StoreBlocks(ctx context.Context, k *Key, instanceID int64, blocks [][]int) (Copied, error) {
	return result(ctx, c, DecodeCopied, OpStore, c.key(k), AppendInt(nil, instanceID), AppendBlockIDs(nil, blocks),
		AppendBytes(nil, []byte(StubEvent)))
}

// RetrieveBlocks asks the server to copy k's range into the worker's blocks, except for the first skipTokens tokens of the range. blocks
// has the block ids of each KV group.
func (c *Client) RetrieveBlocks(ctx context.Context, k *Key, instanceID int64, blocks [][]int, skipTokens int) (Copied, error) {
	return result(ctx, c, DecodeCopied, OpRetrieve, c.key(k), AppendInt(nil, instanceID), AppendBlockIDs(nil, blocks),
		AppendBytes(nil, []byte(StubEvent)), AppendInt(nil, int64(skipTokens)))
}
