// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"strings"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
)

// coordinatorCmd shows, for a hybrid model, what its cache stores, finds and loads.
type coordinatorCmd struct {
	Layout []string `arg:"" optional:"" help:"The model's groups as words (see the examples) or as JSON."`

	Prompt  int    `help:"Prompt length in tokens." default:"2048"`
	Release string `help:"Decide as this published vLLM, its defects included: 0.23 or 0.33. Default: as Kvasir does." enum:",0.23,0.33" default:"" placeholder:"VERSION"`
	Remote  bool   `help:"Also say how often a store is asked that answers over a network: in batches, and for a window only where one could end."`
	ASCII   bool   `name:"ascii" help:"Draw without block characters."`

	storeFlags
}

// Help returns the text that kvasir coordinator --help shows. It implements kong's detailed help.
func (coordinatorCmd) Help() string {
	return `A stored prefix is a hit only when every group of layers can continue from it, and each group
needs other blocks of it. This shows, per group, what is stored, what a hit loads and what is
never needed. docs/how/hybrid-hits.md teaches the rules.

Examples:
  kvasir coordinator full,bs=16 --prompt 4096
  kvasir coordinator full,bs=16 swa,bs=16,win=1024 --prompt 8192
  kvasir coordinator full,bs=16 swa,bs=16,win=1024 --prompt 32768 --remote
  kvasir coordinator full,bs=16 mamba,bs=32,mode=align --release 0.33
  kvasir coordinator full,bs=16 swa,bs=16,win=1024 --master 127.0.0.1:50051 --model simulated --tokens PROMPT.json`
}

var releases = map[string]coordinator.Release{"0.23": coordinator.VLLM023, "0.33": coordinator.VLLM033}

// Run draws one situation.
func (c *coordinatorCmd) Run(e *env) error {
	if len(c.Layout) == 0 {
		return usagef("name the model's groups, for example: kvasir coordinator full,bs=16 swa,bs=16,win=1024")
	}
	layout, err := coordinator.ParseLayout(strings.Join(c.Layout, " "))
	if err != nil {
		return usagef("%v", err)
	}
	if len(c.Master) > 0 {
		return c.explain(e, layout, releases[c.Release], c.ASCII)
	}
	err = coordinator.Explain(e.stdout, coordinator.Explanation{
		Layout: layout, Options: coordinator.Options{Release: releases[c.Release]}, Prompt: c.Prompt, ASCII: c.ASCII, Remote: c.Remote,
	})
	if wrong, ok := errors.AsType[*coordinator.Error](err); ok {
		return usagef("%v", wrong)
	}
	return err
}
