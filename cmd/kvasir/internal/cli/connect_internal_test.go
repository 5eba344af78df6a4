// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
)

// The line for engines names where the server listens, as JSON that vLLM reads.
func TestEngineFlag(t *testing.T) {
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for host, want := range map[string]string{
		"127.0.0.1": "tcp://localhost", "localhost": "tcp://localhost", "10.0.0.5": "tcp://10.0.0.5", "0.0.0.0": "tcp://" + name, "::1": "tcp://[::1]", "fd00::1": "tcp://[fd00::1]",
	} {
		flag, text, _ := strings.Cut(engineFlag(host, 5556), " ")
		var got struct {
			Connector string         `json:"kv_connector"`
			Extra     map[string]any `json:"kv_connector_extra_config"`
		}
		err := json.Unmarshal([]byte(strings.Trim(text, "'")), &got)
		if err != nil || flag != "--kv-transfer-config" || got.Connector != "LMCacheMPConnector" || got.Extra["lmcache.mp.host"] != want || got.Extra["lmcache.mp.port"] != 5556.0 {
			t.Errorf("%s: %s %s, %v", host, flag, text, err)
		}
	}
}
