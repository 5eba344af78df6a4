package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/shm"
)

// The pool is sparse: /dev/shm promises no memory for it. A worker that touches a
// page which the file system cannot provide is killed (SIGBUS). So places are handed
// out only below what has been provided: in the background, from the lowest offset
// up, and ahead of a request that needs more. Without Options.PopulateRate nothing is
// provided ahead and everything is handed out.

const (
	populateStep = 8 << 20          // provided at a time
	provideMost  = 256 << 20        // for one request; the background goes on
	provideAgain = 10 * time.Second // after the file system had no more
)

// memory is how much of the pool has memory.
type memory struct {
	provided atomic.Int64 // from the pool's start, bytes
	trouble  atomic.Pointer[error]
	filling  sync.Mutex // orders the steps
}

// beginMemory finds what has memory already and hands out no more.
func (s *Server) beginMemory() {
	if s.opts.PopulateRate <= 0 {
		return
	}
	s.memory.provided.Store(s.store.Provided())
	if err := s.store.Limit(s.memory.provided.Load()); err != nil {
		s.noMemory(s.memory.provided.Load(), err)
	}
}

// noMemory notes that the file system has no more than from bytes for the pool.
func (s *Server) noMemory(from int64, err error) {
	why := fmt.Errorf("/dev/shm has no memory for the whole pool: %s of %s can be used (%w); free some, or start with a smaller --l1-size-gb",
		kv.FormatBytes(from), kv.FormatBytes(s.store.PoolBytes()), err)
	if s.memory.trouble.Swap(&why) == nil {
		s.log.Error(why.Error())
	}
}

// usable returns how many bytes of the pool may be handed out.
func (s *Server) usable() int64 {
	if s.opts.PopulateRate <= 0 {
		return s.store.PoolBytes()
	}
	return s.memory.provided.Load()
}

// provide has memory ready for a request of so many chunks, as far as there is any:
// else it would evict chunks while most of the pool is unused. objects are the bytes
// of each of a chunk's objects.
func (s *Server) provide(chunks int, objects ...int64) {
	total := s.store.PoolBytes()
	if s.usable() >= total {
		return
	}
	bytes := int64(0)
	for _, n := range objects {
		bytes += int64(chunks) * s.store.Round(n)
	}
	for most := int64(provideMost); most > 0; most -= populateStep {
		usable := s.usable()
		if usable >= total || s.memory.trouble.Load() != nil {
			return
		}
		st := s.store.Stats()
		if free := st.FreeBytes - (total - usable); free >= bytes {
			return
		}
		if s.provideStep(usable) != nil {
			return
		}
	}
}

// provideStep provides one step more than from, unless somebody else just did.
func (s *Server) provideStep(from int64) error {
	m := &s.memory
	m.filling.Lock()
	defer m.filling.Unlock()
	if m.provided.Load() != from {
		return nil
	}
	to := min(from+populateStep, s.store.PoolBytes())
	err := s.store.Populate(from, to-from, false)
	if errors.Is(err, shm.ErrNoPopulate) {
		s.log.Warn("pool memory cannot be provided ahead of use on this system: a /dev/shm that fills up later ends engines", "error", err)
		to, err = s.store.PoolBytes(), nil
	}
	if err == nil {
		err = s.store.Limit(to)
	}
	if err != nil {
		s.noMemory(from, err)
		return err
	}
	m.provided.Store(to)
	if m.trouble.Swap(nil) != nil {
		s.log.Info(fmt.Sprintf("/dev/shm has memory again: %s of %s can be used", kv.FormatBytes(to), kv.FormatBytes(s.store.PoolBytes())))
	}
	return nil
}

// populate has the kernel provide the whole pool, in the order in which slots are
// handed out: a worker also copies several times faster into memory that was touched
// before. Once this server copies itself (a worker lends its KV), it maps that memory
// too.
func (s *Server) populate(ctx context.Context) {
	total := s.store.PoolBytes()
	step := pace(s.opts.PopulateRate)
	defer step.Stop()
	for s.usable() < total {
		select {
		case <-ctx.Done():
			return
		case <-step.C:
		}
		if s.provideStep(s.usable()) == nil {
			continue
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(provideAgain):
		}
	}
	select {
	case <-ctx.Done():
		return
	case <-s.lending:
	}
	step.Reset(pause(4 * s.opts.PopulateRate)) // the pages are there
	for off := int64(0); off < total; off += populateStep {
		select {
		case <-ctx.Done():
			return
		case <-step.C:
		}
		if err := s.store.Populate(off, populateStep, true); err != nil {
			s.log.Warn(fmt.Sprintf("mapping pool memory stopped at %s of %s; first copies into the rest are slower",
				kv.FormatBytes(off), kv.FormatBytes(total)), "error", err)
			return
		}
	}
}

func pace(rate int64) *time.Ticker { return time.NewTicker(pause(rate)) }

// pause is the time from one step to the next.
func pause(rate int64) time.Duration {
	return max(time.Duration(float64(populateStep)/float64(rate)*float64(time.Second)), time.Millisecond)
}

// Healthy reports whether the server can serve a hit and take what is stored: it is
// not shutting down, new workers can map the pool, and the pool has its memory.
func (s *Server) Healthy() bool { return len(s.unhealthy()) == 0 }

// unhealthy says why not.
func (s *Server) unhealthy() []string {
	why := []string{}
	if s.draining.Load() {
		why = append(why, "it is shutting down")
	}
	if s.lost.Load() {
		why = append(why, "the pool's name in /dev/shm was removed: new workers cannot map it")
	}
	if err := s.memory.trouble.Load(); err != nil {
		why = append(why, (*err).Error())
	}
	return why
}
