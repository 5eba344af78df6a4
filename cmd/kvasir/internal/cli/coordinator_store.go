// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/mooncake/store"
	"github.com/kvasir-kv/kvasir/mooncake/store/connector"
	"github.com/kvasir-kv/kvasir/sim/engine"
)

// storeFlags name a store, and a prompt to look for in it.
type storeFlags struct {
	Master  []string      `help:"Ask this Mooncake Store's master, HOST:PORT, which prefix of a prompt is there; name --model, and --hashes or --tokens." group:"A real store" placeholder:"HOST:PORT"`
	Model   string        `help:"Name of the model, as the engines call it." group:"A real store"`
	Ranks   int           `name:"tensor-parallel-size" help:"Ranks of the engines." default:"1" group:"A real store"`
	Prefix  string        `name:"cache-prefix" help:"The engines' cache_prefix." group:"A real store"`
	Hashes  string        `help:"A file with the hashes of the prompt's hash units, hexadecimal, as vLLM's KV events have them." type:"existingfile" group:"A real store" placeholder:"FILE"`
	Tokens  string        `help:"A file with the prompt's token ids, whose hashes are those of kvasir engine." type:"existingfile" group:"A real store" placeholder:"FILE"`
	Timeout time.Duration `help:"Time for all questions." default:"30s" group:"A real store"`
}

// maxPromptFile is the largest file of hashes or token ids, in bytes; a larger one is refused.
const maxPromptFile = 256 << 20

// explain asks the store for the prompt's blocks, and prints which of them it has.
func (c *storeFlags) explain(e *env, layout coordinator.Layout, release coordinator.Release, ascii bool) error {
	var f faults
	mo := store.MasterOptions{Addresses: c.Master}
	options.Each(mo.Validate(), func(e *options.Error) { f.unless(false, "--master %s", e.Text) })
	f.unless(c.Model != "", "--master needs --model: keys have the model's name")
	f.unless((c.Hashes == "") != (c.Tokens == ""), "--master needs --hashes or --tokens: a prompt")
	f.unless(c.Ranks >= 1 && c.Ranks <= 4096, "--tensor-parallel-size %d is outside 1 to 4096", c.Ranks)
	f.unless(c.Timeout > 0, "--timeout %v is not above 0", c.Timeout)
	if err := f.err(); err != nil {
		return err
	}
	s, err := connector.NewScheduler(connector.Options{Layout: layout, Release: release, Model: c.Model, Prefix: c.Prefix, Ranks: c.Ranks})
	if err != nil {
		return usagef("%v", err)
	}
	p, err := c.prompt(layout.HashUnit)
	if err != nil {
		return err
	}
	m, err := store.NewMaster(mo)
	if err != nil {
		return err
	}
	defer m.Close()
	ctx, cancel := context.WithTimeout(e.ctx, c.Timeout)
	defer cancel()
	version, err := m.Version(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintf(e.stdout, "Mooncake %v at %s, model %s, %d ranks\n", version, strings.Join(c.Master, " "), printable(c.Model), c.Ranks)
	return s.Explain(ctx, e.stdout, m, &p, ascii)
}

// prompt reads the file of --hashes or --tokens. A prompt given by hashes gets one more token: the one that an engine must compute.
func (c *storeFlags) prompt(unit int) (p connector.Prompt, err error) {
	if c.Hashes != "" {
		path := c.Hashes
		text, err := readPrompt(path)
		if err != nil {
			return p, err
		}
		if p, err = connector.ParseDigests(strings.Fields(string(text))); err != nil {
			return p, usagef("--hashes %s: %v", path, err)
		}
		p.Tokens = p.Units()*unit + 1
		return p, nil
	}
	tokens, err := readTokens(c.Tokens)
	if err != nil {
		return p, err
	}
	p.Tokens = len(tokens)
	p.Digests, p.Size = engine.Digests(tokens, unit, "")
	return p, nil
}

// readPrompt reads a file of a prompt.
func readPrompt(path string) ([]byte, error) {
	if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() || info.Size() > maxPromptFile {
		return nil, usagef("%s: a file of at most %d bytes is wanted", path, maxPromptFile)
	}
	return os.ReadFile(path)
}

// readTokens reads the file of --tokens: token ids as a JSON list, or separated by blanks.
func readTokens(path string) (tokens []uint32, err error) {
	text, err := readPrompt(path)
	if err != nil {
		return nil, err
	}
	for word := range strings.FieldsFuncSeq(string(text), func(r rune) bool { return strings.ContainsRune(" \t\r\n,[]", r) }) {
		n, err := strconv.ParseUint(word, 10, 32)
		if err != nil {
			return nil, usagef("--tokens %s: %.40q is no token id", path, word)
		}
		tokens = append(tokens, uint32(n))
	}
	return tokens, nil
}
