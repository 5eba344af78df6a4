// SPDX-License-Identifier: Apache-2.0

package cli

import "github.com/kvasir-kv/kvasir/tier/vllm"

// vllmTierCmd prints the Python module that vLLM loads to use a server as a tier.
type vllmTierCmd struct{}

// Help returns the text that kvasir vllm-tier --help shows. It implements kong's detailed help.
func (vllmTierCmd) Help() string {
	return `vLLM's tiered offloading copies KV from the GPU into host memory, and hands that memory to secondary tiers. This module is such a
tier: engines of a host share the pool of one kvasir server, which outlives them and leads on to its disk, Redis, S3 or a
Mooncake Store. It needs Python's standard library and vLLM alone.

Examples:
  kvasir server --l1-size-gb 100 --vllm-tier /run/kvasir.sock
  kvasir vllm-tier > kvasir_tier.py     (into a folder of PYTHONPATH)
  PYTHONPATH=. vllm serve MODEL --kv-transfer-config '{"kv_connector":"OffloadingConnector","kv_role":"kv_both",
    "kv_connector_extra_config":{"spec_name":"TieringOffloadingSpec","cpu_bytes_to_use":10737418240,"secondary_tiers":[
      {"type":"KvasirTier","module_path":"kvasir_tier","socket_path":"/run/kvasir.sock"}]}}'

docs/operate/vllm-tier.md has the options, and which releases of vLLM are served.`
}

// Run prints the module.
func (vllmTierCmd) Run(e *env) error {
	_, err := e.stdout.Write(vllm.Shim)
	return err
}
