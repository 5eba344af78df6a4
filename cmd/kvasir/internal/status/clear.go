// SPDX-License-Identifier: Apache-2.0

package status

import (
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/sim"
)

// ClearCommand is kvasir clear. It makes a running server forget what it stored.
type ClearCommand struct {
	Model []string `help:"In the tiers forget this model only. Repeatable; default: all models. The pool is always cleared whole." placeholder:"NAME"`
	Tier  string   `help:"l1: the pool. l2: the tiers below it. all: both." default:"all" enum:"l1,l2,all"`
	Force bool     `help:"Forget also what lookups in progress have pinned. Without it they keep it until the next clear."`
	askFlags
}

// Help returns the text that kvasir clear --help shows. It implements kong's detailed help.
func (ClearCommand) Help() string {
	return `After a weight update under the same model name, the KV of the old weights must not be served: clear the model once the engines have the new weights.
The clear reaches all tiers and all servers that share them. docs/operate/clear.md has the rules.

Examples:
  kvasir clear --model Qwen/Qwen2.5-7B --force
  kvasir clear --tier l1
  kvasir clear --url http://127.0.0.1:8081 --json`
}

// Run sends the request and prints what the server says.
func (c *ClearCommand) Run(e *sim.Env) error {
	answer, at, err := c.ask(e, http.MethodPost, "/cache/clear", map[string]any{"tier": c.Tier, "force": c.Force, "models": c.Model})
	if err != nil {
		return err
	}
	var got struct {
		Status  string
		Cleared *struct {
			Tier   string
			Chunks int
			Stays  string
		}
	}
	if err := json.Unmarshal(answer, &got); err != nil || got.Status != "ok" || got.Cleared == nil {
		return fmt.Errorf("%s is not answered by a kvasir server", at)
	}
	if c.JSON {
		return printJSON(e, answer)
	}
	what := map[string]string{"l1": "the pool", "l2": "the tiers", "all": "the pool and the tiers"}[got.Cleared.Tier]
	if _, err = fmt.Fprintf(e.Stdout, "cleared %s: %s chunks left the pool\n", what, Thousands(uint64(max(0, got.Cleared.Chunks)))); err != nil || got.Cleared.Stays == "" {
		return err
	}
	_, err = fmt.Fprintln(e.Stdout, "what stays: "+printable(got.Cleared.Stays))
	return err
}
