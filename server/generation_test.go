package server_test

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/vectors"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// oldClient is one socket of a client that numbers its operations itself.
type oldClient struct {
	t       *testing.T
	dealer  *zmtp.Dealer
	uid     byte
	replies chan [][]byte
}

// dial connects a client whose next request has number uid: 0 for a new one, more
// for one that outlived a server.
func (n *node) dial(t *testing.T, uid byte) *oldClient {
	t.Helper()
	c := &oldClient{t: t, uid: uid, replies: make(chan [][]byte, 64)}
	c.dealer = zmtp.NewDealer(n.url, zmtp.DealerOptions{Handler: func(m zmtp.Message) {
		own := make([][]byte, len(m))
		for i := range m {
			own[i] = bytes.Clone(m[i])
		}
		c.replies <- own
	}})
	if err := c.dealer.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.dealer.Close() })
	return c
}

func (c *oldClient) send(op byte, payloads ...[]byte) (uid byte) {
	c.t.Helper()
	uid = c.uid
	c.uid++
	if err := c.dealer.Send(append([][]byte{{uid}, {op}}, payloads...)...); err != nil {
		c.t.Fatal(err)
	}
	return uid
}

// answer returns the result frame of the next reply, nil for None.
func (c *oldClient) answer(uid byte) []byte {
	c.t.Helper()
	select {
	case m := <-c.replies:
		if m[0][0] != uid {
			c.t.Fatalf("reply to request %d, not to %d", m[0][0], uid)
		}
		if len(m) == 2 {
			return nil
		}
		return m[2]
	case <-time.After(20 * time.Second):
		c.t.Fatalf("no reply to request %d", uid)
		return nil
	}
}

func (c *oldClient) call(op byte, payloads ...[]byte) []byte {
	c.t.Helper()
	return c.answer(c.send(op, payloads...))
}

// quiet reports that no reply has come when a later request is answered.
func (c *oldClient) quiet(op byte, payloads ...[]byte) {
	c.t.Helper()
	c.send(op, payloads...)
	time.Sleep(20 * time.Millisecond)
	select {
	case m := <-c.replies:
		c.t.Fatalf("operation %d got the reply %x", op, m)
	default:
	}
}

// oldKey is a key as clients before 0.5.5 send it.
func oldKey(worker int, seed, tokenCount int, request string) []byte {
	return tokenKey("m", worker, seed, tokenCount, request)
}

func tokenKey(model string, worker int, seed, tokenCount int, request string) []byte {
	b := msgp.AppendMapHeader(nil, 8)
	b = msgp.AppendString(msgp.AppendString(b, "model_name"), model)
	b = msgp.AppendInt(msgp.AppendString(b, "world_size"), 1)
	b = msgp.AppendString(b, "worker_id")
	if worker == lmcache.AllWorkers {
		b = msgp.AppendNil(b)
	} else {
		b = msgp.AppendInt(b, worker)
	}
	b = lmcache.AppendTokens(msgp.AppendString(b, "token_ids"), tokens(tokenCount, seed))
	b = msgp.AppendInt(msgp.AppendString(b, "start"), 0)
	b = msgp.AppendInt(msgp.AppendString(b, "end"), tokenCount)
	b = msgp.AppendString(msgp.AppendString(b, "request_id"), request)
	return msgp.AppendString(msgp.AppendString(b, "cache_salt"), "")
}

// oldRegistration is a worker of smallLayout without num_physical_slots.
func oldRegistration(id int64) []byte {
	b := msgp.AppendMapHeader(nil, 8)
	b = msgp.AppendInt64(msgp.AppendString(b, "instance_id"), id)
	b = msgp.AppendString(msgp.AppendString(b, "model_name"), "m")
	b = msgp.AppendInt(msgp.AppendString(b, "world_size"), 1)
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), 16)
	b = msgp.AppendInt(msgp.AppendString(b, "num_layers"), smallLayout.Layers)
	b = msgp.AppendInt(msgp.AppendString(b, "hidden_dim_size"), smallLayout.Hidden)
	b = msgp.AppendString(msgp.AppendString(b, "dtype_str"), smallLayout.DType)
	return msgp.AppendBool(msgp.AppendString(b, "use_mla"), smallLayout.SinglePlane)
}

var (
	integer = func(v int64) []byte { return lmcache.AppendInt(nil, v) }
	text    = func(s string) []byte { return lmcache.AppendString(nil, s) }
	empty   = lmcache.AppendBytes(nil, nil)
	yes, no = lmcache.AppendBool(nil, true), lmcache.AppendBool(nil, false)
)

func (c *oldClient) want(got, want []byte, what string) {
	c.t.Helper()
	if !bytes.Equal(got, want) {
		c.t.Errorf("%s: %x, want %x", what, got, want)
	}
}

// A recorded client of each release gets the answers that its own server gave,
// but for places.
func TestRecordedGenerations(t *testing.T) {
	for _, release := range []string{"0.4.6", "0.4.7", "0.5.0", "0.5.3", "0.5.5"} {
		t.Run(release, func(t *testing.T) { replayGeneration(t, release) })
	}
}

type recordedMessage struct {
	Way string
	Hex []vectors.Hex
}

func replayGeneration(t *testing.T, release string) {
	var rec struct {
		Sockets [2][]recordedMessage // the scheduler's and the worker's
	}
	vectors.Read(t, "lmcache-mp/generation-"+release+".json", &rec)
	n, stop := startNode(t, t.TempDir(), 64, server.Options{Pickle: server.PickleOn})
	defer stop()
	of, err := lmcache.ParseGenerations(release)
	if err != nil {
		t.Fatal(err)
	}
	clients := [2]*oldClient{n.dial(t, 0), n.dial(t, 0)}
	// play sends what socket s said up to the first request of an operation.
	play := func(s int, until lmcache.Op) {
		for i, m := range rec.Sockets[s] {
			if m.Way != ">" {
				continue
			}
			frames := vectors.Frames(m.Hex)
			r, err := of.Read(frames, nil)
			if err != nil || len(r) != 1 {
				t.Fatalf("request %x: %v, %v", frames[1], r, err)
			}
			c := clients[s]
			c.uid = frames[0][0]
			got := c.call(frames[1][0], frames[2:]...)
			for _, answer := range rec.Sockets[s][i:] {
				if want := vectors.Frames(answer.Hex); answer.Way == "<" && bytes.Equal(want[0], frames[0]) {
					compareResult(t, r[0].Op, got, want[2:])
				}
			}
			if r[0].Op == until {
				rec.Sockets[s] = rec.Sockets[s][i+1:]
				return
			}
		}
	}
	const scheduler, worker = 0, 1
	play(worker, lmcache.OpCommitStore)
	play(scheduler, lmcache.OpQueryPrefetchStatus)
	play(worker, lmcache.OpCommitRetrieve)
	play(scheduler, lmcache.OpUnknown)
	play(worker, lmcache.OpUnknown)
	if log := n.log.String(); strings.Contains(log, "declined") {
		t.Errorf("log:\n%s", log)
	}
}

// compareResult compares a result with the recorded one, none or one frame.
func compareResult(t *testing.T, op lmcache.Op, got []byte, recorded [][]byte) {
	t.Helper()
	want := slices.Concat(recorded...)
	if op == lmcache.OpPrepareRetrieve {
		g, _ := lmcache.DecodePrepareRetrieve(got)
		if w, _ := lmcache.DecodePrepareRetrieve(want); len(w.Data) > 0 {
			if !g.Success || !sameTensors(t, g.Data, w.Data) {
				t.Errorf("prepare_retrieve: other tensors")
			}
			return
		}
	}
	if want != nil && got != nil {
		got, want = withoutPlaces(t, op, got), withoutPlaces(t, op, want)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%v: %x, want %x", op, got, want)
	}
}

// Two generations at once: one number on two connections is two operations, and
// each finds what the other stored.
func TestTwoGenerationsAtOnce(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	old, now := n.dial(t, 0), n.dial(t, 0)
	old.want(old.call(17), integer(16), "0.4.7's get_chunk_size")
	now.want(now.call(21), integer(16), "0.5.3's get_chunk_size")
	now.want(now.call(40), []byte{0x90}, "0.5.3's get_experimental")
	for i, c := range []*oldClient{old, now} {
		if p, err := lmcache.DecodePool(c.call([]byte{10, 14}[i], oldRegistration(int64(100+i)))); err != nil || p.ShmName == "" {
			t.Fatalf("registered at %+v, %v", p, err)
		}
		p, err := lmcache.DecodePrepareStore(c.call([]byte{12, 16}[i], oldKey(0, i, 32, "s"), integer(int64(100+i))))
		if err != nil || len(p.Slots) != 2 {
			t.Fatalf("prepare_store: %+v, %v", p, err)
		}
		c.want(c.call([]byte{13, 17}[i], oldKey(0, i, 32, "s"), integer(int64(100+i)), empty), yes, "commit_store")
	}
	for seed := range 2 {
		request := fmt.Sprint("r", seed)
		look := oldKey(lmcache.AllWorkers, seed, 32, request)
		old.want(old.call(5, look, integer(1)), nil, "0.4.7's lookup")
		old.want(old.call(6, text(request)), integer(2), "0.4.7's hit")
		old.want(old.call(8, look, integer(1)), nil, "0.4.7's free_lookup_locks")
		old.want(old.call(9, text(request)), nil, "0.4.7's end_session")
		now.want(now.call(8, look, integer(1)), nil, "0.5.3's lookup")
		now.want(now.call(9, text(request)), integer(2), "0.5.3's hit")
		now.want(now.call(12, look, integer(1)), nil, "0.5.3's free_lookup_locks")
	}
	if st := n.store.Stats(); st.EvictableObjs != 4 {
		t.Errorf("%d of 4 chunks are not pinned", st.EvictableObjs)
	}
}

// The second life of a server knows from the note of the first what the workers
// are: their first message is not their first request. Number 14 with a key and an
// id is commit_retrieve of 0.4.6 and prepare_retrieve of 0.4.7.
func TestNoteTellsGeneration(t *testing.T) {
	dir := t.TempDir()
	n, stop := startNode(t, dir, 64, server.Options{Pickle: server.PickleOn})
	a, b := n.dial(t, 0), n.dial(t, 0)
	a.want(a.call(16), integer(16), "0.4.6's get_chunk_size")
	a.want(a.call(10, oldRegistration(46)), nil, "0.4.6's registration")
	b.want(b.call(17), integer(16), "0.4.7's get_chunk_size")
	if b.call(10, oldRegistration(47)) == nil {
		t.Error("0.4.7 is not told of the pool")
	}
	key := oldKey(0, 1, 16, "s")
	if p, err := lmcache.DecodePrepareStore(b.call(12, key, integer(47))); err != nil || len(p.Slots) != 1 {
		t.Fatalf("prepare_store: %+v, %v", p, err)
	}
	b.want(b.call(13, key, integer(47), empty), yes, "commit_store")
	stop()

	n, stop = startNode(t, dir, 64, server.Options{Pickle: server.PickleOn})
	defer stop()
	look := n.dial(t, 20) // 0.4.7's scheduler; 0.4.6's would say the same
	look.want(look.call(5, oldKey(lmcache.AllWorkers, 1, 16, "r"), integer(1)), nil, "lookup")
	look.want(look.call(6, text("r")), integer(1), "hit")
	a, b = n.dial(t, 20), n.dial(t, 20)
	a.want(a.call(14, oldKey(0, 1, 16, "r"), integer(46)), yes, "0.4.6's commit_retrieve")
	p, err := lmcache.DecodePrepareRetrieve(b.call(14, oldKey(0, 1, 16, "r"), integer(47)))
	if err != nil || !p.Success || len(p.Slots) != 1 {
		t.Errorf("0.4.7's prepare_retrieve: %+v, %v", p, err)
	}
	b.want(b.call(15, oldKey(0, 1, 16, "r"), integer(47)), yes, "0.4.7's commit_retrieve")
	for _, ping := range [][2]any{{a, byte(17)}, {b, byte(18)}} {
		c := ping[0].(*oldClient)
		c.want(c.call(ping[1].(byte)), yes, "ping of a worker that is known")
	}
}

// Where no note tells, an ambiguous message is answered when the next one has shown
// what the client is, and as that.
func TestAmbiguousMessageWaits(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	for _, ping := range []byte{17, 18} {
		c := n.dial(t, 20)
		c.quiet(14, oldKey(0, 1, 16, "r"), integer(int64(ping)))
		if got := c.call2(ping); !bytes.Equal(got[0], no) {
			t.Errorf("ping of a worker that is not known: %x", got[0])
		} else if p, err := lmcache.DecodePrepareRetrieve(got[1]); ping == 17 && !bytes.Equal(got[1], no) ||
			ping == 18 && (err != nil || p.Success) {
			t.Errorf("after ping %d: %x", ping, got[1])
		}
	}
	// One that never shows it is declined, and costs no more than its share.
	c := n.dial(t, 20)
	for range 16 {
		c.quiet(14, oldKey(0, 1, 16, "r"), integer(7))
	}
	c.want(c.call(14, oldKey(0, 1, 16, "r"), integer(7)), nil, "one too many")
	n.Tick(time.Now().Add(14 * time.Second))
	if !c.silent() {
		t.Error("answered before a heartbeat can have come")
	}
	n.Tick(time.Now().Add(16 * time.Second))
	for uid := byte(20); uid < 36; uid++ {
		c.want(c.answer(uid), nil, "held for too long")
	}
}

// Where one answer is right for all that a message can be, it comes at once; so
// does one to a client that is new and did not ask for the chunk size, which no
// connector is.
func TestAmbiguousMessageIsDeclined(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	c := n.dial(t, 0)
	c.call(17)
	c.call(10, oldRegistration(1))
	c.call(12, oldKey(0, 1, 16, "s"), integer(1))
	c.want(c.call(13, oldKey(0, 1, 16, "s"), integer(1), empty), yes, "commit_store")
	c.call(5, oldKey(lmcache.AllWorkers, 1, 16, "r"), integer(1))
	other := tokenKey("other", lmcache.AllWorkers, 1, 16, "r")
	stranger := n.dial(t, 20)
	stranger.want(stranger.call(8, other, integer(1)), nil, "free_lookup_locks or lookup")
	stranger.want(stranger.call(9, text("r")), nil, "end_session or status")
	if st := n.store.Stats(); st.EvictableObjs != 0 || st.Sessions != 1 {
		t.Errorf("a guess was made: %+v", st)
	}
	stranger = n.dial(t, 20)
	both := stranger.call(13, oldKey(0, 1, 16, "r"), integer(77))
	if p, err := lmcache.DecodePrepareRetrieve(both); err != nil || p.Success {
		t.Errorf("as prepare_retrieve: %+v, %v", p, err)
	}
	if p, err := lmcache.DecodePrepareStore(both); err != nil || p.Slots == nil || len(p.Slots) > 0 {
		t.Errorf("as prepare_store: %+v, %v", p, err)
	}
	narrowed := n.dial(t, 20) // 0.4.6 or 0.4.7, which agree on 9
	narrowed.quiet(14, oldKey(0, 1, 16, "r"), integer(77))
	narrowed.want(narrowed.call(9, text("r")), nil, "end_session")
	if st := n.store.Stats(); st.Sessions != 0 {
		t.Errorf("the session is not ended: %+v", st)
	}
	young := n.dial(t, 0)
	young.want(young.call(14, oldKey(0, 1, 16, "r"), integer(77)), nil, "commit_retrieve or prepare_retrieve")
	if log := n.log.String(); !strings.Contains(log, "commit_retrieve of 0.4.6, prepare_retrieve of 0.4.7") {
		t.Errorf("log:\n%s", log)
	}
}

// Held messages are a share of a user's, also of many connections, and go with
// the connection.
func TestHeldMessagesHaveAShare(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	large := oldKey(0, 1, 150_000, "r")
	each := 2 << 20 / len(large)
	all := 16 << 20 / len(large)
	var clients []*oldClient
	for held := 0; held+each <= all; held += each {
		c := n.dial(t, 20)
		for range each {
			c.quiet(14, large, integer(7))
		}
		clients = append(clients, c)
	}
	c := clients[0]
	c.want(c.call(14, large, integer(7)), nil, "more than a connection's share")
	late := n.dial(t, 20)
	for range all - each*len(clients) {
		late.quiet(14, large, integer(7))
	}
	late.want(late.call(14, large, integer(7)), nil, "more than a user's share")
	if err := c.dealer.Close(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); ; {
		if late.send(14, large, integer(7)); late.silent() {
			return
		}
		if time.Now().After(end) {
			t.Fatal("what an ended connection had held is still counted")
		}
	}
}

// silent reports that no reply comes; one that came is taken.
func (c *oldClient) silent() bool {
	select {
	case <-c.replies:
		return false
	case <-time.After(50 * time.Millisecond):
		return true
	}
}

// call2 sends one request and returns its result and that of the request before.
func (c *oldClient) call2(op byte) (results [2][]byte) {
	c.t.Helper()
	uid := c.send(op)
	for range 2 {
		select {
		case m := <-c.replies:
			results[uid-m[0][0]] = append([]byte(nil), slices.Concat(m[2:]...)...)
		case <-time.After(20 * time.Second):
			c.t.Fatal("no reply")
		}
	}
	return results
}

// Heartbeats without an id bring workers back to a server that lost what it knew:
// false once, so that they register again, and true from then on. A server that
// took over every worker says true at once.
func TestPingWithoutID(t *testing.T) {
	dir := t.TempDir()
	n, stop := startNode(t, dir, 64, server.Options{Pickle: server.PickleOn})
	for i, ping := range []byte{17, 18} {
		fresh, survivor := n.dial(t, 0), n.dial(t, 20)
		fresh.want(fresh.call(16+byte(i)), integer(16), "get_chunk_size")
		fresh.want(fresh.call(ping), yes, "ping of a client of this life")
		survivor.want(survivor.call(ping), no, "first ping of a client of an earlier life")
		survivor.want(survivor.call(ping), yes, "second ping")
		survivor.call(10, oldRegistration(int64(ping)))
		survivor.want(survivor.call(ping), yes, "ping after it registered")
		stranger := n.dial(t, 20)
		stranger.send(ping)
		stranger.want(stranger.answer(20), no, "first ping of another one")
		stranger.want(stranger.call(11+byte(i), oldKey(0, 1, 16, "s"), integer(int64(999-i))), lmcache.AppendPrepareStore(nil, &lmcache.Slots{}), "prepare_store of an unknown worker")
		stranger.want(stranger.call(ping), no, "ping of a worker that named itself and is not known")
		stranger.want(stranger.call(ping), yes, "the next")
	}
	stop()
	n, stop = startNode(t, dir, 64, server.Options{Pickle: server.PickleOn})
	defer stop()
	for _, ping := range []byte{17, 18} {
		survivor := n.dial(t, 30)
		survivor.want(survivor.call(ping), yes, "ping to a server that took over every worker")
	}
}

// A restored worker whose heartbeats name nobody is not silent before it has moved
// anything: none can be told to be its own.
func TestRestoredWorkerWithoutID(t *testing.T) {
	dir := t.TempDir()
	n, stop := startNode(t, dir, 64, server.Options{})
	for i, first := range []byte{17, 21} {
		c := n.dial(t, 0)
		c.call(first)
		id := int64(47 + 6*i)
		c.call([]byte{10, 14}[i], oldRegistration(id))
		if i == 0 {
			c.want(c.call(18), yes, "ping")
		} else {
			c.want(c.call(22, integer(id)), yes, "ping")
		}
	}
	stop()
	n, stop = startNode(t, dir, 64, server.Options{})
	defer stop()
	for range 25 { // not all at once, as after a suspension
		n.Tick(time.Now())
	}
	for second := range 200 {
		n.Tick(time.Now().Add(time.Duration(second) * time.Second))
	}
	log := n.log.String()
	if !strings.Contains(log, "worker 53 of m dropped") || strings.Contains(log, "worker 47 of m dropped") {
		t.Errorf("log:\n%s", log)
	}
}

// What another user registered under a model tells nothing about this one's client.
func TestAnotherUsersGeneration(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{Pickle: server.PickleOn})
	defer stop()
	theirs := n.Connect(peercred.Peer{UID: os.Geteuid() + 1})
	theirs([][]byte{{0}, {17}})
	theirs([][]byte{{1}, {10}, oldRegistration(1)})
	mine := n.Connect(peercred.Peer{UID: os.Geteuid()})
	mine([][]byte{{20}, {8}, oldKey(lmcache.AllWorkers, 1, 16, "r"), integer(1)})
	if got := mine([][]byte{{21}, {22}, {0xc0}}); len(got) != 3 || !bytes.Equal(got[2], yes) {
		t.Errorf("ping of a later generation: %x", got)
	}
}

// Clients whose releases move KV by CUDA IPC only are told so once each in the log,
// and nothing of theirs is read as something else.
func TestEarlyClientsAreRefused(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	for range 2 {
		c := n.dial(t, 0)
		c.want(c.call(11), nil, "0.4.4's get_chunk_size")
		c.want(c.call(5, oldKey(lmcache.AllWorkers, 1, 16, "r"), integer(1)), nil, "lookup")
		c.want(c.call(6, text("r")), nil, "status")
	}
	if got := strings.Count(n.log.String(), "LMCache 0.4.3 to 0.4.5"); got != 1 {
		t.Errorf("%d lines\n%s", got, n.log.String())
	}
}

// A client that opens the event of every answer cannot be declined a store: its
// registration is not answered, and what else it asks is.
func TestLentKVOfEarlyGenerations(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	pickled := append(msgp.AppendArrayHeader(nil, 1), 0xd5, 1, 0x80, 4)
	registration := [][]byte{nil, pickled, text("m"), integer(1), text("vllm"), {0x80}, {0x90}}
	for i, ping := range []byte{17, 18} {
		c := n.dial(t, 0)
		c.want(c.call(16+byte(i)), integer(16), "get_chunk_size")
		registration[0] = integer(int64(5 + i))
		c.quiet(1, registration[:6+i]...)
		c.want(c.call(ping), no, "ping")
	}
	if got := strings.Count(n.log.String(), "lends its KV by CUDA IPC"); got != 2 {
		t.Errorf("%d lines\n%s", got, n.log.String())
	}
	// 0.5.3 survives [b"", false] on CPUs only, later ones everywhere.
	c := n.dial(t, 0)
	c.call(21)
	c.call(40)
	c.quiet(1, registration...)
	onCPU := slices.Clone(registration)
	onCPU[1] = append(msgp.AppendArrayHeader(nil, 1), append([]byte{0xc7, 21, 1, 0x80, 4}, "CpuShmTensorWrapper"...)...)
	c.want(c.call(1, onCPU...), nil, "0.5.3's registration of KV on CPUs")
	c.want(c.call(6, oldKey(0, 1, 16, "r"), integer(6), []byte{0x91, 0x91, 1}, empty), lmcache.Copied{}.Append(nil), "0.5.3's store")
	c = n.dial(t, 0)
	c.call(21)
	c.call(32)
	c.want(c.call(1, registration...), nil, "0.5.5's registration")
}

// What a client of 0.4.6 is refused leaves no frame that it cannot decode: one
// would end the thread that serves its sockets.
func TestRefusedPickleOnlyClient(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{Pickle: server.PickleOff})
	defer stop()
	c := n.dial(t, 0)
	c.call(16)
	c.want(c.call(10, oldRegistration(1)), nil, "registration without --pickle")
	c.want(c.call(10, []byte{0x80}), nil, "registration that does not decode")
	c.want(c.call(11, oldKey(0, 1, 16, "s"), integer(1)), lmcache.AppendPrepareStore(nil, &lmcache.Slots{}), "prepare_store")
	c.want(c.call(12, oldKey(0, 1, 16, "s"), integer(1), lmcache.AppendBytes(nil, []byte{1})), no, "commit_store")
	if !strings.Contains(n.log.String(), "--pickle on") {
		t.Errorf("log:\n%s", n.log.String())
	}
}

// --client-generation reads what would be ambiguous.
func TestForcedGeneration(t *testing.T) {
	for g, want := range map[lmcache.Generation][]byte{lmcache.Gen046: no, lmcache.Gen047: lmcache.AppendPrepareRetrieve(nil, nil)} {
		n, stop := startNode(t, t.TempDir(), 64, server.Options{ClientGenerations: lmcache.Only(g)})
		c := n.dial(t, 20)
		c.want(c.call(14, oldKey(0, 1, 16, "r"), integer(1)), want, fmt.Sprint("14 of ", g))
		stop()
	}
}

// Ranks that share one shard's objects are counted by what their scheduler sends
// beside the key: all of them may read, and the pins go when all have.
func TestReadersOfEarlyClients(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	c := n.dial(t, 0)
	c.call(21)
	c.call(40)
	for id := range int64(2) {
		c.call(14, oldRegistration(1+id))
	}
	c.call(16, oldKey(0, 1, 16, "s"), integer(1))
	c.want(c.call(17, oldKey(0, 1, 16, "s"), integer(1), empty), yes, "commit_store")
	for _, free := range []bool{false, true} {
		request := fmt.Sprint("r", free)
		c.call(8, oldKey(lmcache.AllWorkers, 1, 16, request), integer(2))
		c.want(c.call(9, text(request)), integer(1), "hit")
		for rank := range int64(2) {
			if got := n.store.Stats().EvictableObjs; got != 0 {
				t.Errorf("not pinned any more before rank %d", rank)
			}
			if !free {
				c.call(18, oldKey(0, 1, 16, request), integer(1+rank))
				c.want(c.call(19, oldKey(0, 1, 16, request), integer(1+rank)), yes, "commit_retrieve")
			}
		}
		if free {
			c.call(12, oldKey(lmcache.AllWorkers, 1, 16, request), integer(2))
		}
		if got := n.store.Stats().EvictableObjs; got != 1 {
			t.Errorf("pins are left, freed %v", free)
		}
	}
}

// Every answer has the type that the client's release declares for the operation,
// also when the request is declined: up to 0.5.4 another one ends the thread that
// serves all sockets of the client.
func TestAnswersHaveTheDeclaredType(t *testing.T) {
	n, stop := startNode(t, t.TempDir(), 64, server.Options{})
	defer stop()
	number := func(t msgp.Type) bool { return t == msgp.IntType || t == msgp.UintType }
	is := func(want msgp.Type) func(msgp.Type) bool { return func(got msgp.Type) bool { return got == want } }
	declared := map[lmcache.Op]func(msgp.Type) bool{
		lmcache.OpQueryPrefetchStatus: number, lmcache.OpWaitPrefetchStatus: number, lmcache.OpQueryLookupHits: number,
		lmcache.OpGetChunkSize: number, lmcache.OpP2PLookupAndLock: number, lmcache.OpNoop: is(msgp.StrType),
		lmcache.OpPrepareStore: is(msgp.MapType), lmcache.OpPrepareRetrieve: is(msgp.MapType),
		lmcache.OpCommitStore: is(msgp.BoolType), lmcache.OpCommitRetrieve: is(msgp.BoolType), lmcache.OpPing: is(msgp.BoolType),
		lmcache.OpStore: is(msgp.ArrayType), lmcache.OpRetrieve: is(msgp.ArrayType), lmcache.OpStoreQ: is(msgp.ArrayType),
		lmcache.OpGetExperimental: is(msgp.ArrayType), lmcache.OpP2PQueryLookupResults: is(msgp.ArrayType),
	}
	first := map[lmcache.Generation]byte{lmcache.Gen046: 16, lmcache.Gen047: 17, lmcache.Gen050: 18, lmcache.Gen053: 21}
	payloads := [][]byte{
		oldKey(0, 1, 16, "r"), oldKey(lmcache.AllWorkers, 1, 16, "r"), integer(5), text("r"), empty, {0xc0}, {0x80}, {0x90}, {0xc1}, oldRegistration(3),
	}
	answers := 0
	for g, ask := range first {
		for id := byte(1); id <= 40; id++ {
			r, err := lmcache.Only(g).Read([][]byte{{0}, {id}}, nil)
			if err != nil || len(r) != 1 || r[0].Op == lmcache.OpRegisterKVCache {
				continue
			}
			op := r[0].Op
			answer := n.Connect(peercred.Peer{UID: os.Geteuid()})
			answer([][]byte{{0}, {ask}})
			if g == lmcache.Gen053 {
				answer([][]byte{{0}, {40}})
			}
			for i := range 4 * len(payloads) {
				m := [][]byte{{byte(i + 1)}, {id}}
				for j := range i % 4 {
					m = append(m, payloads[(i/4+j*(1+i/7))%len(payloads)])
				}
				got := answer(m)
				if len(got) == 2 {
					continue
				}
				answers++
				want := declared[op]
				if op == lmcache.OpRegisterEngineDriven && g != lmcache.Gen046 {
					want = is(msgp.MapType)
				}
				if got := msgp.NextType(got[2]); want == nil || !want(got) {
					t.Errorf("%v of %v with %x: %v", op, g, m[2:], got)
				}
			}
		}
	}
	if answers < 500 {
		t.Errorf("%d answers", answers)
	}
}

// Any messages of a client that is not known: each gets an echo and at most one
// whole value, or none, and the next is answered.
func FuzzConnection(f *testing.F) {
	for _, release := range []string{"0.4.6", "0.4.7", "0.5.0", "0.5.3", "0.5.5"} {
		var rec struct{ Sockets [2][]recordedMessage }
		vectors.Read(f, "lmcache-mp/generation-"+release+".json", &rec)
		for _, socket := range rec.Sockets {
			var all []byte
			for _, m := range socket {
				frames := vectors.Frames(m.Hex)
				if m.Way == ">" && len(slices.Concat(frames...)) < 1<<12 {
					all = append(all, byte(len(frames)))
					for _, frame := range frames {
						all = append(append(all, byte(len(frame)>>8), byte(len(frame))), frame...)
					}
				}
			}
			f.Add(all)
		}
	}
	f.Fuzz(func(t *testing.T, messages []byte) {
		s, _, _ := newPickleServer(t, 16, 1<<20, server.Options{Pickle: server.PickleOn})
		answer := s.Connect(peercred.Peer{UID: os.Geteuid()})
		for b := messages; len(b) > 0; {
			n := int(b[0] % 8)
			b = b[1:]
			var m [][]byte
			for range n {
				if len(b) < 2 {
					return
				}
				size := min(int(b[0])<<8|int(b[1]), len(b)-2)
				m = append(m, b[2:2+size])
				b = b[2+size:]
			}
			got := answer(m)
			if got == nil {
				continue
			}
			if len(got) < 2 || len(got) > 3 || !bytes.Equal(got[0], m[0]) || !bytes.Equal(got[1], m[1]) {
				t.Fatalf("%x is answered by %x", m, got)
			}
			if len(got) == 3 {
				if rest, err := msgp.Skip(got[2]); err != nil || len(rest) > 0 {
					t.Fatalf("%x is answered by %x: %v", m, got[2], err)
				}
			}
		}
	})
}
