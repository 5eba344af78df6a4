// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package status

import "golang.org/x/sys/unix"

// The requests that read and write the settings of a terminal.
const (
	getTermios = unix.TIOCGETA
	setTermios = unix.TIOCSETA
)
