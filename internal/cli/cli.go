// Package cli wires the commands: flags to Options, constructors, signals, and
// closing in reverse order. It holds no logic of its own.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/alecthomas/kong"
)

// root is the command line.
type root struct {
	LogLevel slog.Level `help:"Least severe lines to log: debug, info, warn, error." default:"info" enum:"debug,info,warn,error,DEBUG,INFO,WARN,ERROR"`

	Server      serverCmd      `cmd:"" help:"Serve KV chunks to LMCache clients (vLLM's LMCacheMPConnector)."`
	Demo        demoCmd        `cmd:"" help:"Play a workload on a server with simulated engines, check every byte, print a table."`
	Coordinator coordinatorCmd `cmd:"" help:"Show what the cache of a hybrid model keeps, finds and loads."`
	Transfer    transferCmd    `cmd:"" help:"Move bytes between the memories of two processes (Mooncake's transfer engine over TCP)."`
	Relay       relayCmd       `cmd:"" help:"Stand between a prefill and a decode engine (vLLM's MooncakeConnector) and keep the KV that passes."`
	Bootstrap   bootstrapCmd   `cmd:"" help:"Serve the registry through which vLLM's MooncakeConnector finds P."`
	Version     versionCmd     `cmd:"" help:"Print the version."`
}

// env is what commands share.
type env struct {
	ctx     context.Context // ends at SIGINT or SIGTERM
	stdout  io.Writer
	stderr  io.Writer
	log     *slog.Logger
	ignored []string // flags of LMCache's server that were given and mean nothing here
}

type versionCmd struct{}

func (versionCmd) Run(e *env) error {
	_, err := fmt.Fprintln(e.stdout, "kvasir", Version())
	return err
}

// Version returns the module version or VCS revision of this build.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && (v == "" || v == "(devel)") {
			v = "devel-" + s.Value[:min(12, len(s.Value))]
		}
	}
	if v == "" || v == "(devel)" {
		return "devel"
	}
	return v
}

// errUsage marks errors that a look at --help answers.
var errUsage = errors.New("usage")

// Main runs one command line and returns the exit code: 0, 1 when the command
// failed, 2 when the command line is wrong.
func Main(args []string, stdout, stderr io.Writer) int {
	var cmd root
	exit := -1
	parser, err := kong.New(&cmd,
		kong.Name("kvasir"),
		kong.Description("Kvasir: the KV-cache data plane for LLM serving."),
		kong.Writers(stdout, stderr),
		kong.Exit(func(code int) { exit = code; panic(exitCalled{}) }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, FlagsLast: true, WrapUpperBound: 110}),
		kong.UsageOnError(),
	)
	if err != nil {
		panic("BUG: command line: " + err.Error())
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	args, ignored := dropLMCacheFlags(args)
	ctx, err := parse(parser, args)
	if exit >= 0 {
		return exit // --help
	}
	if err != nil {
		fmt.Fprintf(stderr, "kvasir: %v (see kvasir --help)\n", err)
		return 2
	}
	sig, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	lines := &lineWriter{w: stderr}
	defer lines.flush()
	e := &env{
		ctx: sig, stdout: stdout, stderr: stderr, ignored: ignored,
		log: slog.New(&lineHandler{level: cmd.LogLevel, out: lines}),
	}
	slog.SetDefault(e.log)
	if err := ctx.Run(e); err != nil {
		lines.flush()
		fmt.Fprintf(stderr, "kvasir: %v\n", err)
		if errors.Is(err, errUsage) {
			return 2
		}
		return 1
	}
	return 0
}

type exitCalled struct{}

func parse(p *kong.Kong, args []string) (ctx *kong.Context, err error) {
	defer func() {
		if r := recover(); r != nil {
			if _, ok := r.(exitCalled); !ok {
				panic(r)
			}
		}
	}()
	return p.Parse(args)
}
