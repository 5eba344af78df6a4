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

// connection is the state of the client behind one socket. Only the goroutine that reads the socket uses it.
type connection struct {
	generations      lmcache.Generations // those that the client may be of
	early            string              // the releases that the client is of, if they are not served
	fresh            bool                // it asked for the chunk size, so it was made in this server's life
	base             int                 // chunk size of its listener; 0: the server's own
	chunk            *chunking           // its chunk size; nil while that is not known
	fixed            bool                // the client knows its chunk size
	mustAsk          bool                // requests were declined because it has not asked for its chunk size
	refusedHeartbeat bool                // its heartbeat was answered false for that reason
	sessions         map[string]struct{} // open requests, while the size is not fixed; if there are many, only some
	worker           int64               // the worker that it named last; its lookups are in that worker's layout
	named            bool
	asksAsPeer       bool // it belongs to another node
	local            net.Addr
	limit            *auth.Limit // the tenants that it may use; nil until the first use
	doubted          bool        // its ping without an id was answered false
}

// errHeld means that a message is held until its client's generation is known.
var errHeld = errors.New("held until the client shows its generation")

// connection returns what is known of the caller's client. A caller in this process is of the latest generation.
func (c *caller) connection() *connection {
	if c.conn == nil {
		return &connection{generations: lmcache.Only(lmcache.Latest)}
	}
	return c.conn
}

// read returns the operation of a message. It also finds out the client's generation: by its first request, get_chunk_size; else by what
// the registry has for the worker or model that the message names; else by the message's payloads. An ambiguous message is declined,
// because a guess could do what was not asked for. A reply of the wrong type ends the thread that serves all sockets of an early client. So
// a message without an answer that is right for all its readings is held until another message, such as a heartbeat, shows the client's
// generation.
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
	// Connectors ask for the chunk size first. So an ambiguous message with the number of a first request is not from a client of an
	// earlier server, and is not held.
	if _, _, safe := lmcache.AppendAmbiguous(nil, readings); !safe && !lmcache.IsFirst(m[0]) && s.hold(sc.peer, m) {
		return lmcache.OpUnknown, errHeld
	}
	return lmcache.OpUnknown, ambiguous
}

// ambiguousError is errAmbiguous with the possible readings of the message.
type ambiguousError struct{ readings []lmcache.Reading }

func (e *ambiguousError) Unwrap() error { return errAmbiguous }

func (e *ambiguousError) Error() string {
	var each []string
	for _, r := range e.readings {
		each = append(each, fmt.Sprintf("%s of %s", r.Op, r.Generations))
	}
	return fmt.Sprintf("%v: %s", errAmbiguous, strings.Join(each, ", "))
}

// ofWorker returns the readings whose generation is that of the worker that the message names, or of the workers of its model. `by` is the
// user or address that sent the message. If there are no such readings it returns all.
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

// narrowGenerations sets the generations that the client may still be of.
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

// refuseEarly recognizes clients that can lend their KV only by CUDA IPC. It logs one line for each of their generations.
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

// warnNewer logs, at most once a minute, that a client asks for an operation that is in no release which this server serves.
func (s *Server) warnNewer(sc *scratch) {
	name := lmcache.NameOfOp(sc.frames[1])
	now := time.Now().Unix()
	if last := s.n.newer.Load(); name == "" || now-last < 60 || !s.n.newer.CompareAndSwap(last, now) {
		return
	}
	s.log.Warn("a client asks for an operation of a later lmcache than this server serves: upgrade kvasir, or pin the client's lmcache package",
		"operation", safelog.Text(name, safelog.MaxText), "served", "0.4.6 to "+lmcache.Newest)
}

// decline appends the negative answer to a request that failed with err. ok is false if the answer must have no result.
func (s *Server) decline(sc *scratch, op lmcache.Op, err error) (ok bool) {
	if a, is := errors.AsType[*ambiguousError](err); is {
		sc.out, ok, _ = lmcache.AppendAmbiguous(sc.out[:0], a.readings)
		return ok
	}
	if op == lmcache.OpNegotiateChunkSize { // a client takes any answer for a chunk size
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

// name records that a message of the connection names worker id.
func (c *connection) name(id int64) { c.worker, c.named = id, true }

// pinger returns the worker for which a heartbeat without an id speaks: the one that the connection registered or moved KV for. Without
// such a worker, answer is the reply. A client that was connected to an earlier server, and whose registration may be lost, gets false
// once: a worker then registers again. A scheduler cannot be told from a worker, so it also gets false, and makes no lookups until its next
// heartbeat.
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

// registerPickleOnly registers a worker of a release without shared memory. Its registration has no result, so a worker that cannot be
// served is remembered, and its transfers are declined.
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

// refuseEvents refuses a worker that lends device memory and whose client opens a device event with every answer, even a negative one. A
// declined store would end that client in the middle of its work. So its registration gets no answer, and its start ends after
// lmcache.mp.mq_timeout.
func (s *Server) refuseEvents(sc *scratch, reg *lmcache.KVCache) error {
	s.log.Error("a worker is refused: it lends its KV by CUDA IPC; its protocol has no reply for a refusal, so its start ends after lmcache.mp.mq_timeout; "+
		"set lmcache.mp.mp_transfer_mode=engine_driven in kv_connector_extra_config (0.4.7: data), or with 0.4.6 upgrade its lmcache",
		"worker", reg.InstanceID, "model", reg.Model, "lmcache", sc.conn.generations.String())
	sc.silent = true
	return nil
}

// settleReaders sets the number of readers in the key of a client before 0.5.5, which does not send it.
func (s *Server) settleReaders(sc *scratch, k *lmcache.KeyView, tensorParallel int64) {
	if k.Readers != lmcache.ReadersUnsaid {
		return
	}
	q := s.query(sc, k)
	in := s.registry.NewestOf(&q)
	k.Readers = k.ReadersOf(tensorParallel, in != nil && in.Layout.SinglePlane)
}
