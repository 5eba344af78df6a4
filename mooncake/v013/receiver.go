// SPDX-License-Identifier: Apache-2.0

package v013

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// NewReceiver returns a Receiver that pulls from the side channel that P's answer named; Source.Host and Source.Port carry it. Both
// engines must have the same TP size. Timeout is 60 s by default, as in vLLM 0.13.
func NewReceiver(cache *mooncake.Cache, o mooncake.ReceiverOptions) (*mooncake.Receiver, error) {
	o.Timeout = cmp.Or(o.Timeout, 60*time.Second)
	o.Dialect = dialect{cmp.Or(o.ConnectTimeout, 5*time.Second)}
	return mooncake.NewReceiver(cache, o)
}

// dialect is the mooncake.Dialect that pulls from a P of vLLM 0.13. connect limits the time to connect.
type dialect struct{ connect time.Duration }

func (dialect) Worker(from mooncake.Source, tpRank int) (string, error) {
	if from.Host == "" || from.Port < 1 || from.Port+tpRank > 65535 {
		return "", fmt.Errorf("%w: the side channel has no possible address: host %q, port %d", mooncake.ErrUnreachable, from.Host, from.Port+tpRank)
	}
	return "tcp://" + net.JoinHostPort(from.Host, strconv.Itoa(from.Port+tpRank)), nil
}

func (d dialect) Pull(ctx context.Context, addr string, p *wire.Pull) error {
	ids := slices.Sorted(maps.Keys(p.Wanted))
	m := wire.Pull013{Host: p.Host, Port: p.Port, Requests: ids}
	for i := range p.Regions {
		m.Bases = append(m.Bases, p.Regions[i].Base)
	}
	for _, id := range ids {
		m.Blocks = append(m.Blocks, slices.Concat(p.Wanted[id].Blocks...))
	}
	s := zmtp.NewReq(addr, zmtp.DealerOptions{ConnectTimeout: d.connect})
	if err := s.Start(); err != nil {
		return err
	}
	reply, err := s.Do(ctx, wire.AppendPull013(nil, &m))
	err = errors.Join(err, s.Close()) // if P has not answered, it sees that the connection ends
	switch {
	case err != nil:
		return err
	case len(reply) == 1 && string(reply[0]) == wire.Reply013Done:
		return nil
	}
	return fmt.Errorf("%w: %.100q", mooncake.ErrPeer, reply)
}
