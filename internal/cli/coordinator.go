package cli

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/kvasir-kv/kvasir/coordinator"
)

// coordinatorCmd shows what a hybrid model's cache keeps, finds and loads.
type coordinatorCmd struct {
	Layout []string `arg:"" optional:"" help:"The model's groups as words (see the examples), or the JSON of a vector file's cfg."`

	Prompt    int    `help:"Prompt length in tokens." default:"2048"`
	Vectors   string `help:"Show a case of this vector file instead (.json or .json.gz)." placeholder:"FILE"`
	Case      string `help:"Which case of --vectors: its id; default the first." placeholder:"ID"`
	Original  bool   `help:"Decide as vLLM 0.23.0, not as 0.33.0 (or the release of --vectors)."`
	Corrected bool   `help:"Decide rightly where vLLM errs."`
	ASCII     bool   `name:"ascii" help:"Draw without block characters."`
}

// Help implements kong's detailed help.
func (coordinatorCmd) Help() string {
	return `A stored prefix is a hit only when every group of layers can continue from it, and each group
needs other blocks of it. This shows, per group, what is stored, what a hit loads and what is
never needed. docs/hybrid-hits.md teaches the rules.

Examples:
  kvasir coordinator full,bs=16 --prompt 4096
  kvasir coordinator full,bs=16 swa,bs=16,win=1024 --prompt 8192
  kvasir coordinator full,bs=16 mamba,bs=32,mode=align --corrected`
}

const maxVectorFile = 256 << 20

// Run draws one situation.
func (c *coordinatorCmd) Run(e *env) error {
	o := coordinator.Options{Corrected: c.Corrected, Lenient: true}
	if c.Original {
		o.Dialect = coordinator.Original
	}
	if c.Vectors != "" {
		return c.explainCase(e, o)
	}
	if len(c.Layout) == 0 {
		return fmt.Errorf("%w: name the model's groups, for example: kvasir coordinator full,bs=16 swa,bs=16,win=1024", errUsage)
	}
	layout, err := coordinator.ParseLayout(strings.Join(c.Layout, " "))
	if err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	return coordinator.Explain(e.stdout, coordinator.Explanation{Layout: layout, Options: o, Prompt: c.Prompt, ASCII: c.ASCII})
}

func (c *coordinatorCmd) explainCase(e *env, o coordinator.Options) error {
	f, err := os.Open(c.Vectors)
	if err != nil {
		return err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxVectorFile))
	if err != nil {
		return err
	}
	if z, zerr := gzip.NewReader(bytes.NewReader(data)); zerr == nil {
		if data, err = io.ReadAll(io.LimitReader(z, maxVectorFile)); err != nil {
			return fmt.Errorf("read %s: %w", c.Vectors, err)
		}
	}
	v, err := coordinator.ParseVectors(data)
	if err != nil {
		return fmt.Errorf("read %s: %w", c.Vectors, err)
	}
	if !c.Original {
		o.Dialect = v.Dialect
	}
	for i := range v.Cases {
		if c.Case == "" || v.Cases[i].ID == c.Case {
			return v.Cases[i].Explain(e.stdout, o, c.ASCII)
		}
	}
	return fmt.Errorf("%w: %s has no case %q", errUsage, c.Vectors, c.Case)
}
