// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"errors"
	"fmt"
	"io"
	"time"
)

// transferV1 runs reqs at a peer without acknowledgements: on one connection per request, because engines up to 0.3.9 close the
// connection after a request.
func (l *lane) transferV1(j *job, reqs []request) outcome {
	o := outcome{}
	for ; o.done < len(reqs); o.done++ {
		r := &reqs[o.done]
		// These engines do not check addresses; a bad address kills some of them.
		if !l.desc.covers(r.addr, r.size) {
			desc, err := l.client.refresh(j.ctx, l.peer, l.desc)
			if err != nil {
				o.err = err
				return o
			}
			if l.desc = desc; !desc.covers(r.addr, r.size) {
				o.err = errRefused
				return o
			}
		}
		o.started = o.done + 1
		if o.err = l.oneV1(j, r, &o); o.err != nil {
			return o
		}
		j.sent.confirmed(r.size)
	}
	return o
}

// oneV1 runs one request on a connection of its own.
func (l *lane) oneV1(j *job, r *request, o *outcome) error {
	s, err := l.dial(j.ctx)
	if err != nil && j.ctx.Err() == nil { // the peer may have moved
		var desc *Descriptor
		if desc, err = l.client.refresh(j.ctx, l.peer, l.desc); err == nil {
			l.desc = desc
			s, err = l.dial(j.ctx)
		}
	}
	if err != nil {
		o.started = o.done
		return err
	}
	l.s = s
	defer l.drop()
	defer l.watch(j.ctx)()
	l.client.stats.requests.Add(1)
	if !j.write {
		l.headers = header{r.size, r.addr, opRead}.appendTo(l.headers[:0])
		l.iov = append(l.iov[:0], l.headers)
		if _, err := s.write(l.iov); err != nil {
			return err
		}
		return l.scatter(j, r)
	}
	err = l.sendV1(j, r)
	if err == nil {
		return nil
	}
	if broken(err) {
		return err
	}
	// The peer has not ended its side. Wait for that until SettleTimeout; then r is unsettled.
	s.ctx = nil
	s.conn.CloseWrite()
	s.conn.SetReadDeadline(time.Now().Add(l.client.opt.SettleTimeout))
	_, rerr := io.Copy(io.Discard, s.conn)
	o.unsettled = rerr != nil && !broken(rerr)
	s.abort()
	return err
}

// sendV1 sends header and body and ends its own direction. It takes the peer's clean end as the confirmation that all bytes are in
// place.
func (l *lane) sendV1(j *job, r *request) error {
	s := l.s
	l.headers = header{r.size, r.addr, opWrite}.appendTo(l.headers[:0])
	l.iov = append(l.iov[:0], l.headers)
	var cur cursor
	for cur.start(r); cur.left > 0; {
		for bytes := 0; cur.left > 0 && bytes < writeStep && len(l.iov) < maxIOV; {
			b := cur.next(&j.plan, j.entries, writeStep)
			l.iov = append(l.iov, b)
			bytes += len(b)
		}
		if _, err := s.write(l.iov); err != nil {
			return err
		}
		l.iov = l.iov[:0]
	}
	if err := s.conn.CloseWrite(); err != nil {
		return s.cause(err)
	}
	err := s.fill()
	switch {
	case errors.Is(err, io.EOF):
		return nil
	case err == nil:
		return fmt.Errorf("%w: an answer to an unacknowledged write", ErrProtocol)
	}
	return err
}
