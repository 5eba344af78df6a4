// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/sim"
	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/status"
	tiertool "github.com/kvasir-kv/kvasir/cmd/kvasir/internal/tier"
	"github.com/kvasir-kv/kvasir/tier"
)

// tierCmd looks after what lies below pools.
type tierCmd struct {
	Ls     tierLsCmd     `cmd:"" help:"Show what a tier has."`
	Verify tierVerifyCmd `cmd:"" help:"Read everything that has a checksum, and compare."`
	Drop   tierDropCmd   `cmd:"" help:"Remove what a tier has."`
	Copy   tierCopyCmd   `cmd:"" help:"Copy what one tier has to another."`
	Check  tierCheckCmd  `cmd:"" help:"Try a tier: whether it answers, what this user may do, and how fast. Exit 0: all works; 1: something cannot be done, such as writing; 2: the tier cannot be used."`
}

// Help implements kong's detailed help.
func (tierCmd) Help() string {
	return `A TIER is the JSON of kvasir server --l2-adapter, or short: fs:/data/kv, fs_native:/data/kv, redis:10.0.0.7:6379,
s3_native:BUCKET/PREFIX (region, endpoint and credentials from AWS_REGION, AWS_ENDPOINT_URL and where else Amazon's programs look).
A server may work on it at the same time.

Examples:
  kvasir tier ls fs:/data/kv
  kvasir tier verify fs:/data/kv --remove
  kvasir tier check s3_native:my-bucket/kvasir
  kvasir tier drop fs:/data/kv --model Qwen/Qwen2.5-7B-Instruct
  kvasir tier drop disk --all --url http://127.0.0.1:8080     (of a running server)
  kvasir tier copy fs:/data/kv fs:/mnt/new
  kvasir tier copy fs:/data/kv redis:10.0.0.7:6379
  kvasir tier copy fs:/data/kv s3_native:my-bucket/kvasir`
}

type tierLsCmd struct {
	Tier    string `arg:"" help:"TYPE:PATH or JSON."`
	Objects bool   `help:"A line for each object."`
}

// Run lists.
func (c *tierLsCmd) Run(e *env) error {
	return tiertool.With(c.Tier, e.log, func(t tier.Tier) error { return tiertool.List(e.ctx, e.stdout, t, c.Objects) })
}

type tierVerifyCmd struct {
	Tier   string `arg:"" help:"TYPE:PATH or JSON."`
	Remove bool   `help:"Remove damaged objects: they become misses, and are stored again."`
}

// Run compares.
func (c *tierVerifyCmd) Run(e *env) error {
	return tiertool.With(c.Tier, e.log, func(t tier.Tier) error { return tiertool.Verify(e.ctx, e.stdout, t, c.Remove) })
}

type tierDropCmd struct {
	Tier  string `arg:"" help:"TYPE:PATH or JSON. With --url the name that the server's status has for the tier, such as disk or redis."`
	URL   string `name:"url" help:"HTTP interface of a running server, which removes it: the only way for its --disk." placeholder:"http://HOST:PORT"`
	Model string `help:"Only what belongs to this model."`
	Salt  string `help:"Only objects of this cache salt."`
	Torn  bool   `help:"Only torn objects."`
	All   bool   `help:"Everything."`
}

// Run removes.
func (c *tierDropCmd) Run(e *env, asking *sim.Env) error {
	if c.All == (c.Model != "" || c.Salt != "" || c.Torn) {
		return usagef("say what to remove: --model, --salt, --torn, or --all alone")
	}
	if c.URL != "" {
		if c.Salt != "" || c.Torn {
			return usagef("--url takes --model or --all: a server does not look for salts and torn objects")
		}
		return status.DropTier(asking, c.URL, c.Tier, c.Model)
	}
	return tiertool.With(c.Tier, e.log, func(t tier.Tier) error {
		return tiertool.Drop(e.ctx, e.stdout, t, tiertool.Filter{Model: c.Model, Salt: c.Salt, Torn: c.Torn})
	})
}

type tierCopyCmd struct {
	From string `arg:"" help:"TYPE:PATH or JSON."`
	To   string `arg:"" help:"TYPE:PATH or JSON; made when it is not there."`
}

// Run copies.
func (c *tierCopyCmd) Run(e *env) error {
	return tiertool.CopyBetween(e.ctx, e.stdout, e.log, c.From, c.To)
}

type tierCheckCmd struct {
	Tier    string  `arg:"" help:"TYPE:PATH or JSON."`
	Size    mibSize `help:"Size of an object: MiB, or with a unit." default:"4"`
	Objects int     `help:"How many objects are written and read." default:"16"`
}

// Run tries the tier.
func (c *tierCheckCmd) Run(e *env) error {
	if c.Size < 1 || c.Size > 1<<30 || c.Objects < 1 || c.Objects > 10_000 {
		return usagef("--size is 1 byte to 1 GiB, --objects 1 to 10,000")
	}
	if v := tiertool.CheckTier(e.ctx, e.stdout, e.log, c.Tier, int64(c.Size), c.Objects); v != tiertool.Good {
		return exitError(v)
	}
	return nil
}
