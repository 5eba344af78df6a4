// SPDX-License-Identifier: Apache-2.0

package limits

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/resp"
)

// begin is the script that admits one more request of a key. ARGV: rate, burst, requests at a time, name of the proxy, the proxy's
// requests in progress including this one, life (ms). It answers 1 and 0, or 0 and how long to wait (ms).
const begin = `local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local rate, burst, most = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
if most > 0 then
  local all, sum = redis.call('HGETALL', KEYS[2]), tonumber(ARGV[5])
  for i = 1, #all, 2 do
    if all[i] ~= ARGV[4] then
      local n, ends = string.match(all[i + 1], '^(%d+) (%d+)$')
      if not ends or tonumber(ends) <= now then
        redis.call('HDEL', KEYS[2], all[i])
      else
        sum = sum + tonumber(n)
      end
    end
  end
  if sum > most then return {0, 1000} end
end
if rate > 0 then
  local had = redis.call('HMGET', KEYS[1], 'tokens', 'at')
  local tokens, at = tonumber(had[1] or burst), tonumber(had[2] or now)
  tokens = math.min(burst, tokens + rate * math.max(0, now - at) / 1000)
  local ok = tokens >= 1
  if ok then tokens = tokens - 1 end
  redis.call('HSET', KEYS[1], 'tokens', tostring(tokens), 'at', string.format('%.0f', math.max(now, at)))
  redis.call('PEXPIRE', KEYS[1], math.ceil(burst / rate * 1000) + 1000)
  if not ok then return {0, math.ceil((1 - tokens) / rate * 1000)} end
end
if most > 0 then
  redis.call('HSET', KEYS[2], ARGV[4], string.format('%d %.0f', ARGV[5], now + ARGV[6]))
  redis.call('PEXPIRE', KEYS[2], ARGV[6])
end
return {1, 0}`

// note is the script that records how many requests of a key a proxy has in progress. ARGV: name of the proxy, requests, life (ms).
const note = `local t = redis.call('TIME')
if tonumber(ARGV[2]) == 0 then return redis.call('HDEL', KEYS[1], ARGV[1]) end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d %.0f', ARGV[2], t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[3]))
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1`

// maxBatch bounds the calls that are sent before their answers are read; further calls follow after these answers.
const maxBatch = 256

// run owns the connection, so that the calls of one proxy reach the server in the order in which the proxy counts.
func (l *Limits) run(ctx context.Context) {
	defer close(l.done)
	defer l.disconnect()
	again := time.NewTicker(l.o.Life / 3)
	defer again.Stop()
	for {
		select {
		case a := <-l.asks:
			l.serve(ctx, a)
		case <-l.news:
			l.report(ctx)
		case <-again.C:
			l.reportAll()
		case <-ctx.Done():
			l.leave()
			return
		}
	}
}

// serve answers the ask `first` and the asks that wait behind it, at most maxBatch together.
func (l *Limits) serve(ctx context.Context, first *ask) {
	batch := []*ask{first}
	for len(batch) < maxBatch {
		select {
		case a := <-l.asks:
			batch = append(batch, a)
			continue
		default:
		}
		break
	}
	err := l.connect(ctx)
	if err == nil {
		for _, a := range batch {
			n := l.add(a.Limit, 1, false)
			l.conn.Command("EVALSHA", l.sha, "2", l.name(a.Key, "rate"), l.name(a.Key, "now"), number(a.Rate), number(a.Burst),
				strconv.Itoa(a.AtOnce), l.self, strconv.Itoa(n), l.life())
		}
		err = l.conn.Flush()
	} else {
		for _, a := range batch {
			l.add(a.Limit, 1, true)
		}
	}
	for _, a := range batch {
		if err == nil {
			a.wait, a.ok, err = answer(l.conn.Reply())
		}
		switch {
		case err != nil:
			a.wait, a.ok = 0, true
			l.add(a.Limit, 0, true)
			l.n.unknown.Add(1)
		case !a.ok:
			l.add(a.Limit, -1, true)
			l.n.refused.Add(1)
			fallthrough
		default:
			l.n.asked.Add(1)
		}
		close(a.done)
	}
	l.settle(ctx, err)
}

func number(f float64) string { return strconv.FormatFloat(f, 'f', -1, 64) }

func (l *Limits) name(key, what string) string { return l.o.Prefix + "{" + key + "}:" + what }

func (l *Limits) life() string { return strconv.FormatInt(l.o.Life.Milliseconds(), 10) }

func answer(r resp.Reply, err error) (wait time.Duration, ok bool, _ error) {
	if err != nil {
		return 0, false, err
	}
	if len(r.List) != 2 || r.List[0].Kind != ':' || r.List[1].Kind != ':' {
		return 0, false, fmt.Errorf("%w: a list of %d elements, not of two numbers", resp.ErrProtocol, len(r.List))
	}
	wait = time.Duration(min(max(r.List[1].Int, 0), math.MaxInt32)) * time.Millisecond
	return wait, r.List[0].Int == 1, nil
}

// reportAll marks all counts as changed, so that run reports them again.
func (l *Limits) reportAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for key := range l.mu.now {
		l.mu.changed[key] = true
		l.wake()
	}
}

// report sends the counts that have changed to the server.
func (l *Limits) report(ctx context.Context) {
	if time.Now().Before(l.rests) { // the next tick reports the counts
		return
	}
	type count struct {
		key string
		n   int
	}
	var all []count
	l.mu.Lock()
	for key := range l.mu.changed {
		all = append(all, count{key, l.mu.now[key]})
	}
	clear(l.mu.changed)
	l.mu.Unlock()
	if len(all) == 0 {
		return
	}
	var err error
	for len(all) > 0 && err == nil {
		some := all[:min(len(all), maxBatch)]
		if err = l.connect(ctx); err != nil {
			break
		}
		for _, c := range some {
			l.conn.Command("EVAL", note, "1", l.name(c.key, "now"), l.self, strconv.Itoa(c.n), l.life())
		}
		if err = l.conn.Flush(); err != nil {
			break
		}
		for range some {
			if _, err = l.conn.Int(); err != nil {
				break
			}
		}
		if err == nil {
			all = all[len(some):]
		}
	}
	if err != nil {
		l.mu.Lock()
		for _, c := range all {
			l.mu.changed[c.key] = true
		}
		l.mu.Unlock()
	}
	l.settle(ctx, err)
}

// leave removes this proxy from the server's counts, and allows all requests that still wait for an answer of the server.
func (l *Limits) leave() {
	ctx, cancel := context.WithTimeout(context.Background(), 2*l.o.Timeout)
	defer cancel()
	l.reportAll()
	l.mu.Lock()
	clear(l.mu.now)
	l.mu.Unlock()
	if !l.away {
		l.report(ctx)
	}
	for {
		select {
		case a := <-l.asks:
			a.ok = true
			close(a.done)
		default:
			return
		}
	}
}

var errRests = errors.New("the Redis server did not answer a moment ago, and is asked again soon")

// connect makes sure that there is a connection to the server, and sets the deadline of the next calls.
func (l *Limits) connect(ctx context.Context) error {
	if time.Now().Before(l.rests) {
		return errRests
	}
	until := time.Now().Add(l.o.Timeout)
	if l.conn != nil {
		return l.conn.SetDeadline(until)
	}
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	network, addr := "tcp", l.o.Addr
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		network, addr = "unix", path
	}
	nc, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return err
	}
	if l.o.TLS != nil {
		t := tls.Client(nc, l.o.TLS)
		if err := t.HandshakeContext(ctx); err != nil {
			return errors.Join(fmt.Errorf("TLS: %w", err), nc.Close())
		}
		nc = t
	}
	c := resp.New(nc)
	if err := c.SetDeadline(until); err != nil {
		return errors.Join(err, c.Close())
	}
	l.conn = c
	if l.o.Password != "" {
		login := []string{"AUTH", l.o.Password}
		if l.o.Username != "" {
			login = []string{"AUTH", l.o.Username, l.o.Password}
		}
		c.Command(login...)
		if err := errors.Join(c.Flush(), c.OK()); err != nil {
			return err
		}
	}
	if l.o.Database != 0 {
		c.Command("SELECT", strconv.Itoa(l.o.Database))
		if err := errors.Join(c.Flush(), c.OK()); err != nil {
			return err
		}
	}
	c.Command("SCRIPT", "LOAD", begin)
	if err := c.Flush(); err != nil {
		return err
	}
	r, err := c.Reply()
	l.sha = r.Text
	return err
}

func (l *Limits) disconnect() {
	if l.conn != nil {
		_ = l.conn.Close() // nothing is waited for
		l.conn = nil
	}
}

// settle records the result of a call. After a failure, the server is not asked for Options.Pause; when it answers again, all counts
// are reported again.
func (l *Limits) settle(ctx context.Context, err error) {
	switch {
	case errors.Is(err, errRests):
	case err != nil:
		l.disconnect()
		l.rests = time.Now().Add(l.o.Pause)
		if !l.away && ctx.Err() == nil {
			l.away = true
			l.o.Log.Warn("limits are counted by each proxy alone now", "server", l.o.Addr, "err", err)
		}
	case l.away:
		l.away = false
		l.reportAll()
		l.o.Log.Info("limits are counted together with other proxies again", "server", l.o.Addr)
	}
}
