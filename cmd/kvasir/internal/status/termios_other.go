// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package status

import "golang.org/x/sys/unix"

// Requests for the settings of a terminal.
const (
	getTermios = unix.TIOCGETA
	setTermios = unix.TIOCSETA
)
