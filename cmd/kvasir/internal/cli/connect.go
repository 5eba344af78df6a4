// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"
	"strings"
)

// engineFlag returns the flag that makes vllm serve use a server that listens at host and port. It sets kv_load_failure_policy, because
// with vLLM's default a failed load ends vLLM 0.32 itself.
func engineFlag(host string, port int) string {
	host = strings.Trim(host, "[]")
	switch {
	case isLoopback(host) && !strings.Contains(host, ":"):
		host = "localhost"
	case isEvery(host):
		if name, err := os.Hostname(); err == nil {
			host = name
		}
	}
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	return fmt.Sprintf(`--kv-transfer-config '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute",`+
		`"kv_connector_extra_config":{"lmcache.mp.host":"tcp://%s","lmcache.mp.port":%d,"lmcache.mp.mp_transfer_mode":"engine_driven"}}'`, host, port)
}
