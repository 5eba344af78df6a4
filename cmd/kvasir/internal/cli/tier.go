// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/sim"
	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/status"
	tiertool "github.com/kvasir-kv/kvasir/cmd/kvasir/internal/tier"
	"github.com/kvasir-kv/kvasir/server"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/adapter"
	"github.com/kvasir-kv/kvasir/tier/seal"
)

// tierCmd manages the tiers below pools.
type tierCmd struct {
	Ls     tierLsCmd     `cmd:"" help:"Show what a tier has."`
	Verify tierVerifyCmd `cmd:"" help:"Read everything that has a checksum, and compare."`
	Drop   tierDropCmd   `cmd:"" help:"Remove what a tier has."`
	Copy   tierCopyCmd   `cmd:"" help:"Copy what one tier has to another."`
	Rekey  tierRekeyCmd  `cmd:"" help:"Have a running server encrypt a tier anew with the first of its keys."`
	Check  tierCheckCmd  `cmd:"" help:"Try a tier: whether it answers, what this user may do, and how fast. Exit 0: all works; 1: something cannot be done, such as writing; 2: the tier cannot be used."`
}

// Help returns the text that kvasir tier --help shows. It implements kong's detailed help.
func (tierCmd) Help() string {
	return `A TIER is the JSON of kvasir server --l2-adapter, or short: fs:/data/kv, fs_native:/data/kv, redis:10.0.0.7:6379,
s3_native:BUCKET/PREFIX (region, endpoint and credentials from AWS_REGION, AWS_ENDPOINT_URL and where else Amazon's programs look).
A server may work on it at the same time. Encrypted objects of disk, redis and s3_native need the server's --tier-key-file, --tier-key-command
or KVASIR_TIER_KEYS; without it they are not shown.

Examples:
  kvasir tier ls fs:/data/kv
  kvasir tier verify fs:/data/kv --remove
  kvasir tier check s3_native:my-bucket/kvasir
  kvasir tier drop fs:/data/kv --model Qwen/Qwen2.5-7B-Instruct
  kvasir tier drop disk --all --url http://127.0.0.1:8080     (of a running server)
  kvasir tier rekey disk --url http://127.0.0.1:8080          (of a running server)
  kvasir tier copy fs:/data/kv fs:/mnt/new
  kvasir tier copy fs:/data/kv redis:10.0.0.7:6379
  kvasir tier copy fs:/data/kv s3_native:my-bucket/kvasir`
}

// tierKeyFlags say where the keys of encrypted tiers come from.
type tierKeyFlags struct {
	KeyFile    adapter.KeyFile `name:"tier-key-file" help:"Keys of an encrypted tier, as the server has them. Also KVASIR_TIER_KEYS, the keys themselves." placeholder:"FILE"`
	KeyCommand adapter.Command `name:"tier-key-command" help:"Shell command that prints them." placeholder:"COMMAND"`
}

func (f *tierKeyFlags) source() seal.Source {
	return seal.Source{File: string(f.KeyFile), Command: string(f.KeyCommand), Text: adapter.EnvironmentKeys()}
}

type tierRekeyCmd struct {
	Tier string `arg:"" help:"The name that the server's status has for the tier, such as disk or redis."`
	URL  string `name:"url" required:"" help:"HTTP interface of the running server." placeholder:"http://HOST:PORT"`
	status.AccessFlags
	Rate mibSize `name:"rate-mib" help:"Bytes that are read and written in a second, at most: MiB, or with a unit." default:"128"`
	JSON bool    `name:"json" help:"Print a line of JSON each second, and one at the end."`
}

// Help returns the text that kvasir tier rekey --help shows. It implements kong's detailed help.
func (tierRekeyCmd) Help() string {
	return `Rotate a key: put a new line before the others of the server's --tier-key-file, run this, then remove the old line. The server reads the
keys again at once. Objects that have the newest key are left alone, so a rekey that was broken off goes on.

Examples:
  kvasir tier rekey disk --url http://127.0.0.1:8080
  kvasir tier rekey redis --url http://127.0.0.1:8080 --rate-mib 32 --json | tail -1`
}

// Run asks the server to rekey the tier.
func (c *tierRekeyCmd) Run(_ *env, asking *sim.Env) error {
	if c.Rate < 1<<20 || int64(c.Rate) > server.MaxRekeyRate {
		return usagef("--rate-mib is 1 MiB to 1 TiB a second")
	}
	return status.RekeyTier(asking, c.URL, c.AccessFlags, c.Tier, int64(c.Rate), c.JSON)
}

type tierLsCmd struct {
	Tier    string `arg:"" help:"TYPE:PATH or JSON."`
	Objects bool   `help:"A line for each object."`
	tierKeyFlags
	JSON bool `name:"json" help:"Print JSON: one object, or with --objects a line for each."`
}

// Help returns the text that kvasir tier ls --help shows. It implements kong's detailed help.
func (tierLsCmd) Help() string {
	return `Examples:
  kvasir tier ls fs:/data/kv
  kvasir tier ls s3_native:my-bucket/kvasir --json | jq .total
  kvasir tier ls redis:10.0.0.7:6379 --objects`
}

// Run lists the content of the tier.
func (c *tierLsCmd) Run(e *env) error {
	list := tiertool.List
	if c.JSON {
		list = tiertool.ListJSON
	}
	return tiertool.With(c.Tier, c.source(), e.log, func(t tier.Tier) error { return list(e.ctx, e.stdout, t, c.Objects) })
}

type tierVerifyCmd struct {
	Tier string `arg:"" help:"TYPE:PATH or JSON."`
	tierKeyFlags
	Remove bool `help:"Remove damaged objects: they become misses, and are stored again."`
	JSON   bool `name:"json" help:"Print a line of JSON for each damaged object, and one with the figures."`
}

// Help returns the text that kvasir tier verify --help shows. It implements kong's detailed help.
func (tierVerifyCmd) Help() string {
	return `Examples:
  kvasir tier verify fs:/data/kv
  kvasir tier verify fs:/data/kv --remove
  kvasir tier verify disk:/mnt/nvme/kv --json`
}

// Run compares the objects of the tier with their checksums.
func (c *tierVerifyCmd) Run(e *env) error {
	verify := tiertool.Verify
	if c.JSON {
		verify = tiertool.VerifyJSON
	}
	return tiertool.With(c.Tier, c.source(), e.log, func(t tier.Tier) error { return verify(e.ctx, e.stdout, t, c.Remove) })
}

type tierDropCmd struct {
	Tier string `arg:"" help:"TYPE:PATH or JSON. With --url the name that the server's status has for the tier, such as disk or redis."`
	URL  string `name:"url" help:"HTTP interface of a running server, which removes it: the only way for its --disk." placeholder:"http://HOST:PORT"`
	status.AccessFlags
	Model string `help:"Only what belongs to this model."`
	Salt  string `help:"Only objects of this cache salt."`
	Torn  bool   `help:"Only torn objects."`
	All   bool   `help:"Everything."`
	JSON  bool   `name:"json" help:"Print what was removed as one JSON object."`
}

// Help returns the text that kvasir tier drop --help shows. It implements kong's detailed help.
func (tierDropCmd) Help() string {
	return `Examples:
  kvasir tier drop fs:/data/kv --model Qwen/Qwen2.5-7B-Instruct
  kvasir tier drop fs:/data/kv --torn --json
  kvasir tier drop disk --all --url http://127.0.0.1:8080     (of a running server)`
}

// Run removes objects from the tier.
func (c *tierDropCmd) Run(e *env, asking *sim.Env) error {
	if c.All == (c.Model != "" || c.Salt != "" || c.Torn) {
		return usagef("say what to remove: --model, --salt, --torn, or --all alone")
	}
	if c.URL != "" {
		if c.Salt != "" || c.Torn {
			return usagef("--url takes --model or --all: a server does not look for salts and torn objects")
		}
		return status.DropTier(asking, c.URL, c.AccessFlags, c.Tier, c.Model, c.JSON)
	}
	drop := tiertool.Drop
	if c.JSON {
		drop = tiertool.DropJSON
	}
	return tiertool.With(c.Tier, seal.Source{}, e.log, func(t tier.Tier) error {
		return drop(e.ctx, e.stdout, t, tiertool.Filter{Model: c.Model, Salt: c.Salt, Torn: c.Torn})
	})
}

type tierCopyCmd struct {
	From string `arg:"" help:"TYPE:PATH or JSON."`
	To   string `arg:"" help:"TYPE:PATH or JSON; made when it is not there."`
	tierKeyFlags
	JSON bool `name:"json" help:"Print a line of JSON for each object that cannot be read, every 10 s one with the figures, and one at the end."`
}

// Help returns the text that kvasir tier copy --help shows. It implements kong's detailed help.
func (tierCopyCmd) Help() string {
	return `Examples:
  kvasir tier copy fs:/data/kv fs:/mnt/new
  kvasir tier copy fs:/data/kv redis:10.0.0.7:6379
  kvasir tier copy fs:/data/kv fs:/mnt/new --json | tail -1`
}

// Run copies objects from one tier to another.
func (c *tierCopyCmd) Run(e *env) error {
	report := tiertool.CopyText(e.stdout)
	if c.JSON {
		report = tiertool.CopyJSON(e.stdout)
	}
	return tiertool.CopyBetween(e.ctx, report, e.log, c.source(), c.From, c.To)
}

type tierCheckCmd struct {
	Tier string  `arg:"" help:"TYPE:PATH or JSON."`
	Size mibSize `help:"Size of an object: MiB, or with a unit." default:"4"`
	tierKeyFlags
	Objects int  `help:"How many objects are written and read." default:"16"`
	JSON    bool `name:"json" help:"Print the sentences and the verdict as JSON."`
}

// Help returns the text that kvasir tier check --help shows. It implements kong's detailed help.
func (tierCheckCmd) Help() string {
	return `Examples:
  kvasir tier check s3_native:my-bucket/kvasir
  kvasir tier check fs:/data/kv --size 16 --objects 64
  kvasir tier check redis:10.0.0.7:6379 --json | jq .verdict`
}

// Run tests the tier.
func (c *tierCheckCmd) Run(e *env) error {
	if c.Size < 1 || c.Size > 1<<30 || c.Objects < 1 || c.Objects > 10_000 {
		return usagef("--size is 1 byte to 1 GiB, --objects 1 to 10,000")
	}
	var said strings.Builder
	w := e.stdout
	if c.JSON {
		w = &said
	}
	v := tiertool.CheckTier(e.ctx, w, e.log, c.source(), c.Tier, int64(c.Size), c.Objects)
	if c.JSON {
		if err := tiertool.CheckJSON(e.stdout, v, said.String()); err != nil {
			return err
		}
	}
	if v != tiertool.Good {
		return exitError(v)
	}
	return nil
}
