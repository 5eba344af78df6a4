// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	"github.com/kvasir-kv/kvasir/internal/takeover"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/sim/api"
	"github.com/kvasir-kv/kvasir/sim/engine"
	"github.com/kvasir-kv/kvasir/sim/kvconfig"
)

// likeSGLang changes the options for --like sglang. It returns an error if flags do not fit --like sglang, or need another --like than the
// given one.
func (c *engineCmd) likeSGLang(o *engine.Options) (err error) {
	switch {
	case c.VLLMTier != "" || c.Requests != 0:
		return usagef("--vllm-tier and --requests are for --like vllm-tiering")
	case c.Like != "sglang" && c.Mode != "null":
		return usagef("--disaggregation-mode is for --like sglang: vLLM has --kv-transfer-config")
	case c.Like != "sglang":
		return nil
	}
	if err := c.checkSGLang(); err != nil {
		return err
	}
	if c.Mode == "decode" {
		o.Connectors, err = kvconfig.Parse([]byte(`{"kv_connector":"MooncakeConnector","kv_role":"kv_consumer"}`))
	}
	return err
}

// checkSGLang returns an error for flags that cannot be used with --like sglang.
func (c *engineCmd) checkSGLang() error {
	var bad faults
	bad.unless(c.Transfer == "", "--kv-transfer-config is vLLM's: --like sglang has --disaggregation-mode")
	bad.unless(c.DPSize == 1 && c.PPSize == 1, "--like sglang has one data-parallel rank and one pipeline stage")
	bad.unless(c.Release == "current", "--release is vLLM's")
	bad.port("--disaggregation-bootstrap-port", c.BootPort, false)
	return bad.err()
}

// openBoot starts P's bootstrap server, at which P registers.
func (c *engineCmd) openBoot(e *env, o *engine.Options) (closeBoot func() error, err error) {
	l, err := takeover.ListenTCP(e.ctx, c.Host, c.BootPort)
	if err != nil {
		return nil, takeover.ExplainListen(err, "--host", "--disaggregation-bootstrap-port")
	}
	registry, err := bootstrap.Open(bootstrap.Options{Log: e.log})
	if err != nil {
		_ = l.Close() // the first error counts
		return nil, err
	}
	boot := api.NewBoot(registry, c.Block, 1)
	boot.Register()
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := boot.Serve(ctx, o.Networks.Listener(l)); err != nil && ctx.Err() == nil {
			e.log.Error("the bootstrap server ended", "err", err)
		}
	})
	closeBoot = func() error { stop(); wg.Wait(); return registry.Close() }
	address, _ := json.Marshal(l.Addr().String()) // a string always encodes
	config := fmt.Sprintf(`{"kv_connector":"MooncakeConnector","kv_role":"kv_producer","kv_connector_extra_config":{"bootstrap_server_address":%s}}`, address)
	if o.Connectors, err = kvconfig.Parse([]byte(config)); err != nil {
		return nil, err
	}
	return closeBoot, nil
}
