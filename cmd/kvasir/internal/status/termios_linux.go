// SPDX-License-Identifier: Apache-2.0

package status

import "golang.org/x/sys/unix"

// The requests that read and write the settings of a terminal.
const (
	getTermios = unix.TCGETS
	setTermios = unix.TCSETS
)
