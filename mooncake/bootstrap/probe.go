package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"time"
)

// prober finds out whether something listens at a side channel. It shares probes
// of one address and bounds how many run.
type prober struct {
	timeout time.Duration
	dial    func(ctx context.Context, host string) error
	slots   chan struct{}
	ctx     context.Context // ends at close
	cancel  context.CancelFunc
	wg      sync.WaitGroup

	mu struct {
		sync.Mutex
		running map[string]*probe
	}
}

type probe struct {
	done chan struct{}
	gone bool   // the connection was refused: nobody listens
	why  string // in words
}

func newProber(timeout time.Duration, limit int) *prober {
	p := &prober{timeout: timeout, slots: make(chan struct{}, limit), dial: dialTCP}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.mu.running = map[string]*probe{}
	return p
}

// close ends the probes under way. No call may follow.
func (p *prober) close() {
	p.cancel()
	p.wg.Wait()
}

// maxProbesPerEngine bounds the addresses tried for one decision.
const maxProbesPerEngine = 4

// anyGone reports whether one of the workers' side channels refuses connections,
// and says what was found. An engine works only whole, so one closed side channel
// means that the engine is gone; all of them need not be closed, since another
// process may have got a port of the old engine. It returns after the probe
// timeout at the latest.
func (p *prober) anyGone(ctx context.Context, workers []worker) (bool, string) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	type trial struct {
		*probe
		host   string
		joined bool
	}
	var trials []trial
	why := "no address that can be probed"
	for _, w := range workers[:min(len(workers), maxProbesPerEngine)] {
		host, err := probeAddr(w)
		if err != nil {
			why = err.Error()
			continue
		}
		pr, joined := p.start(host)
		trials = append(trials, trial{pr, host, joined})
	}
	for _, tr := range trials {
		gone := false
		if gone, why = tr.wait(ctx, p.timeout); !gone && tr.joined && ctx.Err() == nil {
			// It began before we asked, so it may be out of date; what is running now is not.
			again, _ := p.start(tr.host)
			gone, why = again.wait(ctx, p.timeout)
		}
		if gone {
			return true, why
		}
	}
	return false, why
}

// wait returns the outcome; when ctx is done, what is known by then.
func (pr *probe) wait(ctx context.Context, timeout time.Duration) (bool, string) {
	select {
	case <-pr.done:
		return pr.gone, pr.why
	default:
	}
	select {
	case <-pr.done:
		return pr.gone, pr.why
	case <-ctx.Done():
		return false, fmt.Sprintf("no answer within %v", timeout)
	}
}

// start joins the probe of an address that is under way, or starts one.
func (p *prober) start(host string) (_ *probe, joined bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pr := p.mu.running[host]; pr != nil {
		return pr, true
	}
	pr := &probe{done: make(chan struct{})}
	p.mu.running[host] = pr
	p.wg.Go(func() {
		ctx, cancel := context.WithTimeout(p.ctx, p.timeout)
		defer cancel()
		err := p.try(ctx, host)
		switch {
		case err == nil:
			pr.why = host + " accepts connections"
		case errors.Is(err, syscall.ECONNREFUSED):
			pr.gone, pr.why = true, host+" refuses connections"
		default:
			pr.why = err.Error()
		}
		p.mu.Lock()
		delete(p.mu.running, host)
		p.mu.Unlock()
		close(pr.done)
	})
	return pr, false
}

// try dials when a slot is free: those who refuse answer fast.
func (p *prober) try(ctx context.Context, host string) error {
	select {
	case p.slots <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("%d probes are under way", cap(p.slots))
	}
	defer func() { <-p.slots }()
	return p.dial(ctx, host)
}

func dialTCP(ctx context.Context, host string) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", host)
	if err != nil {
		return err
	}
	return conn.Close()
}

// probeAddr returns host:port of a side channel.
func probeAddr(w worker) (string, error) {
	hostport, ok := strings.CutPrefix(w.addr, "tcp://")
	host, port, err := net.SplitHostPort(hostport)
	if !ok || err != nil || host == "" || port == "" || port == "0" {
		return "", fmt.Errorf("address %.100q is not tcp://HOST:PORT", w.addr)
	}
	ip, err := netip.ParseAddr(host)
	if (err == nil && (ip.IsLoopback() || ip.IsUnspecified()) || host == "localhost") && w.remote {
		return "", fmt.Errorf("%s was registered by another host", w.addr)
	}
	return hostport, nil
}
