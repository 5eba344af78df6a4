// SPDX-License-Identifier: Apache-2.0

package status

import "golang.org/x/sys/unix"

// Requests for the settings of a terminal.
const (
	getTermios = unix.TCGETS
	setTermios = unix.TCSETS
)
