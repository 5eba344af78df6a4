// SPDX-License-Identifier: Apache-2.0

// Package testkit has what the tests of many packages need: a TestMain that finds leaked goroutines and mappings, ports, small file
// systems, golden vectors, and a check of options. Only tests import it.
package testkit
