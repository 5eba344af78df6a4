// SPDX-License-Identifier: Apache-2.0

// Package testkit is what tests of many packages need: a TestMain that finds what is left, ports, small file systems, golden
// vectors, and a check of options. Only tests import it.
package testkit
