// SPDX-License-Identifier: Apache-2.0

package cli

// configFlags are the flags of every command that runs until a signal stops it. The other flags of such a command can also come from
// the environment and from a file.
type configFlags struct {
	Config      string `help:"YAML file with flags: keys are their names without dashes. A flag counts before the environment (KVASIR_, the command, the flag: KVASIR_SERVER_HTTP_PORT), that before the file, that before the default." placeholder:"FILE" group:"Configuration"`
	CheckConfig bool   `help:"Check the flags, print them as a file for --config with where each comes from, and end." group:"Configuration"`
}

func (c *configFlags) checkOnly() bool { return c.CheckConfig }

// configurable is a command with configFlags.
type configurable interface {
	checkOnly() bool
	check(e *env) error // returns an error for invalid flags; starts nothing
}
