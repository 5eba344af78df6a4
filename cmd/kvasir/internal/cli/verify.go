// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/status"
	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/verify"
)

// verifyCmd tests that restored KV is right.
type verifyCmd struct {
	URL       string `name:"url" required:"" help:"Engine, or a proxy before engines: its OpenAI API. vLLM and SGLang must report cached tokens (--enable-prompt-tokens-details, --enable-cache-report)." placeholder:"http://HOST:PORT"`
	SecondURL string `name:"second-url" help:"Another engine of the same model that shares the cache: what it does not compute was restored." placeholder:"http://HOST:PORT"`
	SingleURL string `name:"single-url" help:"An engine of the same model alone, to compare prefill and decode engines (--url) with." placeholder:"http://HOST:PORT"`
	Server    string `help:"HTTP interface of the kvasir server, to try its tiers, to see what it loaded, and to remove the prompts at the end. Its token needs the scope admin." placeholder:"http://HOST:PORT"`
	status.AccessFlags
	saltFlags

	Key    string `name:"api-key" help:"API key of the engines; best as KVASIR_VERIFY_API_KEY." placeholder:"KEY"`
	Model  string `help:"Model; default: the first one that the engine names." placeholder:"NAME"`
	Keep   string `help:"Leave the prompts in the cache, and write them with their answers to this file, for --expect." placeholder:"FILE"`
	Expect string `help:"Check the prompts of this file, which --keep wrote, and nothing else: after a restart, an upgrade, other weights." placeholder:"FILE"`

	Prompts      int           `help:"Prompts of each step." default:"3"`
	PromptTokens int           `name:"prompt-tokens" help:"About how many tokens a prompt has." default:"1200"`
	MaxTokens    int           `name:"max-tokens" help:"Tokens of an answer." default:"16"`
	FillTokens   int           `name:"fill-tokens" help:"Prompt tokens to send at most, so that the engine's own cache has no room for earlier prompts; a little more than the engine has KV memory for. 0: that step is left out." default:"0"`
	Pause        time.Duration `help:"Time for stores to end, before KV is asked for." default:"2s"`
	Rate         float64       `help:"Requests a second at most, to each engine." default:"4"`
	Tolerance    float64       `help:"Difference of log-probabilities that is always allowed; twice the largest one of two cold runs is, too. 0.001 does for float32." default:"0.1"`

	JSON bool   `name:"json" help:"Print the report as one JSON object."`
	HTML string `name:"html" help:"Also write the report as a page to this file." placeholder:"FILE"`
}

// Help returns the text that kvasir verify --help shows. It implements kong's detailed help.
func (verifyCmd) Help() string {
	return `Sends prompts with planted facts, under cache salts of its own, and compares answers from restored KV with computed ones: greedy tokens,
log-probabilities, cached tokens. It restarts and clears nothing. A step that cannot be made is not tested, never passed.
Exit 0: passed; 1: failed; 3: no restored KV could be tested. docs/operate/verify.md has the steps.

Examples:
  kvasir verify --url http://10.0.0.7:8000 --second-url http://10.0.0.8:8000
  kvasir verify --url http://10.0.0.7:8000 --second-url http://10.0.0.8:8000 --server http://127.0.0.1:8080 --html report.html
  kvasir verify --url http://10.0.0.7:8000 --server http://127.0.0.1:8080 --fill-tokens 400000 --json | jq .verdict
  kvasir verify --url http://10.0.0.7:8000 --keep prompts.json      (then restart the server and the engine)
  kvasir verify --url http://10.0.0.7:8000 --expect prompts.json`
}

// maxKept is the largest file for --expect, in bytes; a larger one is refused as malformed.
const maxKept = 64 << 20

// serverAt is the HTTP interface of a server at an address.
type serverAt struct {
	base  string
	asker *status.Asker
}

// Ask implements verify.Server.
func (s *serverAt) Ask(ctx context.Context, method, path string, body any) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return s.asker.Ask(ctx, method, s.base+path, body)
}

// Run runs the tests and prints the report.
func (c *verifyCmd) Run(e *env) error {
	o, err := c.options()
	if err != nil {
		return err
	}
	r, kept, err := verify.Run(e.ctx, o)
	if err != nil {
		return err
	}
	if kept != nil {
		if err := writeFile(c.Keep, func(w io.Writer) error { return json.NewEncoder(w).Encode(kept) }); err != nil {
			return err
		}
	}
	if c.HTML != "" {
		if err := writeFile(c.HTML, r.WriteHTML); err != nil {
			return err
		}
	}
	return e.report(r, c.JSON)
}

func (c *verifyCmd) options() (o verify.Options, err error) {
	var bad faults
	bad.unless(c.Keep == "" || c.Expect == "", "--keep begins what --expect ends: give one of them")
	bad.unless(c.Prompts >= 1 && c.Prompts <= 1000, "--prompts is 1 to 1,000")
	bad.unless(c.PromptTokens >= 64 && c.PromptTokens <= 1_000_000, "--prompt-tokens is 64 to 1,000,000")
	bad.unless(c.MaxTokens >= 1 && c.MaxTokens <= 1000, "--max-tokens is 1 to 1,000")
	bad.unless(c.FillTokens >= 0, "--fill-tokens is not below 0")
	bad.unless(c.Rate > 0 && c.Rate <= 1e6, "--rate is above 0")
	bad.unless(c.Pause >= 0 && c.Pause <= time.Hour, "--pause is at most an hour")
	bad.unless(c.Tolerance > 0 && c.Tolerance <= 10, "--tolerance is above 0, and 10 at most")
	for flag, at := range map[string]string{"--url": c.URL, "--second-url": c.SecondURL, "--single-url": c.SingleURL, "--server": c.Server} {
		u, err := url.Parse(at)
		bad.unless(at == "" || err == nil && u.Host != "" && (u.Scheme == "http" || u.Scheme == "https"), "%s %.100q is not http://HOST:PORT", flag, at)
	}
	if err := bad.err(); err != nil {
		return o, err
	}
	o = verify.Options{
		URL: c.URL, SecondURL: c.SecondURL, SingleURL: c.SingleURL, Key: c.Key, Model: c.Model, Prompts: c.Prompts, PromptTokens: c.PromptTokens,
		MaxTokens: c.MaxTokens, FillTokens: c.FillTokens, Pause: c.Pause, Rate: c.Rate, Tolerance: c.Tolerance, Keep: c.Keep != "",
	}
	if c.Server != "" {
		asker, err := c.Asker()
		if err != nil {
			return o, err
		}
		o.Server = &serverAt{strings.TrimSuffix(c.Server, "/"), asker}
	}
	var a access
	if err := c.saltFlags.open(&a); err != nil {
		return o, err
	}
	if a.salts != nil {
		o.Sign = a.salts.Sign
	}
	if c.Expect != "" {
		if o.Kept, err = readKept(c.Expect); err != nil {
			return o, fmt.Errorf("--expect %s: %w", c.Expect, err)
		}
	}
	return o, nil
}

// readKept reads a file that --keep has written.
func readKept(path string) (*verify.Kept, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	k := new(verify.Kept)
	if err := json.NewDecoder(io.LimitReader(f, maxKept)).Decode(k); err != nil {
		return nil, fmt.Errorf("it is not what kvasir verify --keep writes: %w", err)
	}
	return k, nil
}

// writeFile writes what the function `write` writes to a file. It creates a missing file, which only its owner may read, and replaces the
// content of an existing one.
func writeFile(path string, write func(io.Writer) error) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}

// report is the findings of a command, and its exit code.
type report interface {
	Write(w io.Writer) error
	WriteJSON(w io.Writer) error
	ExitCode() int
}

// report prints a report, as JSON or for people. It returns the report's exit code as an error, unless the code is 0.
func (e *env) report(r report, asJSON bool) error {
	write := r.Write
	if asJSON {
		write = r.WriteJSON
	}
	if err := write(e.stdout); err != nil {
		return err
	}
	if code := r.ExitCode(); code != 0 {
		return exitError(code)
	}
	return nil
}
