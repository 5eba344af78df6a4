// SPDX-License-Identifier: Apache-2.0

package status

import (
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/sim"
)

// DropTier makes a running server remove the objects of one of its tiers: those of a model, or all if model is empty. With asJSON it
// prints one JSON object.
func DropTier(e *sim.Env, url string, access AccessFlags, tier, model string, asJSON bool) error {
	f := askFlags{interfaceFlags: interfaceFlags{URL: url, AccessFlags: access}, Timeout: maxPatience}
	answer, at, err := f.ask(e, http.MethodPost, "/tiers/drop", map[string]any{"tier": tier, "model": model})
	if err != nil {
		return err
	}
	var got struct {
		Status  string
		Removed int
	}
	if err := json.Unmarshal(answer, &got); err != nil || got.Status != "ok" {
		return fmt.Errorf("%s is not answered by a kvasir server", at)
	}
	if asJSON {
		return json.NewEncoder(e.Stdout).Encode(map[string]any{"tier": tier, "removed": max(0, got.Removed)})
	}
	_, err = fmt.Fprintf(e.Stdout, "removed %s objects of tier %s\n", Thousands(uint64(max(0, got.Removed))), printable(tier))
	return err
}
