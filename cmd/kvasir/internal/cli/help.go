package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
)

type versionCmd struct{}

// Run prints what is known of this build.
func (versionCmd) Run(e *env) error {
	_, err := fmt.Fprintln(e.stdout, versionLine())
	return err
}

// versionLine is the answer to "which build is this".
func versionLine() string {
	v := Version()
	if v == devel {
		v += ", built without version control data"
	}
	return fmt.Sprintf("kvasir %s (%s, %s/%s)", v, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// devel is the version of a build that nothing is known about.
const devel = "devel"

// Version returns the module version or VCS revision of this build, or "devel".
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return devel
	}
	v := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && (v == "" || v == "(devel)") {
			v = "devel-" + s.Value[:min(12, len(s.Value))]
		}
	}
	if v == "" || v == "(devel)" {
		return devel
	}
	return v
}

// helpCmd stands in the list of commands; asHelp answers it.
type helpCmd struct {
	Command []string `arg:"" optional:"" help:"The command, for example: transfer serve."`
}

// asHelp turns "help COMMAND" into "COMMAND --help", and --version into "version".
func asHelp(args []string) []string {
	switch {
	case len(args) == 0:
		return []string{"--help"}
	case args[0] == "--version":
		return []string{"version"}
	case args[0] == "help" && (len(args) < 2 || !strings.HasPrefix(args[1], "-")):
		return append(args[1:len(args):len(args)], "--help")
	}
	return args
}
