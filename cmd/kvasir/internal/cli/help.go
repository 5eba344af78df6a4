// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
)

type versionCmd struct{}

// Run prints the version and platform of this build.
func (versionCmd) Run(e *env) error {
	_, err := fmt.Fprintln(e.stdout, versionLine())
	return err
}

// versionLine returns one line that identifies this build.
func versionLine() string {
	return fmt.Sprintf("kvasir %s (%s, %s/%s)", Version(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// release is the release of this code; during development, the next release.
const release = "0.1.0"

// Version returns the release and, if the build knows it, the commit: "0.1.0+1a2b3c4d5e6f". A build of a tagged module has only the
// release. ".dirty" after the commit means that files differed from it.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return release
	}
	if v := info.Main.Version; strings.TrimPrefix(v, "v") == release {
		return release
	}
	revision, dirty := "", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			revision = "+" + s.Value[:min(12, len(s.Value))]
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = ".dirty"
		}
	}
	if revision == "" {
		return release
	}
	return release + revision + dirty
}

// helpCmd exists only for the list of commands; asHelp turns it into --help.
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
