// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	_ "embed"

	"github.com/alecthomas/kong"

	"github.com/kvasir-kv/kvasir/cmd/kvasir/internal/settings"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// allCmd runs, in one process, the commands for which a file has sections.
type allCmd struct {
	Config      string `help:"YAML file: a section for each command to run (server, bootstrap, relay, proxy), with its flags; log-level and log-format stand above them." default:"kvasir.yaml" placeholder:"FILE" sections:"bootstrap,server,relay,proxy" group:"Configuration"`
	CheckConfig bool   `help:"Check the file, print all flags as such a file with where each comes from, and end." group:"Configuration"`

	parts []*part
}

// Help returns the text that kvasir all --help shows. It implements kong's detailed help.
func (allCmd) Help() string {
	return `Examples:
  kvasir config init          (writes kvasir.yaml)
  kvasir config check
  kvasir all
  kvasir all --config /etc/kvasir.yaml

Each section is what kvasir server, bootstrap, relay or proxy does; a section that is missing is not run. The
environment counts before the file, as for the commands alone (KVASIR_SERVER_PORT). The parts start in
the order registry, server, relay, proxy and end in reverse. docs/operate/all.md has the rules.`
}

func (c *allCmd) checkOnly() bool { return c.CheckConfig }

// part is a section of the file, parsed as the command line of its command.
type part struct {
	name  string
	given *settings.Settings
	ctx   *kong.Context
	cmd   configurable
	run   func(*env) error
}

// env returns the env of a part. Its flags and log are the part's own; everything else is that of e.
func (p *part) env(e *env) *env {
	return &env{
		ctx: e.ctx, stdout: e.stdout, stderr: e.stderr, log: e.log.With("part", p.name), given: p.given,
		flags: p.given.Values(p.ctx), sources: p.given.Sources(p.ctx), parts: e.parts, ready: e.ready,
	}
}

// fault returns a part's error as a usageError that names the part, and from where the flags come.
func (p *part) fault(err error) error {
	if file, ok := errors.AsType[settings.FileError](err); ok {
		return usagef("%s", file.Error()) // its text names file and line
	}
	text := p.name + ": " + strings.ReplaceAll(parseText(err), "\n", "; ")
	return &usageError{text + p.given.Origins(text)}
}

// check reads all sections. The error lists what is wrong in any of them.
func (c *allCmd) check(e *env) error {
	var errs []error
	c.parts = nil
	if err := e.given.Faults(); err != nil {
		errs = append(errs, usagef("%s", err))
	}
	var at []address
	var registry *address
	for _, name := range []string{"bootstrap", "server", "relay", "proxy"} {
		given, ok := e.given.Section(name)
		if !ok {
			continue
		}
		if name == "relay" && registry != nil && registry.Port != 0 {
			given.Default("upstream", registry.URL(), "the section bootstrap")
		}
		p, wrong := readPart(name, given)
		if p.cmd != nil {
			if err := p.cmd.check(p.env(e)); err != nil {
				wrong = append(wrong, p.fault(err))
			}
		}
		if errs = append(errs, wrong...); len(wrong) > 0 {
			continue
		}
		at = append(at, addressesOf(p)...)
		if name == "bootstrap" {
			registry = &at[0]
		}
		c.parts = append(c.parts, p)
	}
	if len(c.parts)+len(errs) == 0 {
		return usagef("%s has no section: server, bootstrap, relay or proxy", c.Config)
	}
	for _, text := range addressConflicts(at) {
		errs = append(errs, usagef("%s", text))
	}
	return errors.Join(errs...)
}

// readPart parses a section as if its flags were on a command line, and returns every error in it. It leaves out values that cannot be
// parsed, so that the others are checked, too. If a section cannot be parsed at all, its part has no command.
func readPart(name string, given *settings.Settings) (p *part, wrong []error) {
	for {
		p = &part{name: name, given: given}
		options := append([]kong.Option{
			kong.Name("kvasir"), kong.Resolvers(given), kong.Writers(io.Discard, io.Discard), settings.Alone(new(root), []string{name}),
		}, numbers...)
		k, err := kong.New(new(struct{}), options...)
		if err != nil {
			panic("BUG: sections: " + err.Error())
		}
		p.ctx, err = k.Parse([]string{name})
		if err == nil {
			break
		}
		wrong = append(wrong, p.fault(err))
		if !given.Skip(settings.FlagOf(err.Error())) {
			return p, wrong
		}
	}
	if err := given.Faults(); err != nil {
		wrong = append(wrong, p.fault(err))
	}
	if err := refuseEmpty(p.ctx); err != nil {
		wrong = append(wrong, p.fault(err))
	}
	c := p.ctx.Selected().Target.Addr().Interface().(interface {
		configurable
		Run(e *env) error
	})
	p.cmd, p.run = c, c.Run
	return p, wrong
}

// addressesOf returns the addresses on which a part listens.
func addressesOf(p *part) []address {
	of := func(flag, host string, port int) address {
		return address{Part: p.name, Flag: flag, Host: host, Port: port}
	}
	switch c := p.cmd.(type) {
	case *serverCmd:
		out := []address{of("--port", c.Host, c.Port), of("--http-port", c.HTTPHost, c.HTTPPort)}
		events, _ := c.addresses() // they were checked
		for _, a := range events {
			a.Part = p.name
			out = append(out, a)
		}
		return out
	case *bootstrapCmd:
		return []address{of("--port", c.Host, c.Port)}
	case *relayCmd:
		return []address{of("--port", c.Host, c.Port)}
	case *proxyCmd:
		return []address{of("--port", c.Host, c.Port), of("--admin-port", c.AdminHost, c.AdminPort)}
	}
	return nil
}

// print writes the parts as the sections of a file.
func (c *allCmd) print(w io.Writer) error {
	for _, p := range c.parts {
		var b bytes.Buffer
		if err := p.given.Print(&b, p.ctx); err != nil {
			return err
		}
		text := "  " + strings.ReplaceAll(strings.TrimSuffix(b.String(), "\n"), "\n", "\n  ")
		if _, err := fmt.Fprintf(w, "%s:\n%s\n", p.name, text); err != nil {
			return err
		}
	}
	return nil
}

// Run runs the parts until a signal, or until one of them ends.
func (c *allCmd) Run(e *env) error {
	if err := c.check(e); err != nil {
		return err
	}
	e.parts = new(admin.Parts)
	var parts []runPart
	for i, p := range c.parts {
		for _, v := range p.given.Misspelt(p.ctx.Selected(), os.Environ()) {
			e.log.Warn("an environment variable has no effect", "variable", v)
		}
		parts = append(parts, runPart{Name: p.name, Run: func(ctx context.Context, ready func()) error {
			own := p.env(e)
			own.ctx, own.ready = ctx, ready
			if i == len(c.parts)-1 { // it is the last part, so all others are ready
				own.ready = func() { ready(); notify(e.log, "READY=1") }
			}
			if err := p.run(own); err != nil {
				return fmt.Errorf("%w%s", err, p.given.Origins(err.Error()))
			}
			return nil
		}})
	}
	err := runTogether(e.ctx, e.log, parts...)
	if err == nil {
		e.log.Info("all parts have ended")
	}
	return err
}

// configCmd writes and checks the files of kvasir all.
type configCmd struct {
	Init  configInitCmd  `cmd:"" help:"Write a file with the four sections and the most common settings."`
	Check configCheckCmd `cmd:"" help:"Check a file, and print each flag with where it is from. The same as kvasir all --check-config."`
}

type configInitCmd struct {
	File  string `arg:"" optional:"" help:"Where to write; - is standard output." default:"kvasir.yaml"`
	Force bool   `help:"Replace a file that is there."`
}

//go:embed all.yaml
var exampleFile []byte

// Run writes the file.
func (c *configInitCmd) Run(e *env) error {
	if c.File == "-" {
		_, err := e.stdout.Write(exampleFile)
		return err
	}
	if info, err := os.Stat(c.File); err == nil && !info.Mode().IsRegular() {
		return fmt.Errorf("%s is no file: name the file to write, as %s", c.File, filepath.Join(c.File, "kvasir.yaml"))
	}
	how := os.O_WRONLY | os.O_CREATE | os.O_EXCL
	if c.Force {
		how = os.O_WRONLY | os.O_CREATE | os.O_TRUNC
	}
	f, err := os.OpenFile(c.File, how, 0o644)
	if errors.Is(err, os.ErrExist) {
		return fmt.Errorf("%s is there already: --force replaces it", c.File)
	}
	if err != nil {
		return err
	}
	if _, err := f.Write(exampleFile); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := f.Close(); err != nil {
		return err
	}
	_, err = fmt.Fprintf(e.stdout, "%s is written: change it, then kvasir config check %[1]s, and kvasir all --config %[1]s\n", c.File)
	return err
}

type configCheckCmd struct {
	File string `arg:"" optional:"" help:"The file." default:"kvasir.yaml"`
}

// Run checks the file.
func (c *configCheckCmd) Run(e *env) error {
	if code := Main([]string{"all", "--config", c.File, "--check-config"}, e.stdout, e.stderr); code != 0 {
		return exitError(code)
	}
	return nil
}

// exitError is an exit code for the process; the command has already printed the error itself.
type exitError int

func (e exitError) Error() string { return "exit " + strconv.Itoa(int(e)) }
