// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package cli

// absent stands for a command that is not in this build; refuseElsewhere gives the reason.
type absent struct {
	Args []string `arg:"" optional:"" passthrough:""`
}

// Run is never called.
func (absent) Run() error { return nil }

type (
	keeperCmd struct{ absent }
	doctorCmd struct{ absent }
)
