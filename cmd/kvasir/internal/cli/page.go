// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/status"
	"github.com/kvasir-kv/kvasir/proxy"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// pageFlags are the flags of the page at /.
type pageFlags struct {
	Peers   []string `name:"peer" help:"Page of another node, to which this one's page has a link: http://HOST:PORT. Repeatable." placeholder:"URL" sep:"none" group:"Page"`
	Price   float64  `name:"gpu-hour-price" help:"Price of an hour of the GPUs that compute prompts, in any currency: the page shows what hits have saved; 0: no money is shown." default:"0" placeholder:"PRICE" group:"Page"`
	Prefill float64  `name:"prefill-tokens-per-second" help:"Prompt tokens that these GPUs compute in a second, for the time that hits have saved." default:"10000" group:"Page"`
}

func (f *pageFlags) check() (err error) {
	for _, p := range f.Peers {
		if e := admin.CheckPeer(p); e != nil {
			err = errors.Join(err, fmt.Errorf("--peer %w", e))
		}
	}
	return errors.Join(err, status.CheckCost(f.Price, f.Prefill))
}

// addProxy makes the page of the server in the same process show the engines of a proxy.
func addProxy(e *env, p *proxy.Proxy) {
	e.parts.AddProxy(func() []admin.ProxyEngine {
		out := []admin.ProxyEngine{}
		for _, s := range p.Engines() {
			out = append(out, admin.ProxyEngine{URL: s.URL, Role: s.Role, Reason: s.Reason, Well: s.Well, Draining: s.Draining, Requests: s.Requests, Models: s.Models})
		}
		return out
	}, func(url, role string, on bool) error {
		if !p.DrainEngine(url, role, on) {
			return admin.ErrNoEngine
		}
		e.log.Info("an engine is drained or takes requests again", "engine", url, "draining", on)
		return nil
	})
}
