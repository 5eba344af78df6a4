// SPDX-License-Identifier: Apache-2.0

//go:build !crashpoints

package pool

// crashPoint marks a place between two writes that outlive the process. Builds with
// -tags crashpoints can be killed there.
func crashPoint() {}
