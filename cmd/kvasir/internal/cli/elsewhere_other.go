// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package cli

// absent is a command that is not in this build: refuseElsewhere says why.
type absent struct {
	Args []string `arg:"" optional:"" passthrough:""`
}

// Run is not reached.
func (absent) Run() error { return nil }

type (
	keeperCmd struct{ absent }
	doctorCmd struct{ absent }
)
