// SPDX-License-Identifier: Apache-2.0

// Package cli connects the commands: it turns flags into Options, calls constructors, handles signals, and closes everything in reverse
// order. It has no logic of its own.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/proxy"
	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/settings"
	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/sim"
	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/status"
	"github.com/kvasir-kv/kvasir/internal/hostmem"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// root is the whole command line. The tag `whole` marks commands that need all of it (settings.Alone).
type root struct {
	logFlags `group:"Log"`

	All       allCmd       `cmd:"" group:"Serve" help:"Run server, registry, relay and proxy in one process, from one file."`
	Server    serverCmd    `cmd:"" group:"Serve" help:"Serve KV chunks to LMCache clients (vLLM's LMCacheMPConnector)."`
	Proxy     proxyCmd     `cmd:"" group:"Serve" help:"Stand in front of engines (OpenAI API), prefill and decode apart or not."`
	Relay     relayCmd     `cmd:"" group:"Serve" help:"Stand between a prefill and a decode engine (vLLM's MooncakeConnector) and keep the KV that passes."`
	Bootstrap bootstrapCmd `cmd:"" group:"Serve" help:"Serve the registry through which vLLM's MooncakeConnector finds P."`
	StoreNode storeNodeCmd `cmd:"" group:"Serve" help:"Give memory to a Mooncake Store cluster."`
	Keeper    keeperCmd    `cmd:"" group:"Serve" help:"Hold directories of vLLM's fs offloading tier at a limit."`
	VLLMTier  vllmTierCmd  `cmd:"" group:"Serve" name:"vllm-tier" help:"Print the module by which vLLM's tiered offloading uses a server."`
	Config    configCmd    `cmd:"" group:"Serve" help:"Write a file for kvasir all to begin with, or check one."`

	Status  status.StatusCommand  `cmd:"" group:"Watch" help:"Ask a running server how it is and, in words, why hits are missing."`
	Top     status.TopCommand     `cmd:"" group:"Watch" help:"Watch a running server in a terminal."`
	Explain status.ExplainCommand `cmd:"" group:"Watch" help:"Ask a running server why lookups found no more than they did."`
	Advise  status.AdviseCommand  `cmd:"" group:"Watch" help:"Ask a running server what to buy or change for more hits."`

	Verify verifyCmd `cmd:"" group:"Watch" help:"Prove on running engines that KV which was stored and restored is right."`
	Doctor doctorCmd `cmd:"" group:"Watch" help:"Look at this machine for what keeps Kvasir from working well, and name the command that mends it."`

	Quota    status.QuotaCommand `cmd:"" group:"Data" help:"Show and set what tenants of a running server keep: quota, time to live, pins."`
	Clear    status.ClearCommand `cmd:"" group:"Data" help:"Have a running server forget what it stored, in the pool, the tiers and on servers that share them."`
	Pool     poolCmd             `cmd:"" group:"Data" help:"Show and remove what servers left in /dev/shm."`
	Tier     tierCmd             `cmd:"" group:"Data" help:"Show, check, empty and copy what lies below pools."`
	Store    storeCmd            `cmd:"" group:"Data" help:"Look into a Mooncake Store cluster: objects and where they are."`
	Transfer transferCmd         `cmd:"" group:"Data" help:"Move bytes between the memories of two processes (Mooncake's transfer engine over TCP)."`

	Demo        demoCmd        `cmd:"" group:"Try" help:"Play a workload on a server with simulated engines, check every byte, print a table."`
	Engine      engineCmd      `cmd:"" group:"Try" help:"Simulate a vLLM engine: OpenAI API, its scheduler, real KV bytes, the real connectors; no GPU."`
	Bench       benchCmd       `cmd:"" group:"Try" help:"Measure an endpoint of the OpenAI API as vllm bench serve does; compare results."`
	Sim         sim.Command    `cmd:"" group:"Try" help:"Run deployments in virtual time: the original's table, traces, held-out tables, sweeps."`
	Coordinator coordinatorCmd `cmd:"" group:"Try" help:"Show what the cache of a hybrid model keeps, finds and loads."`

	CurveKey   curveKeyCmd   `cmd:"" group:"Help" help:"Make a key for --curve-key, ZeroMQ's encryption."`
	Token      tokenCmd      `cmd:"" group:"Help" help:"Make a token for --token-file."`
	Version    versionCmd    `cmd:"" group:"Help" help:"Print the version."`
	HelpOf     helpCmd       `cmd:"" group:"Help" whole:"" name:"help" help:"Show the help of a command."`
	Completion completionCmd `cmd:"" group:"Help" whole:"" help:"Print a completion script for a shell."`
	Man        manCmd        `cmd:"" group:"Help" whole:"" help:"Write the manual's pages into a directory."`
}

// env is what commands share.
type env struct {
	ctx     context.Context // ends at SIGINT or SIGTERM
	stdout  io.Writer
	stderr  io.Writer
	log     *slog.Logger
	model   *kong.Application
	given   *settings.Settings
	flags   map[string]string // values of the command's flags by name, without secrets
	sources map[string]string // for each value: where it comes from
	ignored []string          // flags of LMCache's server that were given but have no effect here
	ready   func()            // called when a part of kvasir all listens; nil outside it
	parts   *admin.Parts      // other parts in the server's process; nil: none
}

// isReady must be called when a command listens. Soon after that, memory that only the start needed is returned to the system.
func (e *env) isReady() {
	time.AfterFunc(100*time.Millisecond, hostmem.GiveBack)
	if e.ready != nil {
		e.ready()
		return
	}
	notify(e.log, "READY=1")
}

// Main runs one command line and returns the exit code: 0, or 1 if the command failed, or 2 if the command line is wrong.
func Main(args []string, stdout, stderr io.Writer) int {
	args, ignored := dropLMCacheFlags(proxy.Args(asHelp(sim.Aliases(args))))
	line, err := readLine(args, stdout, stderr)
	if line.exit >= 0 {
		return line.exit // --help
	}
	given := line.given
	if err != nil {
		text, command := parseText(err), commandOf(err)
		if command == "kvasir proxy" {
			text = proxy.Foreign(text)
		}
		fmt.Fprintf(stderr, "kvasir: %s%s (see %s --help)\n", text, given.Origins(text), command)
		return 2
	}
	sig, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	e := &env{
		ctx: sig, stdout: stdout, stderr: stderr, model: line.parser.Model, given: given, ignored: ignored,
		log: newLog(stderr, line.log),
	}
	defer whenOver(sig, func() { notify(e.log, "STOPPING=1") })()
	if err := runOrCheck(e, line.ctx, given); err != nil {
		if code, ok := errors.AsType[exitError](err); ok {
			return int(code)
		}
		text := strings.ReplaceAll(err.Error(), "\n", "; ") // of joined errors
		text += given.Origins(text)
		_, ours := errors.AsType[*usageError](err)
		if _, ok := errors.AsType[*sim.UsageError](err); ok || ours {
			fmt.Fprintf(stderr, "kvasir: %s (see kvasir %s --help)\n", text, line.ctx.Selected().Path())
			return 2
		}
		fmt.Fprintf(stderr, "kvasir: %s\n", text)
		return 1
	}
	return 0
}

// guarding lists flags whose value, a secret or a file, decides whom a listener lets in.
var guarding = []string{"token-file", "tls-client-ca", "salt-secret-file", "curve-clients", "transfer-secret-file", "tenant-file", "admin-token", "api-keys", "token"}

// refuseEmpty returns an error if a flag of guarding is given with an empty value, for example from a variable that is not set: without
// the flag, the listener would let everyone in.
func refuseEmpty(ctx *kong.Context) error {
	for _, p := range ctx.Path {
		if f := p.Flag; f != nil && slices.Contains(guarding, f.Name) && f.Target.Kind() == reflect.String && f.Target.Len() == 0 {
			return usagef("--%s is empty: leave it out where it is not wanted", f.Name)
		}
	}
	return nil
}

// runOrCheck runs the command. With --check-config, it prints the command's flags instead.
func runOrCheck(e *env, ctx *kong.Context, given *settings.Settings) error {
	if err := refuseElsewhere(runtime.GOOS, ctx.Selected().Path()); err != nil {
		return err
	}
	c, ok := ctx.Selected().Target.Addr().Interface().(configurable)
	if !ok {
		return ctx.Run(e, &sim.Env{Ctx: e.ctx, Stdout: e.stdout, Stderr: e.stderr, Progress: progress})
	}
	if err := refuseEmpty(ctx); err != nil {
		return err
	}
	for _, v := range given.Misspelt(ctx.Selected(), os.Environ()) {
		e.log.Warn("an environment variable has no effect", "variable", v)
	}
	if c.checkOnly() {
		if err := c.check(e); err != nil {
			return err
		}
		if err := given.Print(e.stdout, ctx); err != nil {
			return err
		}
		if all, ok := c.(*allCmd); ok {
			return all.print(e.stdout)
		}
		return nil
	}
	noCoreFile(e)
	e.flags, e.sources = given.Values(ctx), given.Sources(ctx)
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	go func() {
		for {
			select {
			case <-hup:
				e.log.Info("SIGHUP does nothing: flags are read at the start only; restart to change them")
			case <-e.ctx.Done():
				return
			}
		}
	}()
	return ctx.Run(e)
}

// noCoreFile prevents that a crash writes prompts and secrets into a core file. Another process may raise the limit again with prlimit.
func noCoreFile(e *env) {
	var core syscall.Rlimit
	err := syscall.Getrlimit(syscall.RLIMIT_CORE, &core)
	if err == nil {
		core.Cur = 0
		err = syscall.Setrlimit(syscall.RLIMIT_CORE, &core)
	}
	if err != nil {
		e.log.Warn("a crash may write a core file with prompts and secrets", "err", err)
	}
}

// commandLine is a parsed command line.
type commandLine struct {
	parser *kong.Kong
	ctx    *kong.Context
	given  *settings.Settings
	log    logFlags
	exit   int // exit code after --help; -1: --help was not given
}

// readLine parses a command line, first with the flags of its command only, which is faster, and if that fails, with those of all
// commands.
func readLine(args []string, stdout, stderr io.Writer) (*commandLine, error) {
	if alone := settings.Alone(new(root), args); alone != nil {
		var one struct {
			logFlags `group:"Log"`
		}
		if l, err := parse(&one, &one.logFlags, args, stdout, stderr, alone, settings.New()); err == nil {
			return l, nil
		}
	}
	all := new(root)
	l, err := parse(all, &all.logFlags, args, stdout, stderr, nil, settings.New())
	return l, allFaults(l, err, args)
}

// lineError has all errors of a command line, and of the file that the command line names.
type lineError struct {
	first error
	texts []string
}

func (e *lineError) Error() string { return strings.Join(e.texts, "; ") }

// Unwrap returns the first error.
func (e *lineError) Unwrap() error { return e.first }

// allFaults adds to the first error of a file the errors in the rest of the file. It leaves out values that cannot be parsed, so that
// the others are checked, too.
func allFaults(l *commandLine, err error, args []string) error {
	if err == nil {
		return nil
	}
	all := &lineError{err, []string{parseText(err)}}
	for next := err; ; {
		file, ofFile := errors.AsType[settings.FileError](next)
		if ofFile && file.Unreadable() || !ofFile && !l.given.Skip(settings.FlagOf(next.Error())) {
			break
		}
		again := new(root)
		if _, next = parse(again, &again.logFlags, args, io.Discard, io.Discard, nil, l.given); next == nil {
			break
		}
		if text := parseText(next); !slices.Contains(all.texts, text) {
			all.texts = append(all.texts, text)
		}
	}
	if len(all.texts) == 1 {
		return err
	}
	return all
}

type exitCalled struct{}

func parse(grammar any, log *logFlags, args []string, stdout, stderr io.Writer, more kong.Option, given *settings.Settings) (l *commandLine, err error) {
	l = &commandLine{given: given, exit: -1}
	options := []kong.Option{
		kong.Name("kvasir"),
		kong.Description("Kvasir: the KV-cache data plane for LLM serving."),
		kong.Writers(stdout, stderr),
		kong.Exit(func(code int) { l.exit = code; panic(exitCalled{}) }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, FlagsLast: true, WrapUpperBound: 110}),
		kong.UsageOnError(),
		kong.Resolvers(l.given),
		wordsFlag,
	}
	options = append(options, numbers...)
	if more != nil {
		options = append(options, more)
	}
	if l.parser, err = kong.New(grammar, options...); err != nil {
		panic("BUG: command line: " + err.Error())
	}
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(exitCalled); !ok {
				panic(r)
			}
		}
	}()
	l.ctx, err = l.parser.Parse(args)
	l.log = *log
	return l, err
}
