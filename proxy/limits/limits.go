// SPDX-License-Identifier: Apache-2.0

// Package limits counts the requests of API keys together with other proxies, in a shared Redis or Valkey.
//
//	KEYS 1  PREFIX{ID}:rate     hash: tokens left, at (ms)
//	KEYS 2  PREFIX{ID}:now      hash: proxy -> "requests expiry (ms)"
//
// A proxy writes the number of its requests in progress, not a difference, and writes it again before it expires. So a lost write is
// soon repaired, and a dead proxy stops counting after Options.Life. All times are those of the Redis server.
//
// If the server does not answer, every request is allowed, within the limits that each proxy keeps by itself. Limits logs when that
// begins and when it ends.
package limits

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/internal/resp"
)

// Options configures Limits. A zero field means its default.
type Options struct {
	Addr               string // host:port, or unix:PATH; default 127.0.0.1:6379
	Username, Password string
	Database           int
	TLS                *tls.Config // nil: no TLS

	Prefix  string        // of the keys in the server; default "kvasir:proxy:"
	Timeout time.Duration // for making a connection, and for a call; default 250 ms
	Pause   time.Duration // how long the server is not asked after a failure; default 1 s
	Life    time.Duration // how long the requests of a silent proxy still count; default 15 s

	Log *slog.Logger // nil: nothing is logged
}

// ParseURL parses redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE], rediss:// for TLS, or unix:PATH.
func ParseURL(s string) (o Options, err error) {
	if strings.HasPrefix(s, "unix:") {
		o.Addr = s
		return o, nil
	}
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "redis" && u.Scheme != "rediss" || u.Hostname() == "" || u.RawQuery != "" {
		return o, errors.New("is not redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE], rediss:// or unix:PATH") // without the text: a URL may have a password
	}
	o.Addr = net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "6379"))
	o.Username = u.User.Username()
	o.Password, _ = u.User.Password()
	if path := strings.Trim(u.Path, "/"); path != "" {
		if o.Database, err = strconv.Atoi(path); err != nil {
			return o, errors.New("has a database that is no number")
		}
	}
	if u.Scheme == "rediss" {
		o.TLS = &tls.Config{ServerName: u.Hostname(), MinVersion: tls.VersionTLS12}
	}
	return o, nil
}

// Validate returns an error with everything that is wrong with o.
func (o Options) Validate() error {
	var c options.Checks
	_, _, err := net.SplitHostPort(o.Addr)
	c.That(o.Addr == "" || err == nil || strings.HasPrefix(o.Addr, "unix:"), "Addr", "%q is not host:port or unix:PATH", o.Addr)
	options.Within(&c, "Database", o.Database, 0, 1<<20)
	options.Within(&c, "Timeout", o.Timeout, 0, time.Minute)
	options.Within(&c, "Pause", o.Pause, 0, time.Hour)
	options.Within(&c, "Life", o.Life, 0, time.Hour)
	c.That(o.Life <= 0 || o.Life >= 100*time.Millisecond, "Life", "%v is below 100ms", o.Life)
	return c.Err()
}

// maxAsks bounds the requests that wait for an answer of the Redis server; further requests are allowed at once.
const maxAsks = 1024

// Limits counts requests of keys. Its methods are safe for concurrent use.
type Limits struct {
	o    Options
	self string // this proxy's name in the server
	asks chan *ask
	news chan struct{} // holds one token if a count has changed, which makes run report it
	stop context.CancelFunc
	done chan struct{}

	mu struct {
		sync.Mutex
		now     map[string]int  // requests in progress, by key; no entry is 0
		changed map[string]bool // keys whose count has changed and is not reported yet
	}
	n struct{ asked, refused, unknown atomic.Int64 }
	// Owned by run.
	conn  *resp.Conn
	sha   string    // hash of the script, as the server knows it
	rests time.Time // the server is not asked before this time
	away  bool      // the server did not answer the last time
}

// ask is one request that waits for the right to begin.
type ask struct {
	Limit
	wait time.Duration
	ok   bool
	done chan struct{}
}

// Limit is the limits of one key.
type Limit struct {
	Key    string  // name of the key in the server
	Rate   float64 // requests per second; 0: no limit
	Burst  float64 // requests at the same time after a pause
	AtOnce int     // requests in progress at a time; 0: no limit
}

// New returns Limits. The server need not be running yet.
func New(o Options) (*Limits, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o.Addr = cmp.Or(o.Addr, "127.0.0.1:6379")
	o.Prefix = cmp.Or(o.Prefix, "kvasir:proxy:")
	o.Timeout, o.Pause, o.Life = cmp.Or(o.Timeout, 250*time.Millisecond), cmp.Or(o.Pause, time.Second), cmp.Or(o.Life, 15*time.Second)
	o.Log = cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	l := &Limits{o: o, self: rand.Text(), asks: make(chan *ask, maxAsks), news: make(chan struct{}, 1), done: make(chan struct{})}
	l.mu.now, l.mu.changed = make(map[string]int), make(map[string]bool)
	ctx, stop := context.WithCancel(context.Background())
	l.stop = stop
	go l.run(ctx)
	return l, nil
}

// Close removes this proxy's requests from the server's counts and ends Limits.
func (l *Limits) Close() {
	l.stop()
	<-l.done
}

// Stats are the counters of Limits.
type Stats struct {
	Asked   int64 `counter:"kvasir_proxy_shared_limits_asked_total" help:"Requests that were counted together with other proxies."`
	Refused int64 `counter:"kvasir_proxy_shared_limits_refused_total" help:"Of them beyond the limits of their key."`
	Unknown int64 `counter:"kvasir_proxy_shared_limits_unknown_total" help:"Requests that only this proxy's own limits held for, since Redis did not answer."`
}

// Stats returns the counters; those of a nil Limits are 0.
func (l *Limits) Stats() Stats {
	if l == nil {
		return Stats{}
	}
	return Stats{l.n.asked.Load(), l.n.refused.Load(), l.n.unknown.Load()}
}

// Begin asks for the right to begin one more request of the key. If one of the key's limits `what` is reached, ok is false, and wait is the
// estimated time until it is not. Each Begin with ok needs an End. Begin itself waits no longer than a few times Options.Timeout.
func (l *Limits) Begin(what Limit) (wait time.Duration, ok bool) {
	a := &ask{Limit: what, done: make(chan struct{})}
	select {
	case l.asks <- a:
		select {
		case <-a.done:
			return a.wait, a.ok
		case <-l.done: // Close came first
			select {
			case <-a.done:
				return a.wait, a.ok
			default:
			}
		}
	default:
	}
	l.n.unknown.Add(1)
	l.add(what, 1, true)
	return 0, true
}

// End records that a request has ended.
func (l *Limits) End(what Limit) { l.add(what, -1, true) }

// add adds n to the key's requests in progress and returns the sum. If tell is true, run reports the sum to the server.
func (l *Limits) add(what Limit, n int, tell bool) (now int) {
	if what.AtOnce == 0 {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	now = max(l.mu.now[what.Key]+n, 0)
	if l.mu.now[what.Key] = now; now == 0 {
		delete(l.mu.now, what.Key)
	}
	if tell {
		l.mu.changed[what.Key] = true
		l.wake()
	}
	return now
}

// wake makes run report the counts that have changed.
func (l *Limits) wake() {
	select {
	case l.news <- struct{}{}:
	default:
	}
}
