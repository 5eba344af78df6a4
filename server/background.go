package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
)

// checksums computes and compares checksums in the background, at no more than
// ChecksumRate bytes per second, several small ones at a time.
func (s *Server) checksums(ctx context.Context) {
	const burst = 16 << 20
	rest := time.NewTimer(0)
	defer rest.Stop()
	corrupt := uint64(0)
	for {
		select {
		case <-ctx.Done():
			return
		case <-rest.C:
		}
		read, more := int64(0), true
		for more && read < burst {
			n := s.store.SumNext()
			read, more = read+n, n > 0
		}
		if got := s.store.Stats().CorruptChunks; got != corrupt {
			corrupt = got
			s.log.Error(fmt.Sprintf("%d chunks of the earlier server differed from their checksums and were dropped: "+
				"something wrote into the pool, or memory is faulty", got))
		}
		wait := time.Duration(float64(read) / float64(s.opts.ChecksumRate) * float64(time.Second))
		if !more {
			wait = max(wait, time.Second)
		}
		rest.Reset(wait)
	}
}

// summary is the state of the counters at the last summary line.
type summary struct{ lookups, asked, hit, stored, loaded uint64 }

// summarize logs one line about the time since last, if anything happened.
func (s *Server) summarize(last summary) summary {
	st := s.store.Stats()
	now := summary{
		lookups: s.n.requests[lmcache.OpLookup].Load(), asked: s.n.askedTokens.Load(), hit: s.n.hitTokens.Load(),
		stored: st.StoredBytes, loaded: st.LoadedBytes,
	}
	if now == last {
		return now
	}
	rate := "no tokens asked for"
	if asked := now.asked - last.asked; asked > 0 {
		rate = fmt.Sprintf("%.1f %% of %d tokens hit", 100*float64(now.hit-last.hit)/float64(asked), asked)
	}
	s.log.Info(fmt.Sprintf("last 10 s: %d lookups, %s, stored %s, retrieved %s, pool %.1f %% full",
		now.lookups-last.lookups, rate, kv.FormatBytes(int64(now.stored-last.stored)), kv.FormatBytes(int64(now.loaded-last.loaded)),
		100*float64(st.Bytes-st.FreeBytes)/float64(st.Bytes)))
	return now
}

// p2pTasks answers the peer-to-peer operations of a server that lends nothing: a
// lookup gets a task id, and asking for its result says of each key that it is
// not held, once.
type p2pTasks struct {
	mu    sync.Mutex
	last  int64
	keys  map[int64]int
	order []int64
}

const maxP2PTasks = 1024

var errP2PKeys = errors.New("too many keys")

func (t *p2pTasks) lookup(sc *scratch, p [][]byte) error {
	n, err := lmcache.CountObjectKeys(p[0])
	if err != nil {
		return err
	}
	if n > 1<<16 {
		return errP2PKeys
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.keys == nil {
		t.keys = make(map[int64]int)
	}
	if len(t.order) >= maxP2PTasks {
		delete(t.keys, t.order[0])
		t.order = append(t.order[:0], t.order[1:]...)
	}
	t.last++
	t.keys[t.last] = n
	t.order = append(t.order, t.last)
	sc.out = lmcache.AppendInt(sc.out, t.last)
	return nil
}

func (t *p2pTasks) query(sc *scratch, p [][]byte) error {
	id, err := lmcache.DecodeInt(p[0])
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if n, ok := t.keys[id]; ok {
		delete(t.keys, id)
		sc.out = lmcache.AppendP2PMiss(sc.out, n)
	}
	return nil
}

// limiter lets a few log lines per second and reason through.
type limiter struct {
	mu     sync.Mutex
	second [maxReasons]int64
	shown  [maxReasons]int
	hidden [maxReasons]uint64
}

const linesPerSecond = 5

// allow reports whether a line may be logged, and how many were not since the
// last one.
func (l *limiter) allow(reason int, now time.Time) (ok bool, hidden uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if sec := now.Unix(); l.second[reason] != sec {
		l.second[reason], l.shown[reason] = sec, 0
	}
	if l.shown[reason] >= linesPerSecond {
		l.hidden[reason]++
		return false, 0
	}
	l.shown[reason]++
	hidden, l.hidden[reason] = l.hidden[reason], 0
	return true, hidden
}
