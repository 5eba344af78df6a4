// SPDX-License-Identifier: Apache-2.0

package server

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/workers"
)

// connection is the state of the client behind one socket. It is used on
// the goroutine that reads the socket.
type connection struct {
	generations      lmcache.Generations // that the client can be of
	early            string              // releases that are not served, once it is known to be of them
	fresh            bool                // it asked for the chunk size: it was made in this server's life
	base             int                 // the chunk size of its listener; 0 is the server's
	chunk            *chunking           // its chunk size; nil while that is not known
	fixed            bool                // the client knows its chunk size
	mustAsk          bool                // requests were declined because it has not asked for its chunk size
	refusedHeartbeat bool                // its heartbeat was answered false for that
	sessions         map[string]struct{} // open requests, while the size is not fixed; some where there are many
	worker           int64               // the worker that it named last; lookups are in its layout
	named            bool
	asksAsPeer       bool // it belongs to another node
	local            net.Addr
	limit            *auth.Limit // of tenants; nil until it is asked for
	doubted          bool        // its ping without an id was answered false
}

// errHeld means that a message is kept until its client shows its generation.
var errHeld = errors.New("held until the client shows its generation")

// connection returns what is known of the client behind the caller's socket.
// In-process callers are of the latest generation.
func (c *caller) connection() *connection {
	if c.conn == nil {
		return &connection{generations: lmcache.Only(lmcache.Latest)}
	}
	return c.conn
}

// read returns the operation of a message. It also recognises the connection's client:
// by its first request, get_chunk_size, else by what the registry has for the worker or
// model that the message names, else by its payloads. An ambiguous message is
// declined. A guess could do what was not asked for, and a
// reply of the wrong type ends the thread that serves all sockets of an early
// client: a message without an answer that is right for all its readings is held
// until another one shows what the client is. A heartbeat does.
func (s *Server) read(sc *scratch, m [][]byte) (lmcache.Op, error) {
	c := sc.conn
	if c.early != "" {
		return lmcache.OpUnknown, fmt.Errorf("%w: lmcache %s", errGeneration, c.early)
	}
	readings, err := c.generations.Read(m, sc.readings[:0])
	if err != nil {
		return lmcache.OpUnknown, err
	}
	if len(readings) > 1 {
		readings = s.ofWorker(sc.caller().By, m[2:], readings)
	}
	var of lmcache.Generations
	for _, r := range readings {
		of |= r.Generations
	}
	switch len(readings) {
	case 0:
		s.refuseEarly(c, m)
		return lmcache.OpUnknown, nil
	case 1:
		s.narrowGenerations(c, of)
		return readings[0].Op, nil
	}
	s.narrowGenerations(c, of)
	ambiguous := &ambiguousError{readings: append([]lmcache.Reading(nil), readings...)}
	// Connectors ask for the chunk size first. So an ambiguous message with the number of a first
	// request is not of a client that outlived another server, and is not held.
	if _, _, safe := lmcache.AppendAmbiguous(nil, readings); !safe && !lmcache.IsFirst(m[0]) && s.hold(sc.peer, m) {
		return lmcache.OpUnknown, errHeld
	}
	return lmcache.OpUnknown, ambiguous
}

// ambiguousError is errAmbiguous with what the message can be.
type ambiguousError struct{ readings []lmcache.Reading }

func (e *ambiguousError) Unwrap() error { return errAmbiguous }

func (e *ambiguousError) Error() string {
	var each []string
	for _, r := range e.readings {
		each = append(each, fmt.Sprintf("%s of %s", r.Op, r.Generations))
	}
	return fmt.Sprintf("%v: %s", errAmbiguous, strings.Join(each, ", "))
}

// ofWorker keeps the readings of which the generation is that of the worker that
// the message names, or of the workers of its model.
func (s *Server) ofWorker(by principal, p [][]byte, readings []lmcache.Reading) []lmcache.Reading {
	kept := readings[:0:0]
	for _, r := range readings {
		id, model, world := r.Op.Names(p)
		known := s.registry.GenerationsOf(id, by, model, world)
		if r.Generations &= known; r.Generations != 0 {
			kept = append(kept, r)
		}
	}
	if len(kept) == 0 {
		return readings
	}
	return kept
}

// narrowGenerations narrows what the client can be of.
func (s *Server) narrowGenerations(c *connection, g lmcache.Generations) {
	if g == c.generations {
		return
	}
	was := c.generations
	c.generations = g
	if g.Settled() && !was.Settled() {
		s.log.Debug("a client's generation is known", "generation", g.String())
	}
}

// refuseEarly notices clients that lend their KV by CUDA IPC and have no other
// way. One line for each of their generations says so.
func (s *Server) refuseEarly(c *connection, m [][]byte) {
	if c.generations.Settled() {
		return
	}
	c.early = lmcache.Early(m)
	if c.early == "" {
		return
	}
	if _, said := s.n.earlyClients.LoadOrStore(c.early, true); !said {
		s.log.Error("a client's lmcache moves KV by CUDA IPC only; this server serves 0.4.6 and later: upgrade the client's lmcache package", "lmcache", c.early)
	}
}

// warnNewer logs, at most once a minute, that a client asks for an operation that no served release
// has.
func (s *Server) warnNewer(sc *scratch) {
	name := lmcache.NameOfOp(sc.frames[1])
	now := time.Now().Unix()
	if last := s.n.newer.Load(); name == "" || now-last < 60 || !s.n.newer.CompareAndSwap(last, now) {
		return
	}
	s.log.Warn("a client asks for an operation of a later lmcache than this server serves: upgrade kvasir, or pin the client's lmcache package",
		"operation", safelog.Text(name, safelog.MaxText), "served", "0.4.6 to "+lmcache.Newest)
}

// decline appends the negative answer to a request that failed with err. ok is
// false when it is to have no result.
func (s *Server) decline(sc *scratch, op lmcache.Op, err error) (ok bool) {
	if a, is := errors.AsType[*ambiguousError](err); is {
		sc.out, ok, _ = lmcache.AppendAmbiguous(sc.out[:0], a.readings)
		return ok
	}
	if op == lmcache.OpNegotiateChunkSize { // a client takes no answer for a number, too
		sc.out = lmcache.AppendInt(sc.out[:0], int64(s.current(sc.conn).tokens))
		return true
	}
	if op == lmcache.OpRegisterEngineDriven && sc.conn.generations.PickleOnly() {
		return false
	}
	if op == lmcache.OpClear { // its client takes any other answer for success
		sc.frames[1], ok = lmcache.AppendFailure(nil, sc.frames[1], err.Error())
		sc.silent = !ok
		return false
	}
	sc.out, ok = lmcache.AppendNegative(sc.out[:0], op, err.Error())
	return ok
}

// name notes that a message of the connection names worker id.
func (c *connection) name(id int64) { c.worker, c.named = id, true }

// pinger returns the worker that a heartbeat without an id speaks for: the one
// that the connection registered or moved KV for. Without such a worker answer is the reply. A client that came over from an earlier server, whose registration may be
// lost, is answered false once: a worker then registers again. So is a scheduler,
// which looks the same; it makes no lookups until the next heartbeat.
func (s *Server) pinger(c *connection) (id int64, ok, answer bool) {
	switch {
	case c.named:
		return c.worker, true, false
	case c.fresh || c.doubted || s.complete:
		return 0, false, true
	}
	c.doubted = true
	return 0, false, false
}

// registerPickleOnly takes a worker that knows of no shared memory. Its
// registration has no result, so one that cannot be served is remembered and its
// transfers are declined.
func (s *Server) registerPickleOnly(sc *scratch, in *workers.Worker) error {
	in.TakeSide(workers.Pickle)
	if s.opts.Pickle != PickleOff {
		if err := s.admit(in); err != nil {
			return err
		}
		sc.mark()
		return nil
	}
	in.Refused = fmt.Sprintf("lmcache %s sends chunks as pickled tensors only: start the server with --pickle on", in.Generations)
	s.makeRoom(in)
	if _, _, err := s.registry.Add(in); err != nil {
		return err
	}
	s.log.Error("a worker is refused", "worker", in.ID, "model", in.Model, "err", in.Refused)
	return nil
}

// refuseEvents refuses a worker that lends device memory and whose client opens
// a device event with every answer, also with a negative one. A declined store
// would end it in the middle of its work, so its registration gets no answer: its
// start ends with lmcache.mp.mq_timeout.
func (s *Server) refuseEvents(sc *scratch, reg *lmcache.KVCache) error {
	s.log.Error("a worker is refused: it lends its KV by CUDA IPC; its protocol has no reply for a refusal, so its start ends after lmcache.mp.mq_timeout; "+
		"set lmcache.mp.mp_transfer_mode=engine_driven in kv_connector_extra_config (0.4.7: data), or with 0.4.6 upgrade its lmcache",
		"worker", reg.InstanceID, "model", reg.Model, "lmcache", sc.conn.generations.String())
	sc.silent = true
	return nil
}

// settleReaders gives a key of a client before 0.5.5 its number of readers.
func (s *Server) settleReaders(sc *scratch, k *lmcache.KeyView, tensorParallel int64) {
	if k.Readers != lmcache.ReadersUnsaid {
		return
	}
	q := s.query(sc, k)
	in := s.registry.NewestOf(&q)
	k.Readers = k.ReadersOf(tensorParallel, in != nil && in.Layout.SinglePlane)
}
