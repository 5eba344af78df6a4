// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
)

const (
	// staleAfter is the idle time after which a lane checks a connection before use: the peer may have ended it.
	staleAfter = 20 * time.Millisecond

	maxIOV = 1024 // most slices in one vectored write (IOV_MAX)
)

// lane is a slot for one pooled connection to a peer. The goroutine that has taken the lane from the peer owns it.
type lane struct {
	client *Client // immutable
	peer   *peer

	s       *stream    // nil: not connected
	keeps   bool       // the peer keeps this connection open when it refuses a request
	proof   auth.Proof // the proof that the peer gave on this connection; set if desc.proves
	desc    *Descriptor
	used    time.Time
	window  int      // requests that may be in flight at a time
	headers []byte   // headers of the requests in iov
	iov     [][]byte // slices that the next vectored write gives to the kernel
}

// run transfers reqs and records failures in j. Afterwards the lane has an idle connection or no connection.
func (l *lane) run(j *job, reqs []request) {
	retried, inRow := false, 0
	for len(reqs) > 0 {
		reused, err := l.connect(j.ctx)
		if err != nil {
			j.fail(reqs, l.client.public(err))
			return
		}
		o := l.transfer(j, reqs)
		l.used = time.Now()
		if o.done > 0 {
			inRow = 0
		}
		var again []request // entries of merged requests that were refused, to be tried one by one
		for _, i := range o.refused {
			again = append(again, l.refused(j, reqs[i])...)
		}
		if o.err == nil {
			reqs = again
			continue
		}
		l.drop()
		switch {
		case errors.Is(o.err, errRefused):
			l.window = 1 // a refused request costs the bytes of its body: send one request at a time
			rest := reqs[o.done+1:]
			reqs = append(l.refused(j, reqs[o.done]), again...)
			if inRow++; inRow == maxRefusedInRow { // each refusal has cost a connection
				j.fail(append(reqs, rest...), ErrRejected)
				return
			}
			reqs = append(reqs, rest...)
		case reused && o.done == 0 && !retried && broken(o.err):
			// The peer ended the idle connection before it saw the requests, so none of their bytes can arrive late. The peer may have
			// moved.
			retried = true
			l.client.stats.retries.Add(1)
			if _, err := l.client.refresh(j.ctx, l.peer, l.desc); err != nil {
				j.fail(reqs, err)
				return
			}
		default:
			o.err = l.client.public(o.err)
			j.failRest(reqs, o)
			j.fail(again, o.err)
			return
		}
	}
}

// maxRefusedInRow is how many refusals in a row a call tries at a peer that ends the connection after each refusal. After that, the
// call fails all remaining requests as refused.
const maxRefusedInRow = 256

// refused records that the peer refused r. If r is a merged request, it returns its entries as requests to be tried one by one.
func (l *lane) refused(j *job, r request) []request {
	l.client.stats.rejected.Add(1)
	if !r.single {
		return j.plan.singles(r, j.entries)
	}
	j.fail([]request{r}, ErrRejected)
	return nil
}

// transfer runs reqs on the lane's connection. For a peer without acknowledgements there is no connection yet: transferV1 makes one per
// request.
func (l *lane) transfer(j *job, reqs []request) outcome {
	if !l.desc.acked() {
		return l.transferV1(j, reqs)
	}
	defer l.watch(j.ctx)()
	if j.write {
		return l.write(j, reqs)
	}
	return l.read(j, reqs)
}

// watch makes the end of ctx interrupt the connection, until the caller calls the returned function.
func (l *lane) watch(ctx context.Context) func() {
	if ctx.Done() == nil {
		return func() {}
	}
	s := l.s
	s.watch(ctx)
	return func() {
		if !s.unwatch() {
			l.drop() // the interruption may still be on its way
		}
	}
}

// connect makes sure that the lane has a connection. reused reports whether it existed before. A new connection is dialed by a
// descriptor that is at most freshFor old.
func (l *lane) connect(ctx context.Context) (reused bool, err error) {
	c := l.client
	desc, err := c.describe(ctx, l.peer)
	if err != nil {
		return false, err
	}
	if l.s != nil && !l.desc.sameLife(desc) {
		l.drop() // another lane has found that the peer restarted
	}
	if l.s != nil && l.desc.proves && !c.opt.Secrets.Counts(&l.proof) {
		l.drop() // the secret of the peer's proof was removed
	}
	if l.s != nil && time.Since(l.used) > staleAfter && !l.idle() {
		l.drop()
		if desc, err = c.refresh(ctx, l.peer, desc); err != nil { // the peer may have moved
			return false, err
		}
	}
	l.window = cmp.Or(l.window, c.opt.Window)
	if l.s != nil {
		l.desc = desc
		return true, nil
	}
	if l.desc, err = c.describeNow(ctx, l.peer); err != nil {
		return false, err
	}
	if !l.desc.acked() {
		return false, nil // one connection per request
	}
	if l.s, err = l.dial(ctx); err == nil || ctx.Err() != nil {
		return false, err
	}
	if l.desc, err = c.refresh(ctx, l.peer, l.desc); err != nil {
		return false, err
	}
	if !l.desc.acked() {
		return false, nil
	}
	l.s, err = l.dial(ctx)
	return false, err
}

// idle reports whether the connection is still open and the peer has sent nothing.
func (l *lane) idle() bool {
	// A read deadline in the past would hide from the check that the peer has ended the connection.
	if l.s.conn.SetReadDeadline(time.Time{}) != nil {
		return false
	}
	l.s.readArmed = time.Time{}
	return l.s.try() == nil && l.s.buffered() == 0
}

// dial opens a data connection to the address in l.desc.
func (l *lane) dial(ctx context.Context) (*stream, error) {
	c := l.client
	addr, err := l.desc.dataAddr(l.peer.name)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, c.opt.DialTimeout)
	defer cancel()
	defer context.AfterFunc(c.base, cancel)()
	c.stats.dials.Add(1)
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("data connection to %s: %w", l.peer.name, err)
	}
	switch {
	case l.desc.proves:
		l.proof, err = prove(ctx, conn, l.peer.name, c.opt.Secrets)
	case c.opt.Secrets.Demands(conn.RemoteAddr()):
		err = fmt.Errorf("%w: the peer asks for no proof", ErrUnproven)
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("data connection to %s: %w", l.peer.name, err)
	}
	s, err := newStream(conn.(*net.TCPConn), c.opt.ProgressTimeout)
	if err != nil {
		conn.Close()
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mu.closed {
		conn.Close()
		return nil, ErrClosed
	}
	c.mu.conns[conn] = struct{}{}
	l.keeps = l.desc.Keeps && l.desc.acked()
	if l.keeps {
		l.headers = header{addr: keepAddr, op: opKeep}.appendTo(l.headers[:0])
		conn.SetWriteDeadline(time.Now().Add(c.opt.ProgressTimeout))
		_, err = conn.Write(l.headers)
	}
	return s, err
}

// drop closes the connection, if there is one.
func (l *lane) drop() {
	if l.s != nil {
		l.client.forget(l.s)
		l.s = nil
	}
}

func (c *Client) forget(s *stream) {
	c.mu.Lock()
	delete(c.mu.conns, net.Conn(s.conn))
	c.mu.Unlock()
	s.close()
}

// write sends reqs, with many in flight at a time, and collects their acknowledgements.
func (l *lane) write(j *job, reqs []request) outcome {
	var cur cursor
	o, counted := outcome{}, 0
	for o.done < len(reqs) {
		for cur.left > 0 || cur.req < len(reqs) && cur.req-o.done < l.window {
			l.gather(j, reqs, &cur, o.done)
			o.started = cur.req
			if cur.left > 0 {
				o.started++
			}
			if _, err := l.s.write(l.iov); err != nil {
				l.lateAcks(&o, cur.req)
				return l.giveUp(o, cur.req, err)
			}
			if cur.req == len(reqs) {
				break
			}
			if err := l.s.try(); err != nil {
				return l.giveUp(o, cur.req, err)
			}
			if o.err = l.takeAcks(&o, cur.req); o.err != nil {
				return o
			}
			counted = j.count(reqs, counted, o)
		}
		if o.done < cur.req {
			if err := l.s.need(statusBytes); err != nil {
				return l.giveUp(o, cur.req, err)
			}
		}
		if o.err = l.takeAcks(&o, cur.req); o.err != nil {
			return o
		}
		counted = j.count(reqs, counted, o)
	}
	return o
}

// gather puts the next headers and bodies into l.iov. It stops at writeStep bytes, at maxIOV slices, and at the window.
func (l *lane) gather(j *job, reqs []request, cur *cursor, done int) {
	l.iov, l.headers = l.iov[:0], l.headers[:0]
	if cap(l.headers) < maxIOV/2*headerBytes {
		l.headers = make([]byte, 0, maxIOV/2*headerBytes) // large enough that it never moves below
		l.iov = make([][]byte, 0, maxIOV)
	}
	for bytes := 0; bytes < writeStep && len(l.iov) <= maxIOV-2; {
		if cur.left == 0 {
			if cur.req == len(reqs) || cur.req-done >= l.window {
				return
			}
			r := &reqs[cur.req]
			cur.start(r)
			at := len(l.headers)
			l.headers = header{r.size, r.addr, opWrite | opAcked}.appendTo(l.headers)
			l.iov = append(l.iov, l.headers[at:])
			l.client.stats.requests.Add(1)
		}
		b := cur.next(&j.plan, j.entries, writeStep)
		l.iov = append(l.iov, b)
		bytes += len(b)
	}
}

// takeAcks reads the acknowledgements in the buffer. It accepts them only for the first `sent` requests, whose bodies are sent.
func (l *lane) takeAcks(o *outcome, sent int) error {
	for l.s.buffered() >= statusBytes {
		code, ok := parseStatus(l.s.next(statusBytes))
		switch {
		case !ok:
			return fmt.Errorf("%w: the peer's status does not begin with its magic number", ErrProtocol)
		case code == statusRejected && o.done < o.started:
			if !l.keeps {
				return errRefused
			}
			o.refused = append(o.refused, o.done)
		case code != statusOK:
			return fmt.Errorf("%w: the peer's status %d is unknown", ErrProtocol, code)
		case o.done == sent:
			return fmt.Errorf("%w: acknowledgement without a request", ErrProtocol)
		}
		o.done++
		l.window = min(l.window+1, l.client.opt.Window)
	}
	return nil
}

// lateAcks reads the acknowledgements that the peer had sent before it broke the connection. Like takeAcks, it accepts them for the first
// `sent` requests.
func (l *lane) lateAcks(o *outcome, sent int) {
	for {
		if o.err = l.takeAcks(o, sent); o.err != nil {
			return
		}
		before := l.s.buffered()
		if l.s.try() != nil || l.s.buffered() == before {
			return
		}
	}
}

// giveUp ends a write that cannot go on because of err, and returns o with the acknowledgements that have come meanwhile for the first `sent`
// requests. If the peer has ended the connection, the peer applies nothing more. Otherwise the lane ends its own direction and waits for
// the peer's end, at most SettleTimeout, so that no byte of the write is on its way any more; without that end, o is unsettled.
func (l *lane) giveUp(o outcome, sent int, err error) outcome {
	if o.err != nil { // the peer told the reason
		return o
	}
	o.err = err
	if broken(err) {
		return o
	}
	s := l.s
	s.ctx = nil
	s.conn.SetWriteDeadline(time.Now().Add(l.client.opt.SettleTimeout))
	s.conn.CloseWrite()
	until := time.Now().Add(l.client.opt.SettleTimeout)
	for {
		if l.takeAcks(&o, sent) != nil {
			o.unsettled = false // the peer refused, or broke the protocol: it reads no further
			s.abort()
			return o
		}
		if o.done == o.started { // all requests are confirmed after all
			return o
		}
		s.makeRoom()
		s.conn.SetReadDeadline(until)
		n, rerr := s.conn.Read(s.buf[s.w:])
		s.w += n
		if n > 0 || errors.Is(rerr, os.ErrDeadlineExceeded) && time.Now().Before(until) {
			continue // or the interruption by the context came late
		}
		o.unsettled = !broken(rerr)
		s.abort()
		return o
	}
}

// read sends requests ahead of the replies, and copies the replies, which come in the order of the requests, into the entries.
func (l *lane) read(j *job, reqs []request) outcome {
	o := outcome{}
	for o.done < len(reqs) {
		if o.started < len(reqs) && o.started-o.done <= l.window/2 {
			if o.err = l.sendHeaders(reqs, &o); o.err != nil {
				return o
			}
		}
		if o.err = l.s.need(statusBytes); o.err != nil {
			return o
		}
		code, ok := parseStatus(l.s.next(statusBytes))
		switch {
		case !ok:
			o.err = fmt.Errorf("%w: the peer's status does not begin with its magic number", ErrProtocol)
		case code == statusRejected && l.keeps:
			o.refused = append(o.refused, o.done)
		case code == statusRejected:
			o.err = errRefused
		case code != statusOK:
			o.err = fmt.Errorf("%w: the peer's status %d is unknown", ErrProtocol, code)
		default:
			o.err = l.scatter(j, &reqs[o.done])
		}
		if o.err != nil {
			return o
		}
		o.done++
		l.window = min(l.window+1, l.client.opt.Window)
	}
	return o
}

// sendHeaders sends the headers of the next read requests, as many as the window allows.
func (l *lane) sendHeaders(reqs []request, o *outcome) error {
	l.headers = l.headers[:0]
	for o.started < len(reqs) && o.started-o.done < max(l.window, 1) {
		r := &reqs[o.started]
		l.headers = header{r.size, r.addr, opRead | opAcked}.appendTo(l.headers)
		o.started++
		l.client.stats.requests.Add(1)
	}
	l.iov = append(l.iov[:0], l.headers)
	_, err := l.s.write(l.iov)
	return err
}

// scatter reads the body of r's reply into the entries of r.
func (l *lane) scatter(j *job, r *request) error {
	var cur cursor
	for cur.start(r); cur.left > 0; {
		if err := l.s.readFull(cur.next(&j.plan, j.entries, maxRun)); err != nil {
			return err
		}
	}
	return nil
}
