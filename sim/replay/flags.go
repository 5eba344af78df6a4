// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/kvasir-kv/kvasir/bench/workload"
)

// PolicyFlags are the flags of kvasir sim evict.
type PolicyFlags struct {
	Trace      string          `required:"" help:"Trace: JSON lines with timestamp (ms), input_length, output_length, hash_ids; sessions of AIPerf; or agentic: made sessions of coding agents." placeholder:"FILE"`
	Format     workload.Format `name:"trace-format" help:"How lines are read: mooncake, timed (vLLM's timed_trace), or aiperf (sessions); default by the keys of each line." enum:",mooncake,timed,aiperf" default:"" placeholder:"NAME"`
	Capacities []int           `name:"capacity-blocks" help:"Sizes of the cache in blocks." default:"1000,2000,5000,10000,20000" placeholder:"N,..."`
	Policies   []string        `name:"policies" help:"Policies to play; default all." placeholder:"NAME,..."`
	Block      int             `name:"block-tokens" help:"Tokens of a hash id." default:"512"`
	Requests   int             `help:"Requests to play; 0 is all." default:"0" placeholder:"N"`
	CSV        string          `name:"csv" help:"Write the rows as CSV to this file." placeholder:"FILE"`
	SVG        string          `name:"plot" aliases:"svg" help:"Draw the block hit rates into this file." placeholder:"FILE"`
}

// Help returns the text of kvasir sim evict --help.
func (PolicyFlags) Help() string {
	return `What a store of each size would have had of a trace under each eviction policy, and what the optimum would have had, which
knows the future. Only full blocks count; a hit is a run of them from a prompt's start. JSON: rows of policy, capacity_blocks,
block_hit, token_hit, and default, the policy of kvasir server. docs/how/eviction.md describes the policies.

The trace may be longer than memory: beyond 67 million blocks of prompts (512 MiB) the rest is in temporary files without a name in
$TMPDIR, 8 bytes for each. About 100 bytes of memory for each different block remain, at most 67 million of these.

Examples:
  kvasir sim evict --trace conversation_trace.jsonl
  kvasir sim evict --trace conversation_trace.jsonl --capacity-blocks 1000,10000 --json -
  kvasir sim evict --trace agentic --block-tokens 256 --capacity-blocks 480
  kvasir sim evict --trace conversation_trace.jsonl --policies lru,leaf-hazard --csv rates.csv --plot rates.svg`
}

// Play reads the trace and plays the policies. The error is ErrOptions, workload.ErrTrace, ctx's, or one of files.
func (f *PolicyFlags) Play(ctx context.Context) (*PolicyResult, error) {
	o := PolicyOptions{Policies: f.Policies, Capacities: f.Capacities}
	if err := o.check(); err != nil {
		return nil, err
	}
	if f.Requests < 0 || f.Block < 1 {
		return nil, fmt.Errorf("%w: --requests %d is below 0, or --block-tokens %d below 1", ErrOptions, f.Requests, f.Block)
	}
	return CompareStream(ctx, workload.Stream(f.Trace, workload.TraceOptions{BlockTokens: f.Block, Max: f.Requests, Format: f.Format}), o)
}

// Files writes the output files for which the flags ask.
func (f *PolicyFlags) Files(r *PolicyResult) error {
	return errors.Join(writeFile(f.CSV, r.WriteCSV), writeFile(f.SVG, r.WriteSVG))
}

func writeFile(name string, write func(io.Writer) error) error {
	if name == "" {
		return nil
	}
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}
