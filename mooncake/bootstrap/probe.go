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
	p := &prober{timeout: timeout, slots: make(chan struct{}, limit)}
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
	var probes []*probe
	why := "no address that can be probed"
	for _, w := range workers[:min(len(workers), maxProbesPerEngine)] {
		host, err := probeAddr(w)
		if err != nil {
			why = err.Error()
			continue
		}
		probes = append(probes, p.start(host))
	}
	for _, pr := range probes {
		select {
		case <-pr.done:
			if why = pr.why; pr.gone {
				return true, why
			}
		case <-ctx.Done(): // it hangs; one after it may have answered
			why = fmt.Sprintf("no answer within %v", p.timeout)
		}
	}
	return false, why
}

// start joins the probe of an address that is under way, or starts one.
func (p *prober) start(host string) *probe {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pr := p.mu.running[host]; pr != nil {
		return pr
	}
	pr := &probe{done: make(chan struct{})}
	select {
	case p.slots <- struct{}{}:
	default:
		pr.why = fmt.Sprintf("%d probes are under way", cap(p.slots))
		close(pr.done)
		return pr
	}
	p.mu.running[host] = pr
	p.wg.Go(func() {
		defer func() { <-p.slots }()
		conn, err := (&net.Dialer{Timeout: p.timeout}).DialContext(p.ctx, "tcp", host)
		switch {
		case err == nil:
			conn.Close()
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
	return pr
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
