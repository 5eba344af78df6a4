// SPDX-License-Identifier: Apache-2.0

package status

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"text/tabwriter"
	"time"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/sim"
	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/server/admin"
	"github.com/kvasir-kv/kvasir/store/tenant"
)

// QuotaCommand is kvasir quota. It shows and sets what single tenants of a running server have of their own.
type QuotaCommand struct {
	List   quotaListCommand   `cmd:"" help:"Show quota, use, time to live and pins of each tenant that has something of its own."`
	Set    quotaSetCommand    `cmd:"" help:"Set quota, time to live, or how much may be pinned, of one tenant."`
	Remove quotaRemoveCommand `cmd:"" help:"Take away what a tenant has of its own; its chunks stay."`
}

// Help returns the text that kvasir quota --help shows. It implements kong's detailed help.
func (QuotaCommand) Help() string {
	return `A tenant is a cache salt. Its quota is its guaranteed part of the pool; its time to live is the idle time after which its chunks are dropped;
its pin limit is how much POST /cache/pins may keep. A setting survives restarts of a server with --state FILE, and else ends with the server; --quota, --tenant-ttl and
--pin-limit set it at each start.
_default is the empty salt, __default a tenant called _default.

Examples:
  kvasir quota list
  kvasir quota set team-a --size 40GiB
  kvasir quota set team-a --ttl 24h --pins 2GiB
  kvasir quota set _default --ttl never
  kvasir quota remove team-a
  kvasir quota list --json | jq '.tenants[].bytes'`
}

type quotaListCommand struct{ askFlags }

// Help returns the text that kvasir quota list --help shows. It implements kong's detailed help.
func (quotaListCommand) Help() string {
	return `Examples:
  kvasir quota list
  kvasir quota list --url http://127.0.0.1:8081 --json`
}

// Run asks the server for its tenants and prints them.
func (c *quotaListCommand) Run(e *sim.Env) error {
	body, at, err := c.ask(e, http.MethodGet, "/tenants", nil)
	if err != nil {
		return err
	}
	var got admin.Tenants
	if err := json.Unmarshal(body, &got); err != nil || got.Tenants == nil {
		return fmt.Errorf("%s is not answered by a kvasir server", at)
	}
	if c.JSON {
		return printJSON(e, body)
	}
	return printTenants(e, got.Tenants)
}

func printTenants(e *sim.Env, list []admin.Tenant) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(e.Stdout, "No tenant has a quota, a time to live or pins of its own (kvasir quota set --help).")
		return err
	}
	t := tabwriter.NewWriter(e.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "TENANT\tQUOTA\tHAS\tEVICTED\tTTL\tEXPIRED\tPINNED\tMAY PIN")
	for _, u := range list {
		quota, has, evicted, ttl, expired, pinned, limit := "-", "-", "-", "-", "-", "-", "-"
		if u.Quota != nil {
			quota, has, evicted = kv.FormatBytes(*u.Quota), kv.FormatBytes(u.Bytes), kv.FormatBytes(int64(u.EvictedBytes))
		}
		if u.TTL != nil {
			ttl, expired = ttlWords(*u.TTL), Thousands(u.Expired)+" chunks"
		}
		if u.PinLimit > 0 || u.PinnedObjects > 0 {
			pinned, limit = kv.FormatBytes(u.PinnedBytes), kv.FormatBytes(u.PinLimit)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", printable(u.Salt), quota, has, evicted, ttl, expired, pinned, limit)
	}
	return t.Flush()
}

func ttlWords(seconds float64) string {
	if seconds < 0 {
		return "never"
	}
	return time.Duration(min(seconds, tenant.MaxTTL.Seconds()) * float64(time.Second)).String()
}

type quotaSetCommand struct {
	Salt string `arg:"" help:"Cache salt; _default is the empty one."`
	Size string `help:"What it keeps of the pool: GiB, or with a unit, as 512MiB; none takes it away." placeholder:"SIZE"`
	TTL  string `name:"ttl" help:"Idle time after which a chunk is dropped: 90s, 24h, never, or default for the server's --ttl-seconds." placeholder:"TIME"`
	Pins string `help:"How much of it may be pinned at a time: as --size." placeholder:"SIZE"`
	askFlags
}

// Help returns the text that kvasir quota set --help shows. It implements kong's detailed help.
func (quotaSetCommand) Help() string {
	return `What is not named stays as it is.

Examples:
  kvasir quota set team-a --size 40GiB
  kvasir quota set team-a --ttl 30m --pins 2GiB
  kvasir quota set team-a --size none --ttl default`
}

// Run sets the values that the flags name, and prints what the tenant has after that.
func (c *quotaSetCommand) Run(e *sim.Env) error {
	body := map[string]any{}
	for _, f := range []struct{ flag, field, value string }{{"--size", "quota_bytes", c.Size}, {"--pins", "pin_limit_bytes", c.Pins}} {
		var bytes options.GiB
		switch {
		case f.value == "":
		case f.value == "none":
			body[f.field] = nil
		case bytes.UnmarshalText([]byte(f.value)) != nil:
			return sim.UsageErrorf("%s %q is no size, as 40GiB or 512MiB, and not none", f.flag, f.value)
		default:
			body[f.field] = int64(bytes)
		}
	}
	switch c.TTL {
	case "":
	case "default":
		body["ttl_seconds"] = nil
	default:
		ttl, err := admin.ParseTTL(c.TTL)
		if err != nil {
			return sim.UsageErrorf("--ttl %v", err)
		}
		body["ttl_seconds"] = ttl.Seconds()
		if ttl == tenant.Forever {
			body["ttl_seconds"] = -1
		}
	}
	if len(body) == 0 {
		return sim.UsageErrorf("say what to set: --size, --ttl or --pins")
	}
	answer, at, err := c.ask(e, http.MethodPut, "/tenants/"+url.PathEscape(c.Salt), body)
	if err != nil {
		return err
	}
	var got admin.SetTenant
	if err := json.Unmarshal(answer, &got); err != nil || got.Salt == "" {
		return fmt.Errorf("%s is not answered by a kvasir server", at)
	}
	if c.JSON {
		return printJSON(e, answer)
	}
	if err := printTenants(e, []admin.Tenant{got.Tenant}); err != nil || got.KeptIn != "" {
		return err
	}
	_, err = fmt.Fprintln(e.Stdout, "This ends with the server: kvasir server --state FILE keeps what is set over restarts.")
	return err
}

type quotaRemoveCommand struct {
	Salt string `arg:"" help:"Cache salt; _default is the empty one."`
	askFlags
}

// Help returns the text that kvasir quota remove --help shows. It implements kong's detailed help.
func (quotaRemoveCommand) Help() string {
	return `Its quota and time to live end, and so do its pins. Its chunks stay, and may be evicted for other tenants.

Examples:
  kvasir quota remove team-a`
}

// Run removes what the tenant has of its own.
func (c *quotaRemoveCommand) Run(e *sim.Env) error {
	answer, at, err := c.ask(e, http.MethodDelete, "/tenants/"+url.PathEscape(c.Salt), nil)
	if err != nil {
		return err
	}
	var got struct{ Status string }
	switch err := json.Unmarshal(answer, &got); {
	case err != nil || got.Status != "removed" && got.Status != "not_found":
		return fmt.Errorf("%s is not answered by a kvasir server", at)
	case got.Status == "not_found":
		return fmt.Errorf("tenant %s has nothing of its own (kvasir quota list)", printable(c.Salt))
	case c.JSON:
		return printJSON(e, answer)
	}
	_, err = fmt.Fprintf(e.Stdout, "removed what %s had of its own; its chunks stay\n", printable(c.Salt))
	return err
}
