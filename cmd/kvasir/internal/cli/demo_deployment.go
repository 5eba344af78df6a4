// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/kvasir-kv/kvasir/bench/workload"
	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/sim"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/sim/demo"
	"github.com/kvasir-kv/kvasir/sim/tables"
)

// Limits of the second part, which takes some seconds. It plays the first requests whose prompts are short enough.
const (
	deploymentRequests = 200
	deploymentTokens   = 12000 // most tokens of a prompt
)

// deployment plays requests through a server, a registry, P and D.
func (c *demoCmd) deployment(e *env, requests []workload.Request) error {
	if len(requests) == 0 {
		fmt.Fprintf(e.stderr, "no prompt is short enough for the second part: %d tokens at most\n", deploymentTokens)
		return nil
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	name := fmt.Sprintf("%skvasir_demo_pd_%d", lmcachePrefix, os.Getpid())
	command := func(args ...string) *exec.Cmd {
		cmd := exec.Command(self, append([]string{
			"server", "--host", "127.0.0.1", "--http-port", "0", "--l1-size-gb", fmt.Sprint(min(c.PoolGB, 256<<20)),
			"--chunk-size", "256", "--shm-name", name, "--log-level", "error",
		}, args...)...)
		cmd.Stderr = e.stderr
		cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "KVASIR_SERVER_") }) // they are meant for another server
		return cmd
	}
	fmt.Fprintf(e.stderr, "then the whole picture: a server process, a registry, P and D, %d requests through both, kill -9 of the server in the middle\n", len(requests))
	show, end := progress(e.stderr, "requests")
	r, err := demo.Run(e.ctx, demo.Options{
		Requests: requests, Progress: show, // no Log: the errors after the kill would fill it
		Server: func(port int) *exec.Cmd { return command("--port", strconv.Itoa(port)) },
	})
	end()
	err = errors.Join(err, command("--drop").Run())
	if r == nil {
		return err
	}
	interrupted := e.ctx.Err() != nil
	if !interrupted {
		printDeployment(e.stdout, r)
	}
	switch {
	case r.WrongBytes > 0 || r.Differ > 0:
		return errors.Join(err, fmt.Errorf("%d requests were given wrong KV, %d answers differ", r.WrongBytes, r.Differ))
	case interrupted:
		return fmt.Errorf("interrupted after %d of %d requests of the second part", r.Requests, len(requests))
	}
	return errors.Join(err, c.printModelled(e))
}

// printModelled plays the original's table in virtual time, and writes a page about it if a flag asks for that.
func (c *demoCmd) printModelled(e *env) error {
	t, err := tables.Play(e.ctx, tables.Options{})
	if err != nil {
		return err
	}
	fmt.Fprintf(e.stdout, "\nOn two A10 GPUs it would be, in virtual time, beside the table of vLLM's pull request (docs/measured/accuracy.md):\n")
	if err := t.PrintShort(e.stdout); err != nil {
		return err
	}
	if c.Plot != "" {
		f, err := os.Create(c.Plot)
		if err != nil {
			return err
		}
		if err := errors.Join(sim.TableReport(f, t), f.Close()); err != nil {
			return err
		}
		fmt.Fprintf(e.stdout, "The page with distributions and timelines: %s\n", c.Plot)
	}
	fmt.Fprintln(e.stdout, "Next, with vLLM: kvasir server --l1-size-gb 4, and the engine's line from kvasir server --help. Without a GPU: kvasir engine --help.")
	return nil
}

func printDeployment(w io.Writer, r *demo.Report) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(t, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	fmt.Fprintln(t)
	row("requests through P and D", "%d in %.1f s, %d failed", r.Requests, r.Elapsed.Seconds(), r.Failed)
	row("prompt tokens", "%s", thousands(uint64(r.PromptTokens)))
	row("pushed from P to D", "%s tokens, %s", thousands(uint64(r.Pushed)), kv.FormatBytes(r.Pushed*demo.TokenBytes))
	row("loaded from the server", "%s tokens, %s", thousands(uint64(r.FromCache)), kv.FormatBytes(r.FromCache*demo.TokenBytes))
	if r.KilledAfter > 0 {
		row("server killed (kill -9)", "after %d requests, answered again %v later", r.KilledAfter, r.BackAfter.Round(time.Millisecond))
	}
	row("wrong KV / other answers", "%d / %d", r.WrongBytes, r.Differ)
	_ = t.Flush()
	if r.Computed > 0 {
		fmt.Fprintf(w, "\nPrompt tokens to compute: %s without the server, %s with it (%.1f x less).\n",
			thousands(uint64(r.Alone)), thousands(uint64(r.Computed)), float64(r.Alone)/float64(r.Computed))
	}
}
